"""Entropy: a bonus for it in the loss, and training on the tokens with the highest entropy alone.

The bonus is the mean over loss tokens of the policy's entropy (A3C 1602.01783). --entropy_quantile
leaves out the tokens below a quantile of the rollout batch (2506.01939, "beyond the 80/20 rule").
"""

from dataclasses import dataclass

from features.feature import Feature, flag, refuse
from losses import high_entropy_mask


@dataclass(frozen=True)
class BonusFlags:
    entropy_coef: float = flag(0.0, "coefficient of the entropy bonus", at_least=0,
                               section="the entropy")


class Entropy(Feature):
    """The bonus."""

    flags = BonusFlags

    def __init__(self, learner):
        super().__init__(learner)
        learner.needs_new_entropy = True

    def loss(self, micro, scores, mini):
        per_token = micro.rollout.mask / mini.rollout.mask.sum().clamp(min=1)       # [B, T]
        return {"entropy_loss": -self.settings.entropy_coef * (per_token * scores.entropy).sum()}


@dataclass(frozen=True)
class QuantileFlags:
    entropy_quantile: float = flag(
        0.0, "train only on tokens whose entropy is at or above this quantile of the rollout "
             "batch; the others stay in the divisor; 0: train on all tokens", at_least=0, at_most=1,
        needs={"old_logp=recompute": "which computes the entropies"})


class HighEntropy(Feature):
    """The tokens with the highest entropy."""

    flags = QuantileFlags

    @classmethod
    def check(cls, settings):
        if settings.entropy_quantile and not settings.row.per_token:
            refuse(settings, "entropy_quantile", "needs a ratio per token, as in gspo_token")

    def __init__(self, learner):
        super().__init__(learner)
        learner.needs_old_entropy = True

    def after_scoring(self, learner, batch, old):
        batch.scale_surrogate(high_entropy_mask(old.entropy, batch.rollout.mask,
                                                self.settings.entropy_quantile))
