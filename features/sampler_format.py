"""The number format of the sampler: it samples from a copy of the policy whose weights are rounded,
as an inference engine holds them.

With --bf16 or --fp16 the copy has that format, so that sampling is as fast as scoring.
--sampler_dtype chooses another one, down to a few bits; docs/evidence.md (`dose`, `controls_final`)
says how coarse a sampler an algorithm tolerates.
"""

from dataclasses import dataclass

import torch

from features.feature import Feature, flag, refuse
from plumbing.engines.wrapper import Wrapper
from plumbing.model.copies import plain_copy

SIXTEEN_BITS = ("bfloat16", "float16")


@dataclass(frozen=True)
class Flags:
    sampler_dtype: str | None = flag(
        None, "number format of the sampler's copy of the weights", section="the sampler's format",
        unset="the format of --bf16 or --fp16, else float32",
        choices=("float32", *SIXTEEN_BITS, "int8", "int5", "int4", "int3"))


class SamplerFormat(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return bool(settings.sampler_dtype or settings.autocast_dtype)

    @classmethod
    def check(cls, settings):
        formats = ("float32", *SIXTEEN_BITS)
        if settings.sampler == "vllm" and settings.sampler_dtype not in (None, *formats):
            refuse(settings, "sampler_dtype", "is not a format of --sampler vllm: "
                   f"{', '.join(formats)}")

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        """vLLM rounds a copy of its own."""
        if not training or settings.sampler == "vllm":
            return sampler
        return RoundedSampler(sampler, settings)


def find_sampler_format(settings):
    return settings.sampler_dtype or settings.arithmetic


class RoundedSampler(Wrapper):
    """Samples from a copy of the policy whose weights are rounded."""

    def sample(self, *inputs, **options):
        dtype = find_sampler_format(self.settings)
        policy = self.sampler.policy
        try:
            self.sampler.policy = sampling_copy(policy, dtype)
            return self.sampler.sample(*inputs, **options)
        finally:
            self.sampler.policy = policy


def sampling_copy(policy, dtype):
    """The policy to sample with: in float32 the policy itself, else a copy rounded to `dtype`, as
    an inference engine holds it."""
    if dtype == "float32" and all(p.dtype == torch.float32 for p in policy.parameters()):
        return policy
    # in which it computes, too
    copy_dtype = getattr(torch, dtype) if dtype in SIXTEEN_BITS else torch.float32
    copied = plain_copy(policy, copy_dtype)
    for p in copied.parameters():
        p.data = rounded(p.data, dtype)
    return copied


def rounded(weight, dtype):
    """A weight [..., n] rounded to `dtype` and back, symmetrically, with one scale per row: the
    largest absolute value of a row maps to the largest number of `dtype`.

    int<b>: 2^b - 1 equally spaced levels. Vectors (norms, biases) stay as they are, as in quantized
    inference engines.
    """
    if weight.dim() < 2 or dtype in ("float32", *SIXTEEN_BITS):
        return weight
    tiny = torch.finfo(weight.dtype).tiny
    largest = weight.abs().amax(-1, keepdim=True).clamp(min=tiny)                   # [..., 1]
    levels = 2 ** (int(dtype.removeprefix("int")) - 1) - 1
    return (weight / largest * levels).round() * (largest / levels)
