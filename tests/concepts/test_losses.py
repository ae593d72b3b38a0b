"""losses.py against float64 loops over tokens that a reader can check by eye. python -m pytest tests/concepts/test_losses.py

The loops know the formulas of the gradients, not autograd. The batch holds every clip case of both signs, a row without loss
tokens, holes as tool output leaves them, advantages of 0, and absurd numbers in everything outside the mask.
"""

import math
import runpy

import pytest
import torch

from advantages import group_advantages
from losses import (OBJECTIVES, STATISTICS, high_entropy_mask, kl_penalty, mismatch_mask, mismatch_weight,
                    policy_loss, token_weights)
from losses import combine_stats
from plumbing.run.metrics import weight_stats
from ratios import sequence_ratio

G, T, L_MAX = 4, 10, 16
ABSURD = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]
# The papers' rows, which reference() knows; a new row passes the tests that need no formula of its own.
TABLE = {"reinforce": ("none", None, None, "token-mean"), "ppo": ("token", 0.2, 0.2, "sequence-mean"),
         "grpo": ("token", 0.2, 0.2, "sequence-mean"), "dr_grpo": ("token", 0.2, 0.2, "constant"),
         "dapo": ("token", 0.2, 0.28, "token-mean"), "dapo_paper": ("token", 0.2, 0.28, "group-token-mean"),
         "gspo": ("sequence", 3e-4, 4e-4, "sequence-mean"), "gspo_token": ("gspo-token", 3e-4, 4e-4, "sequence-mean"),
         "gmpo": ("log-token", 0.4, 0.4, "sequence-mean"), "rspo": ("log-shifted", 0.4, 0.4, "sequence-mean"),
         "cispo": ("token", 1.0, 0.28, "token-mean"),
         "dppo": ("token", 0.2, 0.2, "token-mean"), "dppo_kl": ("token", 0.05, 0.05, "token-mean"), "sapo": ("token", None, None, "sequence-mean"),
         "kpop": ("token", 2.0, 2.0, "token-mean"), "ipo": ("token", 0.1, 0.1, "token-mean"), "rollout_is": ("token", 0.2, 0.28, "token-mean"), "dro": ("token", None, None, "token-mean"),
         "luspo": ("sequence", 2e-3, 2.5e-3, "sequence-sum"), "vespo": ("product", None, None, "token-mean"),
         "sequence_is": ("product", 0.2, 0.2, "sequence-mean")}
WITH_BAND = [name for name, row in TABLE.items() if row[1] is not None]
PER_TOKEN = ("reinforce", "ppo", "grpo", "dr_grpo", "dapo", "dapo_paper", "gspo_token", "cispo", "sapo",
             "dppo", "dppo_kl", "kpop", "ipo", "rollout_is", "dro")
TOKEN_FAMILY = ("ppo", "grpo", "dr_grpo", "dapo", "dapo_paper")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_clip_pulls_where_the_advantage_is_0_only_if_it_says_so(name):
    """Groups of equal rewards are left out of the updates of all others."""
    row, one = OBJECTIVES[name], torch.ones(2, 3, dtype=torch.float64)
    for constants in ({}, dict.fromkeys([row.kind.pulls], 0.0) if row.kind.pulls else {}):
        logp = (-one).requires_grad_()
        loss, _ = policy_loss(name, logp, -1.1 * one, one[:, 0] * 0, one.bool(), weights=one, constants=constants,
                              router_shift=0.9 * one if "shifted" in row.ratio else None)
        assert bool(torch.autograd.grad(loss, logp)[0].any()) == bool(row.kind.pulls and not constants)
    assert row.kind.pulls is None or row.kind.pulls in row.constants


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_says_whether_a_token_may_have_its_own_advantage_and_whether_s_is_clipped(name):
    """An advantage of one token alone: it moves the log-prob of that token alone, or is refused."""
    row, one, lone = OBJECTIVES[name], torch.ones(1, 3, dtype=torch.float64), torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    options = dict(weights=one, router_shift=one if "shifted" in row.ratio else None)
    logp = (-one).requires_grad_()
    if not row.per_token:
        with pytest.raises(ValueError, match=f"{name} takes advantages of shape"):
            policy_loss(name, logp, -one, lone, one.bool(), **options)
    else:
        loss, _ = policy_loss(name, logp, -one, lone, one.bool(), **options)
        assert torch.autograd.grad(loss, logp)[0].ne(0).tolist() == [[False, True, False]]
    # log w of the tokens goes 9, -4 and -4 band widths up: only their mean is inside the clip range
    if row.epsilon is not None:
        w = torch.tensor([[9.0, -4.0, -4.0]], dtype=torch.float64) * row.epsilon_high / 1.5
        stats = policy_loss(name, w - 1, -one, one[:, 0], one.bool(), **options)[1]
        assert row.clips_s == (name in ("gspo", "gspo_token", "luspo"))
        assert not row.clips_s or stats["clip_high"] == 0


