"""--load_in_4bit: the frozen weights under LoRA's adapters, stored in 4 bits each by bitsandbytes.

The format is QLoRA's NormalFloat (2305.14314): 64 weights share one scale, and 256 scales share a
second-level scale, which makes 0.52 bytes per weight. A layer decodes its weights before it
multiplies, so sampling, scoring and updates use the same values. Only linear layers are quantized.
The LM head, embeddings and norms keep their precision; models with experts are refused, because
experts are not linear layers here.
"""

from dataclasses import dataclass

import torch

from features.feature import Feature, flag
from plumbing.engines.wrapper import Wrapper
from plumbing.model.nf4 import layers_to_quantize
from plumbing.parallel.devices import autocast


@dataclass(frozen=True)
class Flags:
    load_in_4bit: bool = flag(
        False, "store the frozen weights of the policy in 4 bits each (needs pip install "
               "bitsandbytes)", section="4 bits", fixed=True, package={True: "bitsandbytes"},
        needs={"use_peft": "",
               "model_name_or_path": "the tiny MoE's experts are not linear layers"},
        without={"sampler=vllm": "only the built-in sampler reads 4 bits",
                 "sampler_dtype": "it samples with the 4-bit weights themselves",
                 "device=mps": "it has no kernels for MPS"})


class FourBit(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.load_in_4bit

    @classmethod
    def load(cls, settings, policy, folder):
        return quantize(policy, settings.autocast_dtype)

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return AutocastSampler(sampler, settings) if training else sampler


def quantize(policy, dtype=None):
    """Replace all linear layers but the LM head by 4-bit layers. Their weights are quantized when
    the policy is moved to its device. dtype: in which they multiply; None: float32. Raises
    Refusal for a model without linear layers or with experts."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    for name, linear in layers_to_quantize(policy):
        small = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                           compute_dtype=dtype or torch.float32, quant_type="nf4", device="meta")
        small.weight = Params4bit(linear.weight.data, quant_type="nf4", module=small)
        small.bias = linear.bias
        small.support_avx512bf16_for_cpu = False             # would make sampling alone bfloat16
        policy.set_submodule(name, small)
    policy.is_loaded_in_4bit = True                          # peft reads this attribute
    return policy


class AutocastSampler(Wrapper):
    """Samples from the weights that are trained, in the arithmetic of scoring and updates."""

    def sample(self, *inputs, **options):
        with autocast(self.policy.device, self.settings.autocast_dtype):
            return self.sampler.sample(*inputs, **options)
