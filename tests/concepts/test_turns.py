"""Turns of a conversation: their numbers, their returns and advantages, and which estimators of
credit per turn point the wrong way. python -m pytest tests/concepts/test_turns.py
"""

import itertools
import math

import pytest
import torch

from advantages import (estimate_advantages, gae, group_advantages,
                        groups_with_signal, has_signal, reward_turns, turn_leave_one_out,
                        turn_returns)
from ratios import turn_numbers
import reference

NAN = math.nan


def conversation(*rows):
    """turn_rewards and mask [B, T] of responses that are lists of rewards, one per turn. Turn k has
    k + 1 tokens, then two tokens of the environment follow, but for the last."""
    length = lambda row: sum(k + 3 for k in range(len(row)))
    T = max(map(length, rows)) + 1
    mask = torch.zeros(len(rows), T, dtype=torch.bool)                               # [B, T]
    turn_rewards = torch.zeros(len(rows), T, dtype=torch.float64)                    # [B, T]
    for i, row in enumerate(rows):
        place = 0
        for k, reward in enumerate(row):
            mask[i, place:place + k + 1] = True
            turn_rewards[i, place + k] = reward
            place += k + 3
    return turn_rewards, mask


def loop(rows, group_size, scale):
    """{(response, turn): advantage} by plain sums."""
    returns = [[math.fsum(row[k:]) for k in range(len(row))] for row in rows]
    found = {}
    for i, row in enumerate(rows):
        first = i // group_size * group_size
        for k in range(len(row)):
            group = [r[k] for r in returns[first:first + group_size] if len(r) > k]
            batch = [r[k] for r in returns if len(r) > k]
            mean = sum(group) / len(group)
            some = {"group": group, "batch": batch, "none": [0.0]}[scale]
            middle = sum(some) / len(some)
            std = math.sqrt(sum((x - middle) ** 2 for x in some) / len(some))
            alone = math.isclose(returns[i][k], mean)
            found[i, k] = 0.0 if alone else (returns[i][k] - mean) / (std + 1e-6 if std else 1.0)
    return found


