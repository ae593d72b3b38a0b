"""ipo's pull towards π_old with a tau of one's own: the gradient of an update is that of loops in
float64 where it is larger than rounding; the same code in float64 agrees everywhere.

python -m pytest tests/loop/test_ipo_tau.py
"""

import copy

import torch

import train
from losses import policy_loss, varied
from tiny_run import TINY

TAU = 0.02
EPSILON = 0.1


def row_logp(model, rollout, i):
    """Log-probs [t] of response i from a forward of its row alone."""
    q = i // rollout.group_size
    prompt = rollout.prompt_ids[q][rollout.prompt_mask[q]]                              # [p]
    ids = torch.cat([prompt, rollout.response_ids[i][rollout.mask[i]]])                 # [p+t]
    logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, ids[1:, None])[len(prompt) - 1:, 0]


def gradient_of(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def by_rows(model, old, mini):
    """-1[|π - μ| <= ε] A π/μ + τ log²(π/μ), averaged over the loss tokens (prime-rl's ipo)."""
    loss = 0.0
    for i in range(len(mini.rollout.mask)):
        new = row_logp(model, mini.rollout, i)                                          # [t]
        mu = old[i][mini.rollout.mask[i]]                                               # [t]
        kept = (new.exp() - mu.exp()).abs() <= EPSILON
        loss = loss + (TAU * (new - mu) ** 2 - kept * mini.advantages[i] * (new - mu).exp()).sum()
    return gradient_of(loss / mini.rollout.mask.sum(), model)


def by_policy_loss(model, old, mini):
    logp = torch.zeros_like(old)                                                        # [B, T]
    for i, mask in enumerate(mini.rollout.mask):
        logp[i, mask] = row_logp(model, mini.rollout, i)
    mask = mini.rollout.mask                                                            # [B, T]
    loss, _ = policy_loss(varied("ipo", dict(tau=TAU)), logp, old, mini.advantages.double(), mask,
                          weights=mask.double() / mask.sum())
    return gradient_of(loss, model)


def test_a_large_relative_difference_at_a_tiny_gradient_is_rounding(workplace, monkeypatch):
    update = train.update
    found = []

    def watched(settings, learner, mini):
        now = copy.deepcopy(learner.policy).double()
        stats = update(settings, learner, mini)
        ours = torch.cat([p.grad.double().flatten() for p in learner.policy.parameters()])
        old = mini.old_logp.double()
        want = by_rows(now, old, mini)
        apart = (by_policy_loss(now, old, mini) - want).norm() / want.norm()
        found.append((want.norm().item(), ((ours - want).norm() / want.norm()).item(),
                      apart.item()))
        return stats
    monkeypatch.setattr(train, "update", watched)
    train.main([*TINY, "--algorithm", "ipo", "--objective_constants", f"tau={TAU}", "--steps", "8",
                "--warmup_steps", "0", "--max_grad_norm", "0", "--output_dir", "run"])
    assert all(apart < 1e-9 for _, _, apart in found)
    assert all(gap < 1e-4 for norm, gap, _ in found if norm > 1e-2)
    assert any(gap > 1e-2 for norm, gap, _ in found if norm < 1e-4)
