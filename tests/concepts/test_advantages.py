"""advantages.py against plain loops, and the numerical traps of group statistics. python -m pytest tests/concepts/test_advantages.py"""

import math
import runpy
import statistics

import pytest
import torch

from advantages import (ADVANTAGES, INPUTS, ValueHead, estimate_advantages, gae, gdpo, group_advantages, has_signal,
                        leave_one_out, leave_one_out_std, not_all_correct, overlong_penalty, reinforce_plus_plus, value_loss, whiten)


def random_rewards(n=24, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged_mask():
    """Rows of 5, 3, 0 and 6 loss tokens, the last with tool output in its middle."""
    mask = torch.arange(8) < torch.tensor([5, 3, 0, 8])[:, None]
    mask[3, 3:5] = False
    return mask


def std(values, unbiased=False):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - unbiased))


def test_the_papers_example_is_plus_minus_one():
    rewards, signs = torch.tensor([1.0, 0, 1, 0]), torch.tensor([1.0, -1, 1, -1])
    torch.testing.assert_close(group_advantages(rewards, 4), signs, rtol=0, atol=3e-6)
    torch.testing.assert_close(group_advantages(rewards, 4, unbiased=True), signs * 0.8660254, rtol=0, atol=3e-6)


@pytest.mark.parametrize("group_size", [2, 3, 4, 8])
def test_group_advantages_equal_a_loop(group_size):
    rewards = random_rewards()
    for scale in ("group", "batch", "none", "mean"):
        rewards = rewards.abs() if scale == "mean" else rewards                # MaxRL's are at least 0
        values = rewards.tolist()
        for unbiased in (False, True):
            expected = []
            for start in range(0, len(values), group_size):
                group = values[start:start + group_size]
                divisor = {"group": std(group, unbiased) + 1e-6, "batch": std(values, unbiased) + 1e-6, "none": 1.0,
                           "mean": sum(group) / group_size if sum(group) > 0 else math.inf}[scale]
                expected += [(r - sum(group) / group_size) / divisor for r in group]
            got = group_advantages(rewards, group_size, scale=scale, unbiased=unbiased)
            assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("group", [[1, -1, -1, 1.004], [0.5, -0.5, 0, 0], [-1, -1, -1, -1], [1, 0, -1e-4, 0]])
def test_maxrl_refuses_rewards_below_zero(group):
    """A mean near 0 would give advantages of a thousand, one below 0 would change their signs."""
    with pytest.raises(ValueError, match="scale_rewards mean .* at least 0; add a constant"):
        group_advantages(torch.tensor([*group, 1.0, 0, 0, 1]), 4, scale="mean")


def test_maxrl_is_bounded_by_the_group_and_a_group_of_zeros_gives_zero():
    got = group_advantages(torch.tensor([1e-30, 0, 0, 0, 0, 0, 0, 0]), 4, scale="mean")
    assert got.tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])


def test_maxrl_is_the_gradient_of_the_log_pass_rate():
    """log p = -Σ_k (1 - p)^k / k (2602.02710): enumerated over all groups of G answers, 0/1 rewards, (r - r̄)/r̄ has the
    gradient of this series up to k = G - 1, where (r - r̄) has that of p, its first term, alone."""
    G, p, expected = 6, 0.3, {"mean": 0.0, "none": 0.0}
    for right in range(G + 1):
        chance = math.comb(G, right) * p ** right * (1 - p) ** (G - right)
        rewards = torch.tensor([1.0] * right + [0.0] * (G - right), dtype=torch.float64)
        scores = torch.where(rewards > 0, 1 - p, -p)                           # d log π / d logit of being right
        for scale in expected:
            expected[scale] += chance * (group_advantages(rewards, G, scale=scale) * scores).mean().item()
    assert expected["mean"] == pytest.approx(sum(p * (1 - p) ** k for k in range(1, G)))
    assert expected["none"] == pytest.approx(p * (1 - p) * (G - 1) / G)


