"""The KL to a reference policy, which keeps the policy near the one that it started from.

    loss + β · KL(π_θ || π_ref)         in the loss (GRPO 2402.03300 eq. 4), by --kl_estimator
    r_t - β · (log π_old - log π_ref)   in the reward of every token, by --use_kl_in_reward, and
                                        where the --advantage reads "kl" (REINFORCE++)

The reference is the starting policy. With --sync_ref_model it follows the policy (TR-DPO
2404.09656). losses.kl_penalty has the estimators.
"""

from dataclasses import dataclass

from advantages import ADVANTAGES
from features.feature import Feature, flag, refuse
from features.moving import list_weights, move_towards, restore_weights
from losses import kl_penalty
from ratios import masked_mean


@dataclass(frozen=True)
class Flags:
    beta: float = flag(
        0.0, "coefficient of the KL to the reference policy, which is the starting policy; 0: no "
             "KL and no reference policy", at_least=0, section="the KL to a reference policy",
        also="kl_coef kl init_kl_coef kl_loss_coef kl_weight")
    kl_estimator: str = flag("k3", "estimator of the KL of --beta",
                             choices=("k1", "k2", "k3", "k3_is", "k3_st"), needs="beta",
                             also="use_bias_correction_kl=k3_is")
    use_kl_in_reward: bool = flag(
        False, "subtract the KL of --beta, as k1, from the reward of every token, in place of a "
               "term of the loss; an advantage per response reads its sum",
        needs="beta", without={"scale_rewards=mean": "MaxRL divides by the mean reward of a group, "
                                                     "which must not be below 0"})
    sync_ref_model: bool = flag(False, "move the reference policy of --beta towards the policy, "
                                       "every --ref_model_sync_steps rollout batches",
                                needs={"beta": "without it there is no reference policy"})
    ref_model_mixup_alpha: float = flag(
        0.6, "share of the policy in the new reference policy of --sync_ref_model; 1: the policy "
             "itself", above=0, at_most=1, needs="sync_ref_model")
    ref_model_sync_steps: int = flag(512, "number of rollout batches between two moves of the "
                                     "reference policy", at_least=1, needs="sync_ref_model")


class ReferenceKL(Feature):
    flags = Flags
    provides = ("kl", "beta")

    @classmethod
    def on(cls, settings):
        return settings.beta > 0

    @classmethod
    def check(cls, settings):
        if kl_in_rewards(settings) and settings.kl_estimator != "k3":
            refuse(settings, "kl_estimator", "has no effect: k1 is subtracted from the rewards "
                   "(--use_kl_in_reward, or an --advantage that reads kl)")
        reads = {"rewards", "token_rewards", "turn_rewards", "kl"}
        if settings.use_kl_in_reward and not reads & {*ADVANTAGES[settings.advantage].reads}:
            refuse(settings, "use_kl_in_reward", f"has no effect: --advantage {settings.advantage} "
                   "does not read the total reward")

    @classmethod
    def notes(cls, settings):
        every = settings.ref_model_sync_steps
        if not settings.sync_ref_model or every < settings.steps:
            return []
        return [f"note: the reference policy moves after every {every} rollout batches "
                f"(--ref_model_sync_steps), and never in this run of {settings.steps}"]

    def __init__(self, run):
        self.settings = run.settings
        self.actor = run.actor
        self.reference = run.load_reference()
        if kl_in_rewards(run.settings):
            self.loss = None

    def after_scoring(self, learner, batch, old):
        settings = self.settings
        done = batch.step - 1                                # batches
        if settings.sync_ref_model and done and done % settings.ref_model_sync_steps == 0:
            move_towards(self.reference, self.actor.policy, settings.ref_model_mixup_alpha)
        ref_logp = learner.score(batch.rollout, scorer=self.reference).logp         # [B, T]
        batch.extras["ref_logp"] = ref_logp
        if kl_in_rewards(settings):
            mask = batch.rollout.mask                                               # [B, T]
            batch.extras["kl"] = kl_penalty(batch.old_logp, ref_logp, mask, "k1")   # [B, T]
            batch.extras["beta"] = settings.beta

    def loss(self, micro, scores, mini):
        kl = kl_penalty(scores.logp, micro.extras["ref_logp"], micro.rollout.mask,
                        self.settings.kl_estimator, micro.old_logp)                 # [B, T]
        return {"kl_loss": self.settings.beta * (micro.weights * kl).sum()}

    def metrics(self, batch, mini, new):
        mask = batch.rollout.mask
        return {"kl": masked_mean(kl_penalty(batch.old_logp, batch.extras["ref_logp"], mask), mask)}

    def state_dict(self):
        moves = self.settings.sync_ref_model
        return {"reference": list_weights(self.reference)} if moves else {}

    def load_state_dict(self, state):
        if self.settings.sync_ref_model:
            restore_weights(self.reference, state.get("reference"))


def kl_in_rewards(settings):
    """Whether the KL is subtracted from the rewards, not added to the loss."""
    return settings.use_kl_in_reward or "kl" in ADVANTAGES[settings.advantage].reads
