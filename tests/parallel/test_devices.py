"""--device, --fp16 and what Apple's MPS lacks: python -m pytest tests/parallel/test_devices.py

No GPU is needed: autocast to float16 and the gradient scaler exist on a CPU, and what torch has
kernels for on MPS is written in the table that torch is generated from (torchgen). No run on
Apple's hardware has been seen.
"""

import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe
import train
from features.sampler_format import find_sampler_format
from plumbing.parallel import devices, processes
from session import learner
from session.arguments import parse
from tiny_run import TINY, TRAIN, metrics, python


# -------------------------------------------------------------------- --device and the arithmetic

@pytest.fixture
def machine(monkeypatch):
    """machine("cuda mps bfloat16"): it has these, as torch says it."""
    def has(words):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in words)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in words)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True:
                            "bfloat16" in words or including_emulation)
    return has


@pytest.mark.parametrize("has, flags, kind", [
    ("", "", "cpu"), ("cuda", "", "cuda"), ("cuda", "--device cpu", "cpu"), ("mps", "", "cpu"),
    ("mps", "--device mps", "mps"), ("cuda mps", "--device auto", "cuda"),
    ("cuda", "--device cuda", "cuda")])
def test_the_device_is_the_one_asked_for(has, flags, kind, machine):
    machine(has + " bfloat16")
    assert devices.find_device_type(parse(flags.split())) == kind


@pytest.mark.parametrize("has, flags, words", [
    ("", "--device cuda", "--device cuda: torch"), ("", "--device mps", "--device mps: torch"),
    ("", "--bf16 true --fp16 true", "autocast uses only one format"),
    ("cuda", "--bf16 true --device auto", "no bfloat16 arithmetic; use --fp16")])
def test_what_cannot_be_is_one_line(has, flags, words, machine, refused):
    machine(has)
    assert words in refused(flags)


CHECKPOINT = "--model_name_or_path m"


@pytest.mark.parametrize("has, flags, half", [
    ("bfloat16", "", None), ("bfloat16", CHECKPOINT, "bfloat16"),
    ("", CHECKPOINT, "float16"),                             # a T4: bfloat16 would be emulated
    ("", "--config recipes/gsm8k-16gb.yaml", "float16"),
    ("", f"{CHECKPOINT} --bf16 false", None), ("", f"{CHECKPOINT} --fp16 false", None),
    ("bfloat16", f"{CHECKPOINT} --fp16", "float16"),
    ("bfloat16", f"{CHECKPOINT} --fp16 false", "bfloat16"),
    ("", f"{CHECKPOINT} --device cpu", None)])
def test_bfloat16_only_where_the_gpu_has_it(has, flags, half, machine):
    machine(f"cuda {has}")
    args = parse(flags.split())
    assert (args.bf16, args.fp16) == (half == "bfloat16", half == "float16")
    assert find_sampler_format(args) == (half or "float32")
    assert args.autocast_dtype == (half and getattr(torch, half))


# ---------------------------------------------------------------------------------------- --fp16

FP16 = "--fp16 --warmup_steps 0"


def scaler_of(folder):
    """(scale, what it has counted, updates that counted) at the end of a run."""
    state = torch.load(max(Path(folder).glob("checkpoints/*/state.pt")), weights_only=True)
    scaler = state["scaler"]
    return scaler["scale"], scaler["_growth_tracker"], state["updates"]


def test_float16_has_float32s_gradients_and_saves_its_scaler(run):
    """The same rollout: float16's first gradient is float32's to 1 %, whatever the scale. It
    resumes exactly: tests/run/test_resume.py."""
    flags = f"{FP16} --steps 3 --sampler_dtype float32"
    norm = lambda records: records[0]["minibatches"][0]["grad_norm"]
    full, half = norm(run("--warmup_steps 0", folder="float32")), norm(run(flags, folder="whole"))
    assert full == pytest.approx(half, rel=0.01) and full != half
    assert scaler_of("whole")[:2] == (65536.0, 6)


@pytest.mark.parametrize("more", ["", "--use_peft"])
def test_a_gradient_beyond_float16_lowers_the_scale_and_is_no_bad_batch(more, run, monkeypatch):
    """From a scale of 2^24 the first updates overflow, more in a row than learner.BAD; then
    training goes on. A skipped update does not count."""
    if "--use_peft" in more:
        pytest.importorskip("peft")
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(scaler, init_scale=2.0**24))
    records = run(f"{FP16} --steps 7 {more}")
    overflows = [record["skipped"] for record in records]
    assert overflows[0] == 2 and overflows[-1] == 0 and sum(overflows) > learner.BAD
    assert records[-1]["lr"] > 0 and records[-1]["grad_norm"] > 0
    scale, _, counted = scaler_of("run")
    assert (scale, counted) == (2.0**(24 - sum(overflows)), 14 - sum(overflows))


