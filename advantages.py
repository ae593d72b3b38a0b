"""Advantages: how much better was this response than expected? Rewards in, Â out.

    group            (r - mean of its group) / std of its group    GRPO, GSPO: no critic
    leave-one-out    r - mean of the other responses               RLOO: unbiased, no std
    REINFORCE++      returns, whitened over the batch's tokens     no group needed
    GAE              a learned value for every token               PPO: the critic
    turn returns     what a turn and those after it earned, minus  conversations of several turns
                     the mean of the responses that reached it

Each row is a response; the group_size responses to one prompt are adjacent. rewards [B]; mask
[B, T] bool, the loss mask. Results carry no gradient and are 0 outside the mask. A reward that
differs from the mean of its group by rounding alone has advantage 0 (see center): clips and skipped
groups look at the sign, and a sign of 3e-8 counts as much as any. Rewards are therefore float64
until their mean is subtracted; advantages are float32. NaN marks a response that was not graded: it
is left out of every mean and std, and its advantage is 0. Raises ValueError for infinite rewards,
for other shapes, and where a group has fewer than two responses.

To add an advantage, write its function and a row of ADVANTAGES; train.py then accepts it as
--advantage NAME.

Next: losses.py, which multiplies ratio and advantage.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ratios import check_per_token, turn_numbers

LARGEST_REWARD = 1e15        # sums of squares of larger ones overflow float32


def group_advantages(rewards, group_size, scale="group", unbiased=False, eps=1e-6):
    """(r_i - mean_group) / (std + eps), [B]. A zero-variance group is exactly 0.

    scale     "group": divide by the std of the group (GRPO 2402.03300, GSPO 2507.18071 eq. 6).
              "batch": divide by the std of all rewards (Lite-PPO 2508.08221).
              "none": do not divide (Dr. GRPO 2503.20783).
    unbiased  compute the std with G - 1 instead of G, as most libraries do: rewards 1,0,1,0 then
              give ±0.866, not ±1
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r} is unknown; known: group, batch, none")
    groups = check_rewards(rewards, group_size)                                  # [prompts, G]
    centered = center(groups)                                                    # [prompts, G]
    if scale == "none":
        return centered.flatten()                                                # [B]
    if scale == "batch":
        groups = groups.view(1, -1)                                              # [1, B]
    squares = center(groups).square().sum(-1, keepdim=True)                      # [prompts or 1, 1]
    divisor = (count_graded(groups) - int(unbiased)).clamp(min=1)                # [prompts or 1, 1]
    std = (squares / divisor).sqrt()                                             # [prompts or 1, 1]
    return (centered / (std + eps).masked_fill(std == 0, 1.0)).flatten()         # [B]  GSPO eq. 6


def leave_one_out(rewards, group_size):
    """r_i - mean of the other rewards = G / (G - 1) · (r_i - mean_group), [B]. RLOO 2402.14740."""
    groups = check_rewards(rewards, group_size)                                  # [prompts, G]
    graded = count_graded(groups)                                                # [prompts, 1]
    return (center(groups) * graded / (graded - 1).clamp(min=1)).flatten()       # [B]


def gdpo(parts, part_weights, group_size, unbiased=False, eps=1e-6):
    """Advantages [B] from K reward components, parts [B, K], with one weight each. Each is
    normalized within its group, so that one with large rewards does not hide the others. Their
    weighted sum is divided by its std over the batch (its mean is 0 already, because the mean of
    every group is 0). NaN means that a response does not have the component, which then contributes
    0. GDPO 2601.05242."""
    columns = [group_advantages(part, group_size, "group", unbiased, eps) for part in parts.T]
    total = sum(weight * column
                for weight, column in zip(part_weights, columns, strict=True))   # [B]
    graded = (~parts.isnan()).any(-1).sum()                                      # []
    std = (total.square().sum() / (graded - int(unbiased)).clamp(min=1)).sqrt()       # []
    return total / (std + eps)                                                   # [B]


