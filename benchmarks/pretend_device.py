"""A GPU that is not there: the memory of torch code as if on cuda:0, on a CPU-only build.

    from pretend_device import gpu            # BEFORE torch is imported; needs g++ once
    with gpu:
        with gpu.phase("name"):
            ...
    gpu.peak["name"]                          # bytes

Tensors on "cuda" are wrapper subclasses that say cuda:0, so that torch's own C++ (autograd engine,
autocast, composite ops, Module.to, optimizers) takes its CUDA branches; a TorchDispatchMode counts
the live bytes of their storages, and the masks that attention converts. Floating-point tensors are
on "meta": only shapes are computed, so that an update of a 3 B model takes seconds and no memory.
Not covered: the allocator's rounding, cuBLAS workspaces, fragments, errors of device.
"""

import contextlib
import ctypes
import functools
import getpass
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from pathlib import Path

assert "torch" not in sys.modules, "import pretend_device before torch: its hooks come first"
sys.modules["bitsandbytes"] = None   # peft imports it where it is, and it asks a GPU for its stream


def load_shim():
    """Compile pretend_shim.cpp once per torch build, and load it before Python's part of torch."""
    home = Path(importlib.util.find_spec("torch").origin).parent
    source = Path(__file__).with_name("pretend_shim.cpp")
    version = (home / "version.py").read_bytes()
    mark = hashlib.sha256(source.read_bytes() + version).hexdigest()[:12]
    built = Path(tempfile.gettempdir()) / f"pretend_shim-{getpass.getuser()}-{mark}.so"
    if not built.exists():
        partial = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-O1", "-std=c++20", "-fPIC", "-shared", source,
                        f"-I{home}/include", f"-L{home}/lib", "-lc10", "-ltorch_cpu",
                        "-o", partial], check=True)
        partial.rename(built)
    ctypes.CDLL(str(home / "lib/libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


load_shim()
import torch  # noqa: E402
import torch._dynamo  # noqa: E402,F401  asks at import what there is, before it is pretended
import torch.nn.functional as F  # noqa: E402
import torch.optim.optimizer  # noqa: E402,F401
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

aten, CUDA, CPU = torch.ops.aten, torch.device("cuda", 0), torch.device("cpu")


class Pretend(torch.Tensor):
    """A tensor that says it is on cuda:0; its shape is that of .elem, on meta or on the CPU."""

    @staticmethod
    def __new__(cls, elem):
        out = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=CUDA)
        out.elem = elem
        gpu.track(out)
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return gpu.dispatch(func, args, kwargs or {})

    def tolist(self):
        return self.elem.tolist()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.elem = value.elem


def on_gpu(x):
    return isinstance(x, Pretend)


def leaves(x):
    """The tensors in a nest of lists, tuples and dicts (torch's pytree is ten times slower)."""
    if isinstance(x, torch.Tensor):
        return [x]
    parts = x if isinstance(x, (list, tuple)) else x.values() if isinstance(x, dict) else ()
    nests = (torch.Tensor, list, tuple)
    return [leaf for y in parts if isinstance(y, nests) for leaf in leaves(y)]


def tree_map(change, x):
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, (list, tuple)):
        parts = [tree_map(change, y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return {k: tree_map(change, v) for k, v in x.items()} if isinstance(x, dict) else x


def to_meta(x, dtype=None):
    return torch.empty_strided(x.size(), x.stride(), dtype=dtype or x.dtype, device="meta")


def in_engine():
    """Whether autograd's engine asks, and no Python code of a backward. The engine adds up what
    flows into a node in place, but not for subclasses such as ours."""
    frame, passed = sys._getframe(1), (__file__, "_compile.py", "eval_frame.py")
    while frame and frame.f_code.co_filename.endswith(passed):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


class Gpu(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ready, self.phases, self.live, self.now = False, ["-"], {}, 0
        self.reset()

    def reset(self):
        self.peak = Counter()

    @contextlib.contextmanager
    def phase(self, name):
        self.phases.append(name)
        self.peak[name] = max(self.peak[name], self.now)
        try:
            yield
        finally:
            self.phases.pop()

    def track(self, wrapper):
        storage = wrapper.elem.untyped_storage()
        key, nbytes, name = storage._cdata, storage.nbytes(), self.phases[-1]
        if key not in self.live:
            self.live[key] = [0, nbytes, set()]
            self.now += nbytes
            self.peak[name] = max(self.peak[name], self.now)
        entry = self.live[key]
        entry[0] += 1
        entry[2].add(weakref.ref(wrapper, functools.partial(self.free, key)))

    def free(self, key, ref):
        entry = self.live.get(key)
        if entry and ref in entry[2]:
            entry[2].discard(ref)
            entry[0] -= 1
            if entry[0] == 0:
                self.now -= entry[1]
                del self.live[key]

    # -------------------------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func, args, kwargs):
        mine = [x for x in leaves(args) + leaves(kwargs) if on_gpu(x)]
        device = kwargs.get("device")
        device = None if device is None else torch.device(device)
        if not mine and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)                     # all on the CPU
        with _disable_current_modes():
            name = func._schema.name.split("::")[1]
            return self.run(func, name, args, dict(kwargs), mine, device)

    def run(self, func, name, args, kwargs, mine, device):
        if name == "_to_copy":
            return self.to_copy(args[0], kwargs, device)
        if name == "copy_":
            func(*(x.elem if on_gpu(x) else x for x in args[:2]))
            return args[0]
        if name == "_local_scalar_dense":
            return args[0].elem.item()
        if device is not None:
            kwargs["device"] = CPU
        to_gpu = device is None or device.type == "cuda"
        meta = any(x.elem.device.type == "meta" for x in mine)
        unwrap = lambda x: x.elem if on_gpu(x) else x
        if meta:
            out = self.on_meta(func, name, args, kwargs)
        else:
            out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if name == "add" and len(mine) == 2 and in_engine() and args[0].dim() == 2:
            return Pretend(args[0].elem)                     # gradients of a weight, added in place
        mutable, back = func._schema.is_mutable, {id(x.elem): x for x in mine}

        def wrap(x):                                         # changed in place: what it was
            known = None if func.is_view else back.get(id(x))
            return known if known is not None else Pretend(x) if to_gpu else x
        if mutable and not func._schema.returns:
            return out
        return args[0] if meta and mutable and name.endswith("_") else tree_map(wrap, out)

    def to_copy(self, x, kwargs, device):
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "device")}
        to_gpu = on_gpu(x) if device is None else device.type == "cuda"
        elem, dtype = x.elem if on_gpu(x) else x, kwargs.get("dtype") or x.dtype
        if on_gpu(x) and not to_gpu:
            return aten._to_copy.default(elem, **kwargs)
        big = x.is_floating_point() and x.numel() >= 1024
        if not on_gpu(x) and (big or elem.device.type == "meta"):
            return Pretend(to_meta(x, dtype))
        return Pretend(aten._to_copy.default(elem, **kwargs))

    def on_meta(self, func, name, args, kwargs):
        """Only shapes; changing a real tensor in place is left out."""
        def unwrap(x):
            elem = x.elem if on_gpu(x) else x
            return elem if elem.device.type == "meta" else to_meta(elem)
        mutable = func._schema.is_mutable and name.endswith("_")
        if name.startswith("_fused_adam"):
            return None
        if mutable and on_gpu(args[0]) and args[0].elem.device == CPU:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))

    # --------------------------------------------------------------------------------- patches

    def __enter__(self):
        if not self.ready:
            self.ready = True
            patch()
            torch.autograd.set_multithreading_enabled(False)  # a thread that outlives Python aborts
        return super().__enter__()


