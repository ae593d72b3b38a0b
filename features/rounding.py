"""How far rounding moves log s: what 16-bit arithmetic sees of a change of the policy, minus what
float32 sees of the same change.

GSPO's clip range is [1 - 3e-4, 1 + 4e-4] (2507.18071, section 5.1). In bfloat16 a log-prob is
rounded to some 1e-2, and the rounding of log π_new and log π_old is not the same once the weights
have changed. If the difference is larger than the clip range, the clip removes responses by chance.

It is measured once, in the first rollout batch of a run with --bf16 or --fp16, on a few of its
responses, and enters log_s_noise of metrics.jsonl. No random numbers are drawn, nothing is changed.
Without float32 weights (--use_peft holds matrices in 16 bits), or with several processes, it is not
measured.
"""

from contextlib import contextmanager

import torch

from features.feature import Feature
from ratios import sequence_log_ratio

ROWS = 8                # responses that are scored again, at most: the first of the rollout batch


class Rounding(Feature):
    @classmethod
    def on(cls, settings):
        return bool(settings.half) and not getattr(settings, "use_peft", False)

    def __init__(self, run):
        self.settings = run.settings
        self.actor = run.actor
        self.rows = None
        self.before = None
        self.error = None

    def before_updates(self, learner, batch, old):
        """In the first batch, score the rows under the old policy, in both arithmetics."""
        if self.rows is not None or self.error is not None or learner.world > 1:
            return
        settings = self.settings
        count = len(batch.old_logp)
        micro = settings.micro_batch_size or count // settings.steps_per_generation
        few = min(ROWS, settings.num_generations, max(micro // 2, 1))
        self.rows = batch.rollout.without("routes").rows(0, few)
        self.before = self.scores()

    def report(self, folder, record):
        if self.before is not None:
            self.error = self.measure()
        if self.error is not None and "log_s_noise" in record:
            record["log_s_noise"] = max(record["log_s_noise"], self.error)

    def measure(self):
        """The root mean square over the rows of log s in 16 bits minus log s in float32, in
        nats."""
        mask = self.rows.mask                                                       # [R, T]
        half, exact = (sequence_log_ratio(new, old, mask)
                       for new, old in zip(self.scores(), self.before))                # [R] each
        self.before = None
        return (half - exact).square().mean().sqrt().item()

    @torch.no_grad()
    def scores(self):
        """log π of the rows in the arithmetic of the run and in float32, [R, T] each."""
        temperature = self.settings.temperature
        half = self.actor(self.rows, temperature=temperature).logp                  # [R, T]
        with in_float32(self.actor):
            return half, self.actor(self.rows, temperature=temperature).logp        # [R, T] each

    def state_dict(self):
        return {} if self.error is None else {"error": self.error}

    def load_state_dict(self, state):
        self.error = state.get("error")


@contextmanager
def in_float32(actor):
    """Inside the block, the actor computes without autocast. Its weights are float32."""
    half = actor.half
    actor.half = None
    try:
        yield
    finally:
        actor.half = half
