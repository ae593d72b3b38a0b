"""Terms: which advantages a flag asks for, and what a loss holds besides the objective."""

import torch

from advantages import (gae, gdpo, group_advantages, leave_one_out, overlong_penalty,
                        reinforce_plus_plus, value_loss)
from losses import high_entropy_mask, kl_penalty, mismatch_mask, mismatch_weight
from plumbing.data import tasks
from plumbing.loop import batches
from plumbing.speed.cutting import response_routes
from routes import expert_share, has_sigmoid, load_balancing_loss, router_shift

VALUE_COEF = 0.5  # weight of the critic's loss, as TRL's PPO and PPO2 before it


def with_overlong_penalty(args, parts, rollout):
    """Rewards in parts [B, K], DAPO's penalty for answers near the length limit as one more part if
    there is an --overlong_cache."""
    if not args.overlong_cache:
        return parts
    cache = tasks.overlong_zone(args.overlong_cache, args.max_completion_length)
    lengths = rollout.mask.sum(-1)                                                  # [B]
    penalty = overlong_penalty(lengths, args.max_completion_length, cache)          # [B]
    return torch.cat([parts, penalty[:, None]], 1)                                  # [B, K + 1]


def estimate_advantages(args, parts, rollout, problems, task, tensors, values):
    """Rewards in parts [B, K] -> {"advantages": [B] or [B, T]}, with a critic also its "values" and
    "returns"."""
    G, mask, rewards = args.num_generations, rollout.mask, task.total(parts)        # [B]
    if args.advantage == "gae":
        advantages, returns = gae(rewards, values, mask)      # [B, T] each
        return {"advantages": advantages, "values": values, "returns": returns}
    if args.advantage.startswith("reinforce_plus_plus"):
        baseline = G if args.advantage.endswith("baseline") else None
        kl = None
        if kl_in_rewards(args):
            kl = kl_penalty(tensors["old_logp"], tensors["ref_logp"], mask, "k1")   # [B, T]
        advantages = reinforce_plus_plus(rewards, mask, baseline, kl=kl, beta=args.beta)
        return {"advantages": advantages}                                           # [B, T]
    if args.advantage == "gdpo":
        return {"advantages": gdpo(parts, task.weights(parts), G)}                  # [B]
    if args.advantage == "leave_one_out":
        advantages = leave_one_out(rewards, G)                                      # [B]
    else:
        advantages = group_advantages(rewards, G, scale=args.scale_rewards)         # [B]
    if args.advantage == "token_credit":  # what precedes the first wrong step is not to blame
        to_blame = blamed(task, rollout, problems) | (advantages[:, None] > 0)      # [B, T]
        advantages = advantages[:, None] * to_blame                                 # [B, T]
    return {"advantages": advantages}


def kl_in_rewards(args):
    """Whether the KL is taken off the rewards, as REINFORCE++ does, and not added to the loss."""
    return args.beta > 0 and args.advantage == "reinforce_plus_plus"


def mismatch_correction(args, old_logp, rollout):
    """{"mismatch": [B, T]}, weight times rejection of tokens that the sampler wrote and the policy
    sees otherwise; {} without --mismatch and --mismatch_mask."""
    mask, sampler = rollout.mask, rollout.sampler_logp                              # [B, T]
    weights = mask.float()                                                          # [B, T]
    if not args.mismatch and not args.mismatch_mask:
        return {}
    if args.mismatch:
        weights = mismatch_weight(old_logp, sampler, mask, args.mismatch, 0.0, args.mismatch_high)
    if args.mismatch_mask:
        low, high = args.mismatch_mask_bounds
        weights = weights * mismatch_mask(old_logp, sampler, mask, args.mismatch_mask, low, high)
    return {"mismatch": weights}


def high_entropy(args, entropy, mask):
    """{"high_entropy": [B, T] bool}, the tokens that --entropy_quantile keeps; {} without it."""
    if not args.entropy_quantile:
        return {}
    return {"high_entropy": high_entropy_mask(entropy, mask, args.entropy_quantile)}


def blamed(task, rollout, problems):
    """Which response tokens [B, T], characters, stand at or after the first wrong step."""
    G, (B, T), device = rollout.group_size, rollout.mask.shape, rollout.mask.device
    errors = [task.first_error(text, problems[i // G]) for i, text in enumerate(rollout.texts)]
    first = torch.tensor([0 if e is None else e for e in errors], device=device)    # [B]
    return torch.arange(T, device=device) >= first[:, None]                         # [B, T]


def shift(args, part, routes):
    """RSPO's router shift [B, T] of the new routes against the old ones; None for the others."""
    if args.objective != "rspo":
        return None
    old, new = batches.old_and_new(part, routes)
    return router_shift(old.logits, new.logits, old.indices, part.rollout.mask)     # [B, T]


def other_terms(args, policy, part, new, whole):
    """What the loss of a micro-batch holds besides the objective, by name: KL, entropy bonus,
    critic, load balancing. whole: the mini-batch; its experts' shares are the old policy's."""
    mask, terms = part.rollout.mask, {}                                             # [B, T]
    if args.beta and not kl_in_rewards(args):
        kl = kl_penalty(new.logp, part["ref_logp"], mask, args.kl_estimator, part["old_logp"])
        terms["kl"] = args.beta * (part["weights"] * kl).sum()
    if args.entropy_coef:
        terms["entropy"] = -args.entropy_coef * (part["per_token"] * new.entropy).sum()
    if new.values is not None:
        critic = value_loss(new.values, part["values"], part["returns"], mask, part["per_token"])
        terms["critic"] = VALUE_COEF * critic
    if args.router_aux_loss_coef:
        logits = response_routes(new.routes, part.rollout).logits                   # [L, B, T, E]
        old, tokens = response_routes(whole.routes, whole.rollout), whole.rollout.mask
        share = expert_share(old.indices, tokens, logits.shape[-1])                 # [L, E]
        balance = load_balancing_loss(logits, mask, share, tokens.sum(), has_sigmoid(policy))
        terms["balance"] = args.router_aux_loss_coef * balance
    return terms