def reinforce_plus_plus(rewards, mask, baseline_group_size=None, kl=None, beta=0.0, gamma=1.0,
                        eps=1e-8):
    """Returns-to-go, whitened over all loss tokens of the batch: [B, T]. REINFORCE++ 2501.03262.

    The reward is given at the last loss token; beta * kl [B, T] (k1 = log π_old - log π_ref) is
    subtracted at every token. baseline_group_size: first subtract from each reward the mean of its
    group of this size; None: do not."""
    if baseline_group_size is not None:
        rewards = center(check_rewards(rewards, baseline_group_size)).flatten()  # [B]
    per_token = token_rewards(rewards, mask, kl, beta).float()                   # [B, T]
    no_critic = torch.zeros_like(per_token)                                      # [B, T]
    returns, _ = gae(per_token, no_critic, mask, gamma, lam=1.0)                 # [B, T]
    return whiten(returns, mask, eps)                                            # [B, T]


def reinforce_plus_plus_baseline(rewards, mask, group_size):
    """reinforce_plus_plus of the rewards minus the mean of their group, [B, T]."""
    return reinforce_plus_plus(rewards, mask, group_size)                        # [B, T]


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalized advantage estimation (1506.02438 eq. 16): (advantages, returns), [B, T] each; the
    returns are the targets of the critic. rewards [B], given at the last loss token, or [B, T].
    values [B, T]: the critic's estimate before each token. lam = 1: the return minus the value;
    lam = 0: the one-step TD error."""
    check_per_token(mask, values=values, rewards=rewards if rewards.dim() == 2 else None)
    rewards = at_last_token(rewards, mask) if rewards.dim() == 1 else rewards    # [B, T]
    rewards = rewards.to(values.dtype)                                           # [B, T]
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


def gae_advantages(token_rewards, values, mask, lam=0.95):
    """The advantages of gae, [B, T], without the returns."""
    return gae(token_rewards, values, mask, lam=lam)[0]                          # [B, T]


def turn_returns(turn_rewards, mask, group_size, scale="group", eps=1e-6):
    """The advantage of every turn, at each of its tokens: [B, T]. A turn's return is the sum of its
    own reward and of those of the later turns; it is compared with the group's responses that
    reached a turn of this number, as in group_advantages. A turn that only one response of the
    group reached has advantage 0.

    turn_rewards [B, T]: the reward of each turn at its last token. scale: "group": divide by the
    std over the responses of the group that reached the turn. "batch": over all that did.
    "none": do not divide. Division by the std biases the expected gradient, as in
    group_advantages, and can turn its sign (docs/corrections.md 10)."""
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale!r}: turn_returns takes group, batch or none")
    turns = turn_numbers(mask)                                                   # [B, T]
    advantages = torch.zeros(mask.shape, device=mask.device)                     # [B, T]
    for k, returns, centered, count in compare_turns(turn_rewards, mask, group_size):
        if scale == "group":
            squares = centered.view(-1, group_size).square().sum(-1)             # [prompts]
            std = squares.repeat_interleave(group_size).div(count.clamp(min=1)).sqrt()   # [B]
        else:
            std = center(returns[~returns.isnan()]).square().mean().sqrt().expand(len(returns))
        if scale != "none":
            centered = centered / (std + eps).masked_fill(std == 0, 1.0)         # [B]
        advantages = torch.where(turns == k, centered[:, None], advantages)      # [B, T]
    return advantages


def turn_leave_one_out(turn_rewards, mask, group_size):
    """As turn_returns, but minus the mean of the *other* responses that reached the turn, and not
    divided: [B, T]. A turn that only one response reached keeps its return. The expected gradient
    of Σ_t Â_t log π is then exactly that of the expected return, at every turn, also where
    responses end early: the returns of the others do not depend on what this one did there. The
    weights 1/|y| of a reduction and the clip still change it."""
    turns = turn_numbers(mask)                                                   # [B, T]
    advantages = torch.zeros(mask.shape, device=mask.device)                     # [B, T]
    for k, returns, centered, count in compare_turns(turn_rewards, mask, group_size):
        others = centered * count / (count - 1).clamp(min=1)                     # [B]
        others = torch.where(count == 1, returns.float(), others)                # [B]
        advantages = torch.where(turns == k, others[:, None], advantages)        # [B, T]
    return advantages


def compare_turns(turn_rewards, mask, group_size):
    """For the turns of each number k: k, their returns [B], NaN where a response has no such turn,
    the returns minus the mean of the group's responses that reached it [B], 0 where it was not
    reached, and the number of these responses of the group [B]."""
    check_per_token(mask, turn_rewards=turn_rewards)
    for k, returns in enumerate(sum_later_rewards(turn_rewards, turn_numbers(mask)).T):     # [B]
        groups = check_rewards(returns, group_size)                              # [prompts, G]
        count = count_graded(groups).flatten().repeat_interleave(group_size)     # [B]
        yield k, returns, center(groups).flatten(), count


def sum_later_rewards(turn_rewards, turns):
    """The return of each turn, the sum of the rewards from its first token on: [B, turns] for the
    largest number of turns; NaN where a response has fewer. turns [B, T]: ratios.turn_numbers of
    the mask."""
    earned = turn_rewards.masked_fill(turns < 0, 0.0).flip(-1)                   # [B, T]
    to_go = without_rounding(earned.cumsum(-1), earned.abs().cumsum(-1)).flip(-1)    # [B, T]
    columns = []
    for k in range(int(turns.max()) + 1):
        first = (turns == k).int().argmax(-1, keepdim=True)                      # [B, 1]
        returns = to_go.gather(-1, first).squeeze(-1)                            # [B]
        columns.append(returns.masked_fill(~(turns == k).any(-1), torch.nan))
    return torch.stack(columns, -1) if columns else to_go[:, :0]                 # [B, turns]


def without_rounding(sums, sizes):
    """Sums in float64, with 0 for each that is only rounding: 0.1 + 0.2 - 0.3. sizes: the sums of
    the magnitudes of what was added."""
    return sums.masked_fill(sums.abs() < 1e-12 * sizes, 0.0)


def token_rewards(rewards, mask, kl=None, beta=0.0, turn_rewards=None, parts=None,
                  part_weights=None):
    """The reward of every token, [B, T]: rewards [B] at the last loss token, or with turn_rewards
    [B, T] (see reward_turns, which needs parts and part_weights) that of each turn; minus
    beta * kl [B, T] (k1 = log π_old - log π_ref) at every one (1909.08593 eq. 2; verl's
    apply_kl_penalty)."""
    check_per_token(mask, kl=kl)
    if turn_rewards is None:
        per_token = at_last_token(rewards, mask)                                 # [B, T]
    else:
        per_token = reward_turns(turn_rewards, parts, part_weights, mask)        # [B, T]
    return per_token if kl is None else per_token - beta * kl.detach().masked_fill(~mask, 0.0)


def reward_turns(turn_rewards, parts, part_weights, mask):
    """The weighted reward of every token of a response of several turns, [B, T]: what each turn
    earned at its last token, turn_rewards [B, T], and the components of the reward besides the
    return, parts[:, 1:], at the last loss token. Their sum is the reward on paper; a difference
    between the reward and the return would be the rounding of both."""
    check_per_token(mask, turn_rewards=turn_rewards)
    weights = torch.tensor(part_weights, dtype=parts.dtype, device=parts.device)     # [K]
    others = (parts[:, 1:].nan_to_num(nan=0.0) * weights[1:]).sum(-1)            # [B]
    return turn_rewards * weights[0] + at_last_token(others, mask)               # [B, T]


# --------------------------------------------------------------------------------- the table

@dataclass(frozen=True)
class Advantage:
    function: Callable           # its parameters name what it reads; others have a default
    per: str                     # "response": it returns [B]; "token": it returns [B, T]

    @property
    def reads(self):
        """The names of the function's parameters."""
        return tuple(inspect.signature(self.function).parameters)

    @property
    def places_rewards(self):
        """Whether it reads a reward for every token."""
        return bool({"token_rewards", "turn_rewards"} & {*self.reads})


