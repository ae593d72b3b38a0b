"""advantages.py against plain loops, and the numerical traps of group statistics.
python -m pytest tests/concepts/test_advantages.py
"""

import math
from types import SimpleNamespace

import pytest
import torch

from advantages import (ADVANTAGES, estimate_advantages, gae, gdpo, group_advantages, has_signal,
                        leave_one_out, overlong_penalty, reinforce_plus_plus, whiten)
import reference
from features import FEATURES
from features.critic import ValueHead, value_loss
from plumbing.data.task import Task
from reference import at_the_end, clip, mean, penalized


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged_mask():
    """Rows of 5, 3, 0 and 6 loss tokens, the last with tool output in its middle."""
    mask = torch.arange(8) < torch.tensor([5, 3, 0, 8])[:, None]
    mask[3, 3:5] = False
    return mask


def std(values, unbiased=False):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - unbiased))


# ------------------------------------------------------------- advantages of responses, in groups

def group_loop(group, batch, unbiased):                                 # GRPO; GSPO eq. 6
    return [(r - mean(group)) / (std(group, unbiased) + 1e-6) for r in group]


def batch_loop(group, batch, unbiased):                                 # Lite-PPO 2508.08221
    return [(r - mean(group)) / (std(batch, unbiased) + 1e-6) for r in group]


def none_loop(group, batch, unbiased):                                  # Dr. GRPO 2503.20783
    return [r - mean(group) for r in group]


def leave_one_out_loop(group, batch, unbiased):                         # RLOO 2402.14740
    return [r - mean(group[:i] + group[i + 1:]) for i, r in enumerate(group)]


LOOPS = {  # a function, or a scale of group_advantages: its loop
    "group": group_loop, "batch": batch_loop, "none": none_loop, leave_one_out: leave_one_out_loop}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("G", [2, 3, 4, 8])
@pytest.mark.parametrize("how", LOOPS)
def test_advantages_of_groups_equal_a_loop(how, G, unbiased):
    rewards, loop = draw(24).abs(), LOOPS[how]
    values = rewards.tolist()
    expected = [x for i in range(0, 24, G) for x in loop(values[i:i + G], values, unbiased)]
    got = how(rewards, G) if callable(how) else group_advantages(rewards, G, how, unbiased)
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["group", "reinforce_plus_plus_baseline"])
def test_rewards_up_to_the_limit_have_advantages(name):
    """Squares of 1e20 are infinite in float32: all advantages would be 0."""
    right = torch.tensor([0.0, 1.0, 0.0, 1.0] * 64)                                  # [B]
    more = {"mask": torch.ones(256, 1).bool()}
    usual = estimate_advantages(name, right, 4, **more)
    large = estimate_advantages(name, right * 0.99e15, 4, **more)
    torch.testing.assert_close(large, usual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -5.3, 1e6 + 0.1, 1e-30])
