"""losses.py against reference.py, the papers' formulas in float64 loops. The formulas have a table
of their own, PAPERS; what holds for every objective is tried on OBJECTIVES, new rows included.
python -m pytest tests/concepts/test_losses.py
"""

import math
from typing import NamedTuple

import pytest
import torch

from losses import (OBJECTIVES, RATIOS, STATISTICS, Objective, Ratio, combine_stats,
                    high_entropy_mask, kl_penalty, mismatch_mask, mismatch_weight, policy_loss,
                    token_weights, with_options)
from plumbing.refusal import Refusal
from ratios import token_ratio
from reference import BATCHES, G, L_MAX, PAPERS, Batch, objective, only, ragged, responses
from session.arguments import parse

REDUCTIONS = ["sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"]
DUAL = ["ppo", "grpo", "dr_grpo", "dapo", "dapo_paper"]                # dual_clip is for these
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


class Got(NamedTuple):
    loss: float
    gradient: torch.Tensor                       # [B, T]
    stats: dict


def ours(name, batch, *, reduction=None, mismatch=False, constants=None, dual_clip=None,
         off_policy_mask=None, **options):
    """policy_loss of a batch. The only place of this file that hands it options."""
    row = OBJECTIVES[name]
    row = with_options(name, constants=row.constants | (constants or {}),
                       dual_clip=dual_clip, off_policy_mask=off_policy_mask)
    sizes = dict(group_size=min(G, len(batch.mask)), max_length=L_MAX)
    options = sizes | options
    if reduction:
        options["weights"] = token_weights(batch.mask, reduction, **sizes)
    if mismatch:
        options["factors"] = batch.mismatch
    if row.ratio == "log-shifted":
        options.setdefault("router_shift", batch.shift)
    logp = batch.logp.clone().requires_grad_()
    given = name if row == with_options(name) else row
    loss, stats = policy_loss(given, logp, batch.old_logp, batch.A, batch.mask, **options)
    gradient, = torch.autograd.grad(loss, logp)
    stats = {key: value.item() for key, value in stats.items()}
    return Got(loss.item(), gradient.double(), stats)


def everything(name, batch):
    """The loss, a tensor, of all that a batch holds."""
    logp, old_logp, A, mask, shift, mismatch = batch
    return policy_loss(name, logp, old_logp, A, mask, factors=mismatch, group_size=G,
                       max_length=L_MAX, router_shift=shift)[0]


def small(logp, old_logp, A, kind=torch.float64):
    """A batch from lists of floats: probabilities' logs [B, T], advantages [B] or [B, T]."""
    logp, old_logp, A = (torch.as_tensor(x, dtype=kind) for x in (logp, old_logp, A))
    ones = torch.ones_like(logp)
    return Batch(logp, old_logp, A, ones.bool(), ones, ones)


# ------------------------------------------------------------- value, gradient and statistics

def options_of(name):
    """Every option that the objective takes, alone and all together."""
    row, paper = OBJECTIVES[name], PAPERS[name]
    singly = [dict(off_policy_mask=0.1), dict(mismatch=True),
              dict(reduction=REDUCTIONS[REDUCTIONS.index(paper.reduction) - 1])]
    if paper.epsilon is not None:
        low, high = (0.5, 0.4) if paper.center else (0.02, 0.01)
        singly += [dict(epsilon=low), dict(epsilon_high=high)]
    if name in DUAL:
        singly.append(dict(dual_clip=1.6))
    for key, value in row.constants.items():
        singly.append(dict(constants={key: value * (0.06 if key == "cap" else 0.7)}))
    return [*singly, {key: value for option in singly for key, value in option.items()}]


def cases():
    for name in PAPERS:
        for kind in BATCHES:
            if kind != "per token":
                yield name, kind, {}
            elif OBJECTIVES[name].per_token:
                yield name, kind, {}
                yield name, kind, options_of(name)[-1]
        for options in options_of(name):
            yield name, "ragged", options


def label(value):
    if not isinstance(value, dict):
        return value
    return " ".join(f"{k}={v}" for k, v in value.items()).replace("'", "") or "plain"


