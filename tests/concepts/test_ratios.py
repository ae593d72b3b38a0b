"""ratios.py against reference.py, and the properties that make GSPO's ratio.
python -m pytest tests/concepts/test_ratios.py
"""

import math

import pytest
import torch

import reference
from ratios import (cross_entropy, gspo_token_ratio, perplexity, product_ratio, ratio_stats,
                    sequence_log_ratio, sequence_ratio, token_log_ratio, token_ratio)
from reference import ragged, responses

FORMULAS = {  # ratio of token t of the response y, or of the response
    token_log_ratio: lambda y, t: y.log_w[t],
    token_ratio: lambda y, t: y.w[t],
    sequence_log_ratio: lambda y, t: math.log(y.s),
    sequence_ratio: lambda y, t: y.s,
    product_ratio: lambda y, t: y.product,
    gspo_token_ratio: lambda y, t: y.sg.s * y.p[t] / y.sg.p[t],
}
every_ratio = pytest.mark.parametrize("ratio", FORMULAS, ids=lambda f: f.__name__)


LOGP, OLD, _, MASK, *_ = ragged()


@every_ratio
def test_every_ratio_and_its_gradient_are_the_formulas(ratio):
    logp = LOGP.clone().requires_grad_()
    got = ratio(logp, OLD, MASK)
    slopes, = torch.autograd.grad(got.sum(), logp)
    assert (slopes[~MASK] == 0).all()
    for i, m, y in responses(ragged()):
        tokens = range(len(y.logp) if got.dim() == 2 else 1)
        values = got[i][m] if got.dim() == 2 else got[i:i + 1]

        def total(y):
            return sum(FORMULAS[ratio](y, t) for t in tokens)
        expected = [FORMULAS[ratio](y, t) for t in tokens]
        assert values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert slopes[i][m].tolist() == pytest.approx(reference.gradient(total, y), rel=1e-7)


def test_outside_the_mask_a_log_ratio_is_0_and_a_ratio_1():
    outside = ~MASK
    assert (token_log_ratio(LOGP, OLD, MASK)[outside] == 0).all()
    assert (token_ratio(LOGP, OLD, MASK)[outside] == 1).all()
    assert sequence_ratio(LOGP, OLD, MASK)[outside.all(-1)].tolist() == [1]


def test_the_sequence_ratio_is_a_ratio_of_perplexities():
    s = sequence_ratio(LOGP, OLD, MASK)
    quotient = perplexity(OLD, MASK) / perplexity(LOGP, MASK)
    delta_h = cross_entropy(OLD, MASK) - cross_entropy(LOGP, MASK)
    for same in (quotient, delta_h.exp()):
        torch.testing.assert_close(same, s, rtol=1e-12, atol=0)
    guess = torch.full((1, 5), -math.log(17.0))                         # uniform: the vocabulary
    assert perplexity(guess, torch.ones(1, 5).bool()).item() == pytest.approx(17.0)


def test_ratio_stats_equal_plain_statistics():
    stats = ratio_stats(LOGP, OLD, MASK)
    rows = [y for _, _, y in responses(ragged()) if y.logp]
    log_w = [x for y in rows for x in y.log_w]
    for name, values in (("log_w", log_w), ("log_s", [math.log(y.s) for y in rows])):
        mean = reference.mean(values)
        variance = reference.mean([(x - mean) ** 2 for x in values])
        assert stats[f"{name}_mean"].item() == pytest.approx(mean)
        assert stats[f"{name}_var"].item() == pytest.approx(variance)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(max(log_w)))
    assert (stats["tokens"].item(), stats["answers"].item()) == (len(log_w), 15)
    downhill = torch.tensor([[-2.0, 0.0]]), torch.tensor([[-1.0, 0.0]])       # no w reaches 1
    largest = ratio_stats(*downhill, torch.tensor([[True, False]]))["ratio_max"]
    assert largest.item() == pytest.approx(math.exp(-1))


@every_ratio
def test_a_ratio_too_large_for_float32_stays_finite_with_a_finite_gradient(ratio):
    logp, mask = torch.full((1, 3), -1.0).requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
    value = ratio(logp, torch.full((1, 3), -200.0), mask)
    slopes, = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all() and slopes.isfinite().all()


@pytest.mark.parametrize("call, message", [
    (lambda: token_ratio(LOGP, OLD[:, :8], MASK), "old_logp is"),
    (lambda: sequence_ratio(LOGP, OLD, MASK.double()), "mask is torch.float64"),
    (lambda: cross_entropy(LOGP[0], MASK[0]), "mask is torch.bool"),
    (lambda: token_log_ratio(LOGP.bfloat16(), OLD, MASK), "must be float32")])
def test_bad_shapes_types_and_masks_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
