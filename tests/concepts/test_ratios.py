"""ratios.py against loops over tokens, and the properties that make GSPO's ratio. python -m pytest tests/concepts/test_ratios.py"""

import math
import runpy

import pytest
import torch

from ratios import (cross_entropy, gspo_token_ratio, perplexity, product_ratio, ratio_stats, sequence_log_ratio, sequence_ratio,
                    token_log_ratio, token_ratio)

ABSURD = [float("nan"), float("inf"), -float("inf"), 1e30]


def batch(rows=6, width=9, dtype=torch.float64, seed=0, spread=0.4):
    """Ragged rows, one empty, one with a hole as tool output leaves it; absurd numbers everywhere outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.tensor([9, 4, 0, 1, 7, 6])[:rows, None]
    mask[4, 2:5] = False
    old_logp = -3 * torch.rand(rows, width, generator=generator, dtype=dtype)
    logp = old_logp + spread * torch.randn(rows, width, generator=generator, dtype=dtype)
    absurd = torch.tensor(ABSURD, dtype=dtype).repeat(rows * width)[:rows * width].view(rows, width)
    return torch.where(mask, logp, absurd), torch.where(mask, old_logp, absurd.flip(-1)), mask


def loop(logp, old_logp, mask):
    """Per row: log w of its loss tokens, as plain floats."""
    return [[logp[i, t].item() - old_logp[i, t].item() for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]


def test_every_ratio_equals_a_loop_over_tokens():
    logp, old_logp, mask = batch()
    rows = loop(logp, old_logp, mask)
    means = [sum(x) / len(x) if x else 0.0 for x in rows]
    for i, row in enumerate(rows):
        assert token_log_ratio(logp, old_logp, mask)[i][mask[i]].tolist() == pytest.approx(row, abs=1e-12)
        assert token_ratio(logp, old_logp, mask)[i][mask[i]].tolist() == pytest.approx([math.exp(x) for x in row])
        assert gspo_token_ratio(logp, old_logp, mask)[i][mask[i]].tolist() == pytest.approx([math.exp(means[i])] * len(row))
    assert sequence_log_ratio(logp, old_logp, mask).tolist() == pytest.approx(means, abs=1e-12)
    assert sequence_ratio(logp, old_logp, mask).tolist() == pytest.approx([math.exp(m) for m in means])
    assert product_ratio(logp, old_logp, mask).tolist() == pytest.approx([math.prod(math.exp(x) for x in row) for row in rows])
    assert (token_log_ratio(logp, old_logp, mask)[~mask] == 0).all() and (token_ratio(logp, old_logp, mask)[~mask] == 1).all()


def test_gradients_equal_the_formulas():
    logp, old_logp, mask = batch()
    rows = loop(logp, old_logp, mask)
    for function, gradient in (
            (token_ratio, lambda row, t: math.exp(row[t])),
            (sequence_ratio, lambda row, t: math.exp(sum(row) / len(row)) / len(row)),
            (product_ratio, lambda row, t: math.exp(sum(row))),
            (gspo_token_ratio, lambda row, t: math.exp(sum(row) / len(row)))):
        x = logp.clone().requires_grad_()
        got = torch.autograd.grad(function(x, old_logp, mask).sum(), x)[0]
        assert (got[~mask] == 0).all()
        for i, row in enumerate(rows):
            assert got[i][mask[i]].tolist() == pytest.approx([gradient(row, t) for t in range(len(row))]), function.__name__


def test_the_gradient_of_a_gspo_token_ratio_stays_at_its_own_token():
    logp, old_logp, mask = batch()
    x = logp.clone().requires_grad_()
    got = torch.autograd.grad(gspo_token_ratio(x, old_logp, mask)[0, 3], x)[0]
    expected = torch.zeros_like(logp)
    expected[0, 3] = sequence_ratio(logp, old_logp, mask)[0]
    assert torch.equal(got, expected)


def test_the_sequence_ratio_is_a_ratio_of_perplexities():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        logp, old_logp, mask = batch(dtype=dtype)
        s = sequence_ratio(logp, old_logp, mask)
        torch.testing.assert_close(perplexity(old_logp, mask) / perplexity(logp, mask), s, rtol=tolerance, atol=0)
        torch.testing.assert_close((cross_entropy(old_logp, mask) - cross_entropy(logp, mask)).exp(), s, rtol=tolerance, atol=0)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary_size():
    logp = torch.full((1, 5), -math.log(17.0))
    assert perplexity(logp, torch.ones(1, 5, dtype=torch.bool)).item() == pytest.approx(17.0)


def test_permuting_tokens_leaves_the_sequence_ratio_unchanged():
    logp, old_logp, mask = batch()
    order = torch.randperm(mask.shape[1], generator=torch.Generator().manual_seed(3))
    before, after = sequence_ratio(logp, old_logp, mask), sequence_ratio(logp[:, order], old_logp[:, order], mask[:, order])
    torch.testing.assert_close(before, after, rtol=1e-14, atol=0)


def test_a_wider_padding_changes_nothing():
    logp, old_logp, mask = batch()
    pad = lambda x, value: torch.nn.functional.pad(x, (0, 5), value=value)
    wide = pad(logp, float("nan")), pad(old_logp, 1e30), pad(mask, False)
    for function in (sequence_ratio, product_ratio, sequence_log_ratio):
        torch.testing.assert_close(function(*wide), function(logp, old_logp, mask), rtol=1e-14, atol=0)
    torch.testing.assert_close(perplexity(wide[0], wide[2]), perplexity(logp, mask), rtol=1e-14, atol=0)


def test_the_paper_strip_two_tokens_among_512():
    log_w = torch.zeros(1, 512)
    log_w[0, 100], log_w[0, 300] = math.log(1.9), math.log(0.4)
    s = sequence_ratio(log_w, torch.zeros_like(log_w), torch.ones_like(log_w, dtype=torch.bool)).item()
    assert s == pytest.approx(0.99946, abs=5e-6)
    assert s < 1 - 3e-4                                                        # outside the band, not comfortably inside


def test_the_sequence_ratio_steadies_with_length_and_the_product_explodes():
    generator, spread = torch.Generator().manual_seed(0), []
    for length in (16, 1024):
        log_w = 0.05 * torch.randn(2000, length, generator=generator)
        mask = torch.ones_like(log_w, dtype=torch.bool)
        stats = ratio_stats(log_w, torch.zeros_like(log_w), mask)
        assert (stats["log_s_var"] / stats["log_w_var"]).item() == pytest.approx(1 / length, rel=0.15)
        spread.append(product_ratio(log_w, torch.zeros_like(log_w), mask).log().std().item())
    assert spread == pytest.approx([0.05 * 4, 0.05 * 32], rel=0.1)


def test_ratio_stats_equal_plain_statistics():
    logp, old_logp, mask = batch()
    stats = ratio_stats(logp, old_logp, mask)
    rows = loop(logp, old_logp, mask)
    tokens, answers = [x for row in rows for x in row], [sum(row) / len(row) for row in rows if row]
    for name, values in (("log_w", tokens), ("log_s", answers)):
        mean = sum(values) / len(values)
        assert stats[f"{name}_mean"].item() == pytest.approx(mean)
        assert stats[f"{name}_var"].item() == pytest.approx(sum((x - mean) ** 2 for x in values) / len(values))
    assert stats["ratio_max"].item() == pytest.approx(math.exp(max(tokens)))
    assert (stats["tokens"].item(), stats["answers"].item()) == (len(tokens), 5)


def test_a_ratio_too_large_for_float32_stays_finite_with_a_finite_gradient():
    logp = torch.full((1, 3), -1.0).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    for function in (token_ratio, sequence_ratio, product_ratio, gspo_token_ratio):
        ratio = function(logp, torch.full((1, 3), -200.0), mask)
        assert ratio.isfinite().all() and torch.autograd.grad(ratio.sum(), logp)[0].isfinite().all()


def test_bfloat16_is_refused_because_it_cannot_hold_the_band():
    logp, old_logp, mask = batch(spread=2e-3, dtype=torch.float32)
    logp, old_logp = logp.masked_fill(~mask, 0.0), old_logp.masked_fill(~mask, 0.0)
    true = sequence_log_ratio(logp, old_logp, mask)
    coarse = sequence_log_ratio(logp.bfloat16().float(), old_logp.bfloat16().float(), mask)
    assert (coarse - true).abs().max() > 4e-4                                  # the rounding alone crosses GSPO's band
    edges = torch.tensor([1 - 3e-4, 1 + 4e-4]).bfloat16()
    assert edges.tolist() == [1.0, 1.0]
    for half in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"logp \[6, 9\] is torch\.b?float16: it must be float32"):
            token_log_ratio(logp.to(half), old_logp, mask)
        with pytest.raises(ValueError, match=r"old_logp \[6, 9\]"):
            sequence_ratio(logp, old_logp.to(half), mask)
        with pytest.raises(ValueError, match="logp"):
            perplexity(logp.to(half), mask)


def test_the_demo_shows_the_strip_and_the_identity(capsys):
    runpy.run_module("ratios", run_name="__main__")
    out = capsys.readouterr().out
    assert (out.count("·") - 1, out.count("▲") - 1, out.count("▼") - 1) == (510, 1, 1)             # 1 each in the legend
    assert out.count("0.9994641") == 3


def test_bad_shapes_and_masks_are_named():
    logp, old_logp, mask = batch()
    with pytest.raises(ValueError, match=r"old_logp is \[6, 8\] but mask is \[6, 9\]"):
        token_ratio(logp, old_logp[:, :8], mask)
    with pytest.raises(ValueError, match=r"mask is torch.float64 \[6, 9\]: it must be torch.bool"):
        sequence_ratio(logp, old_logp, mask.double())
    with pytest.raises(ValueError, match=r"mask is torch.int64"):
        cross_entropy(logp, mask.long())