# What the function of an advantage may read, beside anything in batch.extras; tensors have a shape:
#   rewards        [B] the weighted sums of the reward's components; with --use_kl_in_reward minus
#                  beta times the sum of kl over the response; NaN if no function graded the
#                  response, whose advantage is then 0
#   token_rewards  [B, T] the reward of every token: that of the response at its last token; with
#                  --environment that of each turn at its last token; with --use_kl_in_reward minus
#                  beta times kl at every token
#   turn_rewards   [B, T] the rewards of the turns, as token_rewards; needs an --environment
#   parts          [B, K] the components of the rewards; with --environment the return first
#   part_weights   K numbers, --reward_weights
#   group_size     G, --num_generations; at least 2 for an advantage that reads it
#   scale          --scale_rewards
#   mask           [B, T] the loss tokens, bool
#   old_logp       [B, T] log π_old
#   entropy        [B, T] the entropy of π_old at every token, in nats; --old_logp recompute
#   kl, beta       [B, T] log π_old - log π_ref, then not in the loss, nor in rewards or
#                  token_rewards; --beta. Only with --beta: give defaults
#   values         [B, T] the critic's estimates; a run that reads them trains a critic, on the
#                  returns of gae(token_rewards, values, mask), whatever the function makes of
#                  advantages
#   lam            --lam, the λ of GAE; for an advantage that reads values

