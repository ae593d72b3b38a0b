"""What is trained, the policy and its critic, and the copy of it that samples."""

import copy
import math
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

import rollout
from advantages import ValueHead
from plumbing import fast
from plumbing.policy import load_policy
from routes import Routes, record_routes


class Forward(NamedTuple):
    logp: torch.Tensor            # [B, T] float32
    entropy: torch.Tensor | None  # [B, T] float32
    values: torch.Tensor | None   # [B, T] float32, the critic's
    routes: Routes | None         # of the forwards of the policy, a row per response


class Actor(nn.Module):
    """The policy and, for PPO, its critic: all that is trained, the one module that DDP or FSDP2
    wraps."""

    def __init__(self, policy, args):
        super().__init__()
        self.policy, self.bf16 = policy, args.bf16
        self.critic = ValueHead(policy.config.hidden_size) if args.advantage == "gae" else None
        self.response_logp = rollout.response_logp if args.plain else fast.response_logp
        self.checkpointed = checkpoint_layers(policy) if args.gradient_checkpointing else []

    def forward(self, batch, record=False, **options):
        """A rollout under the policy -> Forward. record: its routes too."""
        for layer in self.checkpointed:
            layer.training = torch.is_grad_enabled()  # what is inside stays in eval mode, undropped
        with record_routes(self.policy) if record else nullcontext() as routes:
            with torch.autocast(self.policy.device.type, torch.bfloat16, enabled=self.bf16):
                scores = self.response_logp(self.policy, batch, **options)
        if record and routes.passes[-1].indices.shape[1] != len(batch.prompt_ids):
            # equal responses shared a row of the last forward: a row for each
            routes = routes.rows([slice(None)] * (len(routes.passes) - 1) + [scores.rows])
        values = None if self.critic is None else self.critic(scores.hidden)        # [B, T]
        return Forward(scores.logp, scores.entropy, values, routes)


def checkpoint_layers(policy):
    """Let backward compute the layers again -> the modules that do so while in training mode."""
    policy.activation_checkpointing_enable()
    layers = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        for name, value in list(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)  # some layers call dropout as a function, not as a module
    return layers


def make_optimizer(args, actor):
    if args.optim == "sgd":
        return torch.optim.SGD(actor.parameters(), args.learning_rate)
    return torch.optim.AdamW(actor.parameters(), args.learning_rate, betas=(0.9, 0.95),
                             weight_decay=0.0, fused=True)


def make_schedule(args, optimizer):
    """The rate of every optimiser step: up from 1/n of the highest in n steps, then as flagged.

    To be stepped with the optimiser: an update that is skipped does not count.
    """
    n, steps = args.warmup_steps, args.steps * args.steps_per_generation

    def share(step):
        if step < n:
            return (step + 1) / n
        progress = min(1.0, (step - n) / max(1, steps - n))
        return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2,
                "constant_with_warmup": 1.0}[args.lr_scheduler_type]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def reference_of(args, task, device):
    """The frozen starting policy that --beta holds on to, or None."""
    if not args.beta:
        return None
    return Actor(load_policy(args, task, device)[0], args).to(device).requires_grad_(False)


def sampling_copy(policy, dtype, keep=False):
    """The policy that samples: itself in float32, or a copy as an inference engine holds it,
    rounded as `dtype` says. keep: into the copy of the last call, where compiled code looks for it.
    """
    if dtype == "float32":
        return policy
    copied = standing_copy(policy, dtype) if keep else copy_for(policy, dtype)
    for new, old in zip(copied.parameters(), policy.parameters(), strict=True):
        new.data.copy_(rounded(old.data, dtype))
    return copied


def copy_for(policy, dtype):
    """bfloat16 is weights and arithmetic; other types are of weights, computed with in float32."""
    copied = copy.deepcopy(policy)
    return copied.to(torch.bfloat16) if dtype == "bfloat16" else copied


standing_copy = lru_cache(maxsize=1)(copy_for)


def rounded(weight, dtype):
    """A weight [..., n] rounded row by row to `dtype` and back, symmetrically: the largest of a row
    lands on the largest number.

    int<b>: 2^b - 1 equally spaced levels; float8: e4m3. Vectors (norms, biases) stay as they are,
    as quantised engines leave them.
    """
    if weight.dim() < 2 or dtype == "bfloat16":
        return weight
    tiny = torch.finfo(weight.dtype).tiny
    largest = weight.abs().amax(-1, keepdim=True).clamp(min=tiny)                   # [..., 1]
    if dtype == "float8":
        return (weight / largest * 448).to(torch.float8_e4m3fn).to(weight.dtype) * (largest / 448)
    levels = 2 ** (int(dtype.removeprefix("int")) - 1) - 1
    return (weight / largest * levels).round() * (largest / levels)
