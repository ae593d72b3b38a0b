"""Plain copies of a policy, for what samples from one: an engine, a rounded sampler."""

import copy
from collections import Counter

import torch
from torch import nn


def adapted_layers(policy):
    """[(name, layer)] of the layers that carry an adapter."""
    return [(name, module) for name, module in policy.named_modules() if hasattr(module, "lora_A")]


def merged(policy, dtype=torch.float32):
    """A plain copy in `dtype`, with the adapters, if any, added to the matrices.

    Weights are copied one by one, and no buffer is rounded: RoPE's frequencies stay float32. A
    matrix that is also the embedding table (tied weights) gets a copy of its own first, because its
    adapter changes only one of the two.
    """
    copies = {}
    for name, p in policy.named_parameters():
        kind = torch.float32 if ".lora_" in name else dtype
        copies[id(p)] = nn.Parameter(p.detach().to(kind, copy=True), requires_grad=False)
    plain = copy.deepcopy(policy, copies)
    uses = Counter(id(p) for module in plain.modules() for p in module.parameters(recurse=False))
    for name, layer in adapted_layers(plain):
        base = layer.get_base_layer()
        if uses[id(base.weight)] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
            plain.config.tie_word_embeddings = False
        layer.merge()
        plain.set_submodule(name, base)
    for name in ("adapters", "first_adapters", "peft_config", "save_pretrained"):
        vars(plain).pop(name, None)
    return plain