def make_batch(dtype=torch.float64, seed=0):
    """logp, old_logp, advantages [16] and [16, T], mask, router shift. Each row's log s is chosen to cross every band."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0.5, -0.5, 2e-2, -2e-2, 1e-4, -1e-4, 2.2e-3, -2.2e-3] * 2).double()      # log s
    lengths = [10, 3, 7, 10, 9, 1, 8, 5, 4, 10, 0, 2, 6, 10, 8, 3]
    signs = [1, 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, 0]
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    mask[3, 2:5] = mask[9, 0:2] = mask[13, 6] = False                                                # tool output
    log_w = 0.4 * draw(16, T)
    log_w = log_w + (targets - (log_w * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    old_logp = -0.05 - 3 * torch.rand(16, T, generator=generator, dtype=torch.float64)
    A = torch.tensor(signs, dtype=torch.float64) * (0.3 + draw(16).abs())
    A_token = draw(16, T) * (torch.rand(16, T, generator=generator) > 0.2)
    shift = 0.8 + 0.2 * torch.rand(16, T, generator=generator, dtype=torch.float64)
    absurd = torch.tensor(ABSURD, dtype=torch.float64).repeat(16 * T)[:16 * T].view(16, T)
    poison = lambda x, k: torch.where(mask, x, absurd.roll(k)).to(dtype)
    return poison(old_logp + log_w, 0), poison(old_logp, 1), A.to(dtype), poison(A_token, 2), mask, poison(shift, 3)


def weight_loop(mask, reduction):
    """The weight of row i's tokens, as a list of floats."""
    lengths = [sum(row) for row in mask.tolist()]
    N = len(lengths)
    group = lambda i: sum(lengths[i // G * G:i // G * G + G])
    weight = {"sequence-mean": lambda i: 1 / N / lengths[i], "token-mean": lambda i: 1 / sum(lengths),
              "group-token-mean": lambda i: 1 / (N // G) / group(i), "constant": lambda i: 1 / N / L_MAX,
              "sequence-sum": lambda i: 1 / N}[reduction]
    return [weight(i) if lengths[i] else 0.0 for i in range(N)]


def reference(name, logp, old_logp, A, mask, epsilon=None, epsilon_high=None, shift=None, cap=math.inf, constants={}, dropped=()):
    """Loss, gradient [B, T], and the tokens whose gradient the clip removed below and above the band; plain Python throughout."""
    row = OBJECTIVES[name]
    lo, hi = row.epsilon if epsilon is None else epsilon, row.epsilon_high if epsilon_high is None else epsilon_high
    weights, constant = weight_loop(mask, row.reduction), row.constants | constants
    loss, gradient, below, above = 0.0, torch.zeros(mask.shape).double(), set(), set()
    clip = lambda x, low, high: min(max(x, low), high)
    for i in range(len(mask)):
        tokens = [t for t in range(T) if mask[i, t] and i not in dropped]
        n = len(tokens)
        log_w = [logp[i, t].item() - old_logp[i, t].item() for t in tokens]
        if shift is not None:
            log_w = [x + math.log(shift[i, t].item()) for x, t in zip(log_w, tokens)]
        advantage = [(A[i, t] if A.dim() == 2 else A[i]).item() for t in tokens]
        s, product = math.exp(sum(log_w) / max(n, 1)), math.exp(sum(log_w))
        cut = []                                                                                     # GMPO's log-ratios
        for x, a in zip(log_w, advantage):
            sign = (a > 0) - (a < 0)
            cut.append(sign * min(sign * x, sign * clip(x, -(lo or 0), hi or 0)) if sign else x)
        rho = math.exp(sum(cut) / max(n, 1))
        for k, t in enumerate(tokens):
            w, a, lp = math.exp(log_w[k]), advantage[k], logp[i, t].item()
            low = high = False
            pull = 0.0                                                                               # d surrogate / d log π where A = 0
            if name == "reinforce":
                value, slope = a * lp, a
            elif name in TOKEN_FAMILY:
                low, high = a < 0 and w < 1 - lo, a > 0 and w > 1 + hi or a < 0 and w > cap
                value, slope = min(w * a, clip(w, 1 - lo, 1 + hi) * a), w * a
                value = max(value, cap * a) if a < 0 else value
            elif name in ("gspo", "gspo_token", "luspo"):
                low, high = a < 0 and s < 1 - lo, a > 0 and s > 1 + hi
                value, slope = min(s * a, clip(s, 1 - lo, 1 + hi) * a), s * a
            elif name == "sequence_is":
                low, high = a < 0 and product < 1 - lo, a > 0 and product > 1 + hi
                value, slope = min(product * a, clip(product, 1 - lo, 1 + hi) * a), n * product * a
            elif name in ("gmpo", "rspo"):
                low, high = a < 0 and log_w[k] < -lo, a > 0 and log_w[k] > hi
                value, slope = rho * a, rho * a
            elif name == "cispo":
                value, slope = clip(w, 1 - lo, 1 + hi) * a * lp, clip(w, 1 - lo, 1 + hi) * a
            elif name in ("dppo", "dppo_kl"):
                p, mu = math.exp(lp), math.exp(old_logp[i, t].item())
                rest, old_rest = max(1 - p, 1e-8), max(1 - mu, 1e-8)
                far = abs(p - mu) if name == "dppo" else mu * math.log(mu / p) + old_rest * math.log(old_rest / rest)
                low, high = a < 0 and p < mu and far > lo, a > 0 and p > mu and far > hi
                weight = min(w, constant["cap"])
                value, slope = (0.0 if low or high else weight * a * lp), weight * a
            elif name == "kpop":
                p, mu = math.exp(lp), math.exp(old_logp[i, t].item())
                rest, old_rest = max(1 - p, 1e-8), max(1 - mu, 1e-8)
                far = max(mu * math.log(mu / p) + old_rest * math.log(old_rest / rest), p * math.log(p / mu) + rest * math.log(rest / old_rest))
                low, high = p < mu and far > lo, p > mu and far > hi
                weight = min(w, constant["cap"])
                value, slope = (0.0 if low or high else weight * a * lp), weight * a
            elif name == "ipo":
                gap = math.exp(lp) - math.exp(old_logp[i, t].item())
                low, high = gap < -lo, gap > hi
                value, slope = (0.0 if low or high else w * a) - constant["tau"] * log_w[k] ** 2, w * a
                pull = -2 * constant["tau"] * log_w[k]
            elif name == "rollout_is":
                low, high = w <= 1 - lo, w >= 1 + hi
                value, slope = (0.0 if low or high else w * a * lp), w * a
            elif name == "dro":
                value, slope = a * lp - constant["beta"] / 2 * log_w[k] ** 2, a
                pull = -constant["beta"] * log_w[k]
            elif name == "sapo":
                tau = constant["tau_positive" if a > 0 else "tau_negative"]
                p = 1 / (1 + math.exp(-tau * (w - 1)))
                value, slope = 4 / tau * p * a, 4 * p * (1 - p) * w * a
            elif name == "vespo":
                k_, lam = (constant[f"{x}_{'positive' if a >= 0 else 'negative'}"] for x in ("k", "lambda"))
                W = clip(product, 1e-8, math.exp(20))
                phi = math.exp(lam) * W ** k_ * math.exp(-lam * W)
                value, slope = phi * a * lp, phi * a
            loss -= weights[i] * value
            gradient[i, t] = -weights[i] * (pull + (0.0 if low or high else slope))
            below |= {(i, t)} if low and a else set()
            above |= {(i, t)} if high and a else set()
    return loss, gradient, below, above


def needs(name, shift):
    """What a row of the table cannot do without."""
    return dict(group_size=G, max_length=L_MAX, router_shift=shift if OBJECTIVES[name].ratio == "log-shifted" else None)


def run(name, logp, *args, **options):
    logp = logp.clone().requires_grad_()
    loss, stats = policy_loss(name, logp, *args, **options)
    return loss.item(), torch.autograd.grad(loss, logp)[0].double(), {key: value.item() for key, value in stats.items()}


def assert_equal(got, expected, mask, A, tolerance=2e-6):
    (loss, gradient, stats), (true_loss, true_gradient, below, above) = got, expected
    assert loss == pytest.approx(true_loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(gradient, true_gradient, rtol=tolerance, atol=1e-9)
    assert (gradient[~mask] == 0).all()
    tokens = mask.sum().item()
    signal = ((A if A.dim() == 2 else A[:, None]).expand(mask.shape)[mask] != 0).sum().item()
    assert (stats["clip_low"], stats["clip_high"]) == pytest.approx((len(below) / tokens, len(above) / tokens))
    assert (stats["clip_signal"], stats["signal_tokens"]) == pytest.approx((len(below | above) / signal, signal))


def test_the_table_is_the_papers():
    assert {name: (row.ratio, row.epsilon, row.epsilon_high, row.reduction) for name, row in OBJECTIVES.items() if name in TABLE} == TABLE
    constants = {name: row.constants for name, row in OBJECTIVES.items() if name in TABLE and row.constants}
    assert constants == {"dppo": {"cap": 20}, "dppo_kl": {"cap": 20}, "kpop": {"cap": 20}, "ipo": {"tau": 1e-3}, "dro": {"beta": 0.05}, "sapo": {"tau_positive": 1, "tau_negative": 1.05},
                         "vespo": {"k_positive": 2, "lambda_positive": 3, "k_negative": 3, "lambda_negative": 2}}


# Values and gradients against the loops

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TABLE)
def test_value_and_every_gradient_equal_a_loop(name, dtype):
    logp, old_logp, A, _, mask, shift = make_batch(dtype)
    expected = reference(name, logp, old_logp, A, mask, shift=shift if name == "rspo" else None)
    got = run(name, logp, old_logp, A, mask, **needs(name, shift))
    assert_equal(got, expected, mask, A, 2e-6 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_advantages_per_token_equal_a_loop(name):
    logp, old_logp, _, A, mask, _ = make_batch()
    assert_equal(run(name, logp, old_logp, A, mask, **needs(name, None)), reference(name, logp, old_logp, A, mask), mask, A)


@pytest.mark.parametrize("name", WITH_BAND)
def test_another_band_equals_a_loop(name):
    logp, old_logp, A, _, mask, shift = make_batch(seed=1)
    band = dict(epsilon=0.05, epsilon_high=0.1)
    expected = reference(name, logp, old_logp, A, mask, shift=shift if name == "rspo" else None, **band)
    assert_equal(run(name, logp, old_logp, A, mask, **needs(name, shift), **band), expected, mask, A)


@pytest.mark.parametrize("name", [name for name in TABLE if OBJECTIVES[name].constants])
def test_other_constants_equal_a_loop(name):
    logp, old_logp, A, _, mask, _ = make_batch()
    constants = {key: 0.06 * x if key == "cap" else 0.7 * x for key, x in OBJECTIVES[name].constants.items()}
    got = run(name, logp, old_logp, A, mask, constants=constants)
    assert_equal(got, reference(name, logp, old_logp, A, mask, constants=constants), mask, A)
    assert got[0] != run(name, logp, old_logp, A, mask)[0]


@pytest.mark.parametrize("name", [name for name in WITH_BAND if name not in ("cispo", "kpop")])
def test_the_batch_holds_every_clip_case(name):
    logp, old_logp, A, _, mask, shift = make_batch()
    _, gradient, below, above = reference(name, logp, old_logp, A, mask, shift=shift if name == "rspo" else None)
    row, log_w = OBJECTIVES[name], torch.where(mask, logp - old_logp + (shift.log() if name == "rspo" else 0.0), 0.0)
    ratio = {"token": log_w.exp(), "sequence": sequence_ratio(logp, old_logp, mask)[:, None],
             "gspo-token": sequence_ratio(logp, old_logp, mask)[:, None], "product": log_w.sum(-1, keepdim=True).exp()}
    ratio = ratio.get(row.ratio, 1 + log_w).expand_as(log_w)
    if name.startswith("dppo") or name == "ipo":
        p, mu = (x.masked_fill(~mask, -1.0).exp() for x in (logp, old_logp))
        kl = mu * (mu / p).log() + (1 - mu) * ((1 - mu) / (1 - p).clamp(min=1e-8)).log()
        ratio = 1 + (kl * (p - mu).sign() if name == "dppo_kl" else p - mu)
    under, over = ratio < 1 - row.epsilon, ratio > 1 + row.epsilon_high
    for sign in (1, -1):
        for region in (under, over, ~under & ~over):
            assert (mask & (A[:, None] * sign > 0) & region).any()
    assert below and above and (gradient != 0).any()


@pytest.mark.parametrize("name", TOKEN_FAMILY)
def test_dual_clip_equals_a_loop(name):
    for seed in range(3):
        logp, old_logp, A, _, mask, _ = make_batch(seed=seed)
        options = needs(name, None)
        expected = reference(name, logp, old_logp, A, mask, cap=1.6)
        assert expected[3] > reference(name, logp, old_logp, A, mask)[3]                             # a proper superset
        assert_equal(run(name, logp, old_logp, A, mask, dual_clip=1.6, **options), expected, mask, A)


def test_dual_clip_is_intellect_2s_delta():
    logp, old_logp, A, _, mask, _ = make_batch()
    x = torch.where(mask, logp, 0.0).requires_grad_()
    w, a, delta = (x - torch.where(mask, old_logp, 0.0)).exp(), A[:, None], 1.6
    literal = -(token_weights(mask, "sequence-mean") * torch.min(w.clamp(max=delta) * a, w.clamp(0.8, 1.2) * a)).sum()
    loss, gradient, _ = run("grpo", logp, old_logp, A, mask, dual_clip=delta)
    assert loss == pytest.approx(literal.item())
    torch.testing.assert_close(gradient, torch.autograd.grad(literal, x)[0])


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gmpo", "cispo"])
def test_mismatch_weights_multiply_the_clipped_surrogate(name):
    logp, old_logp, A, _, mask, _ = make_batch()
    mismatch = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)).masked_fill(~mask, float("nan"))
    twice = run(name, logp, old_logp, A, mask, mismatch=torch.where(mask, 2.0, mismatch), **needs(name, None))
    plain = run(name, logp, old_logp, A, mask, **needs(name, None))
    assert twice[0] == pytest.approx(2 * plain[0])
    torch.testing.assert_close(twice[1], 2 * plain[1])
    if name in ("grpo", "dapo", "cispo"):                                                            # each token on its own
        weighted = run(name, logp, old_logp, A, mask, mismatch=mismatch, **needs(name, None))
        torch.testing.assert_close(weighted[1], mismatch.nan_to_num(0.0) * plain[1], rtol=1e-6, atol=1e-12)


# Properties

def test_gspo_is_gspo_token_under_equal_advantages():
    logp, old_logp, A, _, mask, _ = make_batch()
    loss, gradient, stats = run("gspo", logp, old_logp, A, mask)
    for same in (A, torch.where(mask, A[:, None], float("nan"))):                                    # per answer, or per token
        token_loss, token_gradient, token_stats = run("gspo_token", logp, old_logp, same, mask)
        assert token_loss == pytest.approx(loss, rel=1e-12) and token_stats == stats
        torch.testing.assert_close(token_gradient, gradient, rtol=1e-12, atol=0)


def test_gmpo_with_an_infinite_band_has_unclipped_gspos_gradient():
    logp, old_logp, A, _, mask, _ = make_batch()
    gmpo = run("gmpo", logp, old_logp, A, mask, epsilon=math.inf, epsilon_high=math.inf)
    gspo = run("gspo", logp, old_logp, A, mask, epsilon=1.0, epsilon_high=math.inf)
    assert gmpo[0] == pytest.approx(gspo[0]) and gmpo[2]["clip_low"] == gspo[2]["clip_high"] == 0
    torch.testing.assert_close(gmpo[1], gspo[1], rtol=1e-12, atol=0)


def test_at_ratio_1_the_family_has_one_gradient():
    _, old_logp, A, _, mask, _ = make_batch()
    gradient = lambda name: run(name, old_logp, old_logp, A, mask, group_size=G, router_shift=torch.ones_like(old_logp))[1]
    for name in ("ppo", "gspo", "gspo_token", "gmpo", "rspo", "sapo"):
        torch.testing.assert_close(gradient(name), gradient("grpo"), rtol=1e-7, atol=0)
    for name in ("reinforce", "cispo", "vespo", "dppo", "dppo_kl", "kpop", "ipo", "rollout_is", "dro"):                                                     # token-mean
        torch.testing.assert_close(gradient(name), gradient("dapo"), rtol=1e-12, atol=0)


def test_a_first_loss_of_0_has_a_gradient():
    old_logp, mask = torch.full((16, T), -1.0), torch.arange(T) < torch.arange(1, 17)[:, None]
    A = group_advantages(torch.tensor([1.0, 0, 1, 0] * 4), G)
    for name in ("grpo", "gspo", "gmpo"):
        loss, gradient, _ = run(name, old_logp, old_logp, A, mask)
        assert loss == pytest.approx(0.0, abs=1e-6) and gradient[mask].abs().min() > 1e-3


def test_old_logp_may_be_logp_itself_on_policy():
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    loss, _ = policy_loss("gspo", logp, logp, torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool))
    assert torch.autograd.grad(loss, logp)[0].flatten().tolist() == pytest.approx([-1 / 6] * 3 + [1 / 6] * 3)


def test_a_clipped_sequence_gets_no_gradient_at_any_token():
    logp, old_logp, A, _, mask, _ = make_batch()
    gradient, s = run("gspo", logp, old_logp, A, mask)[1], sequence_ratio(logp, old_logp, mask)
    clipped = (A > 0) & (s > 1 + 4e-4) | (A < 0) & (s < 1 - 3e-4)
    assert clipped.any() and (gradient[clipped] == 0).all()
    assert (gradient[~clipped & (A != 0)] != 0).eq(mask[~clipped & (A != 0)]).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_without_loss_tokens_gets_no_gradient_and_no_nan(name):
    logp, old_logp, A, _, mask, shift = make_batch()
    loss, gradient, stats = run(name, logp, old_logp, A, torch.zeros_like(mask), **needs(name, shift))
    assert loss == 0 and (gradient == 0).all() and not any(math.isnan(value) for value in stats.values())
    assert math.isfinite(run(name, logp, old_logp, A, mask, **needs(name, shift))[0]) and not mask[10].any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_wider_padding_and_shuffled_tokens_change_nothing(name):
    logp, old_logp, A, _, mask, shift = make_batch()
    plain = run(name, logp, old_logp, A, mask, **needs(name, shift))
    pad = lambda x: torch.nn.functional.pad(x, (0, 3), value=False if x.dtype == torch.bool else float("nan"))
    wide = run(name, pad(logp), pad(old_logp), A, pad(mask), **needs(name, pad(shift)))
    order = torch.randperm(T, generator=torch.Generator().manual_seed(5))
    shuffled = run(name, logp[:, order], old_logp[:, order], A, mask[:, order], **needs(name, shift[:, order]))
    for (loss, gradient, stats), expected in ((wide, pad(plain[1]).nan_to_num(0.0)), (shuffled, plain[1][:, order])):
        assert loss == pytest.approx(plain[0], rel=1e-12) and stats == pytest.approx(plain[2])
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_neither_loss_nor_gradient_nor_stats(name, size):
    logp, old_logp, A, _, mask, shift = make_batch()
    loss, gradient, stats = run(name, logp, old_logp, A, mask, **needs(name, shift))
    weights = token_weights(mask, OBJECTIVES[name].reduction, group_size=G, max_length=L_MAX)
    x, total, parts = logp.clone().requires_grad_(), 0.0, []
    for start in range(0, 16, size):
        part = slice(start, start + size)
        router_shift = shift[part] if OBJECTIVES[name].ratio == "log-shifted" else None
        piece, piece_stats = policy_loss(name, x[part], old_logp[part], A[part], mask[part], weights=weights[part],
                                         router_shift=router_shift)
        total, parts = total + piece, parts + [piece_stats]
    assert total.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, x)[0], gradient, rtol=1e-10, atol=1e-15)
    assert {key: value.item() for key, value in combine_stats(parts).items()} == pytest.approx(stats, rel=1e-6, abs=1e-9)


