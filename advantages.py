"""Advantages: was this answer better than one should have expected? Rewards in, Â out.

    group            (r - mean of its group) / std of its group        GRPO, GSPO: the baseline is the same query's answers
    leave-one-out    r - mean of the other answers                      RLOO: unbiased, no std
    REINFORCE++      returns, whitened over all tokens of the batch     no group needed
    GAE              a learned value for every token                    PPO: the critic the others do without

Rows are answers, the group_size answers to one query adjacent. rewards [B]; mask [B, T] bool, the loss tokens. Results are
float32 (float64 for float64 rewards), carry no gradient and are 0 outside the mask. Equal rewards give exactly 0, whatever they
are (see centre): rounding noise divided by a std of almost nothing would be a signal.

ValueError everywhere: rewards that are not [B] or not finite, group sizes that do not divide B or leave nothing to compare with
(1), shapes that disagree, a mask that is not boolean.
"""

import torch
from torch import nn


def group_advantages(rewards, group_size, scale="group", unbiased=False, eps=1e-6):
    """(r_i - mean_group) / (std + eps), [B]. A group of equal rewards is exactly 0.

    scale     "group": the group's own std (GRPO 2402.03300, GSPO 2507.18071 eq. 6); "batch": the std of all rewards (Lite-PPO
              2508.08221); "none": no division (Dr. GRPO 2503.20783)
    unbiased  the std with G - 1, which most libraries compute: rewards 1,0,1,0 give ±0.866 where the papers' example has ±1
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r} is unknown: it must be 'group', 'batch' or 'none'")
    groups = check_rewards(rewards, group_size)                                         # [prompts, G]
    centred = centre(groups)                                                            # [prompts, G]
    if scale == "none":
        return centred.flatten()                                                        # [B]
    if scale == "group":
        std = (centred.square().sum(-1, keepdim=True) / (group_size - unbiased)).sqrt()  # [prompts, 1]
    else:
        std = (centre(groups.flatten()).square().sum() / (groups.numel() - unbiased)).sqrt()
    return (centred / (std + eps).masked_fill(std == 0, 1.0)).flatten()                 # [B]  GSPO eq. 6


def leave_one_out(rewards, group_size):
    """r_i - mean of the other rewards of its group = G / (G - 1) · (r_i - mean_group), [B]. RLOO 2402.14740."""
    return (centre(check_rewards(rewards, group_size)) * group_size / (group_size - 1)).flatten()   # [B]


def reinforce_plus_plus(rewards, mask, baseline_group_size=None, kl=None, beta=0.0, gamma=1.0, eps=1e-8):
    """Returns-to-go, whitened over all loss tokens of the batch: [B, T]. REINFORCE++ 2501.03262.

    The reward falls on an answer's last loss token; beta * kl [B, T] (k1 = log π_old - log π_ref per token) is taken off every
    token. baseline_group_size: the rewards are first centred in their group (REINFORCE++-baseline). Whitening still subtracts the
    mean over tokens, so a group of equal rewards is 0 only where that mean is.
    """
    check_mask(mask, kl=kl)
    if baseline_group_size is not None:
        rewards = centre(check_rewards(rewards, baseline_group_size)).flatten()         # [B]
    token_rewards = at_last_token(rewards, mask)                                        # [B, T]
    if kl is not None:
        token_rewards = token_rewards - beta * kl.detach().masked_fill(~mask, 0.0)      # [B, T]
    returns, running = torch.zeros_like(token_rewards), torch.zeros_like(token_rewards[:, 0])   # [B, T], [B]
    for t in reversed(range(mask.shape[1])):
        running = torch.where(mask[:, t], token_rewards[:, t] + gamma * running, running)   # [B]  tool output is no step
        returns[:, t] = running
    return whiten(returns, mask, eps)                                                   # [B, T]


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation (1506.02438 eq. 16): (advantages, returns), both [B, T]. The returns train the critic.

    rewards [B], paid at an answer's last loss token, or [B, T]. values [B, T]: the critic's estimate before each token. Steps are
    loss tokens: tool output between them is skipped. lam = 1 gives return minus value, lam = 0 the TD error of one step.
    """
    check_mask(mask, values=values, rewards=rewards if rewards.dim() == 2 else None)
    rewards = at_last_token(rewards, mask) if rewards.dim() == 1 else rewards           # [B, T]
    values = values.detach().masked_fill(~mask, 0.0)                                    # [B, T]
    advantages = torch.zeros_like(values)                                               # [B, T]
    next_value, running = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])        # [B], [B]
    for t in reversed(range(mask.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]                       # [B]  the TD error δ_t
        running = torch.where(mask[:, t], error + gamma * lam * running, running)       # [B]
        next_value = torch.where(mask[:, t], values[:, t], next_value)                  # [B]
        advantages[:, t] = running
    advantages = advantages.masked_fill(~mask, 0.0)                                     # [B, T]
    return advantages, advantages + values


class ValueHead(nn.Module):
    """PPO's critic: a linear layer on the policy's last hidden state [B, T, D] -> values [B, T] float32, 0 before any training.

    A token is valued from the state that predicts it. hidden.detach() keeps the critic's loss out of the policy's weights.
    """

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden):
        return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1).float()     # [B, T]


