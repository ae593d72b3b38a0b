"""A sampler that lags behind the policy. python -m pytest tests/engines/test_stale.py"""

import pytest
import torch

from experiments.stale import Stale0, Stale1, Stale2, Stale8
from plumbing.speed.fast import FastSampler


@pytest.mark.parametrize("kind, rounds", [(Stale0, 1), (Stale1, 1), (Stale2, 1), (Stale2, 3),
                                          (Stale8, 1)])
@pytest.mark.parametrize("updated", [(0, 1, 2, 3, 4), (0, 1, 1, 2, 3)])
def test_batch_n_is_sampled_by_the_policy_of_k_updates_before(kind, rounds, updated, monkeypatch):
    """The policies of five batches by their number, once with a skipped update: a lag of 1 is one
    policy, not one batch. rounds: how often each batch samples."""
    sampler, drawn = kind(torch.nn.Linear(1, 1), None, 1), []
    monkeypatch.setattr(FastSampler, "sample",
                        lambda self: drawn.append(self.policy.weight.item()))
    for number in updated:
        torch.nn.init.constant_(sampler.policy.weight, number)
        for _ in range(rounds):
            sampler.sample()
    known = sorted({*updated})
    want = [known[max(0, known.index(number) - kind.k)] for number in updated]
    assert drawn == [number for number in want for _ in range(rounds)]
