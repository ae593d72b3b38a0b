"""--positive_example_nll_weight: the likelihood of right responses in the loss.
python -m pytest tests/features/test_likelihood.py"""

import copy

import pytest
import torch

import train
from models import gradient, own_logp


def test_the_likelihood_of_right_responses_is_a_mean_over_their_tokens(run, first):
    """The loss and the gradient with the term minus those without it: each response alone, in
    float64, over the tokens of the right ones."""
    minis, found = [], []
    first(train, "update", lambda settings, learner, mini: minis.append(
        (copy.deepcopy(learner.policy).double(), mini)))
    first(train, "optimizer_step", lambda learner, stats, max_grad_norm: found.append(
        (torch.cat([p.grad.flatten() for p in learner.policy.parameters()]), stats["loss"].item())))
    for name, more in (("plain", ""), ("more", "--positive_example_nll_weight 0.5")):
        run(f"--steps_per_generation 1 --max_grad_norm 0 {more}", folder=name)
    (plain, loss), (more, other) = found
    policy, mini = minis[1]
    right = (mini.parts[:, 0] >= 1)[:, None] & mini.rollout.mask                    # [B, T]
    term = -0.5 * (own_logp(policy, mini.rollout) * right).sum() / right.sum()
    assert right.any() and other - loss == pytest.approx(term.item(), rel=1e-4)
    want = gradient(policy, term)
    assert (more - plain - want).norm() < 1e-3 * want.norm()
