"""ratios.py against reference.py, and the properties that make GSPO's ratio.
python -m pytest tests/concepts/test_ratios.py
"""

import math
import runpy

import pytest
import torch

import reference
from ratios import (cross_entropy, gspo_token_ratio, perplexity, product_ratio, ratio_stats,
                    sequence_log_ratio, sequence_ratio, token_log_ratio, token_ratio)
from reference import ragged

FORMULAS = {  # ratio of token t of the response y, or of the response
    token_log_ratio: lambda y, t: y.log_w[t],
    token_ratio: lambda y, t: y.w[t],
    sequence_log_ratio: lambda y, t: math.log(y.s),
    sequence_ratio: lambda y, t: y.s,
    product_ratio: lambda y, t: y.product,
    gspo_token_ratio: lambda y, t: y.sg.s * y.p[t] / y.sg.p[t],
}
every_ratio = pytest.mark.parametrize("ratio", FORMULAS, ids=lambda f: f.__name__)


def batch():
    b = ragged()
    return b.logp, b.old_logp, b.mask


def responses():
    """(row, its loss tokens, the reference's response) of the batch."""
    b = ragged()
    for i, m in enumerate(b.mask):
        yield i, m, reference.Response(b.logp[i][m].tolist(), b.old_logp[i][m].tolist(), [])


@every_ratio
def test_every_ratio_and_its_gradient_are_the_formulas(ratio):
    logp, old_logp, mask = batch()
    logp.requires_grad_()
    got = ratio(logp, old_logp, mask)
    slopes, = torch.autograd.grad(got.sum(), logp)
    assert (slopes[~mask] == 0).all()
    for i, m, y in responses():
        tokens = range(len(y.logp) if got.dim() == 2 else 1)
        values = got[i][m] if got.dim() == 2 else got[i:i + 1]

        def total(y):
            return sum(FORMULAS[ratio](y, t) for t in tokens)
        expected = [FORMULAS[ratio](y, t) for t in tokens]
        assert values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert slopes[i][m].tolist() == pytest.approx(reference.gradient(total, y), rel=1e-7)


def test_outside_the_mask_a_log_ratio_is_0_and_a_ratio_1():
    logp, old_logp, mask = batch()
    assert (token_log_ratio(logp, old_logp, mask)[~mask] == 0).all()
    assert (token_ratio(logp, old_logp, mask)[~mask] == 1).all()
    empty = ~mask.any(-1)
    assert (sequence_ratio(logp, old_logp, mask)[empty] == 1).all() and empty.any()


def test_the_sequence_ratio_is_a_ratio_of_perplexities():
    logp, old_logp, mask = batch()
    s = sequence_ratio(logp, old_logp, mask)
    same = dict(rtol=1e-12, atol=0)
    torch.testing.assert_close(perplexity(old_logp, mask) / perplexity(logp, mask), s, **same)
    delta_h = cross_entropy(old_logp, mask) - cross_entropy(logp, mask)
    torch.testing.assert_close(delta_h.exp(), s, **same)
    guess = torch.full((1, 5), -math.log(17.0))                         # uniform: the vocabulary
    assert perplexity(guess, torch.ones(1, 5).bool()).item() == pytest.approx(17.0)


def test_the_papers_example_of_two_tokens_among_512():
    log_w = torch.zeros(1, 512)
    log_w[0, 100], log_w[0, 300] = math.log(1.9), math.log(0.4)
    s = sequence_ratio(log_w, torch.zeros(1, 512), torch.ones(1, 512, dtype=torch.bool)).item()
    assert s == pytest.approx(0.99946, abs=5e-6)
    assert s < 1 - 3e-4                                                 # outside the clip range


def test_the_sequence_ratio_steadies_with_length_and_the_product_explodes():
    generator = torch.Generator().manual_seed(0)
    for length in (16, 1024):
        log_w = 0.05 * torch.randn(2000, length, generator=generator)
        case = log_w, torch.zeros_like(log_w), torch.ones_like(log_w, dtype=torch.bool)
        stats = ratio_stats(*case)
        assert (stats["log_s_var"] / stats["log_w_var"]).item() == pytest.approx(1 / length,
                                                                                 rel=0.15)
        spread = product_ratio(*case).log().std().item()
        assert spread == pytest.approx(0.05 * math.sqrt(length), rel=0.1)


def test_ratio_stats_equal_plain_statistics():
    stats = ratio_stats(*batch())
    rows = [y for _, _, y in responses() if y.logp]
    log_w = [x for y in rows for x in y.log_w]
    for name, values in (("log_w", log_w), ("log_s", [math.log(y.s) for y in rows])):
        mean = reference.mean(values)
        variance = reference.mean([(x - mean) ** 2 for x in values])
        assert stats[f"{name}_mean"].item() == pytest.approx(mean)
        assert stats[f"{name}_var"].item() == pytest.approx(variance)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(max(log_w)))
    assert (stats["tokens"].item(), stats["answers"].item()) == (len(log_w), 15)
    downhill = [torch.full((1, 2), x) for x in (-2.0, -1.0)]            # no w reaches 1
    largest = ratio_stats(*downhill, torch.tensor([[True, False]]))["ratio_max"]
    assert largest.item() == pytest.approx(math.exp(-1))


@every_ratio
def test_a_ratio_too_large_for_float32_stays_finite_with_a_finite_gradient(ratio):
    logp, mask = torch.full((1, 3), -1.0).requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
    value = ratio(logp, torch.full((1, 3), -200.0), mask)
    slopes, = torch.autograd.grad(value.sum(), logp)
    assert value.isfinite().all() and slopes.isfinite().all()


def test_bfloat16_cannot_hold_the_clip_range():
    logp, old_logp, _, mask, *_ = ragged(dtype=torch.float32, absurd=[0.0])
    true = sequence_log_ratio(logp, old_logp, mask)
    coarse = sequence_log_ratio(logp.bfloat16().float(), old_logp.bfloat16().float(), mask)
    assert (coarse - true).abs().max() > 4e-4                           # rounding alone leaves it
    assert torch.tensor([1 - 3e-4, 1 + 4e-4]).bfloat16().tolist() == [1.0, 1.0]


def test_the_demo_shows_the_tokens_and_the_identity(capsys):
    runpy.run_module("ratios", run_name="__main__")
    out = capsys.readouterr().out
    shown = [out.count(sign) - 1 for sign in "·▲▼"]                     # each once in the legend
    assert shown == [510, 1, 1] and out.count("0.9994641") == 3


LOGP, OLD, MASK = batch()


@pytest.mark.parametrize("call, message", [
    (lambda: token_ratio(LOGP, OLD[:, :8], MASK), r"old_logp is \[16, 8\] but mask is \[16, 10\]"),
    (lambda: sequence_ratio(LOGP, OLD, MASK.double()),
     r"mask is torch.float64 \[16, 10\]: it must be torch.bool"),
    (lambda: cross_entropy(LOGP, MASK.long()), "mask is torch.int64"),
    (lambda: cross_entropy(LOGP[0], MASK[0]), r"mask is torch.bool \[10\]"),
    (lambda: token_log_ratio(LOGP.bfloat16(), OLD, MASK),
     r"logp \[16, 10\] is torch.bfloat16: it must be float32"),
    (lambda: sequence_ratio(LOGP, OLD.half(), MASK), r"old_logp \[16, 10\] is torch.float16"),
    (lambda: perplexity(LOGP.half(), MASK), "logp")])
def test_bad_shapes_types_and_masks_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
