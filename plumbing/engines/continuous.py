"""--sampler continuous: the same `sample` by continuous batching of transformers.

A finished response makes room for the next one at once, and all responses share a KV cache in
pages. It computes with the trained weights themselves, so nothing has to be transferred. Responses
are drawn from one random stream per call, whose seed comes from `uniforms`.
"""

import gc
import logging
from math import ceil

import torch
from torch.random import fork_rng
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from moe import TinyMoE
from plumbing.engines.agreement import check_agreement
from plumbing.engines.responses import as_rollout, ending_tokens, row_seeds
from plumbing.model.adapters import adapted_layers, merged
from rollout import pad_token, token_ids

PAGE = 32        # tokens per page of the KV cache
AT_ONCE = 32     # responses in progress; without flash attention each attends to the cache of all
CHUNK = 512      # tokens of a forward, of prompts and of responses in progress


class ContinuousSampler:
    """Samples by transformers' continuous batching, with the same arguments as rollout.Sampler."""

    def __init__(self, policy, tokenizer, max_new_tokens, temperature=1.0, stop=(), tool=None):
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.stop = stop
        self.ends = ending_tokens(policy, tokenizer, stop)
        self.compared = False        # the first responses are compared with the policy's log-probs

    @torch.no_grad()
    def sample(self, prompts, group_size, uniforms=None, temperature=None):
        """See rollout.Sampler.sample. Raises ValueError for a policy that continuous batching
        cannot run, or whose log-probs it does not give."""
        temperature = self.temperature if temperature is None else temperature
        prompts = token_ids(self.tokenizer, prompts)
        rows = [prompt for prompt in prompts for _ in range(group_size)]
        seed = sum(row_seeds(uniforms, len(rows))) % 2 ** 32
        outputs = generate(as_transformers(self.policy), rows, self.generation(temperature),
                           batching(rows, self.max_new_tokens, seed))
        rollout = as_rollout(self.policy, self.tokenizer, prompts, group_size,
                             [output.generated_tokens for output in outputs],
                             [output.logprobs for output in outputs], self.stop)
        if not self.compared:
            dtype = next(self.policy.parameters()).dtype
            check_agreement("continuous", self.policy, rollout, temperature, dtype)
            self.compared = True
        return rollout

    def generation(self, temperature):
        """The GenerationConfig. Continuous batching has no stop strings: a response goes on after
        one that several tokens make up, and as_rollout cuts it."""
        return GenerationConfig(
            do_sample=temperature > 0, temperature=temperature or 1.0, top_k=0, top_p=1.0,
            max_new_tokens=self.max_new_tokens, eos_token_id=self.ends,
            pad_token_id=pad_token(self.tokenizer))


def batching(rows, max_new_tokens, seed):
    """A ContinuousBatchingConfig for these rows. By default it would take most of the memory."""
    pages = ceil((max(map(len, rows)) + max_new_tokens) / PAGE) + 1
    at_once = min(len(rows), AT_ONCE)
    return ContinuousBatchingConfig(
        return_logprobs=True, seed=seed, page_size=PAGE, num_blocks=at_once * pages,
        max_requests_per_batch=at_once, max_batch_tokens=max(CHUNK, at_once))


def generate(model, rows, generation, config):
    """The outputs of model.generate_batch, in the order of the rows. All rows are queued before the
    first forward: generate_batch queues them beside a running one, and which rows share a forward,
    and hence a seed's random numbers, would depend on the clock."""
    log = logging.getLogger("ContinuousBatchingLogger")
    before = log.disabled
    log.disabled = True                                      # it prints tracebacks of other threads
    with fork_rng():                                         # it seeds torch's global generator
        gc.freeze()     # at its end it collects garbage twice: only of objects that it made itself
        try:
            manager = model.init_continuous_batching(generation, config)
            names = manager.add_requests(rows)
            manager.start()
            try:
                outputs = results(manager, len(rows))
            finally:
                manager.stop(block=True)                     # until then, paged attention stays on
                manager.destroy()
        except Exception as error:                           # whatever a model's code raises
            words = " ".join(str(error).split())[:200]
            raise ValueError("--sampler continuous: transformers cannot batch "
                             f"{type(model).__name__} continuously: {words}") from error
        finally:
            log.disabled = before
            gc.unfreeze()
    return [outputs[name] for name in names]


def results(manager, count):
    """{name of a request: its output}. Raises RuntimeError if one failed."""
    outputs = {}
    while len(outputs) < count:
        output = manager.get_result(timeout=1)
        if output is not None and output.error:
            raise RuntimeError(output.error)
        if output is not None:
            outputs[output.request_id] = output
        elif not manager.is_running():
            raise RuntimeError(manager.background_thread_status.fatal_error or "it stopped early")
    return outputs


def as_transformers(policy):
    """The policy as a model of transformers: itself, or for a TinyMoE a Qwen3MoeForCausalLM that
    shares its weights."""
    if not isinstance(policy, TinyMoE):
        return policy
    policy = merged(policy) if adapted_layers(policy) else policy
    with torch.device("meta"):
        twin = Qwen3MoeForCausalLM(policy.config)
    twin.load_state_dict(policy.state_dict(), assign=True)
    rope = Qwen3MoeRotaryEmbedding(policy.config)          # a buffer that no checkpoint holds
    twin.model.rotary_emb = rope.to(policy.device)
    twin.tie_weights()
    return twin.eval()
