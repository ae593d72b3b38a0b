"""Dynamic sampling (DAPO 2503.14476 eq. 11): sample further prompts until the rollout batch has
only groups with different rewards, which are those that have a gradient.
"""

from dataclasses import dataclass, replace

import torch

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

    def __init__(self, run):
        self.settings = run.settings
        self.task = run.task

    def resample(self, rounds, draw):
        count = self.settings.prompts_per_step
        signal = self._find_signal(*rounds[0])                                      # [Q]
        while signal.sum() < count and len(rounds) < ROUNDS:
            rounds.append(draw(len(rounds)))
            signal = torch.cat([signal, self._find_signal(*rounds[-1])])            # [Q]
        keep = signal.int().argsort(descending=True, stable=True)[:count]           # [q]
        rollouts, problems, parts = zip(*rounds)
        G = rollouts[0].group_size
        rows = torch.arange(len(signal) * G).view(-1, G)[keep.cpu()].flatten()      # [q · G]
        # metrics describe all of them, without what would take much memory
        rounds[:] = [(replace(rollout, forced_routes=None), *others)
                     for rollout, *others in rounds]
        problems = sum(problems, [])
        return concat(rollouts).take(rows), [problems[i] for i in rows], torch.cat(parts)[rows]

    def _find_signal(self, rollout, problems, parts):
        """Which groups have a gradient, [Q] bool."""
        return self.task.groups_with_signal(self.settings, rollout, parts)  # [Q]
