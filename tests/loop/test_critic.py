"""What the critic is trained on, and what its values do to the advantages.

python -m pytest tests/loop/test_critic.py
"""

import pytest
import torch

import train
from advantages import ADVANTAGES, Advantage, estimate_advantages, gae, whiten
from features import critic
from tiny_run import TINY, metrics

LAMBDA = 0.95


def by_loops(rewards, values, mask):
    """(Â_t = Σ_l λ^l δ_{t+l}, the returns Â_t + V_t) of 1506.02438 eq. 16 with γ = 1, in float64;
    the reward is given at the last loss token."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(mask)):
        places = mask[i].nonzero().flatten().tolist()
        V = [values[i, t].item() for t in places] + [0.0]
        r = [0.0] * len(places)
        r[-1:] = [rewards[i].item()] * bool(places)
        errors = [r[k] + V[k + 1] - V[k] for k in range(len(places))]
        for k, t in enumerate(places):
            advantages[i, t] = sum(LAMBDA ** j * error for j, error in enumerate(errors[k:]))
            returns[i, t] = advantages[i, t] + V[k]
    return advantages, returns


def test_the_row_gae_gives_the_advantages_and_not_the_returns():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 6, generator=generator) + 0.5                                # [B, T]
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 5])[:, None]                        # [B, T]
    rewards = torch.tensor([1.0, 0.0, 1.0, -0.5])
    found = estimate_advantages("gae", rewards, 2, values=values, mask=mask)
    want, returns = by_loops(rewards, values, mask)
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=1e-5)
    assert (returns - want).abs().max() > 0.5


@pytest.fixture
def targets(monkeypatch):
    """[(part, the returns that its critic is trained on)] of every micro-batch from now on."""
    seen = []
    loss = critic.value_loss
    inside = critic.Critic.in_loss

    def watched(self, part, new, mini):
        def kept(values, old_values, returns, *others):
            seen.append((part, returns))
            return loss(values, old_values, returns, *others)
        monkeypatch.setattr(critic, "value_loss", kept)
        return inside(self, part, new, mini)
    monkeypatch.setattr(critic.Critic, "in_loss", watched)
    return seen


def test_the_critics_targets_are_gaes_returns_whatever_the_advantage_makes_of_them(
        targets, monkeypatch, workplace):
    def whitened(rewards, values, mask):
        return whiten(gae(rewards, values, mask)[0], mask)
    row = Advantage(whitened, "token", ("rewards", "values", "mask"))
    monkeypatch.setitem(ADVANTAGES, "whitened", row)
    train.main([*TINY, "--algorithm", "ppo", "--advantage", "whitened", "--steps", "4",
                "--warmup_steps", "0", "--learning_rate", "0.003", "--output_dir", "run"])
    assert len(targets) == 8 and all(record["value_loss"] > 0 for record in metrics("run"))
    for part, returns in targets:
        mask = part.rollout.mask
        _, want = by_loops(part.rewards, part.more["values"], mask)
        torch.testing.assert_close(returns[mask].double(), want[mask], atol=1e-5, rtol=1e-5)
    part, returns = targets[-1]
    assert part.more["values"][part.rollout.mask].abs().max() > 1e-3, "the critic has learned something"