def test_a_statistic_is_combined_as_the_table_says_or_refused():
    parts = [dict(tokens=torch.tensor(n), odd=torch.tensor(x), most=torch.tensor(x), all=torch.tensor(x)) for n, x in ((1, 0.0), (3, 1.0))]
    with pytest.raises(ValueError, match="statistic odd .* has no entry in losses.STATISTICS: give what it is averaged over"):
        combine_stats(parts)
    with pytest.MonkeyPatch.context() as patch:
        for name, how in (("odd", "tokens"), ("most", "max"), ("all", "sum")):
            patch.setitem(STATISTICS, name, how)
        assert {key: x.item() for key, x in combine_stats(parts).items()} == dict(tokens=4, odd=0.75, most=1, all=1)
        patch.setitem(STATISTICS, "odd", "token")
        with pytest.raises(ValueError, match="statistic odd .* has the value 'token' in losses.STATISTICS"):
            combine_stats(parts)


def test_every_statistic_of_the_loss_has_an_entry_and_every_entry_a_statistic():
    logp, old_logp, A, _, mask, _ = make_batch()
    assert policy_loss("grpo", logp, old_logp, A, mask)[1].keys() == STATISTICS.keys()


def test_the_loss_never_waits_for_the_gpu():
    """Tensors on the meta device have shapes but no values: any .item(), any `if tensor` would raise."""
    logp, old_logp, A, _, mask, shift = (x.to("meta") for x in make_batch(torch.float32))
    for name in OBJECTIVES:
        loss, _ = policy_loss(name, logp.requires_grad_(), old_logp, A, mask, mismatch=shift, **needs(name, shift))
        loss.backward()
    policy_loss("grpo", logp, old_logp, A, mask, dual_clip=3.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_ratios_that_overflow_float32_leave_no_nan(name):
    mask, A = torch.ones(4, 3, dtype=torch.bool), torch.tensor([1.0, -1.0, 1.0, -1.0])
    old_logp = torch.tensor([[-90.0], [-90.0], [-0.1], [-0.1]]).expand(4, 3)
    logp = torch.tensor([[-0.1], [-0.1], [-90.0], [-90.0]]).expand(4, 3)
    loss, gradient, stats = run(name, logp, old_logp, A, mask, group_size=2, max_length=3, router_shift=torch.ones(4, 3))
    assert math.isfinite(loss) and gradient.isfinite().all()


# Reductions

@pytest.mark.parametrize("reduction", ["sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"])
def test_token_weights_equal_a_loop(reduction):
    mask = make_batch()[4]
    weights = token_weights(mask, reduction, group_size=G, max_length=L_MAX)
    expected = torch.tensor(weight_loop(mask, reduction))[:, None] * mask
    torch.testing.assert_close(weights, expected)
    assert weights.dtype == torch.float32 and not weights.requires_grad


def test_the_reductions_disagree_on_one_batch():
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    assert token_weights(mask, "sequence-mean")[:, 0].tolist() == [0.125, 0.5]                       # short answers weigh more
    assert token_weights(mask, "token-mean")[:, 0].tolist() == pytest.approx([0.2, 0.2])
    assert token_weights(mask, "group-token-mean", group_size=1)[:, 0].tolist() == [0.125, 0.5]
    assert token_weights(mask, "group-token-mean", group_size=2)[:, 0].tolist() == pytest.approx([0.2, 0.2])
    assert token_weights(mask, "constant", max_length=8)[:, 0].tolist() == [0.0625, 0.0625]
    assert token_weights(mask, "sequence-sum")[:, 0].tolist() == [0.5, 0.5]


# KL

def kl_case():
    draw = lambda seed: torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw(0).requires_grad_(), draw(1).log_softmax(-1), (draw(0) + 0.5 * draw(2)).log_softmax(-1)


def kl_enumerated(estimator):
    """The estimator's exact expectation and expected gradient over a vocabulary of 6, with tokens of π_θ (of π_old for k3_is)."""
    theta, ref, old = kl_case()
    logp = theta.log_softmax(-1)
    sampled_from = old if estimator == "k3_is" else logp.detach()
    mask = torch.ones(1, 6, dtype=torch.bool)
    kl = kl_penalty(logp[None], ref[None], mask, estimator, old_logp=old[None] if estimator == "k3_is" else None)
    expectation = (sampled_from.exp() * kl[0]).sum()
    return expectation.item(), torch.autograd.grad(expectation, theta)[0]


def true_kl(reverse=True):
    theta, ref, _ = kl_case()
    logp = theta.log_softmax(-1)
    kl = (logp.exp() * (logp - ref)).sum() if reverse else (ref.exp() * (ref - logp)).sum()
    return kl.item(), torch.autograd.grad(kl, theta)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_is", "k3_st"])
def test_kl_estimators_have_the_kl_as_their_expectation(estimator):
    assert kl_enumerated(estimator)[0] == pytest.approx(true_kl()[0])


@pytest.mark.parametrize("estimator", ["k2", "k3_is", "k3_st"])
def test_kl_estimators_with_the_right_gradient(estimator):
    torch.testing.assert_close(kl_enumerated(estimator)[1], true_kl()[1])


def test_k1_as_a_loss_does_nothing_and_k3_pulls_in_the_other_kls_direction():
    torch.testing.assert_close(kl_enumerated("k1")[1], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(kl_enumerated("k3")[1], true_kl(reverse=False)[1])
    assert (kl_enumerated("k3")[1] - true_kl()[1]).abs().max() > 0.05


def test_kl_per_token_equals_the_formulas():
    logp, ref, _, _, mask, _ = make_batch()
    old = torch.where(mask, logp + 0.1, float("nan"))
    k3 = lambda d: math.exp(-d) - 1 + d
    for estimator, value in {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": k3, "k3_st": k3,
                             "k3_is": lambda d: math.exp(-0.1) * k3(d)}.items():
        got = kl_penalty(logp, ref, mask, estimator, old_logp=old)
        assert (got[~mask] == 0).all()
        assert got[mask].tolist() == pytest.approx([value(d) for d in (logp - ref)[mask].tolist()])


def test_k3_keeps_its_digits_where_the_policies_almost_agree():
    d = torch.full((1, 1), 1e-4)
    k3 = kl_penalty(torch.zeros(1, 1), -d, torch.ones(1, 1, dtype=torch.bool))
    assert k3.item() == pytest.approx(5e-9, rel=1e-3)


# Mismatch between trainer and sampler

@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_mismatch_weights_equal_a_loop(level, action):
    old_logp, sampler_logp, _, _, mask, _ = make_batch()
    low, high = 0.6, 1.4
    got = mismatch_weight(old_logp.requires_grad_(), sampler_logp, mask, f"{level}_{action}", low, high)
    kept = mismatch_mask(old_logp, sampler_logp, mask, level, low, high)
    outside = 0
    for i in range(16):
        rho = [(old_logp[i, t] - sampler_logp[i, t]).exp().item() for t in range(T) if mask[i, t]]
        n = len(rho)
        judged = {"token": rho, "seq": [math.prod(rho)] * n, "geo": [math.prod(rho) ** (1 / max(n, 1))] * n}[level]
        inside = [low <= x <= high for x in judged]
        outside += n - sum(inside)
        weighed = rho if level == "geo" and action == "mask" else judged                             # geo_mask: ρ_t
        expected = [min(max(x, low), high) if action == "truncate" else x * keep for x, keep in zip(weighed, inside)]
        assert got[i][mask[i]].tolist() == pytest.approx(expected)
        assert kept[i][mask[i]].tolist() == inside
    assert outside and (got[~mask] == 0).all() and not kept[~mask].any()
    assert not got.requires_grad and not kept.requires_grad


def test_tis_has_no_lower_bound():
    """Truncated importance sampling is [0, C]: where the sampler was twice as sure, the weight is 1/2, not a floor."""
    old_logp, mask = torch.tensor([[-3.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    weight = mismatch_weight(old_logp, torch.tensor([[-1.0, -3.0]]), mask, "token_truncate", 0.0, 2.0)
    assert weight[0].tolist() == pytest.approx([math.exp(-2), 2.0])


def test_weight_stats_equal_a_loop():
    old_logp, sampler_logp, _, _, mask, _ = make_batch()
    weights = torch.where(mask, mismatch_weight(old_logp, sampler_logp, mask, "token_mask", 0.6, 1.4), float("nan"))
    w = weights[mask].tolist()
    stats = weight_stats(weights, mask)
    assert stats["mismatch_ess"] == pytest.approx(sum(w) ** 2 / len(w) / sum(x * x for x in w))
    assert stats["mismatch_chi2"] == pytest.approx(sum((x - 1) ** 2 for x in w) / len(w))


def test_equal_weights_keep_the_whole_sample_and_rejected_ones_none():
    mask = make_batch()[4]
    assert weight_stats(mask.float(), mask) == {"mismatch_ess": 1, "mismatch_chi2": 0}
    assert weight_stats(torch.zeros(mask.shape), mask) == {"mismatch_ess": 0, "mismatch_chi2": 1}
    w = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    stats = weight_stats(w / w[mask].mean(), mask)
    assert stats["mismatch_ess"] == pytest.approx(1 / (1 + stats["mismatch_chi2"]), rel=1e-5)


# 80/20

def test_high_entropy_tokens_are_the_top_fifth_of_the_batch():
    mask = make_batch()[4]
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 9.0)
    kept = high_entropy_mask(entropy, mask, 0.8)
    values = sorted(entropy[mask].tolist())
    position = 0.8 * (len(values) - 1)                                                               # linear quantile
    floor = int(position)
    edge = values[floor] + (position - floor) * (values[floor + 1] - values[floor])
    assert kept.tolist() == [[m and e >= edge for m, e in zip(ms, es)] for ms, es in zip(mask.tolist(), entropy.tolist())]
    assert kept.sum().item() == pytest.approx(0.2 * mask.sum().item(), abs=1) and high_entropy_mask(entropy, mask, 0.0).equal(mask)


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.8, 0.97, 1.0])
def test_the_entropy_quantile_is_torchs_and_has_no_largest_size(quantile):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 1000):
        entropy, mask = torch.rand(1, n, generator=generator), torch.ones(1, n, dtype=torch.bool)
        assert high_entropy_mask(entropy, mask, quantile).equal(entropy >= torch.quantile(entropy, quantile)), n


@pytest.mark.slow
def test_more_than_two_to_the_24_tokens_have_a_quantile():
    entropy = torch.rand(2**12, 2**12 + 1, generator=torch.Generator().manual_seed(0))
    kept = high_entropy_mask(entropy, torch.ones_like(entropy, dtype=torch.bool), 0.8)
    assert kept.float().mean().item() == pytest.approx(0.2, abs=1e-3)



# Answers that the policy has moved away from

@pytest.mark.parametrize("name", TABLE)
def test_the_off_policy_mask_drops_bad_answers_that_became_unlikely(name):
    logp, old_logp, A, _, mask, shift = make_batch()
    delta, dropped = 0.01, []
    for i in range(16):
        log_s = [(logp[i, t] - old_logp[i, t]).item() for t in range(T) if mask[i, t]]
        dropped.append(bool(log_s) and A[i].item() < 0 and -sum(log_s) / len(log_s) > delta)         # -log s > δ
    dropped = torch.tensor(dropped)
    router_shift = shift if name == "rspo" else None
    loss, gradient, _, above = reference(name, logp, old_logp, A, mask, shift=router_shift, dropped=dropped.nonzero().flatten().tolist())
    below = reference(name, logp, old_logp, A, mask, shift=router_shift)[2] | {tuple(x) for x in (mask & dropped[:, None]).nonzero().tolist()}
    assert dropped.sum() == 2 and (dropped != (A < 0)).any()
    got = run(name, logp, old_logp, A, mask, off_policy_mask=delta, **needs(name, shift))
    assert_equal(got, (loss, gradient, below, above), mask, A)
    plain, wide = (run(name, logp, old_logp, A, mask, off_policy_mask=d, **needs(name, shift)) for d in (None, 9.0))
    assert wide[0] == plain[0] and wide[1].equal(plain[1]) and wide[2] == plain[2]


def test_the_off_policy_mask_is_a_lower_clip_on_s():
    logp, old_logp, A, _, mask, _ = make_batch()
    for delta in (1e-4, 1e-2, 0.4):
        gradient, s = run("cispo", logp, old_logp, A, mask, off_policy_mask=delta)[1], sequence_ratio(logp, old_logp, mask)
        expected = (A > 0) | (A < 0) & (s >= math.exp(-delta))
        assert (gradient != 0).any(-1).equal(expected & mask.any(-1))


def test_the_off_policy_mask_takes_advantages_per_token():
    logp, old_logp, _, A, mask, _ = make_batch()
    plain, masked = run("grpo", logp, old_logp, A, mask)[1], run("grpo", logp, old_logp, A, mask, off_policy_mask=0.01)[1]
    stale = (sequence_ratio(logp, old_logp, mask) < math.exp(-0.01))[:, None] & (A < 0)
    torch.testing.assert_close(masked, plain.masked_fill(stale, 0.0))
    assert (masked != plain).any()


def test_a_token_removed_twice_counts_once():
    """Its own w is above dual_clip's c, its answer, bad and now unlikely, is dropped as a whole."""
    old_logp, mask = torch.full((2, 4), -3.0), torch.tensor([[True] * 4, [True, True, True, False]])
    logp = old_logp + torch.tensor([[1.5, -2.0, -2.0, 0.1], [1.5, 0.0, 0.0, 0.0]])     # w = 4.5; log s = -0.6 and 0.5
    _, gradient, stats = run("grpo", logp, old_logp, torch.tensor([-1.0, -1.0]), mask, dual_clip=3.0, off_policy_mask=0.1)
    assert (gradient == 0)[mask].sum() == 5
    assert (stats["clip_low"], stats["clip_high"], stats["clip_signal"]) == pytest.approx((4 / 7, 1 / 7, 5 / 7))


# Presets that are rows already

def test_minirl_is_the_min_clip_summed_over_tokens():
    """MiniRL (2512.01374): the gradient is M·w·Â·∇log π with the PPO side mask M, w = staleness × mismatch."""
    logp, old_logp, A, _, mask, _ = make_batch()
    mismatch = mismatch_weight(old_logp, (old_logp + 0.3 * shift_like(mask)), mask, "token_truncate", 0.0, 5.0)
    expected = torch.zeros(mask.shape).double()
    for i, t in mask.nonzero().tolist():
        w, a = math.exp(logp[i, t] - old_logp[i, t]), A[i].item()
        masked = a > 0 and w > 1.27 or a < 0 and w < 0.8
        expected[i, t] = 0.0 if masked else -mismatch[i, t].item() * w * a / len(mask)
    got = run("grpo", logp, old_logp, A, mask, epsilon=0.2, epsilon_high=0.27, mismatch=mismatch,
              weights=token_weights(mask, "sequence-sum"))[1]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def shift_like(mask):
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def test_dppo_keeps_rare_tokens_that_a_ratio_clip_drops_and_drops_common_ones_it_keeps():
    """The same ratio is a small step for a rare token and a large one for a common one: DPPO's point."""
    old_logp = torch.tensor([[0.001, 0.8]]).log()
    logp, mask, good = torch.tensor([[0.004, 0.95]]).log(), torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.0])
    removed = lambda name, **band: (run(name, logp, old_logp, good, mask, **band)[1][0] == 0).tolist()
    assert removed("grpo") == [True, False]                                                          # w = 4 and 1.19
    assert removed("dppo", epsilon_high=0.1) == [False, True]                                        # π - μ = 0.003 and 0.15
    assert removed("dppo_kl", epsilon_high=0.05) == [False, True]