@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 0], [0.3, 0.7, 0.7, 0.1, 0.9, 0.2], [0.1] * 5, [-2.5, 0.1, 0.1]])
def test_leave_one_out_std_equals_a_loop(rewards):
    """NeMo-RL: mean and unbiased std of the others; not divided where they are equal."""
    expected = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1:]
        off = reward - math.fsum(others) / len(others)
        spread = statistics.stdev(others)
        expected.append(off / (spread + 1e-6) if spread > 1e-9 else off)
    got = leave_one_out_std(torch.tensor(rewards, dtype=torch.float64), len(rewards))
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    if rewards[:2] == [1.0, 0]:
        assert got.tolist() == pytest.approx([1, -3 ** -0.5, -3 ** -0.5, -3 ** -0.5], abs=1e-5)
    assert len(set(rewards)) > 1 or got.tolist() == [0.0] * len(rewards), "equal rewards: exactly 0"
    alone = leave_one_out_std(torch.tensor([1.0, 0.0]), 2)
    assert alone.tolist() == [1.0, -1.0], "one other response has no std"


def table_inputs():
    """Something of every entry of advantages.INPUTS: two groups of three, the rows of different lengths."""
    torch.manual_seed(5)
    mask = ragged_mask()[[0, 1, 2, 3, 0, 1]]
    B, T = mask.shape
    parts = torch.rand(B, 2)
    return dict(rewards=parts.sum(-1), parts=parts, part_weights=[1.0, 2.0], group_size=3, scale="group", mask=mask,
                old_logp=-torch.rand(B, T), kl=torch.rand(B, T), beta=0.1, values=torch.rand(B, T),
                teacher_logp=-torch.rand(B, T), blamed=torch.rand(B, T) > 0.5)


def test_the_inputs_of_this_test_are_those_of_the_table():
    assert table_inputs().keys() == INPUTS.keys()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_row_returns_what_it_says_and_reads_what_it_says(name):
    """An input that a row does not read cannot change it; one that it reads does."""
    row, inputs = ADVANTAGES[name], table_inputs()
    want = estimate_advantages(name, **inputs)
    mask = inputs["mask"]
    assert want.shape == (mask.shape[:1] if row.per == "response" else mask.shape) and want.ne(0).any()
    changed = {**{key: value * 0.5 for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()},
               "part_weights": [2.0, 1.0], "group_size": 2, "scale": "none", "beta": 0.2, "blamed": ~inputs["blamed"],
               "mask": mask & (torch.arange(mask.shape[1]) != 1)}
    changed["rewards"] = inputs["rewards"].square()
    changed["parts"] = inputs["parts"].square()
    for key, value in changed.items():
        same = torch.equal(estimate_advantages(name, **inputs | {key: value}), want)
        assert same == (key not in row.reads), key


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "gae"])
def test_advantage_clip_limits_every_advantage(name):
    inputs = table_inputs()
    want = estimate_advantages(name, **inputs).flatten().tolist()
    limit = statistics.median(abs(x) for x in want if x)
    got = estimate_advantages(name, clip=limit, **inputs).flatten().tolist()
    assert got == pytest.approx([math.copysign(min(abs(x), limit), x) for x in want]) and got != want


def test_a_wrong_call_of_the_table_is_named():
    rewards = torch.rand(4)
    with pytest.raises(ValueError, match="advantage 'groups' is unknown; known: group, leave_one_out, "):
        estimate_advantages("groups", rewards, 2)
    with pytest.raises(ValueError, match="advantage gae reads values, mask, which is missing"):
        estimate_advantages("gae", rewards, 2)


@pytest.mark.parametrize("unbiased", [False, True])
def test_gdpo_equals_a_loop(unbiased):
    """As TRL's multi_objective_aggregation="normalize_then_sum" (its unbiased std) and the paper."""
    parts, weights, G = random_rewards(48).view(24, 2) * torch.tensor([1.0, 50.0]), [1.0, 0.5], 4
    total = []
    for i in range(24):
        start = i // G * G
        total.append(0.0)
        for k, weight in enumerate(weights):
            group = parts[start:start + G, k].tolist()
            total[i] += weight * (parts[i, k].item() - sum(group) / G) / (std(group, unbiased) + 1e-6)
    mean = sum(total) / 24
    expected = [(x - mean) / (std(total, unbiased) + 1e-6) for x in total]
    assert gdpo(parts, weights, G, unbiased=unbiased).tolist() == pytest.approx(expected, rel=1e-9)


