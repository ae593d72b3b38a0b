"""A GPU that is not there, tests/gpu/pretend_device.py: train.py and memory estimates. Needs g++.

    python -m pytest tests/speed/test_gpu.py            # a few presets;  -m slow: all of them

Simulated: devices, host syncs and bytes. A GPU's numbers and speed: benchmarks/gpu.py.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from session.arguments import ALGORITHMS
from tiny_run import python, read_json

HERE = Path(__file__).parents[1]


def pretended(test):
    """A slow test on the pretended GPU."""
    needs = pytest.mark.skipif(not shutil.which("g++"), reason="the pretended GPU needs g++")
    return pytest.mark.slow(needs(test))


def trained(cases, folder):
    """Runs of tests/gpu/run_train.py. All end as they should; nothing waits while tokens are drawn
    or a batch is cut; an update waits twice, and once in each of its passes for the places of the
    loss tokens. transformers' grouped product in Mixtral may wait."""
    script = HERE / "gpu/run_train.py"
    found = [json.loads(line) for line in
             python(script, json.dumps(cases), cwd=folder).stdout.splitlines()]
    for run in found:
        assert (run["exit"], run["error"]) == (None, None), run["flags"]
        if "more" in run["flags"]:                           # of these the waits are not counted
            continue
        waits = {name: [(why, n) for why, n in places if "grouped_mm" not in why]
                 for name, places in run["where"].items()}
        steps = [why for why, _ in waits["token step"] if "graphs.py" not in why]    # its checks
        assert not steps and not waits["cut"], (run["flags"], waits)
        passes = 4 if "micro_batch_size" in run["flags"] else 1
        allowed = 2 + passes + ("ppo" in run["flags"])       # gae looks whether rewards are finite
        many = run["syncs"]["update"] > allowed
        assert not many or "mixtral" in run["flags"], (run["flags"], waits)
    return found


@pretended
def test_a_run_on_two_kinds_of_checkpoints_keeps_to_the_budget_of_waits(tmp_path):
    """A rollout waits seven times while prompts and responses are copied, and after token 0 and
    every sixteenth."""
    first, *_ = trained([
        "hf --steps 1 --bf16 true --beta 0.1 --max_completion_length 40 --output_dir a",
        "--steps 1 --cold_start_steps 5 --bf16 false --algorithm ppo --output_dir b",
        "--steps 1 --cold_start_steps 5 --fp16 true --beta 0.1 --output_dir c",
        *["hf --steps 1 --fp16 true --use_peft --output_dir d"] * bool(find_spec("peft"))],
        tmp_path)
    assert 7 < first["syncs"]["rollout"] <= 7 + 1 + 40 // 16, first["where"]["rollout"]


@pretended
@pytest.mark.parametrize("bf16", ["true", "false"])
@pytest.mark.parametrize("kind", ["", "hf"])
def test_every_preset_runs_and_resumes(kind, bf16, tmp_path):
    """rspo needs routers; srpo's second source are longer sums, or another file."""
    stage2 = " --stage2_step 1" + " --stage2_dataset_name hf/data.jsonl" * bool(kind)
    trained([f"resume {'mixtral' if kind and name == 'rspo' else kind} --steps 2 --bf16 {bf16}"
             f" --algorithm {name} --output_dir {name}" + stage2 * (name == "srpo")
             for name in ALGORITHMS], tmp_path)


@pretended
def test_what_else_there_is_runs_and_resumes(tmp_path):
    trained([
        *(f"resume {kind} --steps 2 --output_dir {kind}{i} {flags}" for kind in ("", "hf")
          for i, flags in enumerate(("--use_peft --bf16 true", "--gradient_checkpointing",
                                     "--beta 0.1", "--micro_batch_size 2 --bf16 true"))),
        *(f"resume --steps 2 --output_dir more{i} {flags}" for i, flags in enumerate(
            ("--routing_replay old", "--routing_replay rollout", "--plain")))], tmp_path)


