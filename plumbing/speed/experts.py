"""The tiny MoE's experts on a GPU: a small layer computes all of them for all tokens."""

import torch.nn.functional as F
from torch import nn

from moe import Experts, MoE

MOST_AT_ONCE = 2**22  # the most numbers in its intermediate tensor: 16 MB in float32


class AllExperts(Experts):
    """All experts for all tokens as one batched product. This is E/K times the arithmetic, but it
    needs no GPU synchronization to find out how many rows each expert gets. It takes the place of
    the given Experts and holds the same parameters."""

    def __init__(self, experts):
        nn.Module.__init__(self)
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj

    def forward(self, x, gates, indices):
        if len(x) * self.gate_up_proj.shape[:2].numel() > MOST_AT_ONCE:             # N·E·2M
            return super().forward(x, gates, indices)
        gate, up = (x @ self.gate_up_proj.transpose(1, 2)).chunk(2, -1)             # [E, N, M]
        y = (F.silu(gate) * up) @ self.down_proj.transpose(1, 2)                    # [E, N, D]
        weight = gates.new_zeros(len(x), len(y)).scatter(1, indices, gates)         # [N, E]
        return (y * weight.T[:, :, None]).sum(0).to(x.dtype)                        # [N, D]


def move_to_device(policy, device):
    """The policy on the device, with the implementation of the experts that suits the device. The
    parameters are the same."""
    policy = policy.to(device)
    for module in policy.modules() if device.type == "cuda" else ():
        if isinstance(module, MoE):
            module.experts = AllExperts(module.experts)
    return policy
