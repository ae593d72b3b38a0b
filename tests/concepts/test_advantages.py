"""advantages.py against plain loops, and the numerical traps of group statistics.
python -m pytest tests/concepts/test_advantages.py
"""

import math
import runpy
import statistics

import pytest
import torch

from advantages import (ADVANTAGES, INPUTS, ValueHead, estimate_advantages, gae, gdpo,
                        group_advantages, has_signal, leave_one_out, leave_one_out_std,
                        not_all_correct, overlong_penalty, reinforce_plus_plus, value_loss, whiten)
from reference import Response, clip, gradient, mean


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


def mean_loop(group, batch, unbiased):                                  # MaxRL 2602.02710
    return [(r - mean(group)) / mean(group) for r in group]


def leave_one_out_loop(group, batch, unbiased):                         # RLOO 2402.14740
    return [r - mean(others) for r, others in with_others(group)]


def leave_one_out_std_loop(group, batch, unbiased):                     # NeMo-RL
    return [(r - mean(others)) / (statistics.stdev(others) + 1e-6)
            for r, others in with_others(group)]


def with_others(group):
    return [(r, group[:i] + group[i + 1:]) for i, r in enumerate(group)]


def scaled(scale):
    return lambda rewards, G, unbiased: group_advantages(rewards, G, scale, unbiased)


LOOPS = {
    "group": (scaled("group"), group_loop),
    "batch": (scaled("batch"), batch_loop),
    "none": (scaled("none"), none_loop),
    "mean": (scaled("mean"), mean_loop),
    "leave_one_out": (lambda rewards, G, _: leave_one_out(rewards, G), leave_one_out_loop),
    "leave_one_out_std": (lambda rewards, G, _: leave_one_out_std(rewards, G),
                          leave_one_out_std_loop),
}


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("G", [2, 3, 4, 8])
@pytest.mark.parametrize("name", LOOPS)
def test_advantages_of_groups_equal_a_loop(name, G, unbiased):
    function, loop = LOOPS[name]
    rewards = draw(24).abs()
    values = rewards.tolist()
    if name == "leave_one_out_std" and G == 2:                          # one other has no std
        loop = leave_one_out_loop
    expected = [x for i in range(0, 24, G) for x in loop(values[i:i + G], values, unbiased)]
    assert function(rewards, G, unbiased).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    order = torch.randperm(24 // G, generator=torch.Generator().manual_seed(1))
    inner = torch.arange(G).roll(1)                                     # groups, rows of a group
    shuffled = rewards.view(-1, G)[order][:, inner].flatten()
    got = function(shuffled, G, unbiased).view(-1, G)
    assert got[:, inner.argsort()][order.argsort()].flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rewards, expected", [
    ([1.0, 0, 0, 0], [1, -3 ** -0.5, -3 ** -0.5, -3 ** -0.5]),          # not divided where the
    ([0.1] * 5, [0.0] * 5), ([1.0, 0.0], [1.0, -1.0]),                  # others are equal
    ([-2.5, 0.1, 0.1], [-2.6, 1.3 / (2.6 / 2 ** 0.5), 1.3 / (2.6 / 2 ** 0.5)])])
def test_leave_one_out_std_where_rewards_are_equal(rewards, expected):
    got = leave_one_out_std(torch.tensor(rewards, dtype=torch.float64), len(rewards)).tolist()
    assert got == pytest.approx(expected, abs=1e-5)
    assert any(expected) or got == expected, "exactly 0"


def test_the_papers_example_is_plus_minus_one():
    rewards, signs = torch.tensor([1.0, 0, 1, 0]), torch.tensor([1.0, -1, 1, -1])
    for shift in (0.0, 1e6):            # in float32 E[x²] - E[x]² would be noise at a million
        torch.testing.assert_close(group_advantages(rewards + shift, 4), signs, rtol=0, atol=3e-6)
    unbiased = group_advantages(rewards, 4, unbiased=True)
    torch.testing.assert_close(unbiased, signs * 0.8660254, rtol=0, atol=3e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, -5.3, 1e6, 1e6 + 0.1, 123456.789, 1e-30])
