"""Peak memory of updates on a pretended GPU beside plumbing/run/memory.py's estimate, as JSON lines.

    python tests/gpu/simulate_memory.py '[{"model": "Qwen 0.5B", "rows": 16}, ...]'

A case: model (of benchmarks/memory.py), rows, any field of Work; layers: fewer than the model has.
Two micro-batches make the step, as gradients of the first are there during the second.
"""

import gc
import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "benchmarks")]
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from losses import policy_loss  # noqa: E402
from memory import named  # noqa: E402  benchmarks/memory.py
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.model.adapters import add_adapters  # noqa: E402
from plumbing.run.memory import Work, footprint  # noqa: E402
from plumbing.model.offload import HostAdamW, halve_matrices  # noqa: E402
from plumbing.model import actor as actors  # noqa: E402
from plumbing.speed import fast  # noqa: E402
from rollout import Rollout  # noqa: E402


def simulated(model, rows, layers=None, way=None, **more):
    """{"peak": simulated bytes, "estimate": footprint's} of an update."""
    config = named(model)
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    work = Work(prompts=8, group_size=8, prompt_tokens=512, new_tokens=512, rows=rows,
                       **{"bf16": True, **more})
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
    policy.tie_weights()
    parameters = sum(p.numel() for p in policy.parameters())
    flags = "--model_name_or_path x --dataset_name y" + " --plain" * work.plain
    flags += " --gradient_checkpointing" * work.gradient_checkpointing
    args = parse(flags.split() + ["--bf16", str(work.bf16), "--lora_r", str(work.lora_r)])
    if work.state == "lora":
        add_adapters(policy.float(), args)
        policy.to_empty(device="meta")
    if work.state != "full" and work.bf16:
        policy.requires_grad_(False)                         # HostAdamW makes its own masters
        halve_matrices(policy)
        for name, p in policy.named_parameters():
            p.requires_grad_(work.state == "offload" or ".lora_" in name)
    before = gpu.now
    with gpu, at_most(work.max_logits):
        actor = actors.Actor(policy.to("cuda:0").eval(), args)
        make = HostAdamW if work.state == "offload" else torch.optim.AdamW
        optimizer = make([p for p in actor.parameters() if p.requires_grad], lr=1e-6,
                         **{} if work.state == "offload" else {"fused": True})
        batch = rollout(work)
        for micro_batches in (1, 2):                         # the first step makes AdamW's moments
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with gpu.phase("update"):
                    logp = actor(batch).logp
                    old, advantages = logp.detach(), torch.ones(rows, device="cuda:0")
                    policy_loss("gspo", logp, old, advantages, batch.mask)[0].backward()
                    del logp, old
            with gpu.phase("step"):
                optimizer.step()
    peak = gpu.peak["update"] - before
    estimate = footprint(config, parameters, work)
    gpu.reset()
    return {"peak": peak, "estimate": estimate["state"] + estimate["updating"],
            "state": estimate["state"], "activations": estimate["activations"],
            "logits": estimate["logits"]}


@contextmanager
def at_most(logits):
    """Inside, the LM head makes so many logits at once, by either way."""
    plain = partial(actors.response_logp, max_logits=logits)
    with (patch.object(actors, "response_logp", plain),
          patch.object(fast, "chunk_logits", lambda device_type: logits)):
        yield


def rollout(work):
    B, G = work.rows, min(work.group_size, work.rows)
    Q = B // G
    seen = torch.ones(Q, work.prompt_tokens, dtype=torch.bool)
    if work.padded:
        seen[:, :7] = False
    ids = torch.randint(5, 100, (B, work.new_tokens))
    prompts = torch.randint(5, 100, seen.shape)
    done = torch.zeros(B, dtype=torch.bool)
    tensors = (prompts, seen, ids, ids > 0, torch.zeros(ids.shape), done)
    return Rollout(*(x.to("cuda:0") for x in tensors), [""] * B, G)


if __name__ == "__main__":
    gpu.shapes = True
    for case in json.loads(sys.argv[1]):
        gc.collect()
        print(json.dumps(case | simulated(**case)), flush=True)
