"""Advantages: was this answer better than one should have expected? Rewards in, Â out.

    group            (r - mean of its group) / std of its group    GRPO, GSPO: no critic
    leave-one-out    r - mean of the other answers                 RLOO: unbiased, no std
    REINFORCE++      returns, whitened over the batch's tokens     no group needed
    GAE              a learned value for every token               PPO: the critic

Rows are answers, the group_size answers to one query adjacent. rewards [B]; mask [B, T] bool, the
loss tokens. Results carry no gradient and are 0 outside the mask. Equal rewards give exactly 0 (see
centre). ValueError: what is not finite, not of these shapes, or leaves no group.
"""

import torch
from torch import nn

from ratios import check_per_token


def group_advantages(rewards, group_size, scale="group", unbiased=False, eps=1e-6):
    """(r_i - mean_group) / (std + eps), [B]. A group of equal rewards is exactly 0.

    scale     "group": the group's own std (GRPO 2402.03300, GSPO 2507.18071 eq. 6); "batch": that
              of all rewards (Lite-PPO 2508.08221); "none": no division (Dr. GRPO 2503.20783);
              "mean": by the group's mean, as in the gradient of log pass rate (MaxRL 2602.02710)
    unbiased  the std with G - 1, as most libraries have it: rewards 1,0,1,0 give ±0.866, not ±1
    """
    if scale not in ("group", "batch", "none", "mean"):
        raise ValueError(f"scale {scale!r} is unknown; known: group, batch, none, mean")
    groups = check_rewards(rewards, group_size)                                  # [prompts, G]
    centred = centre(groups)                                                     # [prompts, G]
    if scale == "none":
        return centred.flatten()                                                 # [B]
    if scale == "mean":
        mean = groups.mean(-1, keepdim=True)                                     # [prompts, 1]
        return (centred / mean).masked_fill(mean <= 0, 0.0).flatten()            # [B]
    if scale == "group":
        variance = centred.square().sum(-1, keepdim=True) / (group_size - unbiased)  # [prompts, 1]
    else:
        variance = centre(groups.flatten()).square().sum() / (groups.numel() - unbiased)
    std = variance.sqrt()
    return (centred / (std + eps).masked_fill(std == 0, 1.0)).flatten()          # [B]  GSPO eq. 6


def leave_one_out(rewards, group_size):
    """r_i - mean of the other rewards = G / (G - 1) · (r_i - mean_group), [B]. RLOO 2402.14740."""
    centred = centre(check_rewards(rewards, group_size))                         # [prompts, G]
    return (centred * group_size / (group_size - 1)).flatten()                   # [B]


def gdpo(parts, weights, group_size, unbiased=False, eps=1e-6):
    """Rewards in parts [B, parts] and a weight for each part -> [B]. Each part is normalised in its
    group, so that none drowns another; their weighted sum is divided by its std over the batch
    (its mean is 0, as that of every group is). GDPO 2601.05242."""
    if parts.dim() != 2 or parts.shape[1] != len(weights):
        raise ValueError(f"parts is {list(parts.shape)}: [B, {len(weights)}], a column per weight")
    columns = [group_advantages(part, group_size, "group", unbiased, eps) for part in parts.T]
    total = sum(weight * column for weight, column in zip(weights, columns))     # [B]
    std = (total.square().sum() / (len(total) - unbiased)).sqrt()                # []
    return total / (std + eps)                                                   # [B]


def reinforce_plus_plus(rewards, mask, baseline_group_size=None, kl=None, beta=0.0, gamma=1.0,
                        eps=1e-8):
    """Returns-to-go, whitened over all loss tokens of the batch: [B, T]. REINFORCE++ 2501.03262.

    The reward falls on the last loss token; beta * kl [B, T] (k1 = log π_old - log π_ref) is taken
    off every token. baseline_group_size: rewards are first centred in their group."""
    check_per_token(mask, kl=kl)
    if baseline_group_size is not None:
        rewards = centre(check_rewards(rewards, baseline_group_size)).flatten()  # [B]
    token_rewards = at_last_token(rewards, mask)                                 # [B, T]
    if kl is not None:
        token_rewards = token_rewards - beta * kl.detach().masked_fill(~mask, 0.0)
    no_critic = torch.zeros_like(token_rewards)                                  # [B, T]
    returns, _ = gae(token_rewards, no_critic, mask, gamma, lam=1.0)             # [B, T]
    return whiten(returns, mask, eps)                                            # [B, T]


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation (1506.02438 eq. 16): (advantages, returns), [B, T] each; the
    returns train the critic. rewards [B], paid at the last loss token, or [B, T]. values [B, T]:
    the critic's estimate before each token. lam = 1: return minus value; 0: a single TD error."""
    check_per_token(mask, values=values, rewards=rewards if rewards.dim() == 2 else None)
    rewards = at_last_token(rewards, mask) if rewards.dim() == 1 else rewards    # [B, T]
    values = values.detach().masked_fill(~mask, 0.0)                             # [B, T]
    advantages = torch.zeros_like(values)                                        # [B, T]
    next_value = running = torch.zeros_like(values[:, 0])                        # [B]
    for t in reversed(range(mask.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]                # [B]  TD error δ_t
        running = torch.where(mask[:, t], error + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = advantages.masked_fill(~mask, 0.0)                              # [B, T]
    return advantages, advantages + values


class ValueHead(nn.Module):
    """PPO's critic: a linear layer on the states that predict tokens, [B, T, D] -> [B, T]."""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden):
        return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1).float()  # [B, T]


