"""The samplers of a run: plain, fast, with rounded weights, over several processes, an inference
engine, or a class of the user's own. All have the same `sample` method
(rollout.Sampler)."""

from functools import lru_cache
from pathlib import Path

import torch

from plumbing.data.reward_functions import load_here
from plumbing.engines.vllm import VllmSampler
from plumbing.engines.wrapper import Wrapper
from plumbing.model.adapters import adapted_layers, merged
from plumbing.parallel import processes
from plumbing.parallel.devices import autocast
from plumbing.speed.fast import FastSampler
from plumbing.speed.rollouts import concat
from rollout import Sampler


def make_sampler(args, actor, tokenizer, task, of_features=()):
    """The sampler of a run, as chosen by --sampler, --plain, --sampler_dtype and the number of
    processes. of_features: the features' `sampler`."""
    sampler = own_sampler(args, actor.policy, tokenizer, task, args.sampler or basic(args))
    for own in of_features:
        sampler = own(sampler)
    if args.load_in_4bit:
        sampler = AutocastSampler(sampler, args.half)
    elif args.sampler == "vllm":
        pass                                 # its own copy of the weights has --sampler_dtype
    elif args.sampler_dtype != "float32" or not all_float32(actor.policy):
        sampler = RoundedSampler(sampler, args.sampler_dtype)
    return SharedSampler(sampler, actor) if processes.world() > 1 else sampler


def evaluation_sampler(args, policy, tokenizer, task):
    """The sampler for an evaluation: of the run's own class, with the policy itself, whose weights
    are not rounded."""
    return own_sampler(args, policy, tokenizer, task, args.sampler or basic(args))


def basic(args):
    return Sampler if args.plain else FastSampler


def own_sampler(args, policy, tokenizer, task, kind):
    settings = (policy, tokenizer, task.max_completion_length, args.temperature, task.stop,
                task.tool)
    if kind == "vllm":
        return VllmSampler(*settings, dtype=args.sampler_dtype,
                           prompt_tokens=args.max_prompt_length,
                           memory_share=args.vllm_gpu_memory_utilization)
    if isinstance(kind, str):
        return load_class(kind)(*settings)
    return kind(*settings, top_p=args.top_p, top_k=args.top_k)


def load_class(name):
    """The class named by FILE.py:CLASS. Raises ValueError if there is none with a method
    `sample`."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"--sampler {name}: it must be vllm or FILE.py:CLASS, and the file must "
                         "exist")
    try:
        kind = load_once(name, Path(path).resolve(), Path(path).stat().st_mtime_ns)
    except AttributeError:
        kind = None
    except Exception as error:                               # whatever the user's file raises
        raise ValueError(f"--sampler {name} does not load: {type(error).__name__}: {error}")
    if not hasattr(kind, "sample"):
        raise ValueError(f"--sampler {name}: {path} has no class {attribute} with a method sample")
    return kind


@lru_cache
def load_once(name, path, changed):
    """load_here(name), once per version of the file: sampling and every evaluation get the same
    class, so that they can share an engine."""
    return load_here(name)


# --------------------------------------------------------------------------------------- wrappers

class RoundedSampler(Wrapper):
    """Samples from a copy of the policy whose weights are rounded to --sampler_dtype."""

    def __init__(self, sampler, dtype):
        super().__init__(sampler)
        self.dtype = dtype

    def sample(self, *inputs, **options):
        policy = self.sampler.policy
        try:
            self.sampler.policy = sampling_copy(policy, self.dtype)
            rollout = self.sampler.sample(*inputs, **options)
        finally:
            self.sampler.policy = policy
        if self.dtype == "float16" and not rollout.sampler_logp.isfinite().all():
            raise ValueError("--sampler_dtype float16: this policy has activations beyond "
                             "float16's 65504; use --sampler_dtype float32")
        return rollout


class AutocastSampler(Wrapper):
    """Samples from the weights that are trained, in the arithmetic of scoring and updates."""

    def __init__(self, sampler, half):
        super().__init__(sampler)
        self.half = half

    def sample(self, *inputs, **options):
        with autocast(self.policy.device, self.half):
            return self.sampler.sample(*inputs, **options)


class SharedSampler(Wrapper):
    """Each process samples for its share of the prompts; every process gets the whole rollout."""

    def __init__(self, sampler, actor):
        super().__init__(sampler)
        self.actor = actor

    def sample(self, prompts, group_size, uniforms=None, **options):
        own = processes.share(len(prompts))
        if uniforms is not None:
            uniforms = uniforms.unflatten(0, (len(prompts), group_size))[own].flatten(0, 1)
        with processes.gathered(self.actor) as policy:
            self.policy = policy
            rollout = self.sampler.sample(prompts[own], group_size, uniforms=uniforms, **options)
        return concat(processes.gather(rollout))


# ----------------------------------------------------------------------------------- rounded copies

HALVES = ("bfloat16", "float16")


def all_float32(policy):
    return all(p.dtype == torch.float32 for p in policy.parameters())


def sampling_copy(policy, dtype):
    """The policy to sample with: in float32 the policy itself, else a copy rounded to `dtype`, as
    an inference engine holds it."""
    if dtype == "float32" and all_float32(policy):
        return policy
    kind = getattr(torch, dtype) if dtype in HALVES else torch.float32  # of arithmetic, too
    source = merged(policy, kind) if adapted_layers(policy) else policy
    copied = merged(policy, kind) if source is policy else source
    for new, old in zip(copied.parameters(), source.parameters(), strict=True):
        new.data.copy_(rounded(old.data, dtype))
    return copied


def rounded(weight, dtype):
    """A weight [..., n] rounded to `dtype` and back, symmetrically, with one scale per row: the
    largest absolute value of a row maps to the largest number of `dtype`.

    int<b>: 2^b - 1 equally spaced levels; float8: e4m3. Vectors (norms, biases) stay as they are,
    as in quantized inference engines.
    """
    if weight.dim() < 2 or dtype in ("float32", *HALVES):
        return weight
    tiny = torch.finfo(weight.dtype).tiny
    largest = weight.abs().amax(-1, keepdim=True).clamp(min=tiny)                   # [..., 1]
    if dtype == "float8":
        return (weight / largest * 448).to(torch.float8_e4m3fn).to(weight.dtype) * (largest / 448)
    levels = 2 ** (int(dtype.removeprefix("int")) - 1) - 1
    return (weight / largest * levels).round() * (largest / levels)