@pytest.mark.parametrize("G", [2, 3, 7])
def test_equal_rewards_are_exactly_zero(value, G):
    same = torch.full((G,), value)
    rewards = torch.cat([same, torch.arange(G) / 3, same])
    for scale in ("group", "batch", "none"):
        for eps in (1e-6, 0.0):
            got = group_advantages(rewards, G, scale=scale, eps=eps).view(3, -1)
            assert (got[[0, 2]] == 0).all() and got.isfinite().all() and (got[1] != 0).any()
    assert (leave_one_out(rewards, G).view(3, -1)[[0, 2]] == 0).all()
    assert (whiten(same[:, None], torch.ones(G, 1, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("rows, signs", [
    ([[0.3], [0.6], [0.9]], [-1, 0, 1]),                     # one stands at the mean, on paper
    ([[0.1, 0.2], [0.3, 0.0]], [0, 0]), ([[0.1, 0.2, -0.3], [0.0, 0.0, 0.0]], [0, 0]),
    ([[1000.0], [1000.001]], [-1, 1]), ([[1.0], [0.0], [0.0], [1.0]], [1, -1, -1, 1])])
@pytest.mark.parametrize("how", [group_advantages, leave_one_out])
def test_rounding_is_no_advantage_and_a_small_difference_is(how, rows, signs):
    names = SimpleNamespace(names=["a", "b", "c"][:len(rows[0])])
    task = Task("", [], [], None, reward_functions=[names])
    rewards = task.total(torch.tensor(rows, dtype=torch.float64))                    # [B]
    got = how(rewards, len(rows))
    assert got.dtype == torch.float32 and got.sign().tolist() == signs
    assert has_signal(rewards, len(rows)).item() == any(signs)
    if how is group_advantages and all(signs):
        assert got.tolist() == pytest.approx(signs, abs=3e-3)


@pytest.mark.parametrize("unbiased", [False, True])
def test_gdpo_equals_a_loop(unbiased):
    """As TRL's multi_objective_aggregation="normalize_then_sum" (its unbiased std) and the paper.
    A part that a response does not have is NaN and contributes 0."""
    parts, weights, G = draw(24, 2) * torch.tensor([1.0, 50.0]), [1.0, 0.5], 4
    parts[4:8] = parts[4]                                               # equal in every part
    parts[8:12, 1] = parts[13, 0] = math.nan

    def normalized(group):
        known = [x for x in group if not math.isnan(x)]
        each = iter(group_loop(known, None, unbiased))
        return [0.0 if math.isnan(x) else next(each) for x in group]
    columns = [[x for i in range(0, 24, G) for x in normalized(part[i:i + G])]
               for part in parts.T.tolist()]
    total = [sum(weight * x for weight, x in zip(weights, row)) for row in zip(*columns)]
    got = gdpo(parts, weights, G, unbiased=unbiased)
    assert got.tolist() == pytest.approx(group_loop(total, None, unbiased), rel=1e-4, abs=1e-5)
    assert (got[4:8] == 0).all() and (gdpo(parts[4:8], weights, G) == 0).all()


@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items()
                                  if "turn_rewards" not in row.reads])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_graded_have_the_advantages_that_they_would_have_alone(name, scale):
    """Two of each group of four were graded by no judge, also where they have a length penalty:
    their advantage is 0."""
    graded = torch.tensor([True, True, False, False]).repeat(3)                      # [B]
    mask = ragged_mask()[[0, 1, 3]].repeat(4, 1)                                     # [B, T]
    parts = draw(12, 2)                                                              # [B, K]
    rewards = parts.sum(-1).masked_fill(~graded, math.nan)                           # [B]
    inputs = dict(rewards=rewards, parts=parts, mask=mask, values=draw(12, 8).float())
    more = OPTIONS | dict(part_weights=[1.0, 1.0], lam=0.9, scale=scale)
    found = estimate_advantages(name, group_size=4, **inputs, **more)
    alone = {key: x[graded] for key, x in inputs.items()}
    want = estimate_advantages(name, group_size=2, **alone, **more)
    torch.testing.assert_close(found[graded], want, rtol=1e-4, atol=1e-5)
    assert (found[~graded] == 0).all() and want.ne(0).any()


# ---------------------------------------------------------------------------- advantages of tokens

@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_reinforce_plus_plus_equals_a_loop(size, beta, gamma):
    mask, rewards = ragged_mask(), draw(4)
    kl = draw(4, 8, seed=1).masked_fill(~mask, math.nan)
    values = rewards.tolist()
    if size:                                                            # minus the group's mean
        values = [r - mean(values[i // 2 * 2:i // 2 * 2 + 2]) for i, r in enumerate(values)]
    returns = []
    for reward, row, m in zip(values, kl, mask):
        given = penalized(reward, beta, row[m].tolist())
        returns += reference.gae(given, [0.0] * len(given), 1.0, gamma)[1]
    expected = [(x - mean(returns)) / std(returns) for x in returns]
    given = {} if gamma == 1.0 else dict(gamma=gamma)                   # the default
    got = reinforce_plus_plus(rewards, mask, size, kl if beta else None, beta, **given)
    assert got[mask].tolist() == pytest.approx(expected, rel=1e-4) and (got[~mask] == 0).all()


@pytest.mark.parametrize("gamma, lam", [(0.97, 0.0), (0.97, 0.9), (1.0, 1.0), (1.0, 0.95)])
def test_gae_equals_the_sum_over_future_errors(gamma, lam):
    mask, rewards = ragged_mask(), draw(4)
    values = draw(4, 8, seed=2).masked_fill(~mask, math.inf).requires_grad_()
    given = dict(gamma=gamma, lam=lam) if (gamma, lam) != (1.0, 0.95) else {}   # the defaults
    advantages, returns = gae(rewards, values, mask, **given)
    for i, m in enumerate(mask):
        V = values[i][m].tolist()
        expected = reference.gae(at_the_end(rewards[i].item(), len(V)), V, lam, gamma)
        assert advantages[i][m].tolist() == pytest.approx(expected[0])
        assert returns[i][m].tolist() == pytest.approx(expected[1])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()
    assert not advantages.requires_grad and not returns.requires_grad


# --------------------------------------------------------------------------------------- the table

OPTIONS = {name: default for feature in FEATURES if feature.flags      # flags that advantages read
           for name, default in vars(feature.flags()).items() if name in feature.provides}


def table_inputs():
    """Something of all that rows read: two groups of three, the rows of different lengths."""
    torch.manual_seed(5)
    mask = ragged_mask()[[0, 1, 2, 3, 0, 1]]
    B, T = mask.shape
    parts = 2 * torch.rand(B, 2)             # some are right, that is at least 1
    return OPTIONS | dict(
        rewards=parts.sum(-1), parts=parts, part_weights=[1.0, 2.0], group_size=3, scale="group",
        mask=mask, old_logp=-torch.rand(B, T), kl=torch.rand(B, T), beta=0.1,
        values=torch.rand(B, T), lam=0.9, turn_rewards=torch.rand(B, T) * mask,
        entropy=torch.rand(B, T))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_row_returns_what_it_says_and_reads_what_it_says(name):
    """An input that a row does not read cannot change it; one that it reads does."""
    row, inputs = ADVANTAGES[name], table_inputs()
    mask = inputs["mask"]
    reads = {*row.reads}
    if {"token_rewards", "turn_rewards"} & reads:    # they are made of these, not of `rewards`
        reads |= {"parts", "part_weights", "mask", "turn_rewards"}
    if "kl" not in reads:                                    # see the test below
        del inputs["kl"], inputs["beta"]
    want = estimate_advantages(name, **inputs)
    assert want.shape == (mask.shape[:1] if row.per == "response" else mask.shape)
    assert want.ne(0).any()
    halved = {"old_logp", "kl", "values", "lam", "beta", "turn_rewards", *OPTIONS} & inputs.keys()
    changed = {key: inputs[key] * 0.5 for key in halved}
    changed |= {key: 2 - inputs[key] for key in ("rewards", "parts")}    # right becomes wrong
    changed |= {"entropy": inputs["entropy"].square()}
    changed |= dict(part_weights=[2.0, 1.0], group_size=2, scale="none",
                    mask=mask & (torch.arange(8) != 1))
    assert changed.keys() == inputs.keys()
    for key, value in changed.items():
        same = torch.equal(estimate_advantages(name, **inputs | {key: value}), want)
        assert same == (key not in reads), key


@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items()
                                  if not {"kl", "turn_rewards"} & {*row.reads}])
def test_a_kl_that_a_row_does_not_read_is_subtracted_from_its_rewards(name):
    inputs, row = table_inputs(), ADVANTAGES[name]
    del inputs["turn_rewards"]
    kl, beta, mask = inputs["kl"], inputs["beta"], inputs["mask"]
    found = estimate_advantages(name, **inputs)
    del inputs["kl"], inputs["beta"]
    rows = [(reward, d[m].tolist()) for reward, d, m in zip(inputs["rewards"].tolist(), kl, mask)]
    if "token_rewards" in row.reads:                         # GAE takes rewards of every token
        given = torch.tensor(sum((penalized(reward, beta, d) for reward, d in rows), []))
        per_token = torch.zeros(mask.shape).masked_scatter(mask, given)
        want, _ = gae(per_token, inputs["values"], mask, lam=inputs["lam"])
    else:
        inputs["rewards"] = torch.tensor([reward - beta * sum(d) for reward, d in rows])
        want = estimate_advantages(name, **inputs)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert "parts" in row.reads or not torch.equal(found, estimate_advantages(
        name, **table_inputs() | {"beta": 0.0, "turn_rewards": None}))


# --------------------------------------------------------------------------- critic and penalties

def test_the_value_head_begins_at_0_and_computes_in_float32():
    head, hidden = ValueHead(16), torch.randn(4, 8, 16)
    assert (head(hidden) == 0).all() and head(hidden).shape == (4, 8)
    assert head(hidden.bfloat16()).dtype == torch.float32


def value_case():
    """values, old values and returns; outside the mask of the latter stand absurd numbers."""
    mask, values = ragged_mask(), draw(4, 8, seed=4)
    old = (values + 0.3 * draw(4, 8, seed=5)).masked_fill(~mask, math.nan)
    return values, old, draw(4, 8, seed=6).masked_fill(~mask, 1e30), mask


def test_value_loss_is_ppos():
    values, old, returns, mask = value_case()
    errors = []
    for i, m in enumerate(mask):
        for v, o, r in zip(values[i][m].tolist(), old[i][m].tolist(), returns[i][m].tolist()):
            errors.append(max((v - r) ** 2, (o + clip(v - o, -0.2, 0.2) - r) ** 2) / 2)
    loss = value_loss(values.requires_grad_(), old, returns, mask, clip=0.2)
    assert loss.item() == pytest.approx(mean(errors), rel=1e-6)
    slopes, = torch.autograd.grad(loss, values)
    assert (slopes[~mask] == 0).all() and 0 < (slopes[mask] == 0).sum() < mask.sum()


def test_has_signal_keeps_mixed_groups():
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 0, 0.1, 0.1, 0.1])
    signal = has_signal(rewards, 3)
    assert signal.tolist() == [False, True, False, False]
    assert (group_advantages(rewards, 3).view(-1, 3)[~signal] == 0).all()


