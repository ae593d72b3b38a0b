"""Responses that are too long: DAPO's penalty near the length limit, and responses that were cut
off there left out of the loss.

Both are from DAPO (2503.14476, section 3.4). advantages.overlong_penalty has the formula.
"""

import itertools
from dataclasses import dataclass, replace

import torch

from advantages import overlong_penalty
from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    overlong_cache: float = flag(
        0.0, "DAPO: length penalty on the reward, from 0 to -1 over this last share of "
             "--max_completion_length; 0: no penalty", at_least=0, at_most=1,
        section="long responses")
    mask_truncated_completions: bool = flag(
        False, "leave responses that were cut off at --max_completion_length out of the loss; "
               "their rewards still count in the group")


class Lengths(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.overlong_cache > 0 or settings.mask_truncated_completions

    @classmethod
    def task(cls, settings, task, load):
        """The built-in task's length limit leaves room for its longest answer."""
        if settings.builtin_task:
            task.own_length = task.max_completion_length     # whose random numbers stay the same
            task.max_completion_length = limit(task.max_completion_length, settings.overlong_cache)
        return task

    def __init__(self, learner):
        super().__init__(learner)
        self.limit = learner.task.max_completion_length
        if self.settings.overlong_cache:
            learner.task.penalties += ("overlong",)

    def after_scoring(self, learner, batch, old):
        if self.settings.overlong_cache:
            batch.parts = self._longer(batch.rollout, batch.parts)                   # [B, K + 1]
            batch.sampled = tuple((one, self._longer(one, parts)) for one, parts in batch.sampled)

    def advantages(self, batch):
        """After the advantages, in which the rewards of all responses count. Metrics of rewards and
        lengths still describe all of them (batch.sampled)."""
        if self.settings.mask_truncated_completions:
            rollout = batch.rollout
            kept = rollout.mask & ~rollout.truncated[:, None]                       # [B, T]
            batch.rollout = replace(rollout, mask=kept)
            if batch.advantages.dim() == 2:
                batch.advantages = batch.advantages * kept                          # [B, T]

    def _longer(self, rollout, parts):
        """The reward components [B, K] with DAPO's penalty as one more, of weight 1: [B, K + 1].
        Like the limit, it counts observations, too: all tokens up to the policy's last one. A
        response that was cut off is as long as the limit."""
        mask = rollout.mask                                                         # [B, T]
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)             # [T]
        lengths = (mask * places).amax(-1).masked_fill(rollout.truncated, self.limit)    # [B]
        zone = overlong_zone(self.settings.overlong_cache, self.limit)
        penalty = overlong_penalty(lengths.to(parts.dtype), self.limit, zone)       # [B]
        return torch.cat([parts, penalty[:, None]], 1)                              # [B, K + 1]


def overlong_zone(share, max_length):
    """The number of tokens before max_length in which DAPO's penalty grows from 0 to -1: this share
    of max_length, at least 1."""
    return max(1, round(share * max_length))


def limit(longest, share):
    """The smallest length limit at which responses of `longest` tokens get no overlong penalty."""
    if not 0 < share < 1:
        return longest
    return next(n for n in itertools.count(longest) if n - overlong_zone(share, n) >= longest)