ROWS = [[0.1, 0.5, 1.0], [0.3], [0.2, 0.0], [0.0, 1.0, 0.25],    # two groups of four
        [1.0], [0.0], [0.5, 0.5, 0.5, 0.5], [0.25]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_turn_returns_equal_a_loop_for_ragged_numbers_of_turns(scale):
    turn_rewards, mask = conversation(*ROWS)
    turns = turn_numbers(mask)
    A = turn_returns(turn_rewards, mask, 4, scale)
    assert A.shape == mask.shape and (A[~mask] == 0).all() and (turns[~mask] == -1).all()
    for (i, k), expected in loop(ROWS, 4, scale).items():
        tokens = A[i][turns[i] == k]
        assert len(tokens) == k + 1
        assert tokens.tolist() == pytest.approx([expected] * (k + 1), rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("row, numbers", [
    ([1, 1, 0, 1, 0, 0, 1], [0, 0, -1, 1, -1, -1, 2]), ([0, 1, 1, 0], [-1, 0, 0, -1]),
    ([0, 0], [-1, -1])])
def test_a_turn_is_a_run_of_loss_tokens(row, numbers):
    assert turn_numbers(torch.tensor([row]).bool()).tolist() == [numbers]


@pytest.mark.parametrize("rows", [
    [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.6], [0.6, 0.0]], [[0.1, 0.2, -0.3], [0.0]],
    [[1.0, 0.1, 0.2, -0.3], [1.0, 0.0]]])
def test_returns_that_are_equal_on_paper_have_advantage_0(rows):
    given, mask = conversation(*rows)
    for advantage in (turn_returns, turn_leave_one_out):
        first = advantage(given, mask, len(rows))[turn_numbers(mask) == 0]
        assert (first == 0).all()


@pytest.mark.parametrize("rows, signal", [
    ([[0.0, 1.0], [1.0, 0.0]], True),                        # equal totals, unequal second turns
    ([[0.5, 0.5], [1.0]], False),                            # only one reached the second turn
    ([[0.1, 0.2], [0.1, 0.2]], False)])
def test_a_group_has_signal_if_the_returns_of_any_turn_differ(rows, signal):
    given, mask = conversation(*rows)
    totals = torch.tensor([math.fsum(row) for row in rows])
    assert not has_signal(totals, 2).any()
    inputs = dict(turn_rewards=given, mask=mask, parts=totals[:, None])
    for weights, live in ([0.3], signal), ([0.0], False):    # 0: the return does not count
        advantages = estimate_advantages("turn_returns", totals, 2, part_weights=weights, **inputs)
        found = groups_with_signal("turn_returns", totals, 2, advantages)
        assert found.tolist() == [live]
    assert turn_returns(given, mask, 2).ne(0).any().item() == signal


def test_rewards_of_turns_and_of_the_response_meet_at_the_last_token_and_gae_carries_over():
    """GAE by the definition: the environment's tokens take no step."""
    given, mask = conversation(*ROWS[:4])
    parts = torch.tensor([[sum(row), other] for row, other in zip(ROWS, (0.0, -1.0, 0.0, 2.0))],
                         dtype=torch.float64)
    rewards = parts[:, 0] + 0.5 * parts[:, 1]                                        # [B]
    per_token = reward_turns(given, parts, [1.0, 0.5], mask)                 # [B, T]
    torch.testing.assert_close(per_token.sum(-1), rewards)
    values = torch.rand(mask.shape, dtype=torch.float64)                             # [B, T]
    A, returns = gae(per_token.double(), values, mask, lam=0.9)
    for i, m in enumerate(mask):
        steps = given[i][m].tolist()
        steps[-1] += (0.0, -0.5, 0.0, 1.0)[i]
        want, _ = reference.gae(steps, values[i][m].tolist(), 0.9, 1.0)
        assert A[i][m].tolist() == pytest.approx(want, abs=1e-6)
    ours = estimate_advantages("gae", rewards, 4, mask=mask, values=values.float(), lam=0.9,
                               turn_rewards=given, parts=parts, part_weights=[1.0, 0.5])
    torch.testing.assert_close(ours, A.float())


# ---------------------------------------------------------- which way do the estimators point?

def episode(given, mask, G):
    """One advantage per response: its total reward minus the group's mean."""
    return group_advantages(given.sum(-1), G, "none")                                # [B]


def immediate(given, mask, G):
    """A turn's own reward minus the mean of those that reached it (MT-GRPO 2505.11821)."""
    turns = turn_numbers(mask)                                                       # [B, T]
    A = torch.zeros_like(given)                                                      # [B, T]
    for k in range(int(turns.max()) + 1):
        mine = turns == k                                                            # [B, T]
        rewards = (given * mine).sum(-1).view(-1, G)                                 # [groups, G]
        reached = mine.any(-1).view(-1, G).sum(-1, keepdim=True).clamp(min=1)        # [groups, 1]
        A += (rewards - rewards.sum(-1, keepdim=True) / reached).view(-1, 1) * mine  # [B, T]
    return A


def normalized_then_summed(given, mask, G):
    """Each turn minus its mean, then summed to go (as IGPO's order is printed)."""
    turns = turn_numbers(mask)                                                       # [B, T]
    last = mask & ~torch.nn.functional.pad(turns, (0, 1), value=-1)[:, 1:].eq(turns) # [B, T]
    return (immediate(given, mask, G) * last).flip(-1).cumsum(-1).flip(-1) * mask    # [B, T]


# A tree: {outcome: [(action, reward) of each turn]}; an action is 1 (go on, win) or 0, its logit
# that of the turn.
GAME = ((.5, .5), [[(0, .6)], [(1, .3), (0, 0)], [(1, .3), (1, 1)]])
SHORT = ((.5, .25), [[(0, .2)], [(1, 0), (1, 1)], [(1, 0), (0, 0)]])
THREE = ((.6, .5, .3), [[(0, .6)], [(1, .3), (0, -.1)], [(1, .3), (1, 0), (1, 1)],
                        [(1, .3), (1, 0), (0, .2)]])


def expected_gradient(tree, G, estimator):
    """[turns]: the expected Σ_i Â_ik d log π_ik / d logit_k / G over all groups of G responses."""
    likely, outcomes = tree
    chance = [math.prod(p if action else 1 - p for p, (action, _) in zip(likely, outcome))
              for outcome in outcomes]
    groups = list(itertools.product(range(len(outcomes)), repeat=G))
    given, mask = conversation(*([r for _, r in outcomes[i]] for group in groups for i in group))
    A, turns = estimator(given, mask, G), turn_numbers(mask)                         # [B, T] each
    A = A if A.dim() == 2 else A[:, None] * mask                                     # [B, T]
    at = [torch.where(turns == k, A, 0).amax(-1) + torch.where(turns == k, A, 0).amin(-1)
          for k in range(len(likely))]                                               # [B] each
    return [sum(math.prod(chance[i] for i in group)
                * sum(at[k][n * G + j].item() * (outcomes[i][k][0] - p)
                      for j, i in enumerate(group) if len(outcomes[i]) > k)
                for n, group in enumerate(groups)) / G for k, p in enumerate(likely)]


def exact_gradient(tree):
    """[turns]: d J / d logit_k, by autograd of the expected return J."""
    logits = torch.tensor(tree[0], dtype=torch.float64).logit().requires_grad_()
    p = logits.sigmoid()
    J = sum(math.prod(p[k] if action else 1 - p[k] for k, (action, _) in enumerate(outcome))
            * sum(reward for _, reward in outcome) for outcome in tree[1])
    return torch.autograd.grad(J, logits)[0].tolist()


@pytest.mark.parametrize("estimator, expected", [
    (episode, 0.05), (lambda *of: turn_returns(*of, "none"), 0.05),
    (immediate, -0.075), (normalized_then_summed, -0.075)],
    ids=["episode", "turn_returns", "immediate", "normalized_then_summed"])
def test_which_way_the_estimators_push_the_first_choice(estimator, expected):
    """Without the factor (G - 1) / G of a mean that contains the response itself."""
    assert exact_gradient(GAME)[0] == pytest.approx(0.05)
    found = expected_gradient(GAME, 3, estimator)[0]
    assert found * 3 / 2 == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("G", [2, 3, 4])
@pytest.mark.parametrize("tree", [SHORT, THREE], ids=["two turns", "three turns"])
def test_leaving_one_out_is_unbiased_at_every_turn_where_responses_end_early(tree, G):
    exact = exact_gradient(tree)
    assert expected_gradient(tree, G, turn_leave_one_out) == pytest.approx(exact, abs=1e-7)
    mean = expected_gradient(tree, G, lambda *of: turn_returns(*of, "none"))
    shares = [x / y for x, y in zip(mean, exact)]
    assert shares[0] == pytest.approx((G - 1) / G) and max(shares[1:]) < shares[0] - .01


def test_division_by_the_std_can_turn_the_sign():
    """Of turn_returns and of group_advantages alike."""
    assert exact_gradient(SHORT)[0] == pytest.approx(.0125)
    for estimator in (turn_returns, lambda given, mask, G: group_advantages(given.sum(-1), G)):
        found = expected_gradient(SHORT, 4, estimator)[0]
        assert found == pytest.approx(-.151, abs=5e-4)
