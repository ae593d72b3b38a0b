"""Peak memory as benchmarks/simulate.py counts it, and the report of benchmarks/gpu.py, which
measures it on a GPU. python -m pytest -m slow tests/speed/test_gpu.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tiny_run import python, read_json

HERE = Path(__file__).parents[1]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M"
SIMULATE = f"""
import json, simulate
simulate.SHAPES = {{{SMOLLM2!r}: None}}
simulate.RECIPES = ()
simulate.write_json = lambda file, found: print(json.dumps(found))
simulate.main([])
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="the simulated GPU needs g++")
def test_simulated_peaks_are_those_that_the_page_was_compared_with():
    found = python("-c", SIMULATE, cwd=HERE.parent / "benchmarks").stdout.splitlines()[-1]
    recorded = read_json(HERE.parent / "experiments/results/simulated.json")["peaks"]
    assert json.loads(found)["peaks"][SMOLLM2] == pytest.approx(recorded[SMOLLM2], rel=0.01)


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