@pretended
@pytest.mark.parametrize("kind", ["", "hf"])
def test_a_run_with_cuda_graphs_trains_resumes_and_repeats_the_run_without(kind, tmp_path):
    """A replayed step is the call again. The first batch is sampled without."""
    flags = "--steps 2 --max_completion_length 24" + " --cold_start_steps 5" * (not kind)
    names = [f"{bf16}{graphs}" for bf16 in ("false", "true") for graphs in ("", " --cuda_graphs")]
    trained([f"resume {kind} {flags} --output_dir {i} --bf16 {name}"
             for i, name in enumerate(names)], tmp_path)
    lines = [read_json(tmp_path / f"{i}/metrics.jsonl") for i in range(4)]
    replayed = [[line["cuda_graphs"] for line in run] for run in lines]
    assert replayed == [[False, False], [False, True]] * 2
    for eager, graph in zip(lines[::2], lines[1::2]):
        assert [x["length"] for x in eager] == [x["length"] for x in graph]
        assert graph[1]["mismatch_kl"] < 10 * eager[1]["mismatch_kl"]


@pretended
def test_tf32_changes_the_products_of_a_run(tmp_path):
    on, off = trained([f"--steps 1 --cold_start_steps 5 --bf16 false --output_dir {name}{flag}"
                       for name, flag in (("a", " --tf32"), ("b", ""))], tmp_path)
    assert (on["precision"], off["precision"]) == ("high", "highest")
    assert "TF32" in on["said"] and "TF32" not in off["said"]


SIMULATED = ("--model_name_or_path HuggingFaceTB/SmolLM2-135M --dataset_name x "
             "--prompts_per_step 4 --max_prompt_length 64 --max_completion_length 64 "
             "--steps_per_generation 4 --bf16 ")
# weights, gradients and AdamW's moments of two layers of SmolLM2: 16 bytes per parameter
STATE = 16 * (49152 * 576 + 576 + 2 * (576 * (2 * 576 + 2 * 192 + 3 * 1536) + 2 * 576))


def peaks(*flags):
    """The simulated peak bytes of two layers of SmolLM2 under each of these flags."""
    code = ("import simulate, json; simulate.gpu.shapes = True; print(json.dumps("
            f"[simulate.simulated({SIMULATED!r} + more, 2) for more in {flags}]))")
    return json.loads(python("-c", code, cwd=HERE.parent / "benchmarks").stdout)


@pretended
def test_the_simulated_memory_follows_the_flags():
    """What there is beside the state grows with the rows and shrinks with what saves memory."""
    full, half, four, eight, checkpointed, lora, lora_half, one, two = peaks(
        "false", "true", "false --micro_batch_size 4", "false --micro_batch_size 8",
        "false --gradient_checkpointing", "false --use_peft", "true --use_peft",
        "true --micro_batch_size 1", "true --micro_batch_size 2")
    assert STATE < four < eight == full < 2 * STATE          # 8 rows are the whole mini-batch
    assert half < full and STATE < checkpointed < full
    assert lora_half < lora < full and STATE < one < two < 2 * STATE


@pretended
def test_the_simulation_prints_the_peak_of_a_run_and_names_an_unknown_model():
    script, words = HERE.parent / "benchmarks/simulate.py", [*SIMULATED.split(), "true"]
    said = python(script, *words, "--model_name_or_path", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert 16 * 134.5e6 / 1e9 < float(said.stdout.split(" GB")[0]) < 8
    unknown = python(script, *words, "--model_name_or_path", "a/model", code=1)
    assert "a/model: not among HuggingFaceTB/SmolLM2-135M" in unknown.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu(run):
    assert run("--device auto --steps 2")[-1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    "--cpu", pytest.param("--pretend", marks=pytest.mark.skipif(
        not shutil.which("g++"), reason="the simulated GPU needs g++"))])
def test_the_report_of_a_gpu_has_every_step_or_says_why_not(kind, tmp_path):
    file = tmp_path / "gpu.json"
    done = python(HERE.parent / "benchmarks/gpu.py", kind, "--json", file, cwd=tmp_path)
    found = read_json(file)
    skipped = [name for name, part in found.items() if "skipped" in str(part)]
    expected = ["tests", *["decoding"] * (kind == "--pretend"), "peaks", "vllm"]
    assert skipped == expected, found
    assert "FAILED" not in done.stdout and found["resume"] is True
    report = done.stdout.split("```")[1].strip().splitlines()
    assert len(report) <= 40 and report[0].startswith("device")
    assert found["recipes"]["gsm8k-24gb"]["tokens_per_second"] > 0