ADVANTAGES = {
    "group": Advantage(group_advantages, "response"),
    "leave_one_out": Advantage(leave_one_out, "response"),
    "gdpo": Advantage(gdpo, "response"),
    "reinforce_plus_plus": Advantage(reinforce_plus_plus, "token"),
    "reinforce_plus_plus_baseline": Advantage(reinforce_plus_plus_baseline, "token"),
    "turn_returns": Advantage(turn_returns, "token"),
    "turn_leave_one_out": Advantage(turn_leave_one_out, "token"),
    "gae": Advantage(gae_advantages, "token"),
}


def find_missing(row, inputs):
    """The names of what a row of ADVANTAGES reads that are not among the inputs."""
    known = inspect.signature(row.function).parameters
    needs = [x for x in row.reads if known[x].default is inspect.Parameter.empty]
    turns = row.places_rewards and inputs.get("turn_rewards") is not None
    needs += ["mask"] * row.places_rewards + ["parts", "part_weights"] * turns
    provided = {*inputs, "rewards", "group_size", "scale", "token_rewards"}
    return [x for x in dict.fromkeys(needs) if x not in provided]


def estimate_advantages(name, rewards, group_size, scale="group", **inputs):
    """The advantages of the row `name` of ADVANTAGES: [B], or [B, T] if every token has its own.

    inputs: what the row reads besides rewards, group_size and scale, by the names of its
    parameters; turn_rewards [B, T] are what the turns earned, without weight, and need parts and
    part_weights. A kl that the row does not read itself is subtracted from the rewards, times beta.
    Raises ValueError for an input that is missing, and for a function that does not return what its
    row says."""
    row = ADVANTAGES[name]
    if lacks := find_missing(row, inputs):
        raise ValueError(f"advantage {name} reads {', '.join(lacks)}, which is missing")
    inputs |= dict(rewards=rewards, group_size=group_size, scale=scale)
    ungraded = rewards.isnan()                                                   # [B]
    if "mask" in inputs:
        inputs["mask"] = inputs["mask"] & ~ungraded[:, None]                     # [B, T]
    if "parts" in inputs:      # the length penalty of a response that was not graded counts neither
        inputs["parts"] = inputs["parts"].masked_fill(ungraded[:, None], torch.nan)  # [B, K]
    kl = None if "kl" in row.reads else inputs.get("kl")                         # [B, T]
    if row.places_rewards:
        names = ("beta", "turn_rewards", "parts", "part_weights")
        placed = token_rewards(rewards, inputs["mask"], kl,
                               **{x: inputs.get(x) for x in names})              # [B, T]
        inputs |= dict(token_rewards=placed, turn_rewards=placed)
    if kl is not None:
        kl = (kl * inputs["mask"]).sum(-1)                                       # [B]
        inputs["rewards"] = rewards.float() - inputs["beta"] * kl                # [B]
    advantages = row.function(**{x: inputs[x] for x in row.reads if x in inputs})   # [B] or [B, T]
    if advantages.shape != (rewards if row.per == "response" else inputs["mask"]).shape:
        raise ValueError(f"advantage {name}: its function does not return one number for every "
                         f"{row.per}, as its row of advantages.ADVANTAGES says: change one of the "
                         "two")
    ungraded = ungraded.view(-1, *[1] * (advantages.dim() - 1))                  # [B] or [B, 1]
    return advantages.float().masked_fill(ungraded, 0.0)


def has_signal(rewards, group_size):
    """Which groups contain different rewards, [prompts] bool. DAPO (2503.14476 eq. 11) keeps only
    these groups; the others are zero-variance groups."""
    return center(check_rewards(rewards, group_size)).ne(0).any(-1)              # [prompts]


