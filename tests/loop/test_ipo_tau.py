"""ipo's pull towards π_old with a tau of one's own: the gradient of an update is that of loops in
float64 where it is larger than rounding; the same code in float64 agrees everywhere.
python -m pytest tests/loop/test_ipo_tau.py
"""

import copy
from dataclasses import replace

import torch

import train
from losses import OBJECTIVES, policy_loss, varied
from models import gradient, own_logp

TAU, EPSILON = 0.02, 0.1


def by_rows(logp, old, mini):
    """-1[|π - μ| <= ε] A π/μ + τ log²(π/μ), averaged over the loss tokens (prime-rl's ipo)."""
    loss = 0.0
    for new, mu, A, mask in zip(logp, old, mini.advantages, mini.rollout.mask):
        for x, y in zip(new[mask], mu[mask]):
            kept = (x.exp() - y.exp()).abs() <= EPSILON
            loss = loss + TAU * (x - y) ** 2 - kept * A * (x - y).exp()
    return loss / mini.rollout.mask.sum()


def by_policy_loss(logp, old, mini):
    mask = mini.rollout.mask
    loss, _ = policy_loss(varied("ipo", dict(tau=TAU)), logp, old, mini.advantages.double(), mask,
                          weights=mask.double() / mask.sum())
    return loss


def test_a_large_relative_difference_at_a_tiny_gradient_is_rounding(run, first, then, monkeypatch):
    policies, found = [], []
    first(train, "update", lambda settings, learner, mini: policies.append(
        copy.deepcopy(learner.policy).double()))

    def compare(stats, settings, learner, mini):
        before, old = policies[-1], mini.old_logp.double()
        want, same = (gradient(before, loss(own_logp(before, mini.rollout), old, mini))
                      for loss in (by_rows, by_policy_loss))
        ours = torch.cat([p.grad.double().flatten() for p in learner.policy.parameters()])
        apart = lambda x: ((x - want).norm() / want.norm()).item()
        found.append((want.norm().item(), apart(ours), apart(same)))
    then(train, "update", compare)
    monkeypatch.setitem(OBJECTIVES, "ipo", replace(OBJECTIVES["ipo"], constants={"tau": TAU}))
    run("--algorithm ipo --steps 8 --warmup_steps 0 --max_grad_norm 0")
    assert all(apart < 1e-9 for _, _, apart in found)
    assert all(gap < 1e-4 for norm, gap, _ in found if norm > 1e-2)
    assert any(gap > 1e-2 for norm, gap, _ in found if norm < 1e-4)
