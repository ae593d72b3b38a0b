"""A GPU that is not there, tests/gpu/pretend_device.py (needs g++): memory estimates, and the
report of benchmarks/gpu.py, which measures a real one.
python -m pytest -m slow tests/speed/test_gpu.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tiny_run import python, read_json

HERE = Path(__file__).parents[1]


def pretended(test):
    """A slow test on the pretended GPU."""
    needs = pytest.mark.skipif(not shutil.which("g++"), reason="the pretended GPU needs g++")
    return pytest.mark.slow(needs(test))


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
def test_the_report_of_a_gpu_has_every_recipe(tmp_path):
    file = tmp_path / "gpu.json"
    python(HERE.parent / "benchmarks/gpu.py", "--cpu", "--json", file, cwd=tmp_path)
    for name, tried in read_json(file)["recipes"].items():
        assert tried["tokens_per_second"] > 0, (name, tried)
