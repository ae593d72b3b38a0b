"""A CUDA graph on a CPU: records what a call does to which memory, and replays it without Python.

As on a GPU, Python numbers, shapes and addresses stay those of the recording, the host may not wait
for a value, and memory that the call did not make must live on. Not covered: kernels that no graph
can hold, memory that a graph's own kernels reuse.
"""

import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


def refuse(*_):
    raise RuntimeError("operation not permitted when stream is capturing")


class Tape(TorchDispatchMode):
    def __init__(self, call):
        super().__init__()
        self.calls, self.own = [], {}
        call()
        with self, mock.patch.object(torch.Tensor, "tolist", refuse):    # which dispatches nothing
            self.result = call()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in WAITS:
            refuse()
        out = func(*args, **(kwargs or {}))
        keep = lambda x: weakref.ref(x) if id(x) not in self.own else lambda: x     # noqa: E731
        hold = lambda x: keep(x) if isinstance(x, torch.Tensor) else x              # noqa: E731
        self.calls.append((func, tree(hold, args), tree(hold, kwargs or {}), leaves(out)))
        self.own.update((id(x), x) for x in leaves(out) if all(x is not y for y in leaves(args)))
        return out

    @torch.inference_mode()
    def __call__(self):
        for func, args, kwargs, old in self.calls:
            args, kwargs = (tree(lambda x: x() if callable(x) else x, y) for y in (args, kwargs))
            found = leaves(func(*args, **kwargs))
            assert [x.shape for x in found] == [x.shape for x in old], func
            for x, y in zip(found, old):
                if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
                    y.copy_(x)
        return self.result


def leaves(x):
    if isinstance(x, torch.Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def tree(change, x):
    if isinstance(x, dict):
        return {name: tree(change, y) for name, y in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(tree(change, y) for y in x)
    return change(x)
