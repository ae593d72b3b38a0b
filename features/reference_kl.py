"""The KL to a reference policy, which keeps the policy near the one that it started from.

    loss + β · KL(π_θ || π_ref)         in the loss (GRPO 2402.03300 eq. 4), by --kl_estimator
    r_t - β · (log π_old - log π_ref)   in the reward of every token, by --use_kl_in_reward, and
                                        where the --advantage reads "kl" (REINFORCE++)

The reference is the starting policy. losses.kl_penalty has the estimators.
"""

from dataclasses import dataclass

from advantages import ADVANTAGES
from features.feature import Feature, flag, refuse
from losses import kl_penalty
from ratios import masked_mean


@dataclass(frozen=True)
class Flags:
    beta: float = flag(
        0.0, "coefficient of the KL to the reference policy, which is the starting policy; 0: no "
             "KL and no reference policy", at_least=0, section="the KL to a reference policy")
    kl_estimator: str = flag("k3", "estimator of the KL of --beta",
                             choices=("k1", "k2", "k3", "k3_is", "k3_st"))
    use_kl_in_reward: bool = flag(
        False, "subtract the KL of --beta, as k1, from the reward of every token, in place of a "
               "term of the loss; an advantage per response reads its sum")


class ReferenceKL(Feature):
    flags = Flags
    provides = ("kl", "beta")

    @classmethod
    def check(cls, settings):
        if kl_in_rewards(settings) and settings.kl_estimator != "k3":
            refuse(settings, "kl_estimator", "has no effect: k1 is subtracted from the rewards "
                   "(--use_kl_in_reward, or an --advantage that reads kl)")
        reads = {"rewards", "token_rewards", "turn_rewards", "kl"}
        if settings.use_kl_in_reward and not reads & {*ADVANTAGES[settings.advantage].reads}:
            refuse(settings, "use_kl_in_reward", f"has no effect: --advantage {settings.advantage} "
                   "does not read the total reward")

    def __init__(self, learner):
        super().__init__(learner)
        self.reference = learner.load_reference()

    def after_scoring(self, learner, batch, old):
        ref_logp = learner.score(batch.rollout, scorer=self.reference).logp         # [B, T]
        batch.extras["ref_logp"] = ref_logp
        if kl_in_rewards(self.settings):
            mask = batch.rollout.mask                                               # [B, T]
            batch.extras["kl"] = kl_penalty(batch.old_logp, ref_logp, mask, "k1")   # [B, T]
            batch.extras["beta"] = self.settings.beta

    def metrics(self, batch, mini, new):
        mask = batch.rollout.mask
        return {"kl": masked_mean(kl_penalty(batch.old_logp, batch.extras["ref_logp"], mask), mask)}


class KLTerm(Feature):
    """The KL as a term of the loss."""

    @classmethod
    def on(cls, settings):
        return settings.beta > 0 and not kl_in_rewards(settings)

    def loss(self, micro, scores, mini):
        kl = kl_penalty(scores.logp, micro.extras["ref_logp"], micro.rollout.mask,
                        self.settings.kl_estimator, micro.old_logp)                 # [B, T]
        return {"kl_loss": self.settings.beta * (micro.weights * kl).sum()}


def kl_in_rewards(settings):
    """Whether the KL is subtracted from the rewards, not added to the loss."""
    return settings.use_kl_in_reward or "kl" in ADVANTAGES[settings.advantage].reads