def test_gdpo_ignores_the_size_of_a_part_and_a_dead_group_is_exactly_zero():
    parts = random_rewards(24).view(12, 2)
    parts[4:8] = parts[4]                                                      # equal answers, in every part
    small, large = gdpo(parts, [1, 1], 4, eps=0.0), gdpo(parts * torch.tensor([1.0, 1e3]), [1, 1], 4, eps=0.0)
    torch.testing.assert_close(small, large)
    assert (small[4:8] == 0).all() and (small[:4] != 0).all()
    assert (gdpo(parts[4:8], [1, 1], 4) == 0).all()
    one = gdpo(parts, [1.0, 0.0], 4)
    torch.testing.assert_close(one / one[0], group_advantages(parts[:, 0], 4) / group_advantages(parts[:, 0], 4)[0])


def test_leave_one_out_equals_a_loop():
    rewards = random_rewards()
    values, expected = rewards.tolist(), []
    for start in range(0, 24, 4):
        group = values[start:start + 4]
        expected += [r - (sum(group) - r) / 3 for r in group]
    assert leave_one_out(rewards, 4).tolist() == pytest.approx(expected)


def test_leave_one_out_is_an_unbiased_baseline():
    """Two arms, the policy's gradient enumerated over all groups of 2 answers: with leave-one-out it is the true one, exactly."""
    p, reward = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64)
    true = p[0] * p[1] * (reward[0] - reward[1])                               # d E[r] / d logit of arm 0
    estimate = 0.0
    for a in (0, 1):
        for b in (0, 1):
            A = leave_one_out(reward[[a, b]], 2)
            estimate += p[a] * p[b] * sum(A[i] * (float(arm == 0) - p[0]) for i, arm in enumerate((a, b))) / 2
    assert estimate.item() == pytest.approx(true.item(), abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, -5.3, 1e6, 1e6 + 0.1, 123456.789, 1e-30])
@pytest.mark.parametrize("group_size", [2, 3, 7, 8])
def test_equal_rewards_are_exactly_zero(value, group_size):
    rewards = torch.cat([torch.full((group_size,), value), torch.arange(group_size) / 3, torch.full((group_size,), value)])
    for scale in ("group", "batch", "none", *["mean"] * (value >= 0)):
        for eps in (1e-6, 0.0):
            got = group_advantages(rewards, group_size, scale=scale, eps=eps).view(3, -1)
            assert (got[[0, 2]] == 0).all() and got.isfinite().all() and (got[1] != 0).any()
    assert (leave_one_out(rewards, group_size).view(3, -1)[[0, 2]] == 0).all()
    assert (whiten(rewards[:group_size, None], torch.ones(group_size, 1, dtype=torch.bool)) == 0).all()


def test_rewards_near_a_million_keep_their_digits():
    rewards = 1e6 + torch.tensor([1.0, 0, 1, 0])                               # float32: E[x²] - E[x]² would be noise
    torch.testing.assert_close(group_advantages(rewards, 4), torch.tensor([1.0, -1, 1, -1]), rtol=0, atol=3e-6)


def test_a_group_depends_only_on_its_own_rows():
    rewards = random_rewards()
    order = torch.tensor([5, 0, 3, 1, 4, 2])                                   # groups shuffled
    inner = torch.tensor([2, 0, 3, 1])                                         # and the rows inside each
    shuffled = rewards.view(6, 4)[order][:, inner].flatten()
    expected = group_advantages(rewards, 4).view(6, 4)[order][:, inner].flatten()
    torch.testing.assert_close(group_advantages(shuffled, 4), expected)


