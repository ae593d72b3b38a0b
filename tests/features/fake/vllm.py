"""What --sampler vllm uses of vLLM, by transformers: a copy of the policy in this process, seeds
per row, transfers.

tests/features/test_vllm.py puts this folder on sys.path, to test our side of the seam without
vLLM. FAULTS names what a transfer leaves behind; CALLS is what the engine was asked, in order.
"""

from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import draw_token

CALLS, FAULTS = [], []


@dataclass
class SamplingParams:
    seed: int
    temperature: float
    max_tokens: int
    logprobs: int
    stop_token_ids: list
    stop: list = field(default_factory=list)


class LLM:
    def __init__(self, model, dtype, **options):
        print(f"vLLM with {options}")
        CALLS.append("load")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        head = self.model.lm_head                            # vLLM on a CPU: a copy of a tied head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        if options["max_model_len"] > self.model.config.max_position_embeddings:
            raise ValueError("longer than the model")
        runner = SimpleNamespace(model=self.model, reload_weights=self.reload)
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        core = SimpleNamespace(shutdown=lambda: CALLS.append("shutdown"))
        self.llm_engine = SimpleNamespace(model_executor=worker, engine_core=core)
        torch.manual_seed(0)                                 # as vLLM does

    def reload(self, weights_iterator):
        CALLS.append("push")
        own = self.model.state_dict()
        for name, weight in weights_iterator:
            if not any(fault in name for fault in FAULTS):
                own[name].copy_(weight)

    def reset_prefix_cache(self):
        CALLS.append("reset")

    def sleep(self, level):
        CALLS.append("sleep")

    def wake_up(self):
        CALLS.append("wake")

    @torch.no_grad()
    def generate(self, rows, params, use_tqdm):
        CALLS.append("generate")
        pairs = list(zip(rows, params, strict=True))
        groups = groupby(pairs, lambda pair: pair[0]["prompt_token_ids"])
        return [SimpleNamespace(outputs=[answer]) for ids, group in groups
                for answer in self.answers(ids, [p for _, p in group])]

    def answers(self, ids, params):
        """A response to the same prompt for each of the params."""
        random = [torch.Generator().manual_seed(p.seed) for p in params]
        live = range(len(params))
        found = [SimpleNamespace(token_ids=[], logprobs=[]) for _ in params]
        while live:
            read = torch.tensor([ids + found[i].token_ids for i in live])           # [b, t]
            for i, row in zip(live, self.model(read).logits[:, -1]):
                u = torch.rand(1, generator=random[i])
                token, logp = draw_token(row[None], u, params[i].temperature)
                found[i].token_ids.append(token.item())
                found[i].logprobs.append({token.item(): SimpleNamespace(logprob=logp.item())})
            live = [i for i in live if not self.ended(found[i].token_ids, params[i])]
        return found

    def ended(self, new, params):
        whole = len(new) == params.max_tokens or new[-1] in params.stop_token_ids
        return whole or any(string in self.tokenizer.decode(new) for string in params.stop)