def test_dppo_caps_the_weight_at_20():
    logp, mask = torch.tensor([[0.1, 0.1]]).log(), torch.ones(1, 2, dtype=torch.bool)
    gradient = run("dppo", logp, torch.tensor([[1e-3, 0.05]]).log(), torch.tensor([1.0]), mask)[1]
    assert gradient[0].tolist() == pytest.approx([-10, -1])                                          # min(w, 20) / 2


# The papers' worked examples

def test_two_tokens_among_512():
    """1.9 and 0.4: s = 0.99946 < 0.9997, GSPO's lower edge: A = -1 is clipped, A = +1 is not. GRPO drops one token of each."""
    log_w = torch.zeros(1, 512)
    log_w[0, 100], log_w[0, 300] = math.log(1.9), math.log(0.4)
    old_logp, mask = torch.full((1, 512), -2.0), torch.ones(1, 512, dtype=torch.bool)
    good, bad = torch.tensor([1.0]), torch.tensor([-1.0])
    up, down = (run("gspo", old_logp + log_w, old_logp, A, mask) for A in (good, bad))
    assert up[2]["clip_low"] == up[2]["clip_high"] == 0 and down[2]["clip_low"] == 1
    assert up[1][0].tolist() == pytest.approx([-0.99946 / 512] * 512, rel=1e-5) and (down[1] == 0).all()
    up, down = (run("grpo", old_logp + log_w, old_logp, A, mask)[1][0] * 512 for A in (good, bad))
    assert up[[100, 300, 0]].tolist() == pytest.approx([0, -0.4, -1])
    assert down[[100, 300, 0]].tolist() == pytest.approx([1.9, 0, 1])                                # 1.9: the dual clip's job
    assert run("grpo", old_logp + log_w, old_logp, bad, mask, dual_clip=1.5)[1][0, 100] == 0