@pytest.mark.parametrize("name, kind, options", [*cases()], ids=label)
def test_value_gradient_and_statistics_are_the_papers(name, kind, options):
    batch = BATCHES[kind]
    got = ours(name, batch, **options)
    loss, gradient, below, above = objective(name, batch, **options)
    tolerance = 2e-5 if kind == "float32" else 2e-6
    assert got.loss == pytest.approx(loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(got.gradient, gradient, rtol=tolerance, atol=1e-9)
    assert (got.gradient[~batch.mask] == 0).all()
    A = batch.A if batch.A.dim() == 2 else batch.A[:, None].expand(batch.mask.shape)
    tokens, signal = batch.mask.sum().item(), (A[batch.mask] != 0).sum().item()
    assert got.stats["clip_low"] == pytest.approx(len(below) / tokens)
    assert got.stats["clip_high"] == pytest.approx(len(above) / tokens)
    assert got.stats["clip_signal"] == pytest.approx(len(below | above) / signal)
    assert got.stats["signal_tokens"] == signal
    if len(options) == 1:                                               # and the option matters
        plain = ours(name, batch)
        assert plain.loss != got.loss or not plain.gradient.equal(got.gradient)


def test_the_table_is_the_papers():
    for name, paper in PAPERS.items():
        row = OBJECTIVES[name]
        assert (row.ratio, row.epsilon, row.epsilon_high, row.reduction, row.constants) == (
            paper.ratio, paper.epsilon, paper.epsilon_high, paper.reduction, paper.constants)


@every_objective
def test_only_logp_gets_a_gradient(name):
    inputs = Batch(*(x.clone() for x in ragged()))
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    everything(name, inputs).backward()
    assert [x.grad is not None for x in inputs] == [True, *[False] * 5]


# --------------------------------------------------------- what holds for every row of the table

@every_objective
def test_a_pull_is_a_gradient_where_the_advantage_is_0(name):
    """Zero-variance groups are left out of the updates of all others."""
    flat = ragged()._replace(A=0 * ragged().A)
    assert OBJECTIVES[name].pulls == ours(name, flat).gradient.any().item()


@every_objective
def test_an_objective_says_whether_a_token_may_have_its_own_advantage(name):
    batch = small([[-1.0] * 3], [[-1.0] * 3], [[0.0, 1.0, 0.0]])
    if OBJECTIVES[name].per_token:
        assert ours(name, batch).gradient.ne(0).tolist() == [[False, True, False]]
    else:
        with pytest.raises(ValueError, match=f"{name} takes advantages of shape"):
            ours(name, batch)


@every_objective
def test_a_token_can_be_left_out_if_the_ratio_is_per_token_and_is_refused_if_not(name):
    batch = ragged()._replace(mismatch=(torch.arange(10) % 2).double().expand(16, 10))
    if OBJECTIVES[name].per_token:
        assert (ours(name, batch, mismatch=True).gradient[:, ::2] == 0).all()
        return
    for flag in ("--entropy_quantile 0.5", "--mismatch_mask token"):
        with pytest.raises(Refusal, match="as in gspo_token"):
            parse(f"--algorithm {name} {flag}".split())


def test_an_objective_says_whether_it_clips_a_mean_over_tokens():
    found = {name for name, row in OBJECTIVES.items() if row.clips_s}
    assert found & {*PAPERS} == {"gspo", "gspo_token", "luspo"}


def test_a_ratio_of_a_readers_own_decides_the_statistics(monkeypatch):
    """The largest w of a response, one of which is outside where s is inside."""
    def largest(logp, old_logp, mask):
        return token_ratio(logp, old_logp, mask).masked_fill(~mask, 0.0).amax(-1)    # [B]
    monkeypatch.setitem(RATIOS, "largest", Ratio(largest, "response"))
    monkeypatch.setitem(OBJECTIVES, "mine", Objective("largest", "min", 0.2, 0.2, "sequence-mean"))
    w = torch.tensor([[1.5, 0.5], [1.1, 0.9], [0.7, 0.6], [1.1, 0.3]])
    batch = small(w.log() - 2, torch.full((4, 2), -2.0), [1.0, 1.0, -1.0, -1.0])
    stats = ours("mine", batch).stats
    assert stats["clip_low"] == stats["clip_high"] == 0.25
    assert not OBJECTIVES["mine"].clips_s
    with pytest.raises(ValueError, match="mine takes advantages of shape"):
        ours("mine", batch._replace(A=torch.ones(4, 2)))


@every_objective
def test_a_batch_without_loss_tokens_gets_no_gradient_and_no_nan(name):
    got = ours(name, ragged()._replace(mask=ragged().mask & False))
    assert got.loss == 0 and (got.gradient == 0).all()
    assert not any(math.isnan(value) for value in got.stats.values())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@every_objective
def test_micro_batches_change_neither_loss_nor_gradient_nor_stats(name, size):
    batch = ragged()
    whole = ours(name, batch)
    weights = token_weights(batch.mask, OBJECTIVES[name].reduction, group_size=G,
                            max_length=L_MAX)
    rows = [slice(start, start + size) for start in range(0, 16, size)]
    parts = [ours(name, only(part, batch), weights=weights[part]) for part in rows]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-12)
    gradient = torch.cat([part.gradient for part in parts])
    torch.testing.assert_close(gradient, whole.gradient, rtol=1e-10, atol=1e-15)
    stats = [{key: torch.tensor(x).double() for key, x in part.stats.items()} for part in parts]
    combined = {key: x.item() for key, x in combine_stats(stats).items()}
    assert combined == pytest.approx(whole.stats, rel=1e-6, abs=1e-8)