@pytest.mark.parametrize("scale, loss, cured", [
    (64.0, 0.5, True), (64.0, float("nan"), False), (1.0, 0.5, False), (None, 0.5, False)])
def test_what_no_scale_cures_is_a_bad_update(scale, loss, cured):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    scaler.scale(torch.zeros(()))                            # makes its scale when first used
    one = SimpleNamespace(scaler=scaler, bad=0, updates=1, settings=None)
    learner.Learner.stop_if_bad(one, {"loss": loss, "skipped": True})
    assert (one.bad == 0) == cured


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard"]], ids=" ".join)
def test_float16_in_two_processes(more, run):
    """Gradients of shards are unscaled as one process's are."""
    flags = f"{FP16} --steps 2 --sampler_dtype float32"
    one = run(flags)[0]["minibatches"][0]["grad_norm"]
    python(TRAIN, *TINY, *flags.split(), "--output_dir", "two", *more, processes=2)
    assert metrics("two")[0]["minibatches"][0]["grad_norm"] == pytest.approx(one, rel=0.01)


# ------------------------------------------------------------------------------------------- MPS

# float64, of CPU tensors
ON_THE_CPU = {("plumbing/data/task.py", "reward_components"), ("train.py", "reward"),
              ("eval.py", "evaluate"), ("eval.py", "bootstrap"),
              ("eval.py", "reward_scores"), ("moe.py", "from_pretrained")}
KERNELS = ("MPS", "CompositeImplicitAutograd", "CompositeExplicitAutograd",
           "CompositeExplicitAutogradNonFunctional")
# MPS takes another way than the CPU's here
ELSEWHERE = {"_to_copy", "_scaled_dot_product_flash_attention_for_cpu", "detach", "_fused_rms_norm",
             "_scaled_dot_product_flash_attention_for_cpu_backward", "_fused_rms_norm_backward"}


@functools.cache
def on_mps():
    """The names (with overload) of torch's operations with a kernel for MPS, or made of others."""
    import torchgen
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    rows = table.read_text(encoding="utf-8").split("\n- func: ")[1:]
    rows = {row.split("(")[0].strip(): row for row in rows}

    def there(row):
        if other := re.search(r"structured_delegate: (\S+)", row):
            return there(rows[other[1]])
        table = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", row)
        return table is None or any(re.search(rf"\b{key}\b", table[1]) for key in KERNELS)
    found = {name for name in rows if there(rows[name])}
    return found - {"_grouped_mm"}                           # a loop of copies to the host


class Mps(TorchDispatchMode):
    """Raises for what MPS cannot do: 64-bit floating-point numbers, operations without a kernel."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        overload = function._schema.overload_name
        name, plain = name + "." * bool(overload) + overload, name
        known = function.namespace == "profiler" or name in on_mps() or plain in ELSEWHERE
        found = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, found))
        dtypes = [x.dtype for x in leaves if isinstance(x, torch.Tensor)]
        wide = {torch.float64, torch.complex128} & {*dtypes}
        if (wide or not known) and not where() & ON_THE_CPU:
            raise NotImplementedError(f"MPS lacks {name} {dtypes}")
        return found


def where():
    """The (file, function) of the calls of this project that are under way."""
    frame, found, root = sys._getframe(2), set(), str(Path(TRAIN).parent) + "/"
    while frame:
        code = frame.f_code
        found.add((code.co_filename.removeprefix(root), code.co_name))
        frame = frame.f_back
    return found


@pytest.mark.parametrize("flags", [
    "--algorithm gspo --eval_samples 1 --eval_prompts 3",
    "--algorithm ppo --beta 0.1 --entropy_coef 0.01", "--algorithm rspo --plain",
    "--algorithm dapo --entropy_quantile 0.5 --bf16 true"])
def test_nothing_that_mps_lacks_is_on_its_path(flags, run, machine, monkeypatch):
    """Checks of the device's type say mps, though tensors are the CPU's."""
    machine("mps bfloat16")
    monkeypatch.setattr(moe, "has_grouped_product", lambda device: False)
    monkeypatch.setattr(train, "reward_dtype", lambda device: torch.float32)
    monkeypatch.setattr(processes, "start",
                        lambda args: [devices.find_device_type(args), torch.device("cpu")][1])
    with Mps():
        assert run(f"--device mps --steps 2 {flags}")[-1]["grad_norm"] > 0
