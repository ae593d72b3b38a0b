"""Zero-variance groups (all rewards equal) left out of the loss, as by SkyRL's flag of this name.

Their advantages are 0 already, but not their share of the divisor, nor their KL, entropy or value.
Without their tokens --reduction token-mean divides by the tokens of the other groups alone. The
other reductions divide by the number of all responses or prompts, so only further terms of the loss
change there. A mini-batch without another group makes no optimizer step.
"""

from dataclasses import dataclass, replace

from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    zero_variance_filter: bool = flag(
        False, "leave groups whose rewards are all equal out of the loss with all their tokens: "
               "out of its divisor (--reduction token-mean), and out of its KL, entropy and value "
               "terms",
        section="zero-variance groups",
        without={"num_generations=1": "a group of one response has nothing to compare"})


class ZeroVarianceFilter(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.zero_variance_filter

    def __init__(self, run):
        self.settings = run.settings
        self.task = run.task

    def advantages(self, batch):
        """After the advantages, which whitening has computed over all tokens. Metrics of rewards
        and lengths still describe all groups (batch.sampled)."""
        rollout = batch.rollout
        live = self.task.groups_with_signal(self.settings, rollout, batch.parts)    # [Q]
        live = live.repeat_interleave(batch.group_size)                             # [B]
        batch.rollout = replace(rollout, mask=rollout.mask & live[:, None])
        batch.advantages = batch.advantages.clone()                                 # [B] or [B, T]
        batch.advantages[~live] = 0.0