def value_loss(values, old_values, returns, mask, weights=None, clip=0.2):
    """The critic's squared error with PPO's clip: ½ max((V - R)², (V_old + clip(V - V_old, ±clip) - R)²), averaged, 0-dim.

    values, old_values, returns [B, T]; the gradient goes to values. weights [B, T]: cut from the token_weights (losses.py) of the
    mini-batch that this is a part of; None: the mean over the loss tokens.
    """
    check_mask(mask, values=values, old_values=old_values, returns=returns, weights=weights)
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach()))  # [B, T]
    clipped = old_values + (values - old_values).clamp(-clip, clip)                     # [B, T]
    error = torch.max((values - returns).square(), (clipped - returns).square()) / 2    # [B, T]
    weights = mask / mask.sum().clamp(min=1) if weights is None else weights.masked_fill(~mask, 0.0)  # [B, T]
    return (weights * error).sum()


def has_signal(rewards, group_size):
    """Which groups hold different rewards, [prompts] bool. DAPO's dynamic sampling (2503.14476 eq. 11) drops the rest: Â = 0."""
    groups = check_rewards(rewards, group_size)                                         # [prompts, G]
    return groups.amax(-1) > groups.amin(-1)                                            # [prompts]


def not_all_correct(rewards, group_size, correct=1.0):
    """Which groups hold a reward below `correct`, [prompts] bool. SRPO's history resampling (2504.14286) keeps these for the next
    epoch: the mixed ones and, unlike DAPO, the all-wrong ones, which may yet be learnt."""
    return check_rewards(rewards, group_size).amin(-1) < correct                        # [prompts]


def overlong_penalty(lengths, max_length, cache):
    """DAPO's soft length penalty (2503.14476 eq. 13), [B], to be added to the rewards. lengths [B] in tokens: 0 up to
    max_length - cache, from there linearly down to -1 at max_length, never lower."""
    if not 0 < cache <= max_length:
        raise ValueError(f"cache is {cache}, max_length is {max_length}: the penalty grows over the last cache tokens before "
                         "max_length, so 0 < cache <= max_length")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)                    # [B]


def centre(x):
    """x minus its mean along the last dimension. Taking off the first entry before the mean changes nothing on paper; in floating
    point it makes equal entries exactly 0 and keeps the digits of rewards near 1e6."""
    x = x - x[..., :1]
    return x - x.mean(-1, keepdim=True)


def whiten(x, mask, eps=1e-8):
    """(x - mean) / sqrt(var + eps) over the loss tokens, population variance: [B, T], 0 outside the mask."""
    check_mask(mask, x=x)
    centred = centre(x[mask])                                                           # [loss tokens]
    return torch.zeros_like(x).masked_scatter(mask, centred / (centred.square().mean() + eps).sqrt())   # [B, T]


