"""Full fine-tuning when 16 bytes per parameter do not fit on the device: the state of AdamW is kept
in the host's memory.

    on the device    the weight: 2 bytes in a matrix (bfloat16, to which autocast would round it at
                     each use anyway), 4 bytes elsewhere
    on the host      its float32 master weight, its gradient and AdamW's two moments: 16 bytes

A step of 1e-6 is far below the resolution of a bfloat16 weight. The float32 master adds up such
steps; the weight on the device changes when their sum is large enough. Forward and backward are
bit-equal to autocast over float32 weights (tests/model/test_adapters.py).

torchao's CPUOffloadOptimizer is not used because its host weights have the device's precision, it
cannot accumulate the gradients of several micro-batches after freeing them, and it requires a GPU.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from moe import Experts


def on_host(tensor):
    return tensor.detach().to("cpu", torch.float32, copy=True)


def halves(args):
    """Whether matrices are held in 16 bits: they are if they are frozen or have float32 masters on
    the host."""
    return bool(args.half) and (args.use_peft or args.optimizer_offload)


@torch.no_grad()
def halve_matrices(policy, dtype=torch.bfloat16, masters=False):
    """Convert the weights that autocast rounds at every use to `dtype`: those of linear layers and
    of the tiny MoE's experts. The LM head (computed in float32), embeddings, norms and routers stay
    float32. Trained parameters, such as LoRA's, are converted only with masters; their float32
    values are then kept on the host for HostAdamW."""
    head = policy.get_output_embeddings()
    head = getattr(head, "base_layer", head)                 # of a head that carries an adapter
    for module in policy.modules():
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        matrix = isinstance(module, (nn.Linear, Conv1D, Experts)) and module is not head
        matrix = matrix and not hasattr(getattr(module, "weight", None), "quant_state")   # 4 bits
        if matrix and (masters or not trained):
            full = [on_host(p) for p in module.parameters() if masters]
            module.to(dtype)
            for parameter, master in zip(module.parameters(), full):
                parameter.master = master
    return policy


class HostAdamW(torch.optim.AdamW):
    """AdamW over float32 master weights in the host's memory, for parameters on a device.

    Each gradient is copied to the host as soon as backward has computed it, accumulated there in
    float32, and freed on the device. step() copies the new weights back. moved() counts the bytes
    of both directions. The gradients to clip are in `param_groups`, as in any optimizer.
    """

    def __init__(self, parameters, **options):
        parameters = list(parameters)
        self.served = [p for p in parameters if p.requires_grad]
        self.bytes_moved = 0
        self.masters = [nn.Parameter(on_host(getattr(p, "master", p))) for p in self.served]
        super().__init__(self.masters, **options)
        for parameter, master in zip(self.served, self.masters):
            parameter.register_post_accumulate_grad_hook(partial(self.fetch, master))

    def fetch(self, master, parameter):
        grad = parameter.grad
        parameter.grad = None
        self.bytes_moved += grad.nbytes
        grad = grad.cpu().float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)

    def moved(self):
        """The bytes copied between host and device since the last call."""
        moved = self.bytes_moved
        self.bytes_moved = 0
        return moved

    def step(self):
        super().step()
        self.show()

    @torch.no_grad()
    def show(self):
        """Round the masters into the device's weights."""
        for parameter, master in zip(self.served, self.masters):
            parameter.copy_(master.to(parameter.dtype))      # rounded here: half the bytes to copy
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
        """Inside the block, the masters replace the parameters, to write a checkpoint in full
        precision."""
        held = [parameter.data for parameter in self.served]
        for parameter, master in zip(self.served, self.masters):
            parameter.data = master.data
        try:
            yield
        finally:
            for parameter, data in zip(self.served, held):
                parameter.data = data
