"""What is trained, the policy and its critic, and the copy of it that samples."""

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

import rollout
from advantages import ValueHead
from plumbing.speed import fast, processes
from plumbing.model.adapters import Frozen, adapted_layers, add_adapters, merged, named_adapters
from plumbing.speed.cutting import route_rows
from plumbing.model.offload import HostAdamW, halve_matrices
from plumbing.model.policy import load_policy
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
        self.halved = halves(args)
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
            first = [slice(None)] * (len(routes.passes) - 1)
            routes = route_rows(routes, [*first, scores.rows])
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


def halves(args):
    """Whether matrices are held in bfloat16: those that are frozen, or have masters on the host."""
    return args.bf16 and (args.use_peft or args.optimizer_offload)


def trained_policy(args, task, device, folder=None):
    """(policy, tokenizer): load_policy's, made ready for training; folder: a checkpoint of ours.

    With --use_peft base weights come from where the run began, adapters from `folder`.
    """
    policy, tokenizer = load_policy(args, task, device, None if args.use_peft else folder)
    if args.use_peft:
        add_adapters(policy, args, folder).to(device)
    if halves(args):
        halve_matrices(policy, masters=args.optimizer_offload)
    return policy, tokenizer


def write_merged(args, task, policy, tokenizer, folder):
    """What --merge leaves: a plain float32 checkpoint, adapters added to weights as once read."""
    if not args.merge or processes.rank():
        return
    plain, _ = load_policy(args, task, torch.device("cpu"))
    add_adapters(plain, args)
    for own, trained in zip(named_adapters(plain).values(), named_adapters(policy).values()):
        own.data.copy_(trained)
    merged(plain).save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")


def make_optimizer(args, actor):
    parameters = [p for p in actor.parameters() if p.requires_grad]
    if args.optimizer_offload and processes.world() > 1:
        raise ValueError("--optimizer_offload serves one process: its gradients leave the device "
                         "before they could be added up; use --shard")
    kind = HostAdamW if args.optimizer_offload else torch.optim.AdamW
    return kind(parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


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


def reference_of(args, task, device, actor):
    """The frozen starting policy of --beta, or None. Of adapters: the same model without them."""
    if not args.beta:
        return None
    if args.use_peft:
        return Frozen(actor)
    return Actor(load_policy(args, task, device)[0], args).to(device).requires_grad_(False)


def sampling_copy(policy, dtype, keep=False):
    """The policy that samples: itself in float32, or a copy as an inference engine holds it,
    rounded as `dtype` says. keep: into the copy of the last call, where compiled code looks for it.
    """
    if dtype == "float32" and all(p.dtype == torch.float32 for p in policy.parameters()):
        return policy
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32  # of arithmetic, too
    source = merged(policy, kind) if adapted_layers(policy) else policy
    copied = standing_copy(policy, kind) if keep else source
    copied = merged(policy, kind) if copied is policy else copied
    for new, old in zip(copied.parameters(), source.parameters(), strict=True):
        new.data.copy_(rounded(old.data, dtype))
    return copied


standing_copy = lru_cache(maxsize=1)(merged)


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
