"""Two bounds beside the clip range, on what may become less likely. They are fields of the run's
row of losses.OBJECTIVES.

    --dual_clip         where A < 0, a token's gradient ends above w = c (1912.09729)
    --off_policy_mask   a response with A < 0 leaves the loss below s = e^-δ (2512.02556)
"""

from dataclasses import dataclass, replace

from features.feature import Feature, flag, refuse
from losses import OBJECTIVES


@dataclass(frozen=True)
class Flags:
    dual_clip: float | None = flag(None, "drop the gradient of tokens with a negative advantage "
                                   "whose token ratio is above this value", unset="off", above=1,
                                   section="bounds beside the clip range", also="delta")
    off_policy_mask: float | None = flag(
        None, "drop responses with a negative advantage whose mean log-prob fell by more than "
              "this many nats", unset="off", above=0, also="off_policy_mask_threshold")


class Bounds(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return bool(settings.dual_clip or settings.off_policy_mask)

    @classmethod
    def check(cls, settings):
        row = OBJECTIVES[settings.objective]
        if settings.dual_clip and (row.ratio, row.clip) != ("token", "min"):
            refuse(settings, "dual_clip", "needs an objective with the token ratio and PPO's clip, "
                   f"such as grpo, which {settings.algorithm} is not")

    @classmethod
    def row(cls, settings, row):
        return replace(row, dual_clip=settings.dual_clip, off_policy_mask=settings.off_policy_mask)
