"""--device, --fp16 and what Apple's MPS lacks: python -m pytest tests/parallel/test_devices.py

No GPU is needed: autocast to float16 and the gradient scaler exist on a CPU, and what torch has kernels for on MPS is written
in the table that torch is generated from (torchgen). No run on Apple's hardware has been seen.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe
import train
from plumbing.run.arguments import parse
from plumbing.parallel import devices, processes
from tiny_run import SMALL, TINY, TRAIN, differences, metrics


# ------------------------------------------------------------------------------------------ --device and the arithmetic

def machine(monkeypatch, cuda=False, mps=False, bfloat16=True):
    """A machine that has these, as torch says it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16 or including_emulation)


@pytest.mark.parametrize("has, flags, kind", [
    ({}, "", "cpu"), ({"cuda": True}, "", "cuda"), ({"cuda": True}, "--device cpu", "cpu"),
    ({"mps": True}, "", "cpu"), ({"mps": True}, "--device mps", "mps"),
    ({"cuda": True, "mps": True}, "--device auto", "cuda"), ({"cuda": True}, "--device cuda", "cuda")])
def test_the_device_is_the_one_asked_for(has, flags, kind, monkeypatch):
    machine(monkeypatch, **has)
    assert devices.kind_of(parse(flags.split())) == kind


@pytest.mark.parametrize("flags, words", [
    ("--device cuda", "--device cuda: torch"), ("--device mps", "--device mps: torch"), ("--device tpu", "known: auto, cpu, cuda, mps"),
    ("--bf16 true --fp16 true", "autocast uses only one format")])