@pytest.mark.parametrize("G", [2, 3, 7, 8])
def test_equal_rewards_are_exactly_zero(value, G):
    same = torch.full((G,), value)
    rewards = torch.cat([same, torch.arange(G) / 3, same])
    for scale in ("group", "batch", "none", *["mean"] * (value >= 0)):
        for eps in (1e-6, 0.0):
            got = group_advantages(rewards, G, scale=scale, eps=eps).view(3, -1)
            assert (got[[0, 2]] == 0).all() and got.isfinite().all() and (got[1] != 0).any()
    assert (leave_one_out(rewards, G).view(3, -1)[[0, 2]] == 0).all()
    assert (whiten(same[:, None], torch.ones(G, 1, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("group", [[1, -1, -1, 1.004], [0.5, -0.5, 0, 0], [-1] * 4,
                                   [1, 0, -1e-4, 0]])
def test_maxrl_refuses_rewards_below_zero(group):
    """A mean near 0 would give advantages of a thousand, one below 0 would change their signs."""
    with pytest.raises(ValueError, match="scale_rewards mean .* at least 0; add a constant"):
        group_advantages(torch.tensor([*group, 1.0, 0, 0, 1]), 4, scale="mean")


def test_maxrl_is_bounded_by_the_group_and_a_group_of_zeros_gives_zero():
    got = group_advantages(torch.tensor([1e-30, 0, 0, 0, 0, 0, 0, 0]), 4, scale="mean")
    assert got.tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])


@pytest.mark.parametrize("scale, true", [
    ("mean", lambda p: sum(p * (1 - p) ** k for k in range(1, 6))),
    ("none", lambda p: p * (1 - p) * 5 / 6)])
def test_maxrl_is_the_gradient_of_the_log_pass_rate(scale, true):
    """log p = -Σ_k (1 - p)^k / k (2602.02710): enumerated over all groups of G = 6 responses with
    0/1 rewards, (r - mean)/mean has the gradient of this series up to k = G - 1, where r - mean has
    that of p, its first term, alone."""
    p, expected = 0.3, 0.0
    for right in range(7):
        chance = math.comb(6, right) * p ** right * (1 - p) ** (6 - right)
        rewards = (torch.arange(6) < right).double()
        scores = torch.where(rewards > 0, 1 - p, -p)                    # d log π / d logit
        expected += chance * (group_advantages(rewards, 6, scale=scale) * scores).mean().item()
    assert expected == pytest.approx(true(p))


def test_leave_one_out_is_an_unbiased_baseline():
    """Two arms, the policy's gradient enumerated over all groups of 2 responses: the true one."""
    p, reward = torch.tensor([0.3, 0.7]).double(), torch.tensor([1.0, 0.25]).double()
    true = p[0] * p[1] * (reward[0] - reward[1])                        # d E[r] / d logit of arm 0
    estimate = 0.0
    for pair in ((0, 0), (0, 1), (1, 0), (1, 1)):
        A = leave_one_out(reward[list(pair)], 2)
        slope = sum(a * (float(arm == 0) - p[0]) for a, arm in zip(A, pair)) / 2
        estimate += p[pair[0]] * p[pair[1]] * slope
    assert estimate.item() == pytest.approx(true.item(), abs=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_gdpo_equals_a_loop(unbiased):
    """As TRL's multi_objective_aggregation="normalize_then_sum" (its unbiased std) and the paper.
    """
    parts, weights, G = draw(24, 2) * torch.tensor([1.0, 50.0]), [1.0, 0.5], 4
    columns = [[x for i in range(0, 24, G) for x in group_loop(part[i:i + G], None, unbiased)]
               for part in parts.T.tolist()]
    total = [sum(weight * x for weight, x in zip(weights, row)) for row in zip(*columns)]
    expected = [(x - mean(total)) / (std(total, unbiased) + 1e-6) for x in total]
    assert gdpo(parts, weights, G, unbiased=unbiased).tolist() == pytest.approx(expected, rel=1e-9)


def test_gdpo_ignores_the_size_of_a_part_and_a_dead_group_is_exactly_zero():
    parts = draw(12, 2)
    parts[4:8] = parts[4]                                               # equal in every part
    small = gdpo(parts, [1, 1], 4, eps=0.0)
    large = gdpo(parts * torch.tensor([1.0, 1e3]), [1, 1], 4, eps=0.0)
    torch.testing.assert_close(small, large)
    assert (small[4:8] == 0).all() and (small[:4] != 0).all()
    assert (gdpo(parts[4:8], [1, 1], 4) == 0).all()
    one, group = gdpo(parts, [1.0, 0.0], 4), group_advantages(parts[:, 0], 4)
    torch.testing.assert_close(one / one[0], group / group[0])


# ---------------------------------------------------------------------------- advantages of tokens

@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("size", [None, 2])
def test_reinforce_plus_plus_equals_a_loop(size, beta):
    mask, rewards, gamma = ragged_mask(), draw(4), 0.9
    kl = draw(4, 8, seed=1).masked_fill(~mask, math.nan)
    values = rewards.tolist()
    if size:                                                            # minus the group's mean
        values = [r - mean(values[i // 2 * 2:i // 2 * 2 + 2]) for i, r in enumerate(values)]
    returns = {}
    for i in range(4):
        running = 0.0
        tokens = [t for t in range(8) if mask[i, t]]
        for t in reversed(tokens):
            reward = values[i] if t == tokens[-1] else 0.0
            running = reward - beta * kl[i, t].item() + gamma * running
            returns[i, t] = running
    every = [*returns.values()]
    got = reinforce_plus_plus(rewards, mask, size, kl if beta else None, beta, gamma)
    for i in range(4):
        for t in range(8):
            white = (returns[i, t] - mean(every)) / std(every) if mask[i, t] else 0.0
            assert got[i, t].item() == pytest.approx(white, rel=1e-6)
    assert got[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert got[mask].square().mean().item() == pytest.approx(1.0)
    undiscounted = torch.tensor(values).double()[:, None].expand(4, 8).contiguous()
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask, size),
                               whiten(undiscounted, mask))


def test_gae_equals_the_sum_over_future_errors():
    mask, rewards, gamma, lam = ragged_mask(), draw(4), 0.97, 0.9       # 1506.02438 eq. 16
    values = draw(4, 8, seed=2).masked_fill(~mask, math.inf)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for i in range(4):
        V = [*values[i][mask[i]].tolist(), 0.0]
        n = len(V) - 1
        error = [rewards[i].item() * (k == n - 1) + gamma * V[k + 1] - V[k] for k in range(n)]
        expected = [sum((gamma * lam) ** (j - k) * error[j] for j in range(k, n))
                    for k in range(n)]
        assert advantages[i][mask[i]].tolist() == pytest.approx(expected)
        assert returns[i][mask[i]].tolist() == pytest.approx([a + v for a, v in zip(expected, V)])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_gae_at_lambda_1_is_return_minus_value_and_needs_no_critic():
    mask, rewards, no_critic = ragged_mask(), draw(4), torch.zeros(4, 8).double()
    advantages, returns = gae(rewards, no_critic, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, rewards[:, None] * mask)
    torch.testing.assert_close(returns, advantages)
    per_token = torch.zeros(4, 8).double()
    per_token[[0, 1, 3], [4, 2, 7]] = rewards[[0, 1, 3]]
    torch.testing.assert_close(gae(per_token, no_critic, mask, lam=1.0)[0], advantages)


def test_nothing_carries_gradient():
    rewards, values = torch.rand(4), torch.rand(4, 8, requires_grad=True)
    assert not any(x.requires_grad for x in gae(rewards, values, ragged_mask()))


# --------------------------------------------------------------------------------------- the table

def table_inputs():
    """Something of every entry of INPUTS: two groups of three, the rows of different lengths."""
    torch.manual_seed(5)
    mask = ragged_mask()[[0, 1, 2, 3, 0, 1]]
    B, T = mask.shape
    parts = torch.rand(B, 2)
    return dict(rewards=parts.sum(-1), parts=parts, part_weights=[1.0, 2.0], group_size=3,
                scale="group", mask=mask, old_logp=-torch.rand(B, T), kl=torch.rand(B, T),
                beta=0.1, values=torch.rand(B, T), lam=0.9, teacher_logp=-torch.rand(B, T),
                blamed=torch.rand(B, T) > 0.5)


def test_the_inputs_of_this_test_are_those_of_the_table():
    assert table_inputs().keys() | {"token_rewards"} == INPUTS.keys()     # made of rewards and mask


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_row_returns_what_it_says_and_reads_what_it_says(name):
    """An input that a row does not read cannot change it; one that it reads does."""
    row, inputs = ADVANTAGES[name], table_inputs()
    mask = inputs["mask"]
    reads = {*row.reads} | ({"rewards", "mask"} if "token_rewards" in row.reads else set())
    if "kl" not in reads:                                    # see the test below
        del inputs["kl"], inputs["beta"]
    want = estimate_advantages(name, **inputs)
    assert want.shape == (mask.shape[:1] if row.per == "response" else mask.shape)
    assert want.ne(0).any()
    halved = {"old_logp", "kl", "values", "teacher_logp", "lam", "beta"} & inputs.keys()
    changed = {key: inputs[key] * 0.5 for key in halved}
    changed |= {key: inputs[key].square() for key in ("rewards", "parts")}
    changed |= dict(part_weights=[2.0, 1.0], group_size=2, scale="none",
                    blamed=~inputs["blamed"], mask=mask & (torch.arange(8) != 1))
    assert changed.keys() == inputs.keys()
    for key, value in changed.items():
        same = torch.equal(estimate_advantages(name, **inputs | {key: value}), want)
        assert same == (key not in reads), key


@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items()
                                  if "kl" not in row.reads and row.reads[0] != "teacher_logp"])
def test_a_kl_that_a_row_does_not_read_is_subtracted_from_its_rewards(name):
    inputs, row = table_inputs(), ADVANTAGES[name]
    kl, beta, mask = inputs["kl"], inputs["beta"], inputs["mask"]
    found = estimate_advantages(name, **inputs)
    del inputs["kl"], inputs["beta"]
    sums = [beta * sum(kl[i, t].item() for t in mask[i].nonzero().flatten()) for i in range(6)]
    if "token_rewards" in row.reads:                         # GAE takes rewards of every token
        per_token = [[-beta * kl[i, t].item() * mask[i, t].item() for t in range(8)]
                     for i in range(6)]
        for i, reward in enumerate(inputs["rewards"].tolist()):
            for t in mask[i].nonzero().flatten().tolist()[-1:]:
                per_token[i][t] += reward
        want, _ = gae(torch.tensor(per_token), inputs["values"], mask, lam=inputs["lam"])
    else:
        inputs["rewards"] = inputs["rewards"] - torch.tensor(sums)
        want = estimate_advantages(name, **inputs)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert "parts" in row.reads or not torch.equal(found, estimate_advantages(
        name, **table_inputs() | {"beta": 0.0}))


# --------------------------------------------------------------------------- critic and penalties

def test_the_value_head_is_linear_and_learns_the_returns():
    torch.manual_seed(0)
    mask, hidden, head = ragged_mask(), torch.randn(4, 8, 16), ValueHead(16)
    returns = torch.randn(4, 8).masked_fill(~mask, math.nan)
    assert (head(hidden) == 0).all() and head(hidden).shape == (4, 8)
    assert head(hidden.bfloat16()).dtype == torch.float32
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(300):
        loss = value_loss(head(hidden), head(hidden), returns, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def value_case():
    """values, old values and returns; outside the mask of the latter stand absurd numbers."""
    mask, values = ragged_mask(), draw(4, 8, seed=4)
    old = (values + 0.3 * draw(4, 8, seed=5)).masked_fill(~mask, math.nan)
    return values, old, draw(4, 8, seed=6).masked_fill(~mask, 1e30), mask


def test_value_loss_and_its_gradient_are_ppos():
    values, old, returns, mask = value_case()
    loss = value_loss(values.requires_grad_(), old, returns, mask, clip=0.2)
    got, = torch.autograd.grad(loss, values)
    total, clipped = 0.0, 0
    for i, m in enumerate(mask):
        V_old, R = old[i][m].tolist(), returns[i][m].tolist()

        def error(y):                                                   # of the row: y.logp is V
            return sum(max((v - r) ** 2, (o + clip(v - o, -0.2, 0.2) - r) ** 2) / 2
                       for v, o, r in zip(y.logp, V_old, R)) / mask.sum().item()
        y = Response(values[i][m].tolist(), V_old, [])
        slopes = gradient(error, y)
        total += error(y)
        clipped += slopes.count(0.0)
        assert got[i][m].tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert loss.item() == pytest.approx(total, rel=1e-6) and (got[~mask] == 0).all()
    assert 0 < clipped < mask.sum()


def test_value_loss_does_not_depend_on_micro_batches():
    case = value_case()
    weights = case[3] / case[3].sum()
    parts = [value_loss(*(x[i:i + 1] for x in case), weights[i:i + 1]) for i in range(4)]
    torch.testing.assert_close(sum(parts), value_loss(*case))


def test_has_signal_keeps_mixed_groups_and_srpo_also_all_wrong_ones():
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 0, 0.1, 0.1, 0.1])
    signal = has_signal(rewards, 3)
    assert signal.tolist() == [False, True, False, False]
    assert not_all_correct(rewards, 3).tolist() == [False, True, True, True]
    assert (group_advantages(rewards, 3).view(-1, 3)[~signal] == 0).all()


def test_overlong_penalty_is_dapos_equation_13():
    lengths = torch.tensor([0, 12, 13, 16, 20, 21, 100])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0, 0, -0.125, -0.5, -1, -1, -1]


