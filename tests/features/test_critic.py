"""What the critic is trained on, what its values do to the advantages.

python -m pytest tests/features/test_critic.py
"""

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
