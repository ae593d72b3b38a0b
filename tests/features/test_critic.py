"""What the critic is trained on, what its values do to the advantages, and its head start.

python -m pytest tests/features/test_critic.py
"""

import math

import pytest
import torch

import reference
import train
from advantages import ADVANTAGES, Advantage, gae, whiten
from features import critic


def whitened(rewards, values, mask):
    return whiten(gae(rewards, values, mask)[0], mask)


def by_loops(part, lam):
    """(advantages, returns) of the loss tokens of a micro-batch, in float64."""
    found = []
    rows = zip(part.rewards.tolist(), part.extras["values"], part.rollout.mask)
    for reward, values, mask in rows:
        V = values[mask].tolist()
        found.append(reference.gae(reference.at_the_end(reward, len(V)), V, lam))
    return [torch.tensor(sum(rows, [])) for rows in zip(*found)]                        # [tokens]


@pytest.mark.parametrize("line, lam, coef", [
    ("", 0.95, 0), ("--lam 0.3", 0.3, 0), ("--advantage whitened --lam 0.5", 0.5, None)])
def test_the_critics_targets_are_gaes_returns_whatever_becomes_of_the_advantages(
        line, lam, coef, run, calls, monkeypatch):
    """A row of one's own may whiten them."""
    row = Advantage(whitened, "token")
    monkeypatch.setitem(ADVANTAGES, "whitened", row)
    parts, targets = calls(critic.Critic, "loss"), calls(critic, "value_loss")
    losses = calls(train, "policy_loss")
    records = run(f"--algorithm ppo --steps 3 --warmup_steps 0 --learning_rate 0.003 {line}")
    assert len(parts) == 6 and all(record["value_loss"] > 0 for record in records)
    same = dict(atol=1e-5, rtol=1e-5)
    for ((_, part, *_), _, _), target, loss in zip(parts, targets, losses, strict=True):
        mask = part.rollout.mask
        advantages, returns = by_loops(part, lam)
        torch.testing.assert_close(target[0][2][mask], returns, **same)
        if coef:
            advantages += coef * (part.extras["teacher_logp"] - part.old_logp)[mask]
        if coef is not None:
            torch.testing.assert_close(loss[0][3][mask], advantages, **same)
    assert part.extras["values"][mask].abs().max() > 1e-3, "the critic has learned something"


# -------------------------------------------------------------------------------- the head start

HEAD = ("--algorithm ppo --critic_warmup 2 --steps 4 --warmup_steps 3 --weight_decay 0.1 "
        "--learning_rate 0.002")


@pytest.fixture
def updates(first):
    """[(batch, rate, weights of the policy, of the critic, AdamW's steps with the policy)] before
    every update from now on."""
    seen = []

    def note(settings, learner, mini):
        policy, head = ([p.detach().clone() for p in module.parameters()]
                        for module in (learner.policy, learner.actor.critic))
        adam = learner.optimizer.state.get(next(learner.policy.parameters()), {})
        rate = learner.optimizer.param_groups[0]["lr"]
        seen.append((mini.step, rate, policy, head, int(adam.get("step", 0))))
    first(train, "update", note)
    return seen


def stays(before, after):
    return all(map(torch.equal, before, after))


def test_the_head_start_trains_the_critic_alone_at_the_peak_rate_and_the_schedule_waits(
        updates, run):
    more = "--num_iterations 2 --lr_scheduler_type cosine"
    head = run(f"{HEAD} {more}")
    steps, rates, policies, critics, adam = zip(*updates)
    for i in range(15):
        assert stays(*policies[i:i + 2]) == (steps[i] <= 2) and not stays(*critics[i:i + 2])
    assert [*adam] == [max(0, i - 8) for i in range(16)]
    share = [min((i + 1) / 3, (1 + math.cos(math.pi * max(0, i - 3) / 5)) / 2) for i in range(8)]
    assert rates == pytest.approx([0.002] * 8 + [0.002 * x for x in share])
    assert head[0]["value_loss"] > 0 and head[0]["clip_low"] == 0
    none = run(f"{HEAD} {more} --critic_warmup 0", folder="none")
    assert not stays(updates[16][2], updates[17][2])
    norms = [records[0]["minibatches"][0]["grad_norm"] for records in (head, none)]
    assert 0 < norms[0] < norms[1], "the policy's gradient is in the second alone"


def test_skipped_updates_of_the_head_start_are_no_head_start_of_the_policy(
        updates, run, then, calls):
    then(train, "policy_loss", lambda result, *_, **__: (
        result[0] * (float("nan") if len(updates) in (1, 3) else 1), result[1]))
    done = calls(train, "update")
    run(HEAD)
    assert [stats["skipped"] for *_, stats in done][:4] == [True, False, True, False]
    rates = [rate for _, rate, *_ in updates]
    assert rates[:6] == pytest.approx([0.002] * 4 + [0.002 / 3, 0.004 / 3])
