"""Plain copies of a policy, for what samples from one: an engine, a rounded sampler."""

import copy
from collections import Counter

import torch
from torch import nn


def has_adapters(policy):
    return hasattr(policy, "peft_model")


def plain_copy(policy, dtype=torch.float32):
    """A frozen copy in `dtype`, with the adapters, if any, merged into the matrices. Weights are
    copied one by one, and no buffer is rounded: RoPE's frequencies stay float32."""
    copies = {}
    for name, p in policy.named_parameters():
        copy_dtype = torch.float32 if ".lora_" in name else dtype
        copies[id(p)] = nn.Parameter(p.detach().to(copy_dtype, copy=True), requires_grad=False)
    copied = copy.deepcopy(policy, copies)
    return merge_adapters(copied) if has_adapters(copied) else copied


def merge_adapters(policy):
    """The policy with its adapters merged into the matrices by peft. A matrix that is also the
    embedding table (tied weights) is copied first, because its adapter changes only one of the
    two."""
    uses = Counter(id(p) for module in policy.modules() for p in module.parameters(recurse=False))
    for layer in policy.modules():
        base = layer.get_base_layer() if hasattr(layer, "lora_A") else None
        if base is not None and uses[id(base.weight)] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            policy.config.tie_word_embeddings = False
    vars(policy).pop("save_pretrained", None)                # the adapters'
    return vars(policy).pop("peft_model").merge_and_unload()