def test_what_cannot_be_is_one_line(flags, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    machine(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        train.main(flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1 and not os.listdir()


@pytest.mark.parametrize("bfloat16, flags, wanted", [
    (True, "", (False, False, "float32")), (True, "--model_name_or_path m", (True, False, "bfloat16")),
    (False, "--model_name_or_path m", (False, True, "float16")),                        # a T4: bfloat16 would be emulated
    (False, "--model_name_or_path m --bf16 false", (False, False, "float32")),
    (False, "--model_name_or_path m --fp16 false", (False, False, "float32")),
    (True, "--model_name_or_path m --fp16", (False, True, "float16")),
    (True, "--model_name_or_path m --fp16 false", (True, False, "bfloat16")),
    (False, "--model_name_or_path m --device cpu", (False, False, "float32"))])
def test_bfloat16_only_where_the_gpu_has_it(bfloat16, flags, wanted, monkeypatch):
    machine(monkeypatch, cuda=True, bfloat16=bfloat16)
    args = parse(flags.split())
    assert (args.bf16, args.fp16, args.sampler_dtype) == wanted
    assert str(args.half or torch.float32) == f"torch.{args.sampler_dtype}"


def test_bfloat16_that_would_be_emulated_is_refused(monkeypatch):
    machine(monkeypatch, cuda=True, bfloat16=False)
    with pytest.raises(ValueError, match="no bfloat16 arithmetic; use --fp16"):
        parse(["--bf16", "true"])


# --------------------------------------------------------------------------------------------------------------- --fp16

FP16 = [*TINY, "--fp16", "--warmup_steps", "0"]


def test_float16_has_float32s_gradients_and_resumes_exactly(workplace):
    """The same rollout: float16's first gradient is float32's to 1 %, whatever the scale. The scaler is part of a checkpoint."""
    flags = [*FP16, "--steps", "3", "--save_steps", "1", "--sampler_dtype", "float32"]
    train.main([*TINY, "--warmup_steps", "0", "--steps", "1", "--output_dir", "float32"])
    for name in ("whole", "parts"):
        train.main([*flags, "--output_dir", name])
    norms = [metrics(run)[0]["minibatches"][0]["grad_norm"] for run in ("float32", "whole")]
    assert norms[0] == pytest.approx(norms[1], rel=0.01) and norms[0] != norms[1]
    state = torch.load("whole/checkpoints/step_3/state.pt", weights_only=True)
    assert state["scaler"]["scale"] == 65536.0 and state["scaler"]["_growth_tracker"] == 6
    shutil.rmtree("parts/checkpoints/step_3")
    train.main([*flags, "--output_dir", "parts", "--resume"])
    assert differences("whole", "parts", 3) == []


@pytest.mark.parametrize("more", [[], ["--use_peft"], ["--optim", "adamw_torch"]], ids=" ".join)
def test_a_gradient_beyond_float16_lowers_the_scale_and_is_no_bad_batch(more, workplace, monkeypatch):
    """From a scale of 2^24 the first updates overflow, more in a row than MAX_BAD_STEPS; then training goes on."""
    if "--use_peft" in more:
        pytest.importorskip("peft")
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(scaler, init_scale=2.0**24))
    train.main([*FP16, "--steps", "7", "--output_dir", "run", *more])
    records = metrics("run")
    overflows = [record["overflows"] for record in records]
    assert overflows[0] == 2 and overflows[-1] == 0 and sum(overflows) > 3
    assert [record["skipped"] for record in records] == overflows and not list(Path("run").glob("bad_batch*"))
    assert records[-1]["lr"] > 0 and records[-1]["grad_norm"] > 0
    state = torch.load("run/checkpoints/step_7/state.pt", weights_only=True)
    assert state["scaler"]["scale"] == 2.0**(24 - sum(overflows))
    assert state["schedule"]["last_epoch"] == 14 - sum(overflows)       # a skipped update does not count


def test_what_no_scale_cures_is_a_bad_batch():
    on, off = torch.amp.GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", enabled=False)
    low = torch.amp.GradScaler("cpu", init_scale=1.0)
    low.scale(torch.zeros(()))                               # a scaler makes its scale when it is first used
    on.scale(torch.zeros(()))
    infinite, broken = {"loss": 0.5}, {"loss": float("nan")}
    assert train.overflowed(on, infinite) and not train.overflowed(on, broken)
    assert not train.overflowed(low, infinite) and not train.overflowed(off, infinite)


def test_a_sampler_that_overflows_says_so(workplace, cold_start, capsys):
    """Weights whose hidden states pass 65504: float16 cannot hold them, and nothing is sampled from nan."""
    from moe import TinyMoE
    from plumbing.data.running_sum import builtin_tokenizer
    policy = TinyMoE.from_pretrained(next(cold_start.iterdir()))
    with torch.no_grad():
        policy.model.layers[0].self_attn.v_proj.weight.mul_(1e4)
        policy.model.layers[0].self_attn.o_proj.weight.mul_(1e3)
    policy.save_pretrained("large")
    builtin_tokenizer().save_pretrained("large")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{j}=", "answer": "1"}) + "\n" for i in range(1, 6) for j in range(1, 6)))
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, "--model_name_or_path", "large", "--dataset_name", "rows.jsonl", "--verifier", "exact", "--steps", "1",
                    "--sampler_dtype", "float16", "--max_completion_length", "4", "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "65504" in err and "--sampler_dtype float32" in err


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard"]], ids=" ".join)
def test_float16_in_two_processes(more, workplace):
    """Gradients of shards are unscaled as one process's are."""
    flags = [*FP16, "--steps", "2", "--sampler_dtype", "float32", "--output_dir"]
    train.main([*flags, "one"])
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN, *flags, "two",
                           *more], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (metrics(run)[0]["minibatches"][0]["grad_norm"] for run in ("one", "two"))
    assert one == pytest.approx(two, rel=0.01)


# ------------------------------------------------------------------------------------------------------------------ MPS

ON_THE_CPU = {("plumbing/data/task.py", "total"), ("eval.py", "bootstrap"), ("eval.py", "reward_scores")}   # float64, of CPU tensors
COMPOSED = {"CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
WRITTEN_ELSEWHERE = {"_to_copy", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
                     "_fused_rms_norm", "_fused_rms_norm_backward", "detach"}    # MPS takes another way than the CPU's here


@functools.cache
def on_mps():
    """The names (with overload) of torch's operations that have a kernel for MPS, or are made of others."""
    import torchgen
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    rows = {row.split("(")[0].strip(): row for row in text.split("\n- func: ")[1:]}

    def there(row):
        other = re.search(r"structured_delegate: (\S+)", row)
        if other:
            return there(rows[other[1]])
        table = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", row)
        return table is None or any(re.search(rf"\b{key}\b", table[1]) for key in ("MPS", *COMPOSED))
    return {name for name in rows if there(rows[name])} - {"_grouped_mm"}      # there by a loop of copies to the host


class Mps(TorchDispatchMode):
    """Raises for what MPS cannot do: numbers of 64 floating-point bits, operations without a kernel there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::") + "." * bool(function._schema.overload_name) + function._schema.overload_name
        known = function.namespace == "profiler" or name in on_mps() or name.split(".")[0] in WRITTEN_ELSEWHERE
        found = function(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        wide = any(x.dtype in (torch.float64, torch.complex128) for x in tensors)
        if (wide or not known) and not where() & ON_THE_CPU:
            raise NotImplementedError(f"MPS lacks {name} {[x.dtype for x in tensors]}")
        return found


def where():
    """The (file, function) of the calls of this project that are under way."""
    frame, found, root = sys._getframe(2), set(), str(Path(TRAIN).parent) + "/"
    while frame:
        code = frame.f_code
        found.add((code.co_filename.removeprefix(root), code.co_name))
        frame = frame.f_back
    return found


def as_on_mps(monkeypatch):
    """The checks of the device's type say mps, though tensors are the CPU's."""
    machine(monkeypatch, mps=True)
    monkeypatch.setattr(moe, "has_grouped_product", lambda device: False)
    monkeypatch.setattr(train, "widest", lambda device: devices.widest(SimpleNamespace(type="mps")))
    monkeypatch.setattr(processes, "start", lambda args: [devices.kind_of(args), torch.device("cpu")][1])


def test_the_table_of_kernels_is_read_right():
    assert {"mm", "_softmax", "_fused_adamw_", "searchsorted.Tensor", "sort.stable", "index_add"} <= on_mps()
    assert not {"_grouped_mm", "_scaled_grouped_mm"} & on_mps()
    with Mps(), pytest.raises(NotImplementedError, match="MPS lacks"):
        torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize("flags", ["--algorithm gspo --eval_samples 1 --eval_prompts 3", "--algorithm ppo --beta 0.1 --entropy_coef 0.01",
                                   "--algorithm rspo --plain", "--algorithm dapo --entropy_quantile 0.5 --bf16 true"])
def test_nothing_that_mps_lacks_is_on_its_path(flags, workplace, monkeypatch):
    as_on_mps(monkeypatch)
    with Mps():
        train.main([*TINY, "--device", "mps", "--steps", "2", "--output_dir", "run", *flags.split()])
    assert metrics("run")[-1]["grad_norm"] > 0