def test_cispo_drops_no_token_where_grpo_does():
    logp, old_logp, A, _, mask, _ = make_batch()
    tokens = mask & (A != 0)[:, None]
    assert (run("cispo", logp, old_logp, A, mask)[1][tokens] != 0).all()
    assert (run("grpo", logp, old_logp, A, mask)[1][tokens] == 0).any()


def test_router_shift_in_gspos_own_band_silences_every_bad_answer():
    """Why RSPO does not shift GSPO: γ̃ < 1 pulls every s below 1 - 3e-4, and what is below is clipped where A < 0."""
    _, old_logp, A, _, mask, shift = make_batch()
    gradient = run("gspo", old_logp, old_logp, A, mask, router_shift=torch.where(mask, shift, 1.0))[1]
    assert (gradient[A < 0] == 0).all() and (gradient[A > 0][mask[A > 0]] != 0).all()


def test_the_router_shift_carries_no_gradient():
    logp, old_logp, A, _, mask, shift = make_batch()
    loss, _ = policy_loss("rspo", logp.requires_grad_(), old_logp, A, mask, router_shift=shift.requires_grad_())
    assert torch.autograd.grad(loss, shift, allow_unused=True)[0] is None


def test_the_demo_shows_every_objective(capsys):
    runpy.run_module("losses", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-len(OBJECTIVES):]] == list(OBJECTIVES)
    assert len({len(line) for line in lines[-len(OBJECTIVES):]}) == 1 and len(lines[-1]) <= 130


