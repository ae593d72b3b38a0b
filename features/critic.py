"""The critic of PPO (1707.06347): a value head on the policy, trained on the returns of GAE.

It is there wherever the --advantage reads "values": `gae` (advantages.py), or a user's row. One
optimizer trains both; verl's critic has an optimizer of its own.
"""

from dataclasses import dataclass

import torch
from torch import nn

from advantages import ADVANTAGES, gae, token_rewards
from features.feature import Feature, flag
from ratios import check_per_token

COEF = 0.5        # weight of the critic's loss, as in PPO2 and TRL's PPO


@dataclass(frozen=True)
class Flags:
    lam: float = flag(0.95, "λ of GAE, in the advantages and in the critic's targets; 1: the "
                            "return minus the value", at_least=0, at_most=1, section="the critic")


class Critic(Feature):
    flags = Flags
    provides = ("values", "lam")
    needs = "--algorithm ppo, or an --advantage that reads values, such as gae"

    @classmethod
    def on(cls, settings):
        return "values" in ADVANTAGES[settings.advantage].reads

    def __init__(self, learner):
        super().__init__(learner)
        policy = learner.policy
        learner.actor.critic = ValueHead(policy.config.hidden_size).to(policy.device)

    def after_scoring(self, learner, batch, old):
        batch.extras["values"] = old.values                                         # [B, T]
        batch.extras["lam"] = self.settings.lam

    def loss(self, micro, scores, mini):
        rewards = micro.rewards                                                     # [B]
        mask = micro.rollout.mask & ~rewards.isnan()[:, None]                       # [B, T]
        values = micro.extras["values"]                                             # [B, T]
        per_token = mask / mini.rollout.mask.sum().clamp(min=1)                     # [B, T]
        inputs = {x: micro.extras.get(x) for x in ("kl", "beta", "turn_rewards")}
        rewards = token_rewards(rewards, mask, parts=micro.parts,
                                part_weights=micro.task.weights(micro.parts), **inputs)   # [B, T]
        _, returns = gae(rewards, values, mask, lam=self.settings.lam)              # [B, T]
        loss = value_loss(scores.values, values, returns, mask, per_token)
        return {"value_loss": COEF * loss}


class ValueHead(nn.Module):
    """PPO's critic: a linear layer on the hidden states that predict the response tokens,
    [B, T, D] -> values [B, T]."""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden):
        return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1).float()  # [B, T]


def value_loss(values, old_values, returns, mask, weights=None, clip=0.2):
    """The critic's squared error with PPO's clip, ½ max((V - R)², (V_old + clip(V - V_old) - R)²).

    weights [B, T]: sum the errors weighted by these (losses.token_weights of the mini-batch);
    None: average over the loss tokens."""
    check_per_token(mask, values=values, old_values=old_values, returns=returns, weights=weights)
    values = values.masked_fill(~mask, 0.0)                                      # [B, T]
    old_values = old_values.detach().masked_fill(~mask, 0.0)                     # [B, T]
    returns = returns.detach().masked_fill(~mask, 0.0)                           # [B, T]
    clipped = old_values + (values - old_values).clamp(-clip, clip)              # [B, T]
    error = torch.max((values - returns).square(), (clipped - returns).square()) / 2
    if weights is None:
        weights = mask / mask.sum().clamp(min=1)                                 # [B, T]
    return (weights.masked_fill(~mask, 0.0) * error).sum()