def patch():
    """What Python's part of torch asks of a device."""
    fixed = dict(
        is_available=True, device_count=1, current_device=0, is_initialized=True,
        is_bf16_supported=True, get_device_capability=(9, 0), _lazy_init=None,
        is_current_stream_capturing=False, mem_get_info=(10**9, 80 * 10**9), set_rng_state=None)
    for name, value in fixed.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda._initialized = True
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.random.fork_rng = contextlib.contextmanager(lambda *_, **__: (yield))
    torch.inference_mode = lambda mode=True: torch.no_grad()  # its wrappers had no version counter
    torch.nn.Module._apply = apply
    optimizer = sys.modules["torch.optim.optimizer"]
    optimizer._foreach_supported_types = [torch.Tensor, torch.nn.Parameter, Pretend]

    from torch.utils._device import _device_constructors
    _device_constructors()  # cached: it must know the real torch.tensor
    plain_tensor = torch.tensor

    def tensor(data, *, device=None, requires_grad=False, **options):
        if device is None or torch.device(device).type != "cuda":
            return plain_tensor(data, device=device, requires_grad=requires_grad, **options)
        with _disable_current_modes():
            x = plain_tensor(data.elem if on_gpu(data) else data, **options)
            return Pretend(x).requires_grad_(requires_grad)
    torch.tensor = tensor
    sdpa = functools.partial(attention, F.scaled_dot_product_attention)
    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = sdpa


def apply(module, fn, recurse=True):
    """Module.to with new Parameters, ties kept."""
    memo = {}

    def new(p):
        if p is None:
            return None
        if id(p) not in memo:
            with torch.no_grad():
                q = fn(p)
            if q is not p and isinstance(p, torch.nn.Parameter):
                q = torch.nn.Parameter(q, p.requires_grad)
            memo[id(p)] = (p, q)                             # p too: its id must not be given again
        return memo[id(p)][1]
    for m in module.modules():
        for name, p in m._parameters.items():
            m._parameters[name] = new(p)
        for name, b in m._buffers.items():
            m._buffers[name] = new(b)
    return module


class Kernel(torch.autograd.Function):
    """One kernel forward, one backward, where the CPU build would run many small ops."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        with _disable_current_modes(), torch.no_grad():
            return Pretend(torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device="meta"))

    @staticmethod
    def backward(ctx, grad):
        with _disable_current_modes():
            return (*(Pretend(torch.empty(x.shape, dtype=x.dtype, device="meta"))
                      for x in ctx.saved_tensors),)


def attention(plain, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    if not on_gpu(query):
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if torch.is_autocast_enabled("cuda"):                    # attention is in its list
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(dtype) for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as CUDA converts it, each time
        bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = bias.masked_fill_(~attn_mask, torch.finfo(query.dtype).min)
    mask = () if attn_mask is None else (attn_mask,)
    with torch.autocast("cuda", enabled=False):
        return Kernel.apply(query, key, value, *mask)


gpu = Gpu()
