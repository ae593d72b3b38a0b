"""The critic of PPO (1707.06347): a value head on the policy, trained on the returns of GAE.

It is there wherever the --advantage reads "values": `gae`, or a row of one's own. advantages.py has
the head (ValueHead), GAE and the clipped loss (value_loss).
"""

from advantages import ADVANTAGES, ValueHead, gae, value_loss
from features.feature import Feature, refuse

COEF = 0.5        # weight of the critic's loss, as in PPO2 and TRL's PPO


class Critic(Feature):
    gives = ("values",)
    adds_gradient = True
    needs_actor = True

    @classmethod
    def on(cls, settings):
        return "values" in ADVANTAGES[settings.advantage].reads

    @classmethod
    def check(cls, settings):
        if not cls.on(settings):
            return
        if settings.old_logp == "sampler":
            refuse(settings, "old_logp", f"cannot be combined with --advantage {settings.advantage}"
                   ": the critic's old values come from the pass that recomputes log-probs")
        for name in ("distillation_coef", "advantage_clip"):
            if getattr(settings, name, None):
                refuse(settings, name, f"cannot be combined with --advantage {settings.advantage}: "
                       "the critic's targets are computed from the advantages")

    def __init__(self, run):
        policy = run.actor.policy
        run.actor.critic = ValueHead(policy.config.hidden_size).to(policy.device)

    def before_updates(self, learner, batch, old):
        batch.more["values"] = old.values                                           # [B, T]

    def in_loss(self, part, new, mini):
        mask = part.rollout.mask                                                    # [B, T]
        values = part.more["values"]                                                # [B, T]
        per_token = mask / mini.rollout.mask.sum().clamp(min=1)                     # [B, T]
        _, returns = gae(part.rewards, values, mask)                                # [B, T]
        loss = value_loss(new.values, values, returns, mask, per_token)
        return {"value_loss": COEF * loss}
