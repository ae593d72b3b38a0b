"""How far rounding moves log s: what 16-bit arithmetic sees of a change of the policy, minus what
float32 sees of the same change.

GSPO's clip range is [1 - 3e-4, 1 + 4e-4] (2507.18071, section 5.1). In bfloat16 a log-prob is
rounded to some 1e-2, and the rounding of log π_new and log π_old is not the same once the weights
have changed. If the difference is larger than the clip range, the clip removes responses by chance.
"""

from contextlib import contextmanager

import torch

from ratios import sequence_log_ratio

ROWS = 8                # responses that are scored again, at most: the first of the rollout batch


class Rounding:
    """Measures once, in the first rollout batch of a run, on a few of its responses. It draws no
    random numbers and changes nothing."""

    def __init__(self, args):
        self.args = args
        self.rows = None
        self.old = None

    def before_updates(self, learner, batch):
        """Score the rows under the old policy, in both arithmetics. Later calls do nothing."""
        if self.rows is None:
            args = self.args
            count = len(batch.old_logp)
            micro = args.micro_batch_size or count // args.steps_per_generation
            few = min(ROWS, args.num_generations, max(micro // 2, 1))
            self.rows = batch.rollout.rows(0, few)
            self.old = self.scores(learner)

    def measure(self, learner):
        """The root mean square over the rows of log s in 16 bits minus log s in float32, in nats;
        None before before_updates and after the first call."""
        if self.old is None:
            return None
        new = self.scores(learner)                                                  # [R, T]
        mask = self.rows.mask                                                       # [R, T]
        half, exact = (sequence_log_ratio(a, b, mask) for a, b in zip(new, self.old))    # [R] each
        self.old = None
        return (half - exact).square().mean().sqrt().item()

    @torch.no_grad()
    def scores(self, learner):
        """log π of the rows in the arithmetic of the run and in float32, [R, T] each."""
        temperature = self.args.temperature
        half = learner.actor(self.rows, temperature=temperature).logp               # [R, T]
        with in_float32(learner.actor):
            return half, learner.actor(self.rows, temperature=temperature).logp     # [R, T] each


@contextmanager
def in_float32(actor):
    """Inside the block, the actor computes without autocast. Its weights are float32."""
    half = actor.half
    actor.half = None
    try:
        yield
    finally:
        actor.half = half
