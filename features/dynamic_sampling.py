"""Dynamic sampling (DAPO 2503.14476 eq. 11): sample further prompts until the rollout batch has
only groups with different rewards, which are those that have a gradient.
"""

from dataclasses import dataclass, replace

import torch

from advantages import (ADVANTAGES, estimate_advantages, find_missing, groups_with_signal,
                        has_signal)
from features.feature import Feature, flag

ROUNDS = 10             # of sampling, at most; then zero-variance groups fill the batch


@dataclass(frozen=True)
class Flags:
    dynamic_sampling: bool = flag(False, "DAPO: sample until every group has right and wrong "
                                         "responses", section="dynamic sampling",
                                  without={"num_generations=1": "a group of one response has "
                                                                "nothing to compare"})


class DynamicSampling(Feature):
    flags = Flags

    def resample(self, rounds, draw):
        count = self.settings.prompts_per_step
        signal = self._find_signal(*rounds[0])                                      # [Q]
        while signal.sum() < count and len(rounds) < ROUNDS:
            rounds.append(draw(len(rounds)))
            signal = torch.cat([signal, self._find_signal(*rounds[-1])])            # [Q]
        self.signal = signal                                                        # [Q]
        keep = signal.int().argsort(descending=True, stable=True)[:count]           # [q]
        (first, *others), problems, parts = zip(*rounds)
        G = first.group_size
        rows = torch.arange(len(signal) * G).view(-1, G)[keep.cpu()].flatten()      # [q · G]
        # metrics describe all of them, without what would take much memory
        rounds[:] = [(replace(rollout, forced_routes=None), *rest) for rollout, *rest in rounds]
        problems = sum(problems, [])
        return first.join(others).take(rows), [problems[i] for i in rows], torch.cat(parts)[rows]

    def metrics(self, batch, mini, new):
        """The core's number, of all groups that were sampled."""
        return {"zero_variance_groups": 1 - self.signal.float().mean().item()}

    def _find_signal(self, rollout, problems, parts):
        """Which groups have a gradient, [Q] bool; where the --advantage reads what is not known
        before the old log-probs: those with different rewards."""
        name, task, G = self.settings.advantage, self.learner.task, rollout.group_size
        rewards = task.total(parts)                                                 # [B]
        inputs = {"parts": parts, "part_weights": task.weights(parts), "mask": rollout.mask}
        if task.played:
            inputs["turn_rewards"] = rollout.turn_rewards                           # [B, T]
        if find_missing(ADVANTAGES[name], inputs):
            return has_signal(rewards, G)                                           # [Q]
        advantages = estimate_advantages(name, rewards, G, self.settings.scale_rewards, **inputs)
        return groups_with_signal(name, rewards, G, advantages)                     # [Q]
