"""What is exact in this implementation and need not be in another: correct the test if it is meant
to change. python -m pytest tests/house/test_exact.py"""

import json
import math
from pathlib import Path

import torch

from rollout import draw
from session.screen import ROUNDING

RESULTS = Path(__file__).resolve().parents[2] / "experiments/results"


def test_the_inverse_cdf_gives_every_token_its_share_of_the_quantiles():
    logits, n = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0]), 100_000
    grid = (torch.arange(n) + 0.5) / n         # every quantile once: exact to 1e-5
    counts = torch.bincount(draw(logits.expand(n, -1), grid), minlength=5) / n
    assert torch.allclose(counts, logits.softmax(-1), atol=2e-5)


def test_the_rounding_of_log_s_that_a_run_is_warned_of_is_the_measured_one():
    """Over lengths, times √L, within a sixth: the part that averages out."""
    read = lambda name: json.loads((RESULTS / name).read_text(encoding="utf-8"))    # noqa: E731
    grid = read("bfloat16.json")["weights"]["grid"]
    measured = {"TF32": read("cuda_graphs.json")["tf32"], **{
        dtype: {L: x["formats"][dtype]["arithmetic"] for L, x in grid.items()}
        for dtype in ("bfloat16", "float16")}}
    for dtype, errors in measured.items():
        for L, error in errors.items():
            assert abs(error * math.sqrt(int(L)) / ROUNDING[dtype][0] - 1) < 1 / 6, (dtype, L)