def test_a_zero_outside_the_band_is_not_a_cap():
    """docs/corrections.md 20: one token of ratio 2, A = +1, and one of ratio 0.4, A = -1."""
    for ratio, A, cap in ((2.0, 1.0, 1.28), (0.4, -1.0, 0.4)):
        old_logp, mask = torch.full((1, 1), 0.2).log(), torch.ones(1, 1, dtype=torch.bool)
        pushes = [-run(name, old_logp + math.log(ratio), old_logp, torch.tensor([A]), mask)[1].item() for name in ("cispo", "rollout_is")]
        assert pushes == pytest.approx([cap * A, 0.0])


def test_icepop_is_rollout_is_with_a_wide_band():
    logp, old_logp, A, _, mask, _ = make_batch()
    gradient = run("rollout_is", logp, old_logp, A, mask, epsilon=0.5, epsilon_high=4.0)[1]
    w = torch.where(mask, logp - old_logp, 0.0).exp()
    expected = torch.where((w > 0.5) & (w < 5), -w * A[:, None], 0.0) * mask / mask.sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


# Bad input

def test_unknown_names_list_the_known_ones():
    logp, old_logp, A, _, mask, _ = make_batch()
    with pytest.raises(ValueError, match="name 'gpso' is unknown; known: .*reinforce, ppo, "):
        policy_loss("gpso", logp, old_logp, A, mask)
    with pytest.raises(ValueError, match="reduction 'tokenmean' is unknown; known: sequence-mean, "):
        token_weights(mask, "tokenmean")
    with pytest.raises(ValueError, match="estimator 'k4'"):
        kl_penalty(logp, old_logp, mask, "k4")
    with pytest.raises(ValueError, match="sapo's constant 'tau' is unknown; known: tau_positive, tau_negative"):
        policy_loss("sapo", logp, old_logp, A, mask, constants={"tau": 1.0})
    with pytest.raises(ValueError, match="mode 'token_clip'.*token_"):
        mismatch_weight(logp, old_logp, mask, "token_clip", 0, 2)


