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
        assert run["syncs"]["update"] <= 2 or "mixtral" in run["flags"], (run["flags"], waits)


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


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"state": "lora"},
                                  {"state": "offload"}], ids=str)
def test_simulated_peaks_are_within_a_tenth_of_the_estimate(more, tmp_path):
    names = ("SmolLM2 135M", "Qwen 0.5B", "Qwen3 0.6B", "Qwen 1.5B", "Qwen 3B")
    names = names[:1] if "offload" in more.values() else names   # its masters are real memory
    cases = [{"model": name, "rows": 8, "layers": 4, "max_logits": 2**26, **more} for name in names]
    for run in simulate("simulate_memory.py", cases, tmp_path):
        assert run["estimate"] == pytest.approx(run["peak"], rel=0.1), run


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
    subprocess.run([sys.executable, HERE.parent / "benchmarks" / "gpu.py", "--cpu", "--json", file],
                   check=True, cwd=tmp_path)
    found = json.loads(file.read_text())
    assert " failed" not in found.pop("tests")               # a line of pytest's
    skipped = {name for name, part in found.items() if "skipped" in part}
    assert skipped == {"syncs", "versus_trl"}, found
    assert not [part for part in found.values() if "error" in part], found
    for name in ("default run", "routing replay old", "routing replay rollout"):
        assert found[name]["batch"]["grad_norm"] > 0
    assert {"fast", "--plain"} == set(found["first command"]) and found["first command"]["fast"]["seconds"] > 0
    gsm8k, samplers = found["gsm8k"], found["samplers"]
    assert (gsm8k["batches"], gsm8k["pairs"]) == (4, 1) and set(gsm8k["before"]) == {"strict", "lenient"}
    gspo, grpo = gsm8k["runs"]
    assert (gspo["algorithm"], grpo["algorithm"]) == ("gspo", "grpo") and gspo["after"] and grpo["after"]
    assert gspo["pass_rate"][0] == grpo["pass_rate"][0]      # same start, prompts and seed
    assert samplers["built-in"]["tokens_per_second"] > 0, samplers
    assert "skipped" in samplers["--sampler vllm"] or samplers["--sampler vllm"]["tokens_per_second"] > 0, samplers
    assert len(found["beside TRL"]["seconds"]) == 3
    assert found["decode"]["plain"] > 0 and found["noise"]["bfloat16"]["log_s"] > 0


@needs_compiler
@pytest.mark.slow
def test_the_gpu_benchmark_ends_on_a_pretended_gpu(tmp_path):
    done = subprocess.run([sys.executable, HERE / "gpu" / "run_bench.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 7 and not [part for part in found.values() if "error" in part], found


def test_the_difference_of_gsm8ks_pairs_is_taken_per_question():
    """Two seeds, four questions: GSPO minus GRPO is +1, 0, -1/2, +1/2 by question."""
    sys.path.insert(0, str(HERE.parent / "benchmarks"))
    from gpu import PUBLISHED, difference, table
    marks = lambda *right: {"strict": right, "lenient": (True,) * 4}
    both = difference([marks(1, 1, 0, 1), marks(1, 0, 0, 0)], [marks(0, 1, 1, 0), marks(0, 0, 0, 0)])
    middle, low, high = both["strict"]
    assert middle == 0.25 and low < 0.25 < high and both["lenient"][0] == 0.0
    runs = [{"algorithm": "gspo", "seed": 3, "after": {"strict": 0.5, "lenient": 0.6}}, {"algorithm": "grpo", "seed": 3, "error": "no memory"}]
    text = table({"questions": 4, "batches": 2, "before": {"strict": 0.25, "lenient": 0.5}, "runs": runs,
                  "gspo_minus_grpo": both, "published": PUBLISHED})
    for line in ("gspo, seed 3, strict: 25.0 -> 50.0", "grpo, seed 3, lenient: 50.0 -> -", "GSPO - GRPO, strict: +25.0", "43.6 -> 50.2 (slime#1835)"):
        assert line in text, text


def test_gsm8ks_two_verifiers():
    """Strict wants the number, and nothing but it, in the last box; lenient takes the last number there is."""
    sys.path.insert(0, str(HERE.parent / "benchmarks"))
    from gpu import command, lenient, strict
    for response, found in (("\\boxed{72}", (True, True)), ("so \\boxed{1,072}. ok", (False, False)), ("The answer is 72.", (False, True)),
                            ("\\boxed{70} no, \\boxed{72}", (True, True)), ("\\boxed{72 apples}", (False, True)), ("72 of 80", (False, False)),
                            ("\\boxed{72.0}", (False, False)), ("", (False, False)), ("\\boxed{72} and 3", (True, False))):
        assert (strict(response, "reasons #### 72"), lenient(response, "reasons #### 72")) == found, response
    assert strict("\\boxed{$1,072$}", "1072") and lenient("it costs 1,072", "1,072")

    class Here:
        cpu, own = False, {"--model_name_or_path": "a/copy", "--dataset_name": None}
    flags = command(Here, ".")                               # README's own, with a copy of the model
    assert flags[:4] == ["--model_name_or_path", "a/copy", "--dataset_name", "openai/gsm8k"] and "--steps" in flags