def test_reinforce_plus_plus_equals_a_loop():
    mask, rewards, gamma, beta = ragged_mask(), random_rewards(4), 0.9, 0.3
    kl = torch.rand(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).masked_fill(~mask, float("nan"))
    returns = {}
    for i in range(4):
        tokens, running = [t for t in range(8) if mask[i, t]], 0.0
        for t in reversed(tokens):
            running = (rewards[i].item() if t == tokens[-1] else 0.0) - beta * kl[i, t].item() + gamma * running
            returns[i, t] = running
    mean, spread = sum(returns.values()) / len(returns), std(list(returns.values()))
    got = reinforce_plus_plus(rewards, mask, kl=kl, beta=beta, gamma=gamma)
    for i in range(4):
        for t in range(8):
            assert got[i, t].item() == pytest.approx((returns[i, t] - mean) / spread if mask[i, t] else 0.0, rel=1e-6)


def test_reinforce_plus_plus_has_mean_0_and_variance_1_over_tokens_and_its_baseline_centres_groups():
    mask, rewards = ragged_mask(), torch.tensor([2.0, 1.0, 5.0, 4.0], dtype=torch.float64)
    for baseline in (None, 2):
        got = reinforce_plus_plus(rewards, mask, baseline)
        assert got[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert got[mask].square().mean().item() == pytest.approx(1.0)
        assert (got[~mask] == 0).all()
    centered = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64)        # groups (2, 1) and (5, 4)
    torch.testing.assert_close(got, whiten(centered[:, None].expand(4, 8).contiguous(), mask))


def test_gae_equals_the_sum_over_future_errors():
    mask, rewards, gamma, lam = ragged_mask(), random_rewards(4), 0.97, 0.9
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).masked_fill(~mask, float("inf"))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for i in range(4):
        tokens = [t for t in range(8) if mask[i, t]]
        V = [values[i, t].item() for t in tokens] + [0.0]
        error = [(rewards[i].item() if k == len(tokens) - 1 else 0.0) + gamma * V[k + 1] - V[k] for k in range(len(tokens))]
        for k, t in enumerate(tokens):
            expected = sum((gamma * lam) ** (j - k) * error[j] for j in range(k, len(tokens)))
            assert advantages[i, t].item() == pytest.approx(expected)
            assert returns[i, t].item() == pytest.approx(expected + V[k])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_gae_at_lambda_1_is_return_minus_value_and_needs_no_critic():
    mask, rewards = ragged_mask(), random_rewards(4)
    advantages, returns = gae(rewards, torch.zeros(4, 8, dtype=torch.float64), mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, rewards[:, None] * mask)
    torch.testing.assert_close(returns, advantages)
    per_token = torch.zeros(4, 8, dtype=torch.float64)
    for i, last in ((0, 4), (1, 2), (3, 7)):
        per_token[i, last] = rewards[i]
    torch.testing.assert_close(gae(per_token, torch.zeros(4, 8, dtype=torch.float64), mask, lam=1.0)[0], advantages)