def test_overlong_penalty_is_dapos_equation_13():
    lengths = torch.tensor([0, 12, 13, 16, 20, 21, 100])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0, 0, -0.125, -0.5, -1, -1, -1]


REWARDS, MASK, ZEROS = torch.rand(6), torch.ones(6, 3, dtype=torch.bool), torch.zeros(6, 3)
REFUSED = [
    (lambda: gdpo(torch.rand(6, 2), [1, 1, 1], 3), "shorter"),
    (lambda: group_advantages(torch.tensor([1.0, 1e20]), 2), "below"),
    (lambda: group_advantages(REWARDS, 2, scale="mean"), "scale 'mean' is unknown"),
    (lambda: group_advantages(REWARDS, 4), "group_size is 4"),
    (lambda: leave_one_out(REWARDS, 1), "group_size is 1"),
    (lambda: has_signal(REWARDS[:, None], 2), "rewards is"),
    (lambda: gae(REWARDS, ZEROS[:, :2], MASK), "values is"),
    (lambda: gae(REWARDS[:5], ZEROS, MASK), "rewards is"),
    (lambda: value_loss(ZEROS, ZEROS, ZEROS[:, :2], MASK), "returns is"),
    (lambda: overlong_penalty(torch.tensor([5]), 20, 30), "cache is 30"),
    (lambda: estimate_advantages("gae", REWARDS, 2), "reads values, mask")]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