def value_loss(values, old_values, returns, mask, weights=None, clip=0.2):
    """The critic's error with PPO's clip, ½ max((V - R)², (V_old + clip(V - V_old) - R)²), averaged
    by weights [B, T] (losses.token_weights, of the mini-batch); None: over the loss tokens."""
    check_per_token(mask, values=values, old_values=old_values, returns=returns, weights=weights)
    values = values.masked_fill(~mask, 0.0)                                      # [B, T]
    old_values = old_values.detach().masked_fill(~mask, 0.0)                     # [B, T]
    returns = returns.detach().masked_fill(~mask, 0.0)                           # [B, T]
    clipped = old_values + (values - old_values).clamp(-clip, clip)              # [B, T]
    error = torch.max((values - returns).square(), (clipped - returns).square()) / 2
    if weights is None:
        weights = mask / mask.sum().clamp(min=1)                                 # [B, T]
    return (weights.masked_fill(~mask, 0.0) * error).sum()


def has_signal(rewards, group_size):
    """Which groups hold different rewards, [prompts] bool: DAPO (2503.14476 eq. 11) keeps these."""
    groups = check_rewards(rewards, group_size)                                  # [prompts, G]
    return groups.amax(-1) > groups.amin(-1)                                     # [prompts]


def not_all_correct(rewards, group_size, correct=1.0):
    """Which groups hold a reward below `correct`, [prompts] bool: SRPO (2504.14286) keeps these."""
    return check_rewards(rewards).view(-1, group_size).amin(-1) < correct        # [prompts]


def overlong_penalty(lengths, max_length, cache):
    """DAPO's soft length penalty (2503.14476 eq. 13), [B], to be added to the rewards. lengths [B]
    in tokens: 0 up to max_length - cache, from there linearly down to -1 at max_length."""
    if not 0 < cache <= max_length:
        raise ValueError(f"cache is {cache}, max_length is {max_length}: 0 < cache <= max_length")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)             # [B]


def centre(x):
    """x less its mean along the last dimension; via the first entry: equal ones are exactly 0."""
    x = x - x[..., :1]
    return x - x.mean(-1, keepdim=True)


def whiten(x, mask, eps=1e-8):
    """(x - mean) / sqrt(var + eps) over the loss tokens, population variance: [B, T], 0 outside."""
    check_per_token(mask, x=x)
    centred = centre(x[mask])                                                    # [loss tokens]
    white = centred / (centred.square().mean() + eps).sqrt()                     # [loss tokens]
    return torch.zeros_like(x).masked_scatter(mask, white)                       # [B, T]


def at_last_token(rewards, mask):
    """[B] -> [B, T]: each reward on its row's last loss token, 0 elsewhere."""
    rewards = check_rewards(rewards)                                             # [B]
    if len(rewards) != len(mask):
        raise ValueError(f"rewards is {list(rewards.shape)} but mask is {list(mask.shape)}")
    later = mask.flip(-1).cumsum(-1).flip(-1)                                    # [B, T]
    return rewards[:, None] * (mask & (later == 1))                              # [B, T]


def check_rewards(rewards, group_size=None):
    """rewards [B] as float, in groups [B / group_size, group_size] if that is given."""
    if rewards.dim() != 1 or not torch.isfinite(rewards).all():
        raise ValueError(f"rewards is {list(rewards.shape)}: it must be [B], all finite")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if group_size is None:
        return rewards
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size is {group_size}, rewards is {list(rewards.shape)}: groups of "
                         "two or more")
    return rewards.view(-1, group_size)                                          # [prompts, G]


if __name__ == "__main__":
    def row(label, numbers):
        print(f"  {label:22}" + "".join(f"{round(x, 3) + 0.0:+8.3f}" for x in numbers))

    print("Two queries, four answers each: the papers' example, and one that is always right\n")
    rewards = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1])
    row("rewards", rewards.tolist())
    for scale, name in (("group", "GRPO, GSPO"), ("none", "Dr. GRPO"), ("mean", "MaxRL")):
        row(f"{scale} ({name})", group_advantages(rewards, 4, scale).tolist())
    row("leave-one-out (RLOO)", leave_one_out(rewards, 4).tolist())
    print("\nA right answer; GAE pays for what the critic comes to believe\n")
    values = torch.tensor([[0.5, 0.5, 0.4, 0.3, 0.7, 0.8, 0.9, 0.9]])
    row("values", values[0].tolist())
    for lam in (0.0, 0.95, 1.0):
        found, _ = gae(rewards[:1], values, torch.ones(1, 8, dtype=torch.bool), lam=lam)
        row(f"advantages, λ = {lam}", found[0].tolist())
