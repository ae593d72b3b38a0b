"""--mismatch and --mismatch_mask: weights of tokens and responses whose recomputed log-probs differ
from the sampler's. The functions: tests/concepts/test_losses.py.
python -m pytest tests/features/test_mismatch.py"""

import math

import pytest
import torch

from features import mismatch
from features.mismatch import bounds_of
from losses import mismatch_mask
from plumbing.run.arguments import parse


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_truncated_weights_go_down_to_0_and_rejected_answers_weigh_nothing(level, run, then):
    """TIS is [0, C], not [1/2, C]; --mismatch_mask geo keeps an answer by its mean, weighed by
    token."""
    calls = []
    then(mismatch, "mismatch_correction", lambda *call: calls.append(call))
    run(f"--sampler_dtype int3 --mismatch {level}_truncate --mismatch_high 1.5 --mismatch_mask geo "
        "--mismatch_mask_bounds 0.6 1.2")
    found, _, old_logp, rollout = calls[0]
    rho = (old_logp - rollout.sampler_logp).exp().double()
    want = []
    for row in (x[m].tolist() for x, m in zip(rho, rollout.mask)):
        product = math.prod(row)
        mean = product ** (1 / len(row))
        of = {"token": row, "seq": [product] * len(row), "geo": [mean] * len(row)}[level]
        want += [min(w, 1.5) * (0.6 <= mean <= 1.2) for w in of]
    assert found[rollout.mask].tolist() == pytest.approx(want, rel=1e-4)
    assert 0 < sum(w == 0 for w in want) < len(want)
    assert level == "geo" or any(0 < w < 0.5 for w in want)


def test_a_response_with_one_outlier_is_dropped_whole():
    log_rho = torch.tensor([[0.0, 9.9, 0.1], [0.0, 0.2, 9.9], [-9.9, 0.0, 0.0], [4.6, -9.2, 0.0]])
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True] * 3])
    kept = mismatch_mask(log_rho - 1, torch.full_like(log_rho, -1), mask, "outlier", 1e-4, 100.0)
    assert torch.equal(kept, mask & torch.tensor([False, True, False, True])[:, None])


def test_the_bounds_of_an_outlier_are_its_own():
    assert bounds_of(parse(["--mismatch_mask", "outlier"])) == (1e-4, 100.0)
    assert bounds_of(parse(["--mismatch_mask", "token"])) == bounds_of(parse([])) == (0.5, 5.0)
