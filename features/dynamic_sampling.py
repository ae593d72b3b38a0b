"""Dynamic sampling (DAPO 2503.14476 eq. 11): sample further prompts until the rollout batch has
only groups with different rewards, which are those that have a gradient.
"""

from dataclasses import dataclass, replace

import torch

from advantages import groups_with_signal
from features.feature import Feature, flag
from plumbing.speed.rollouts import concat

ROUNDS = 10             # of sampling, at most; then zero-variance groups fill the batch


@dataclass(frozen=True)
class Flags:
    dynamic_sampling: bool = flag(False, "DAPO: sample until every group has right and wrong "
                                         "responses", section="dynamic sampling",
                                  without={"num_generations=1": "a group of one response has "
                                                                "nothing to compare"})


class DynamicSampling(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.dynamic_sampling

    def __init__(self, run):
        self.run = run

    def resample(self, rounds, draw):
        settings = self.run.settings
        while True:
            last = len(rounds) == ROUNDS
            if chosen := keep_signal(rounds, settings.prompts_per_step, settings.advantage,
                                     self.run.task.total, last):
                break
            rounds.append(draw(len(rounds)))
        # metrics describe all of them, without what is attached, which would take much memory
        rounds[:] = [(replace(rollout, attached={}), *more) for rollout, *more in rounds]
        return chosen


def keep_signal(rounds, count, advantage, total, last):
    """The first `count` groups with different rewards, total(parts, G) [B], of the rounds, a list
    of (rollout, problems, parts [B, K]): one such round, or None if there are not enough yet. In
    the last round the missing groups are filled with zero-variance groups."""
    chosen = []
    for number, (rollout, problems, parts) in enumerate(rounds, 1):
        G = rollout.group_size
        signal = groups_with_signal(advantage, total(parts, G), G, rollout.turn_rewards,
                                    rollout.mask)                                   # [Q]
        keep = signal.nonzero().squeeze(-1)                                         # [q]
        if last and number == len(rounds):
            keep = signal.int().argsort(descending=True, stable=True)               # [Q]
        if len(keep):
            groups = parts.view(len(problems), G, -1)[keep]                         # [q, G, K]
            chosen.append((rollout.groups(keep), [problems[i] for i in keep], groups.flatten(0, 1)))
    if sum(len(problems) for _, problems, _ in chosen) < count:
        return None
    rollouts, problems, parts = zip(*chosen)
    rows = count * rounds[0][0].group_size
    return concat(rollouts).rows(0, rows), sum(problems, [])[:count], torch.cat(parts)[:rows]
