"""The device that a run computes on, and the number format that suits it.

    --device     auto: CUDA if there is a GPU, else the CPU; mps (Apple) is used only if it is asked
                 for, because it has not been tested on real hardware
    autocast     none, so float32; for a checkpoint on a GPU bfloat16, or float16 with a gradient
                 scaler on GPUs that only emulate bfloat16 (T4, V100 and older)
"""

from contextlib import nullcontext

import torch

from plumbing.refusal import Refusal


def find_device_type(settings):
    """"cpu", "cuda" or "mps". Raises Refusal if torch does not find the device."""
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    backend = {"cuda": torch.cuda, "mps": torch.backends.mps}.get(settings.device)
    if backend and not backend.is_available():
        raise Refusal(f"--device {settings.device}: torch {torch.__version__} finds no such "
                      "device on this machine; use --device auto")
    return settings.device


def has_bfloat16():
    """Whether the GPU has bfloat16 arithmetic. torch can also emulate it, slowly."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def choose_autocast(settings):
    """{"bf16": ..., "fp16": ...}: these flags of a run, chosen here if they were not given.

    Raises Refusal if both are on, or if the GPU has no bfloat16 arithmetic for --bf16.
    """
    gpu = find_device_type(settings) == "cuda"
    bf16 = settings.bf16
    fp16 = settings.fp16
    if bf16 and fp16:
        raise Refusal("--bf16 true and --fp16 true: autocast uses only one format")
    if bf16 and gpu and not has_bfloat16():
        raise Refusal("--bf16 true: this GPU has no bfloat16 arithmetic; use --fp16, which is "
                      "the default on such a GPU")
    wanted = gpu and bool(settings.model_name_or_path)
    if fp16 is None:
        fp16 = wanted and bf16 is None and not has_bfloat16()
    if bf16 is None:
        bf16 = wanted and not fp16 and has_bfloat16()
    return {"bf16": bf16, "fp16": fp16}


def autocast(device, dtype):
    """Autocast to `dtype` on a device; no autocast if it is None."""
    return torch.autocast(device.type, dtype) if dtype else nullcontext()
