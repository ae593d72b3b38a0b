"""A sampler with stale weights: it samples from the policy of k rollout batches ago.

Engines that sample while the trainer updates, and queues of finished rollouts, have such a
staleness. Here it is a number, so that its effect can be measured:

    python train.py --sampler experiments/stale.py:Stale2 --old_logp sampler

With `--old_logp sampler` the ratio is π_θ / π_sampler, so it contains the staleness, and so does
what the clip sees. With `--old_logp recompute` the ratio starts at 1 in each batch and nothing
corrects the staleness, except `--mismatch` (then `mismatch_kl` in metrics.jsonl measures it).
Stale1, Stale2, Stale4 and Stale8 are stale by as many batches, Stale0 by none; another k is a class
of two lines.

`python experiments/run.py controls_final` measures what staleness costs.
"""

import copy
from collections import deque

import torch

from plumbing.speed.fast import FastSampler


class Stale(FastSampler):
    """Samples batch n with the policy that sampled batch n - k of a sampler with current weights;
    the first k batches, with the policy at the start. Only batches that changed the policy count:
    one whose updates were all skipped does not reduce the staleness. A resumed run starts without
    older policies. Holds k + 1 copies of the policy."""

    k = 0

    def __init__(self, *settings):
        super().__init__(*settings)
        self.older = deque(maxlen=self.k + 1)                # the oldest first

    def sample(self, *inputs, **options):
        newest = self.policy
        if not self.older or not equal_weights(newest, self.older[-1]):     # not a second round
            self.older.append(copy.deepcopy(newest).requires_grad_(False))
        try:
            if self.older[0] is not self.older[-1]:          # a copy's last bits may differ
                self.policy = self.older[0]
            return super().sample(*inputs, **options)
        finally:
            self.policy = newest


def equal_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


class Stale0(Stale):
    """Current weights: bit for bit the built-in sampler."""


class Stale1(Stale):
    k = 1


class Stale2(Stale):
    k = 2


class Stale4(Stale):
    k = 4


class Stale8(Stale):
    k = 8