def test_the_demo_shows_the_papers_example(capsys):
    runpy.run_module("advantages", run_name="__main__")
    shown = "+1.000  -1.000  +1.000  -1.000  +0.000  +0.000  +0.000  +0.000"
    assert shown in capsys.readouterr().out


REWARDS, MASK, ZEROS = torch.rand(6), torch.ones(6, 3, dtype=torch.bool), torch.zeros(6, 3)
REFUSED = [
    (lambda: gdpo(torch.rand(6, 2), [1, 1, 1], 3), r"parts is \[6, 2\]: it must be \[B, 3\]"),
    (lambda: reinforce_plus_plus(REWARDS, MASK, 1), "group_size is 1"),
    (lambda: group_advantages(torch.tensor([1.0, math.nan]), 2), "finite"),
    (lambda: group_advantages(REWARDS, 2, scale="groups"),
     "scale 'groups' is unknown; known: group, batch, none, mean"),
    (lambda: reinforce_plus_plus(REWARDS, MASK.float()), r"mask is torch.float32 \[6, 3\]"),
    (lambda: gae(REWARDS, ZEROS[:, :2], MASK), r"values is \[6, 2\] but mask is \[6, 3\]"),
    (lambda: gae(REWARDS[:5], ZEROS, MASK), r"rewards is \[5\] but mask is \[6, 3\]"),
    (lambda: value_loss(ZEROS, ZEROS, ZEROS[:, :2], MASK), r"returns is \[6, 2\]"),
    (lambda: overlong_penalty(torch.tensor([5]), 20, 30), "cache is 30, max_length is 20"),
    (lambda: estimate_advantages("groups", REWARDS, 2),
     "advantage 'groups' is unknown; known: group, leave_one_out, "),
    (lambda: estimate_advantages("gae", REWARDS, 2),
     "advantage gae reads values, mask, which is missing")]
REFUSED += [(lambda f=f, G=G, r=r: f(r, G), message)
            for f in (group_advantages, leave_one_out, has_signal)
            for G, r, message in ((4, REWARDS, r"group_size is 4, rewards is \[6\]"),
                                  (1, REWARDS, "group_size is 1"),
                                  (2, REWARDS[:, None], r"rewards is \[6, 1\]"))]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