@every_objective
def test_the_loss_never_waits_for_the_gpu(name):
    """Tensors on the meta device have shapes but no values: .item() and `if tensor` raise."""
    batch = Batch(*(x.to("meta") for x in BATCHES["float32"]))
    batch.logp.requires_grad_()
    everything(name, batch).backward()


@every_objective
def test_ratios_that_overflow_float32_leave_no_nan(name):
    likely, unlikely = [[-0.1] * 3] * 2, [[-90.0] * 3] * 2
    got = ours(name, small(likely + unlikely, unlikely + likely, [1, -1, 1, -1], torch.float32))
    assert math.isfinite(got.loss) and got.gradient.isfinite().all()


def test_every_statistic_of_the_loss_has_an_entry_and_every_entry_a_statistic():
    assert ours("grpo", ragged()).stats.keys() == STATISTICS.keys()




# ------------------------------------------------------------------------------------------- KL

def draw(seed):
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# log-probs of a vocabulary of 6 tokens: the reference, the old policy; THETA makes the policy's
REF, OLD, THETA = draw(1).log_softmax(-1), (draw(0) + 0.5 * draw(2)).log_softmax(-1), draw(0)


def with_gradient(of_logp):
    """A function of the policy's log-probs: (its value, its gradient)."""
    theta = THETA.clone().requires_grad_()
    value = of_logp(theta.log_softmax(-1))
    return value.item(), torch.autograd.grad(value, theta)[0]


def kl_enumerated(estimator):
    """The estimator's expectation, over tokens drawn from π_θ (k3_is: from π_old)."""
    def expectation(logp):
        drawn_from = OLD if estimator == "k3_is" else logp.detach()
        mask, old = torch.ones(1, 6).bool(), OLD[None] if estimator == "k3_is" else None
        return (drawn_from.exp() * kl_penalty(logp[None], REF[None], mask, estimator, old)).sum()
    return with_gradient(expectation)


def true_kl(forward=False):
    def kl(logp):
        p, q = (REF, logp) if forward else (logp, REF)
        return (p.exp() * (p - q)).sum()
    return with_gradient(kl)


def k3(d):
    return math.exp(-d) - 1 + d


KL = {  # estimator: its value at d = log π - log π_ref of a token, and its expected gradient
    "k1": (lambda d: d, torch.zeros(6).double()),                       # no effect as a loss
    "k2": (lambda d: d * d / 2, true_kl()[1]),
    "k3": (k3, true_kl(forward=True)[1]),
    "k3_is": (lambda d: math.exp(-0.1) * k3(d), true_kl()[1]),
    "k3_st": (k3, true_kl()[1]),
}


