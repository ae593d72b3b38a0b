"""The critic of PPO (1707.06347): a value head on the policy, trained on the returns of GAE.

It is there wherever the --advantage reads "values": `gae`, or a user's row. advantages.py has
the head (ValueHead), GAE and the clipped loss (value_loss).

--critic_warmup gives it a head start, because advantages are no better than its values: the policy
stays as it is, and so do AdamW's moments of it. One optimizer trains both: its rate is
--learning_rate in the head start; warm-up and schedule begin after it, and end with the run. verl's
critic has an optimizer of its own, and its trainer.critic_warmup counts one batch more.
"""

from dataclasses import dataclass

from advantages import ADVANTAGES, ValueHead, gae, token_rewards, value_loss
from features.feature import Feature, flag, refuse

COEF = 0.5        # weight of the critic's loss, as in PPO2 and TRL's PPO


@dataclass(frozen=True)
class Flags:
    lam: float = flag(0.95, "λ of GAE, in the advantages and in the critic's targets; 1: the "
                            "return minus the value", at_least=0, at_most=1, section="the critic")
    critic_warmup: int = flag(
        0, "number of rollout batches at the beginning that train the critic alone, at the peak "
           "learning rate; its schedule begins after them", at_least=0)


class Critic(Feature):
    flags = Flags
    provides = ("values", "lam")
    needs = "--algorithm ppo, or an --advantage that reads values, such as gae"

    @classmethod
    def on(cls, settings):
        return "values" in ADVANTAGES[settings.advantage].reads

    @classmethod
    def check(cls, settings):
        if cls.on(settings) and settings.critic_warmup >= settings.steps:
            refuse(settings, "critic_warmup", f"leaves none of the --steps {settings.steps} to the "
                   "policy")

    def __init__(self, run):
        policy = run.actor.policy
        self.task = run.task
        run.actor.critic = ValueHead(policy.config.hidden_size).to(policy.device)
        self.lam = run.settings.lam
        self.warmup = run.frozen_batches = run.settings.critic_warmup

    def after_scoring(self, learner, batch, old):
        batch.extras["values"] = old.values                                         # [B, T]
        batch.extras["lam"] = self.lam
        steps = self.warmup * learner.settings.updates_per_batch
        if batch.step > self.warmup:
            learner.set_updates(max(learner.updates, steps))     # those that were skipped, too

    def loss(self, micro, scores, mini):
        mask = micro.rollout.mask                                                   # [B, T]
        values = micro.extras["values"]                                             # [B, T]
        per_token = mask / mini.rollout.mask.sum().clamp(min=1)                     # [B, T]
        inputs = {x: micro.extras.get(x) for x in ("kl", "beta", "turn_rewards")}
        rewards = token_rewards(micro.rewards, mask, parts=micro.parts,
                                part_weights=self.task.weights(micro.parts), **inputs)    # [B, T]
        _, returns = gae(rewards, values, mask, lam=self.lam)                       # [B, T]
        loss = value_loss(scores.values, values, returns, mask, per_token)
        return {"value_loss": COEF * loss}
