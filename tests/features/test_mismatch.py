"""--mismatch and --mismatch_mask: weights of tokens and responses whose recomputed log-probs differ
from the sampler's. The functions: tests/concepts/test_losses.py.
python -m pytest tests/features/test_mismatch.py"""

import math
from types import SimpleNamespace

import pytest
import torch

from features import mismatch
from features.mismatch import Mismatch, read_mask_bounds
from losses import mismatch_mask, mismatch_weight
from session.arguments import parse
from reference import ragged


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
def test_truncated_weights_go_down_to_0_and_rejected_answers_weigh_nothing(level, run, then):
    """TIS is [0, C], not [1/2, C]; --mismatch_mask geo keeps an answer by its mean, weighed by
    token."""
    calls = []
    then(mismatch, "mismatch_correction", lambda *call: calls.append(call))
    run(f"--sampler_dtype int3 --mismatch {level}_truncate --mismatch_high 1.5 --mismatch_mask geo "
        "--mismatch_mask_bounds 0.6 1.2")
    found, _, old_logp, rollout = calls[0]
    case = old_logp, rollout.sampler_logp, rollout.mask
    weights = mismatch_weight(*case, level, 1.5)                 # [B, T]
    kept = mismatch_mask(*case, "geo", 0.6, 1.2)                                    # [B, T]
    torch.testing.assert_close(found, weights * kept)
    assert 0 < kept.sum() < rollout.mask.sum()
    assert level == "geo" or (weights[kept] < 0.5).any()


def test_the_bounds_of_an_outlier_are_its_own():
    assert read_mask_bounds(parse(["--mismatch_mask", "outlier"])) == (1e-4, 100.0)
    for words in (["--mismatch_mask", "token", "--algorithm", "grpo"], []):
        assert read_mask_bounds(parse(words)) == (0.5, 5.0)


def test_how_unequal_weights_are_equals_a_loop():
    """Equal weights keep the whole sample, rejected ones nothing of it."""
    mask = ragged().mask
    some = 2 * torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    feature = Mismatch(SimpleNamespace(settings=None))
    for weights in (mask.float(), mask * 0.0, some):
        w = weights[mask].tolist()
        squares = sum(x * x for x in w)
        batch = SimpleNamespace(extras={"mismatch_weights": torch.where(mask, weights, math.nan)},
                                rollout=SimpleNamespace(mask=mask))
        ess = sum(w) ** 2 / len(w) / squares if squares else 0
        assert feature.metrics(batch, None, None) == {"mismatch_ess": pytest.approx(ess)}
    batch.rollout.mask = mask & False
    assert feature.metrics(batch, None, None) == {"mismatch_ess": None}