def at_last_token(rewards, mask):
    """[B] -> [B, T]: each reward on its row's last loss token, 0 elsewhere (and everywhere in a row without any)."""
    rewards = check_rewards(rewards)                                                    # [B]
    if len(rewards) != len(mask):
        raise ValueError(f"rewards is {list(rewards.shape)} but mask is {list(mask.shape)}: one reward per row")
    later = mask.flip(-1).cumsum(-1).flip(-1)                                           # [B, T]  loss tokens from here on
    return rewards[:, None] * (mask & (later == 1))                                     # [B, T]


def check_rewards(rewards, group_size=None):
    """rewards [B] as float, in groups [B / group_size, group_size] if that is given; ValueError if they are unusable."""
    if rewards.dim() != 1 or not torch.isfinite(rewards).all():
        raise ValueError(f"rewards is {list(rewards.shape)}: it must be [B], one finite number per answer"
                         + (f", but is {rewards.tolist()}" if rewards.dim() == 1 else ""))
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if group_size is None:
        return rewards                                                                  # [B]
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size is {group_size}, rewards is {list(rewards.shape)}: answers are compared with the others of "
                         "their group, so group_size must be at least 2 and divide the number of answers")
    return rewards.view(-1, group_size)                                                 # [prompts, G]


def check_mask(mask, **tensors):
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}: it must be torch.bool [B, T], True at the loss tokens")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} but mask is {list(mask.shape)}: both must be [B, T]")


if __name__ == "__main__":
    def row(label, numbers, note=""):
        print(f"  {label:34}" + "".join(f"{x + 0.0:+8.3f}" for x in numbers) + (f"   {note}" if note else ""))

    print("Two queries, four answers each. The first group is the papers' example, in the second every answer is right\n")
    rewards = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1])
    row("rewards", rewards.tolist())
    row("group (GRPO, GSPO)", group_advantages(rewards, 4).tolist(), "±1; equal rewards: exactly 0")
    row("group, unbiased std", group_advantages(rewards, 4, unbiased=True).tolist(), "what most libraries compute")
    row("batch std (Lite-PPO)", group_advantages(rewards, 4, scale="batch").tolist())
    row("no std (Dr. GRPO)", group_advantages(rewards, 4, scale="none").tolist())
    row("leave-one-out (RLOO)", leave_one_out(rewards, 4).tolist())
    mask = torch.ones(8, 1, dtype=torch.bool)
    row("REINFORCE++", reinforce_plus_plus(rewards, mask)[:, 0].tolist(), "all right is above the batch's mean: +")
    row("REINFORCE++-baseline", reinforce_plus_plus(rewards, mask, 4)[:, 0].tolist())
    print(f"  groups with signal (DAPO)         {has_signal(rewards, 4).tolist()}")
    print(f"  not all correct (SRPO)            {not_all_correct(rewards, 4).tolist()}")

    print("\nA right answer of 8 tokens and a critic that comes to believe in it: GAE pays each token for the belief it adds\n")
    values = torch.tensor([[0.5, 0.5, 0.4, 0.3, 0.7, 0.8, 0.9, 0.9]])
    row("values", values[0].tolist())
    for lam in (0.0, 0.95, 1.0):
        advantages, _ = gae(torch.tensor([1.0]), values, torch.ones(1, 8, dtype=torch.bool), lam=lam)
        row(f"advantages, λ = {lam}", advantages[0].tolist(), {0.0: "next step only", 1.0: "return minus value"}.get(lam, ""))

    print("\nOverlong answers (DAPO), at most 20 tokens, a cache of 8\n")
    lengths = torch.tensor([4, 12, 13, 14, 16, 18, 20, 24])
    row("length", lengths.tolist())
    row("added to the reward", overlong_penalty(lengths, 20, 8).tolist())
