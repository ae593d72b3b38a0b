"""Credit per token: where the first wrong step of a response begins, for an --advantage that reads
"blamed", such as token_credit (advantages.py). The built-in task knows it (Task.first_error).
"""

import torch

from advantages import ADVANTAGES
from features.feature import Feature
from plumbing.refusal import Refusal


class TokenCredit(Feature):
    provides = ("blamed",)

    @classmethod
    def on(cls, settings):
        by_characters = settings.builtin_task and not settings.model_name_or_path
        return by_characters and "blamed" in ADVANTAGES[settings.advantage].reads

    def __init__(self, run):
        self.task = run.task
        if not self.task.first_error:
            raise Refusal(f"--advantage {run.settings.advantage} needs to know the first wrong "
                          f"step: the task {self.task.name!r} has no first_error")

    def after_scoring(self, learner, batch, old):
        rollout = batch.rollout
        errors = list(map(self.task.first_error, rollout.texts, batch.problems))
        batch.extras["blamed"] = find_blamed(errors, rollout.mask)                  # [B, T]


def find_blamed(errors, mask):
    """[B, T] bool: the response tokens (one per character) at or after the first wrong step, whose
    place `errors` has for each response; None: all is right, so it does not matter."""
    first = torch.tensor([place or 0 for place in errors], device=mask.device)    # [B]
    places = torch.arange(mask.shape[1], device=mask.device)                        # [T]
    return places >= first[:, None]                                                 # [B, T]