@pytest.mark.parametrize("estimator", KL)
def test_a_kl_estimator_is_its_formula_and_has_its_expectation_and_gradient(estimator):
    formula, gradient = KL[estimator]
    logp, ref, _, mask, *_ = ragged()
    old_logp = torch.where(mask, logp + 0.1, math.nan)
    got = kl_penalty(logp, ref, mask, estimator, old_logp)
    assert (got[~mask] == 0).all()
    assert got[mask].tolist() == pytest.approx([formula(d) for d in (logp - ref)[mask].tolist()])
    expectation, slope = kl_enumerated(estimator)
    torch.testing.assert_close(slope, gradient)
    assert estimator == "k2" or expectation == pytest.approx(true_kl()[0])


def test_k3_keeps_its_digits_where_the_policies_almost_agree():
    k3 = kl_penalty(torch.zeros(1, 1), torch.full((1, 1), -1e-4), torch.ones(1, 1).bool())
    assert k3.item() == pytest.approx(5e-9, rel=1e-3)


# ----------------------------------------------------------------- mismatch, and the 80/20 rule

LOW, HIGH = 0.6, 1.4


LEVELS = {  # what is compared with the bounds at each token of a response
    "token": lambda y: y.w, "seq": lambda y: [y.product] * len(y.w),
    "geo": lambda y: [y.s] * len(y.w),
    "outlier": lambda y: [max(y.w, key=lambda w: abs(w - 1), default=1)] * len(y.w)}


@pytest.mark.parametrize("level", LEVELS)
def test_mismatch_weights_and_masks_equal_a_loop(level):
    logp, sampler_logp, _, mask, *_ = ragged()
    case = logp.requires_grad_(), sampler_logp, mask, level
    kept = mismatch_mask(*case, LOW, HIGH)
    weights = mask.double() if level == "outlier" else mismatch_weight(*case, HIGH)
    for i, m, y in responses(ragged()):
        rho = LEVELS[level](y)
        assert kept[i][m].tolist() == [LOW <= x <= HIGH for x in rho]
        assert level == "outlier" or weights[i][m].tolist() == pytest.approx(
            [min(x, HIGH) for x in rho])
    assert (weights[~mask] == 0).all() and not weights.requires_grad
    assert 0 < kept.sum() < mask.sum() and not kept[~mask].any()


MASKS = [ragged().mask, torch.ones(1, 1).bool(), torch.ones(1, 2).bool(), torch.ones(3, 333).bool()]


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("mask", MASKS, ids=["ragged", "1", "2", "999"])
def test_high_entropy_tokens_are_those_from_torchs_quantile_on(mask, quantile):
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    entropy = entropy.masked_fill(~mask, 9.0)
    kept = high_entropy_mask(entropy, mask, quantile)
    assert kept.equal(mask & (entropy >= torch.quantile(entropy[mask], quantile)))
    assert not high_entropy_mask(entropy, mask & False, quantile).any()


def test_equal_entropies_that_are_rounded_apart_decide_alike():
    entropy = torch.tensor([[1.8617677, 1.8617680, 1.8616]])
    assert high_entropy_mask(entropy, entropy > 0, 1.0).tolist() == [[True, True, False]]


# -------------------------------------------------------------------------------------- errors

WIDE = torch.ones(16, 10)
REFUSED = [  # objective, what is changed, what the message names
    ("grpo", dict(A=WIDE[:15, 0]), "advantages has shape"),
    ("gspo", dict(A=WIDE), "ratio per token"),
    ("rspo", dict(router_shift=None), "router_shift is missing"),
    ("dr_grpo", dict(max_length=None), "max_length is None"),
    ("dapo_paper", dict(group_size=None), "group_size is None"),
    ("dapo_paper", dict(group_size=3), "group_size is 3"),
    ("grpo", dict(weights=WIDE[:, :1]), "weights is"),
    ("grpo", dict(factors=WIDE[:, 0]), "factors is"),
]


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_bad_input_is_named(name, change, message):
    fields = {key: x for key, x in change.items() if key in Batch._fields}
    options = {key: x for key, x in change.items() if key not in fields}
    with pytest.raises(ValueError, match=message):
        ours(name, ragged()._replace(**fields), **options)