@pytest.mark.parametrize("name, change, message", [
    ("gspo", dict(logp=lambda x: x.bfloat16()), r"logp \[16, 10\] is torch.bfloat16"),
    ("grpo", dict(old_logp=lambda x: x.half()), r"old_logp \[16, 10\] is torch.float16"),
    ("grpo", dict(mask=lambda x: x.float()), r"mask is torch.float32 \[16, 10\]: it must be torch.bool"),
    ("grpo", dict(old_logp=lambda x: x[:, :9]), r"old_logp is \[16, 9\] but mask is \[16, 10\]"),
    ("grpo", dict(advantages=lambda x: x[:15]), r"advantages has shape \[15\], mask \[16, 10\]: grpo takes advantages of shape \[B\]"),
    ("gspo", dict(advantages=lambda x: x[:, None].expand(16, T)), r"advantages has shape \[16, 10\].*gspo takes advantages of shape \[B\].*ratio per token"),
    ("gmpo", dict(advantages=lambda x: x[:, None].expand(16, T)), r"gmpo takes advantages of shape \[B\]"),
    ("rspo", dict(), r"router_shift is missing: rspo"),
    ("rspo", dict(router_shift=lambda _: torch.ones(16)), r"router_shift is \[16\] but mask is \[16, 10\]"),
    ("dr_grpo", dict(), "max_length is None"),
    ("dapo_paper", dict(), "group_size is None"),
    ("dapo_paper", dict(group_size=lambda _: 3), r"group_size is 3, mask \[16, 10\]"),
    ("grpo", dict(weights=lambda _: torch.ones(16, 1)), r"weights is \[16, 1\] but mask is \[16, 10\]"),
    ("grpo", dict(mismatch=lambda _: torch.ones(16)), r"mismatch is \[16\]"),
    ("grpo", dict(epsilon=lambda _: 2.0), "epsilon is 2.0, .*clip range"),
    ("gspo", dict(epsilon_high=lambda _: -0.1), "epsilon_high is -0.1"),
    ("sapo", dict(epsilon=lambda _: 0.2), "epsilon is 0.2, .*sapo has no clip range"),
    ("gspo", dict(dual_clip=lambda _: 3.0), "dual_clip is 3.0.*gspo"),
    ("grpo", dict(dual_clip=lambda _: 0.9), "dual_clip is 0.9"),
    ("dppo", dict(dual_clip=lambda _: 3.0), "dual_clip is 3.0.*dppo"),
    ("dppo", dict(epsilon=lambda _: -0.1), "epsilon is -0.1"),
])
def test_bad_input_is_named(name, change, message):
    logp, old_logp, A, _, mask, _ = make_batch()
    inputs = dict(logp=logp, old_logp=old_logp, advantages=A, mask=mask)
    inputs |= {key: function(inputs.get(key)) for key, function in change.items()}
    with pytest.raises(ValueError, match=message):
        policy_loss(name, **inputs)


def test_k3_is_needs_the_old_policy():
    logp, old_logp, _, _, mask, _ = make_batch()
    with pytest.raises(ValueError, match="old_logp is missing"):
        kl_penalty(logp, old_logp, mask, "k3_is")
