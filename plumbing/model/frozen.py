"""Frozen matrices in 16 bits: 2 bytes per parameter instead of 4. Autocast would round them at each
use anyway, so forward and backward are bit-equal (tests/features/test_lora.py)."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from moe import Experts


@torch.no_grad()
def round_frozen(policy, dtype=torch.bfloat16):
    """Convert the frozen weights that autocast rounds at every use to `dtype`: those of linear
    layers and of the tiny MoE's experts. The LM head (computed in float32), embeddings, norms and
    routers stay float32, and so does what is trained, such as LoRA's matrices."""
    head = policy.get_output_embeddings()
    head = getattr(head, "base_layer", head)                 # of a head that carries an adapter
    for module in policy.modules():
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        matrix = isinstance(module, (nn.Linear, Conv1D, Experts)) and module is not head
        if matrix and not trained:
            module.to(dtype)
    return policy