def groups_with_signal(name, rewards, group_size, advantages):
    """Which groups the row `name` of ADVANTAGES learns from, [prompts] bool: those with an
    advantage, [B] or [B, T], that is not 0. Where every token has an advantage of its own that is
    no turn's (GAE, whitened returns): those with different rewards."""
    row = ADVANTAGES[name]
    if row.per == "token" and "turn_rewards" not in row.reads:
        return has_signal(rewards, group_size)                                   # [prompts]
    return advantages.reshape(len(rewards) // group_size, -1).ne(0).any(-1)      # [prompts]


def overlong_penalty(lengths, max_length, cache):
    """DAPO's soft length penalty (2503.14476 eq. 13), [B], to be added to the rewards: 0 for a
    length up to max_length - cache, then linear down to -1 at max_length. lengths [B] in tokens."""
    if not 0 < cache <= max_length:
        raise ValueError(f"cache is {cache}, max_length is {max_length}: cache must be above 0 and "
                         "at most max_length")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)             # [B]


def center(x):
    """x minus its mean along the last dimension, float32; exactly 0 where the two differ by
    rounding alone, and for NaN, which the mean leaves out."""
    low = x.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)                     # [..., 1]
    mean = low + (x - low).nanmean(-1, keepdim=True)     # relative: exact for equal entries
    filled = torch.where(x.isnan(), mean, x)
    relative = filled - filled[..., :1]
    centered = relative - relative.mean(-1, keepdim=True)
    centered = without_rounding(centered, filled.abs().amax(-1, keepdim=True))
    return centered.masked_fill(x.isnan(), 0.0).float()


def count_graded(groups):
    """How many entries of each group [prompts, G] are not NaN, [prompts, 1]."""
    return (~groups.isnan()).sum(-1, keepdim=True)                               # [prompts, 1]


def whiten(x, mask, eps=1e-8):
    """(x - mean) / sqrt(var + eps) over the loss tokens, population variance: [B, T], 0 outside."""
    check_per_token(mask, x=x)
    if not mask.any():                                       # all responses are masked
        return torch.zeros_like(x)                                               # [B, T]
    centered = center(x[mask])                                                   # [loss tokens]
    white = centered / (centered.square().mean() + eps).sqrt()                   # [loss tokens]
    return torch.zeros_like(x).masked_scatter(mask, white)                       # [B, T]


def at_last_token(rewards, mask):
    """Rewards [B] -> [B, T]: each reward at the last loss token of its row, 0 elsewhere."""
    rewards = check_rewards(rewards)                                             # [B]
    if len(rewards) != len(mask):
        raise ValueError(f"rewards is {list(rewards.shape)} but mask is {list(mask.shape)}")
    later = mask.flip(-1).cumsum(-1).flip(-1)                                    # [B, T]
    return torch.where(mask & (later == 1), rewards[:, None], 0.0)               # [B, T]


def check_rewards(rewards, group_size=None):
    """rewards [B] as float; with a group_size, as groups [B / group_size, group_size]. Raises
    ValueError for other shapes and for rewards that are not below LARGEST_REWARD."""
    if rewards.dim() != 1 or (rewards.abs() >= LARGEST_REWARD).any():
        raise ValueError(f"rewards is {list(rewards.shape)}: it must be [B], all below "
                         f"{LARGEST_REWARD:g} in size")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if group_size is None:
        return rewards
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size is {group_size}, rewards is {list(rewards.shape)}: it must "
                         "be at least 2 and divide the number of rewards")
    return rewards.view(-1, group_size)                                          # [prompts, G]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    def row(label, numbers):
        print(f"  {label:22}" + "".join(f"{round(x, 3) + 0.0:+8.3f}" for x in numbers))

    print("Two prompts, four responses each: the papers' example, and one that is always right\n")
    rewards = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1])
    row("rewards", rewards.tolist())
    for scale, name in (("group", "GRPO, GSPO"), ("none", "Dr. GRPO")):
        row(f"{scale} ({name})", group_advantages(rewards, 4, scale).tolist())
    row("leave-one-out (RLOO)", leave_one_out(rewards, 4).tolist())
    print("\nA right response with a critic. GAE: how much a token raised the expected reward\n")
    values = torch.tensor([[0.5, 0.5, 0.4, 0.3, 0.7, 0.8, 0.9, 0.9]])
    row("values", values[0].tolist())
    for lam in (0.0, 0.95, 1.0):
        A, _ = gae(rewards[:1], values, torch.ones(1, 8, dtype=torch.bool), lam=lam)
        row(f"advantages, λ = {lam}", A[0].tolist())