def test_the_value_head_is_linear_and_learns_the_returns():
    torch.manual_seed(0)
    mask, hidden = ragged_mask(), torch.randn(4, 8, 16)
    head, returns = ValueHead(16), torch.randn(4, 8).masked_fill(~ragged_mask(), float("nan"))
    assert (head(hidden) == 0).all() and head(hidden).shape == (4, 8) and head(hidden.bfloat16()).dtype == torch.float32
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(300):
        loss = value_loss(head(hidden), head(hidden), returns, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_value_loss_and_its_gradient_equal_a_loop():
    generator, mask, clip = torch.Generator().manual_seed(4), ragged_mask(), 0.2
    values, old, returns = (torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    old[mask] = (values + 0.3 * torch.randn(4, 8, generator=generator, dtype=torch.float64))[mask]
    old[~mask], returns[~mask] = float("nan"), 1e30
    values.requires_grad_()
    total, gradient = 0.0, torch.zeros(4, 8, dtype=torch.float64)
    for i in range(4):
        for t in range(8):
            if mask[i, t]:
                v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
                clipped = max(o - clip, min(o + clip, v))
                total += max((v - r) ** 2, (clipped - r) ** 2) / 2 / mask.sum().item()
                if clipped == v or (v - r) ** 2 > (clipped - r) ** 2:
                    gradient[i, t] = (v - r) / mask.sum().item()
    loss = value_loss(values, old, returns, mask, clip=clip)
    got = torch.autograd.grad(loss, values)[0]
    assert loss.item() == pytest.approx(total, rel=1e-6)
    torch.testing.assert_close(got, gradient, rtol=1e-6, atol=0)
    assert (gradient == 0).logical_and(mask).any() and (gradient != 0).any()   # clipped tokens and others


def test_value_loss_does_not_depend_on_micro_batches():
    mask = ragged_mask()
    values, old, returns = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(5))
    whole, weights = value_loss(values, old, returns, mask), mask / mask.sum()
    parts = sum(value_loss(values[i:i + 1], old[i:i + 1], returns[i:i + 1], mask[i:i + 1], weights[i:i + 1]) for i in range(4))
    torch.testing.assert_close(parts, whole)


def test_has_signal_keeps_mixed_groups_and_srpo_also_all_wrong_ones():
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 0, 0.1, 0.1, 0.1])
    assert has_signal(rewards, 3).tolist() == [False, True, False, False]
    assert not_all_correct(rewards, 3).tolist() == [False, True, True, True]
    dead = group_advantages(rewards, 3).view(-1, 3)[~has_signal(rewards, 3)]
    assert (dead == 0).all()


def test_overlong_penalty_is_dapos_equation_13():
    lengths = torch.tensor([0, 12, 13, 16, 20, 21, 100])
    assert overlong_penalty(lengths, 20, 8).tolist() == [0, 0, -0.125, -0.5, -1, -1, -1]


def test_nothing_carries_gradient():
    rewards, values = torch.rand(4, requires_grad=True), torch.rand(4, 8, requires_grad=True)
    advantages, returns = gae(rewards.detach(), values, ragged_mask())
    assert not advantages.requires_grad and not returns.requires_grad


def test_the_demo_shows_the_papers_example(capsys):
    runpy.run_module("advantages", run_name="__main__")
    assert "+1.000  -1.000  +1.000  -1.000  +0.000  +0.000  +0.000  +0.000" in capsys.readouterr().out


def test_bad_input_is_named():
    rewards, mask = torch.rand(6), torch.ones(6, 3, dtype=torch.bool)
    for function in (group_advantages, leave_one_out, has_signal):
        with pytest.raises(ValueError, match=r"group_size is 4, rewards is \[6\]"):
            function(rewards, 4)
        with pytest.raises(ValueError, match="group_size is 1"):
            function(rewards, 1)
        with pytest.raises(ValueError, match=r"rewards is \[6, 1\]"):
            function(rewards[:, None], 2)
    with pytest.raises(ValueError, match=r"parts is \[6, 2\]: it must be \[B, 3\]"):
        gdpo(torch.rand(6, 2), [1, 1, 1], 3)
    with pytest.raises(ValueError, match="group_size is 1"):
        reinforce_plus_plus(rewards, mask, baseline_group_size=1)
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), 2)
    with pytest.raises(ValueError, match="scale 'groups' is unknown; known: group, batch, none, mean"):
        group_advantages(rewards, 2, scale="groups")
    with pytest.raises(ValueError, match=r"mask is torch.float32 \[6, 3\]"):
        reinforce_plus_plus(rewards, mask.float())
    with pytest.raises(ValueError, match=r"values is \[6, 2\] but mask is \[6, 3\]"):
        gae(rewards, torch.zeros(6, 2), mask)
    with pytest.raises(ValueError, match=r"rewards is \[5\] but mask is \[6, 3\]"):
        gae(rewards[:5], torch.zeros(6, 3), mask)
    with pytest.raises(ValueError, match=r"returns is \[6, 2\]"):
        value_loss(torch.zeros(6, 3), torch.zeros(6, 3), torch.zeros(6, 2), mask)
    with pytest.raises(ValueError, match="cache is 30, max_length is 20"):
        overlong_penalty(torch.tensor([5]), 20, 30)
