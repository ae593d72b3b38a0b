"""--epsilon auto: GSPO's clip range in standard deviations of log s, measured during the run.

This is not from a paper. GSPO's 3e-4 and 4e-4 were chosen for one model, one response length and
one learning rate, and the spread of s depends on all three. The share of responses that the clip
removes depends on ε / std(log s) (experiments/band_law.py). `--epsilon auto` therefore fixes that
quotient, c, instead of ε: the clip range ("band") is [1 - ε, 1 + ε] with ε = c · std(log s), where
c = 2; `--epsilon auto:4` sets c = 4.

std(log s) is measured over the responses of the last mini-batch of a rollout batch, after all
updates and before any clipping: sqrt(log_s_var) of metrics.jsonl, which is computed in every run.
The spread of s is largest there, so c = 2 rarely clips a response of the earlier mini-batches. The
clip range of a rollout batch follows from the last BATCHES measurements before it:
  * their median is used, because a collapse raises std(log s) and must not widen the clip range
    immediately;
  * ε is at most WIDEST, GRPO's value, because a wider clip range would hardly limit s, and at least
    NARROWEST, so that rounding alone never leaves the clip range;
  * until there is a measurement, the clip range is the objective's own (GSPO: 3e-4, 4e-4). A batch
    does not count as a measurement if its log-probs are not finite, or if the policies differ by
    no more than rounding, for example because all rewards of each group are equal.
"""

import argparse
import math
import statistics

from losses import OBJECTIVES

SCALE = 2.0
BATCHES = 4
WIDEST = 0.2
ROUNDING = 1e-10  # upper bound on Var[log w] of an unchanged policy that is scored twice in float32
NARROWEST = math.sqrt(ROUNDING)


def edge(text):
    """The value of --epsilon: a float, or the text "auto:C" for auto and auto:C. Raises
    ArgumentTypeError for anything else."""
    name, _, scale = text.partition(":")
    try:
        if name != "auto":
            return float(text)
        scale = float(scale) if ":" in text else SCALE
        if 0 < scale < math.inf:
            return f"auto:{scale:g}"
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number, nor auto, nor auto:C with a "
                                     "number C above 0")


def is_auto(args):
    return isinstance(args.epsilon, str)


class AutoBand:
    """The clip range of each rollout batch. Its only state is progress["log_s_std"], which is saved
    in checkpoints, so a resumed run has the clip ranges of an uninterrupted run."""

    def __init__(self, args, progress):
        """progress: the dict of the run that holds the state."""
        self.args = args
        self.progress = progress

    @property
    def epsilon(self):
        """c · median std(log s) of the last batches, between NARROWEST and WIDEST; None without a
        measurement."""
        seen = self.progress.get("log_s_std")
        if not seen:
            return None
        scale = float(self.args.epsilon.removeprefix("auto:"))
        return min(max(scale * statistics.median(seen), NARROWEST), WIDEST)

    def edges(self):
        """(epsilon, epsilon_high) of the next rollout batch."""
        row = OBJECTIVES[self.args.objective]
        epsilon = self.epsilon
        return (row.epsilon, row.epsilon_high) if epsilon is None else (epsilon, epsilon)

    def update(self, log_w_var, log_s_var, noise=0.0):
        """Add the measurement of a completed rollout batch: its variances of log w, which tells
        whether the policies differ, and of log s. noise: the error of log s in nats, which is large
        in 16 bits."""
        if log_w_var > ROUNDING and noise ** 2 < log_s_var < math.inf:
            seen = [*self.progress.get("log_s_std", []), math.sqrt(log_s_var)]
            self.progress["log_s_std"] = seen[-BATCHES:]     # a new list: checkpoints keep the old


def make_band(args, progress):
    """The AutoBand of a run, or None without --epsilon auto."""
    return AutoBand(args, progress) if is_auto(args) else None
