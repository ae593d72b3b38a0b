"""The clip of advantages: every one is limited to [-c, c], as NeMo-RL and ROLL do, so that one rare
right response in a large group does not decide the step.
"""

from dataclasses import dataclass

from features.feature import Feature, flag


@dataclass(frozen=True)
class Flags:
    advantage_clip: float | None = flag(None, "limit every advantage to this value, up and down",
                                        unset="no limit", above=0, section="advantages")


class AdvantageClip(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.advantage_clip is not None

    @classmethod
    def trl(cls, settings):
        return "clip of the advantages"

    verl = trl

    def __init__(self, run):
        self.limit = run.settings.advantage_clip

    def advantages(self, batch):
        batch.advantages = batch.advantages.clamp(-self.limit, self.limit)          # [B] or [B, T]
