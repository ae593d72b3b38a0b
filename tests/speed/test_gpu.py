"""A GPU that is not there, tests/gpu/pretend_device.py: train.py and memory estimates. Needs g++.

    python -m pytest tests/speed/test_gpu.py            # a few presets;  -m slow: all of them

Simulated: devices, host syncs and bytes. A GPU's numbers and speed: benchmarks/gpu.py.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from plumbing.run.arguments import ALGORITHMS

HERE = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="the pretended GPU needs g++")


def simulate(script, cases, folder):
    done = subprocess.run([sys.executable, HERE / "gpu" / script, json.dumps(cases)], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def agrees(found):
    """All ran to their end; nothing waits while tokens are drawn or a batch is cut, and an update
    waits twice. transformers' grouped product in Mixtral may."""
    for run in found:
        assert (run["exit"], run["error"]) == (None, None), run["flags"]
        waits = {name: [(why, n) for why, n in places if "grouped_mm" not in why]
                 for name, places in run["where"].items()}
        assert not waits["token step"] and not waits["cut"], (run["flags"], waits)
        more = "ppo" in run["flags"]                         # gae looks whether rewards are finite
        assert run["syncs"]["update"] <= 2 + more or "mixtral" in run["flags"], (run["flags"], waits)


@needs_compiler
@pytest.mark.slow
def test_a_run_on_two_kinds_of_checkpoints_keeps_to_the_budget_of_waits(tmp_path):
    """A rollout waits seven times while prompts and responses are copied, and once per 16 tokens."""
    tokens = 40
    found = simulate("run_train.py", [
        f"hf --steps 1 --bf16 true --beta 0.1 --max_completion_length {tokens} --output_dir a",
        "--steps 1 --cold_start_steps 5 --bf16 false --algorithm ppo --output_dir b",
        "--steps 1 --cold_start_steps 5 --fp16 true --beta 0.1 --output_dir c",
        *["hf --steps 1 --fp16 true --use_peft --output_dir d"] * bool(find_spec("peft"))], tmp_path)
    agrees(found)
    assert 7 < found[0]["syncs"]["rollout"] <= 7 + tokens // 16, found[0]["where"]["rollout"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("bf16", ["true", "false"])
@pytest.mark.parametrize("kind", ["", "hf"])
def test_every_preset_runs_and_resumes(kind, bf16, tmp_path):
    """rspo needs routers; srpo's second source are longer sums, or another file."""
    stage2 = " --stage2_step 1" + " --stage2_dataset_name hf/data.jsonl" * bool(kind)
    agrees(simulate("run_train.py", [
        f"resume {'mixtral' if kind and name == 'rspo' else kind} --steps 2 --algorithm {name}"
        f" --bf16 {bf16} --output_dir {name}" + stage2 * (name == "srpo") for name in ALGORITHMS],
        tmp_path))


@needs_compiler
@pytest.mark.slow
def test_what_else_there_is_runs_and_resumes(tmp_path):
    agrees(simulate("run_train.py", [
        f"resume {kind} --steps 2 --output_dir {kind}{i} {flags}"
        for kind in ("", "hf") for i, flags in enumerate((
            "--use_peft --bf16 true", "--gradient_checkpointing", "--beta 0.1",
            "--micro_batch_size 2 --bf16 true"))], tmp_path))
    found = simulate("run_train.py", [
        f"resume --steps 2 --output_dir more{i} {flags}" for i, flags in enumerate((
            "--routing_replay old", "--routing_replay rollout",
            "--plain"))], tmp_path)
    assert not [run for run in found if run["exit"] or run["error"]], found


SIMULATED = ("--model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name x --prompts_per_step 4 "
             "--max_prompt_length 64 --max_completion_length 64 --steps_per_generation 4 ")


@needs_compiler
@pytest.mark.slow
def test_the_simulated_memory_follows_the_flags():
    """Weights, gradients and AdamW's moments are 16 bytes per parameter in two layers of SmolLM2;
    what else there is grows with the rows and shrinks with what saves memory."""
    flags = ["--bf16 false", "--bf16 true", "--bf16 false --micro_batch_size 4", "--bf16 false "
             "--micro_batch_size 8", "--bf16 false --gradient_checkpointing", "--bf16 false "
             "--use_peft", "--bf16 true --use_peft"]
    code = (f"import simulate, json, sys; simulate.gpu.shapes = True; "
            f"print(json.dumps([simulate.simulated({SIMULATED!r} + f, 2) for f in {flags}]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parent / "benchmarks",
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    full, half, four, eight, checkpointed, lora, lora_half = json.loads(done.stdout)
    state = 16 * (49152 * 576 + 576 + 2 * (576 * (2 * 576 + 2 * 192 + 3 * 1536) + 2 * 576))
    assert state < four < eight == full < 2 * state          # 8 rows are the whole mini-batch
    assert half < full and state < checkpointed < full
    assert lora_half < lora < full


@needs_compiler
def test_the_simulation_prints_the_peak_of_a_run_and_names_an_unknown_model():
    def printed(model):
        return subprocess.run(
            [sys.executable, HERE.parent / "benchmarks/simulate.py", *SIMULATED.split(), "--bf16",
             "true", "--model_name_or_path", model], capture_output=True, text=True)
    done = printed("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert 16 * 134.5e6 / 1e9 < float(done.stdout.split(" GB")[0]) < 8, done.stderr[-2000:]
    assert "a/model: not among HuggingFaceTB/SmolLM2-135M" in printed("a/model").stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu(workplace):
    import train
    from tiny_run import TINY, metrics
    train.main([*TINY, "--device", "auto", "--steps", "2", "--output_dir", "run"])
    assert metrics("run")[-1]["grad_norm"] > 0


@pytest.mark.slow
def test_the_gpu_benchmark_measures_every_part_on_a_cpu_or_says_why_not(tmp_path):
    file = tmp_path / "gpu.json"
    subprocess.run([sys.executable, HERE.parent / "benchmarks" / "gpu.py", "--cpu", "--json", file,
                    "--limit", "150"], check=True, cwd=tmp_path)
    found = json.loads(file.read_text())
    assert " failed" not in found.pop("tests")               # a line of pytest's
    skipped = {name for name, part in found.items() if "skipped" in part}
    assert skipped == {"syncs", "versus_trl"}, found
    assert not [part for part in found.values() if "error" in part], found
    assert found["run"]["fast"]["seconds_update"]["min"] > 0 and "--plain" in found["run"]
    pairs = found["pairs"]
    assert set(pairs) == {f"{name}, seed {seed}" for name in ("gspo", "grpo") for seed in (0, 1)}
    for seed in (0, 1):                                      # the same start and questions
        both = [pairs[f"{name}, seed {seed}"] for name in ("gspo", "grpo")]
        assert both[0]["pass_at_1_before"] == both[1]["pass_at_1_before"]
        assert both[0]["steps"] == both[1]["steps"]
    assert found["samplers"]["built-in"] > 0
    assert found["decode"]["tokens_per_second"] > 0 and found["noise"]["bfloat16"]["log_s"] > 0


@needs_compiler
@pytest.mark.slow
def test_the_gpu_benchmark_ends_on_a_pretended_gpu(tmp_path):
    done = subprocess.run([sys.executable, HERE / "gpu" / "run_bench.py"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 and not [part for part in found.values() if "error" in part], found
