"""A sampler that lags behind: it samples from the policy of k rollout batches ago.

Engines that sample while the trainer updates, and queues of finished rollouts, have this lag. Here
it is a number, so that its effect can be measured:

    python train.py --sampler plumbing/engines/stale.py:Stale2 --old_logp sampler

With `--old_logp sampler` the ratio is π_θ / π_sampler, so it contains the lag, and so does what the
clip sees. With `--old_logp recompute` the ratio starts at 1 in each batch and nothing corrects the
lag, except `--mismatch` (then `mismatch_kl` in metrics.jsonl measures it). Stale1, Stale2, Stale4
and Stale8 lag by as many batches, Stale0 by none; another k is a class of two lines.

`python experiments/run.py lags` measures what a lag costs each algorithm.
"""

import copy
from collections import deque

import torch

from plumbing.speed.fast import FastSampler


class Stale(FastSampler):
    """Samples batch n with the policy that sampled batch n - k of a sampler without a lag; the
    first k batches, with the policy at the start. Counted are batches that changed the policy: one
    whose updates were all skipped does not shorten the lag. A resumed run starts again without
    older policies. Holds k + 1 copies of the policy."""

    k = 0

    def __init__(self, *settings):
        super().__init__(*settings)
        self.older = deque(maxlen=self.k + 1)                # the oldest first

    def sample(self, *inputs, **options):
        newest = self.policy
        if not self.older or not equal(newest, self.older[-1]):  # a second round is no new batch
            self.older.append(copy.deepcopy(newest).requires_grad_(False))
        try:
            if self.older[0] is not self.older[-1]:          # a copy's last bits may differ
                self.policy = self.older[0]
            return super().sample(*inputs, **options)
        finally:
            self.policy = newest


def equal(one, other):
    """Whether two policies have the same weights."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


class Stale0(Stale):
    """No lag: bit for bit the built-in sampler."""


class Stale1(Stale):
    k = 1


class Stale2(Stale):
    k = 2


class Stale4(Stale):
    k = 4


class Stale8(Stale):
    k = 8
