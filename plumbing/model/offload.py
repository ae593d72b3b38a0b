"""Full fine-tuning where 16 bytes per parameter do not fit: AdamW's numbers stay on the host.

    on the device    a weight: 2 bytes for a matrix, held in bfloat16, which autocast would round it
                     to at each use; 4 for the rest
    on the host      its float32 master, its gradient and AdamW's two moments: 16 bytes

A step of 1e-6 is far below what bfloat16 can show of a weight; the master keeps it, and the device
sees it once enough have come together. Forward and backward are those of autocast over float32
weights, to the bit (tests/model/test_adapters.py).

Not torchao's CPUOffloadOptimizer: its host weights have the device's precision, it cannot add up
the gradients of several micro-batches that it has freed, and it refuses to run without a GPU.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from moe import Experts


def on_host(tensor):
    return tensor.detach().to("cpu", torch.float32, copy=True)


@torch.no_grad()
def halve_matrices(policy, masters=False):
    """Hold in bfloat16 what autocast rounds to it anyway: linear layers and the tiny MoE's experts.
    Not the LM head, whose product is float32, nor embeddings, norms and routers. masters: remember
    the weights as they were, on the host, for HostAdamW."""
    head = policy.get_output_embeddings()
    for module in policy.modules():
        if isinstance(module, (nn.Linear, Experts)) and module is not head:
            full = [on_host(p) for p in module.parameters() if masters]
            module.to(torch.bfloat16)
            for parameter, master in zip(module.parameters(), full):
                parameter.master = master
    return policy


class HostAdamW(torch.optim.AdamW):
    """AdamW over float32 masters in the host's memory of parameters on a device.

    Each gradient goes to the host as soon as backward has made it and is added up there, in
    float32; the device does not keep it. step() brings the new weights back. moved() counts both
    ways. Gradients to clip are in `param_groups`, as of any optimiser.
    """

    def __init__(self, parameters, **options):
        parameters = list(parameters)
        self.served, self.bytes_moved = [p for p in parameters if p.requires_grad], 0
        self.masters = [nn.Parameter(on_host(getattr(p, "master", p))) for p in self.served]
        super().__init__(self.masters, **options)
        for parameter, master in zip(self.served, self.masters):
            parameter.register_post_accumulate_grad_hook(partial(self.fetch, master))

    def fetch(self, master, parameter):
        grad, parameter.grad = parameter.grad, None
        self.bytes_moved += grad.nbytes
        grad = grad.cpu().float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)

    def moved(self):
        """Bytes between host and device since the last call."""
        moved, self.bytes_moved = self.bytes_moved, 0
        return moved

    def step(self):
        super().step()
        self.show()

    @torch.no_grad()
    def show(self):
        """Round the masters into the device's weights."""
        for parameter, master in zip(self.served, self.masters):
            parameter.copy_(master.to(parameter.dtype))      # rounded here: half the bytes to move
            self.bytes_moved += parameter.nbytes

    def state_dict(self):
        return super().state_dict() | {"masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state):
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.show()
        self.bytes_moved = 0

    @contextmanager
    def masters_shown(self):
        """The masters in the parameters' place, for a checkpoint in full precision."""
        held = [parameter.data for parameter in self.served]
        for parameter, master in zip(self.served, self.masters):
            parameter.data = master.data
        try:
            yield
        finally:
            for parameter, data in zip(self.served, held):
                parameter.data = data
