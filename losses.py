"""The family of policy objectives: ratio × advantage × clip × reduction. An algorithm is one row of OBJECTIVES.

    loss = -(weights * surrogate).sum()

The surrogate [B, T] says what a token is worth under the new policy, the weights [B, T] are constants that say how tokens are
averaged. From GRPO to GSPO two choices of a row change: the ratio from "token" to "sequence", and with it the band, hundreds of
times narrower because a sequence's ratio is a mean over its tokens. A sequence-level surrogate is one number repeated along its
row, and the weights 1 / (N·|y|) of "sequence-mean" add it up to its share 1/N.

Clipping does not bound a ratio, it removes a gradient: of good answers (A > 0) above the band, of bad ones (A < 0) below it.
At ratio 1 group-normalised advantages give a loss of about 0, and that is right: the gradient is not 0.

Not in here: the KL to a reference and the entropy bonus, which a caller adds as (weights * term).sum() (see kl_penalty).
"""

from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from ratios import (LARGEST_LOG, check_per_token, gspo_token_ratio, mean_over_tokens, product_ratio, ratio_stats, sequence_ratio,
                    token_log_ratio, token_ratio)


@dataclass(frozen=True)
class Objective:
    ratio: str                   # a key of RATIOS
    clip: str                    # a case of token_surrogate
    epsilon: float | None        # the band is [1 - epsilon, 1 + epsilon_high], of log-ratios [-epsilon, epsilon_high]
    epsilon_high: float | None
    reduction: str               # how tokens are averaged, see token_weights


OBJECTIVES = {
    #                        ratio          clip       epsilon, _high  reduction
    "reinforce":   Objective("none",        "none",    None, None,     "token-mean"),
    "ppo":         Objective("token",       "min",     0.2,  0.2,      "sequence-mean"),     # 1707.06347; GAE advantages
    "grpo":        Objective("token",       "min",     0.2,  0.2,      "sequence-mean"),     # 2402.03300; GSPO's baseline 0.27
    "dr_grpo":     Objective("token",       "min",     0.2,  0.2,      "constant"),          # 2503.20783; advantages without std
    "dapo":        Objective("token",       "min",     0.2,  0.28,     "token-mean"),        # 2503.14476, as implemented
    "dapo_paper":  Objective("token",       "min",     0.2,  0.28,     "group-token-mean"),  # 2503.14476, as printed (eq. 8)
    "gspo":        Objective("sequence",    "min",     3e-4, 4e-4,     "sequence-mean"),     # 2507.18071 eq. 5
    "gspo_token":  Objective("gspo-token",  "min",     3e-4, 4e-4,     "sequence-mean"),     # 2507.18071 eq. 13
    "gmpo":        Objective("log-token",   "log-min", 0.4,  0.4,      "sequence-mean"),     # 2507.20673
    "rspo":        Objective("log-shifted", "log-min", 0.4,  0.4,      "sequence-mean"),     # 2510.23027 v2
    "cispo":       Objective("token",       "weight",  1.0,  0.28,     "token-mean"),        # 2506.13585; 1.0: no lower bound
    "sapo":        Objective("token",       "sigmoid", None, None,     "sequence-mean"),     # 2511.20347
    "luspo":       Objective("sequence",    "min",     2e-3, 2.5e-3,   "sequence-sum"),      # 2602.05261
    "vespo":       Objective("product",     "gamma",   None, None,     "token-mean"),        # 2602.10693
    "sequence_is": Objective("product",     "min",     0.2,  0.2,      "sequence-mean"),     # textbook; to see why nobody uses it
}

RATIOS = {  # (logp, old_logp, mask) -> [B, T], or [B] where an answer has one ratio
    "none": lambda logp, old_logp, mask: torch.ones_like(logp),
    "token": token_ratio,
    "sequence": sequence_ratio,
    "gspo-token": gspo_token_ratio,
    "product": product_ratio,
    "log-token": token_log_ratio,
    "log-shifted": token_log_ratio,  # of w·γ̃, with RSPO's router shift γ̃
}


def token_surrogate(clip, ratio, A, logp, mask, low, high):
    """What each token is worth, [B, T]. ratio [B, T] or [B, 1], advantages A [B, T], the band from low to high."""
    if clip == "none":                                                               # REINFORCE
        return A * logp                                                              # [B, T]
    if clip == "min":                                                                # PPO eq. 7, GSPO eq. 5 and 13
        return torch.min(ratio * A, ratio.clamp(low, high) * A)                      # [B, T]
    if clip == "log-min":                                                            # GMPO 2507.20673: cut tokens stay constants
        log_w = torch.where(A > 0, ratio.clamp(max=high), ratio.clamp(min=low))      # [B, T]
        return mean_over_tokens(log_w, mask).clamp(max=LARGEST_LOG).exp()[:, None] * A  # [B, T]
    if clip == "weight":                                                             # CISPO 2506.13585 eq. 4, 5: drops no token
        return ratio.detach().clamp(low, high) * A * logp                            # [B, T]
    if clip == "sigmoid":                                                            # SAPO 2511.20347: slope A at w = 1
        tau = torch.where(A > 0, 1.0, 1.05)                                          # [B, T]
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A                        # [B, T]
    if clip == "gamma":                                                              # VESPO 2602.10693: φ(W) = e^λ W^k e^-λW
        W = ratio.detach().clamp(1e-8, 4.85e8)                                       # [B, 1]  up to e^20
        k, lam = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)        # [B, T]
        return (lam + k * W.log() - lam * W).exp() * A * logp                        # [B, T]


def policy_loss(name, logp, old_logp, advantages, mask, *, epsilon=None, epsilon_high=None, weights=None, group_size=None,
                max_length=None, router_shift=None, mismatch=None, dual_clip=None):
    """The loss of objective `name` and what it did: (loss, stats), 0-dim tensors. Nothing in here waits for the GPU.

    logp, old_logp          [B, T] float32, log-probabilities (nats) of the sampled tokens; the gradient goes to logp
    advantages              [B], or [B, T] where the ratio is per token (gspo refuses it and names gspo_token)
    mask                    [B, T] bool, the loss tokens; what is outside changes nothing, a row without any gets gradient 0
    epsilon, epsilon_high   the band [1 - epsilon, 1 + epsilon_high] (gmpo, rspo: of log w, without the 1); None: the paper's
    weights                 [B, T], cut from the token_weights of the mini-batch that this is a part of; None: this is all of it
    group_size, max_length  what the reductions of dapo_paper and dr_grpo need where weights is None
    router_shift            [B, T] RSPO's γ̃ (moe.router_shift), multiplied into w before the clip; rspo needs it
    mismatch                [B, T] constants (mismatch_weight), multiplied onto the clipped surrogate
    dual_clip               c > 1: for A < 0 the surrogate is at least c·A, so that nothing pushes down above w = c (1912.09729;
                            INTELLECT-2's delta, 2505.07291, is the same)

    stats: clip_low, clip_high, the shares of loss tokens whose gradient the clip removed below and above the band (a clipped
    sequence counts all its tokens, dual_clip counts as high); clip_signal, both as a share of the signal_tokens (A not 0); and
    ratio_stats. combine_stats merges the stats of micro-batches.
    ValueError: unknown name, shapes that disagree, mask not bool, half precision, an option missing or without meaning here.
    """
    objective = OBJECTIVES[choose("name", name, OBJECTIVES)]
    check_per_token(mask, logp=logp, old_logp=old_logp, weights=weights, router_shift=router_shift, mismatch=mismatch)
    low, high = check_choices(name, advantages, mask, epsilon, epsilon_high, router_shift, dual_clip)
    A = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(logp)  # [B, T]
    A, logp, old_logp = A.detach().masked_fill(~mask, 0.0), logp.masked_fill(~mask, 0.0), old_logp.detach()  # [B, T]

    shifted = logp if router_shift is None else logp + router_shift.detach().log()   # [B, T]  log w·γ̃: RSPO 2510.23027 v2
    ratio = RATIOS[objective.ratio](shifted, old_logp, mask)                         # [B, T] or [B]
    ratio = ratio if ratio.dim() == 2 else ratio[:, None]                            # [B, T] or [B, 1]
    surrogate = token_surrogate(objective.clip, ratio, A, logp, mask, low, high)     # [B, T]
    if dual_clip is not None:
        surrogate = torch.where(A < 0, torch.max(surrogate, dual_clip * A), surrogate)    # [B, T]  dual clip, 1912.09729
    if weights is None:
        weights = token_weights(mask, objective.reduction, group_size=group_size, max_length=max_length)  # [B, T]
    if mismatch is not None:
        weights = weights * mismatch.detach()                                        # [B, T]
    loss = -(weights.masked_fill(~mask, 0.0) * surrogate).sum()

    below = above = torch.zeros_like(mask)                                           # [B, T]  the clip removed its gradient
    if objective.clip in ("min", "log-min"):
        below, above = (ratio < low) & (A < 0), (ratio > high) & (A > 0)             # [B, T]
    if dual_clip is not None:
        above = above | (ratio > dual_clip) & (A < 0)                                # [B, T]
    tokens, signal_tokens = mask.sum(), (A != 0).sum()                               # A is 0 outside the mask
    stats = dict(clip_low=below.sum() / tokens.clamp(min=1), clip_high=above.sum() / tokens.clamp(min=1),
                 clip_signal=(below | above).sum() / signal_tokens.clamp(min=1), signal_tokens=signal_tokens)
    return loss, stats | ratio_stats(logp, old_logp, mask)


def token_weights(mask, reduction, *, group_size=None, max_length=None):
    """How a reduction averages the loss tokens: a constant weight per token, [B, T] float32, 0 outside the mask.

    Made once for a whole mini-batch (N rows, those without loss tokens included) and cut with it, so that no split into
    micro-batches or over devices can change a loss.

        sequence-mean     mask / (N·|y_i|)                         GRPO, GSPO
        token-mean        mask / Σ_j |y_j|                         DAPO as implemented
        group-token-mean  mask / (prompts · Σ_{j in group} |y_j|)  DAPO as printed; needs group_size
        constant          mask / (N·max_length)                    Dr. GRPO; needs max_length
        sequence-sum      mask / N                                 LUSPO
    """
    choose("reduction", reduction, ("sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"))
    check_per_token(mask)
    lengths, N = mask.sum(-1, keepdim=True), len(mask)                               # [B, 1]
    if reduction == "sequence-mean":
        divisor = N * lengths                                                        # [B, 1]
    elif reduction == "token-mean":
        divisor = lengths.sum()                                                      # []
    elif reduction == "group-token-mean":
        if not group_size or N % group_size:
            raise ValueError(f"group_size is {group_size}: {reduction} needs mask {list(mask.shape)} to be whole groups of rows")
        groups = lengths.view(-1, group_size).sum(-1)                                # [prompts]
        divisor = len(groups) * groups.repeat_interleave(group_size)[:, None]        # [B, 1]
    else:
        if reduction == "constant" and not max_length:
            raise ValueError(f"max_length is {max_length}: the reduction of dr_grpo divides by it, the longest answer allowed")
        divisor = torch.full_like(lengths, N * max_length if reduction == "constant" else N)  # [B, 1]
    return mask / divisor.clamp(min=1)                                               # [B, T]


def kl_penalty(logp, ref_logp, mask, estimator="k3", old_logp=None):
    """Per-token estimates of KL(π_θ || π_ref), [B, T], 0 outside the mask; the loss gets + beta * (weights * kl).sum().

    With d = log π_θ - log π_ref, and the gradient as a factor of ∇log π_θ:
        k1      d             gradient 1         zero in expectation: as a loss it does nothing
        k2      d²/2          gradient d         RIGHT for tokens of π_θ, though the value is biased
        k3      e^-d - 1 + d  gradient 1 - e^-d  that of the forward KL, not of this one; GRPO's choice (2402.03300 eq. 4)
        k3_is   w·k3          gradient w·d       RIGHT for tokens of π_old, as w = π_θ/π_old carries gradient; needs old_logp
        k3_st   k3            gradient d         RIGHT for tokens of π_θ: the value of k3, the gradient of k2
    """
    choose("estimator", estimator, ("k1", "k2", "k3", "k3_is", "k3_st"))
    if estimator == "k3_is" and old_logp is None:
        raise ValueError("old_logp is missing: k3_is weights k3 by exp(logp - old_logp)")
    d = token_log_ratio(logp, ref_logp, mask)                                        # [B, T]
    k2, k3 = d**2 / 2, torch.expm1((-d).clamp(max=LARGEST_LOG)) + d                  # [B, T]  exp(-d) - 1 cancels at small d
    if estimator == "k3_is":
        return token_ratio(logp, old_logp, mask) * k3                                # [B, T]
    return {"k1": d, "k2": k2, "k3": k3, "k3_st": k3.detach() + k2 - k2.detach()}[estimator]


def mismatch_weight(old_logp, sampler_logp, mask, mode, low, high):
    """Weights for ρ = π_old / π_sampler, the gap between trainer and sampling engine: [B, T], detached, 0 outside the mask.

    mode: a level, `token` ρ_t, `seq` Π_t ρ_t or `geo` (Π_t ρ_t)^(1/|y|), and what happens outside [low, high]: `_truncate`
    clamps, `_mask` gives weight 0. TIS is token_truncate 0, 2; IcePop token_mask 0.5, 5. A product with a fixed bound masks by
    length (0.03 nats of noise per token, high 3: 5 % of answers of 512 tokens, 28 % of 4096); geo does not.
    """
    levels = {"token": token_ratio, "seq": product_ratio, "geo": sequence_ratio}
    modes = [f"{level}_{action}" for level in levels for action in ("truncate", "mask")]
    level, action = choose("mode", mode, modes).split("_")
    rho = levels[level](old_logp, sampler_logp, mask).detach()                       # [B, T] or [B]
    rho = rho if level == "token" else rho[:, None]                                  # [B, T] or [B, 1]
    rho = rho.clamp(low, high) if action == "truncate" else rho.masked_fill((rho < low) | (rho > high), 0.0)
    return rho.expand(mask.shape).masked_fill(~mask, 0.0)                            # [B, T]


def combine_stats(parts):
    """The stats of a mini-batch from those of its micro-batches, exactly: shares and means weighted by what they count."""
    total = {count: sum(part[count] for part in parts) for count in ("tokens", "signal_tokens", "answers")}
    counts = dict(clip_low="tokens", clip_high="tokens", clip_signal="signal_tokens", log_w_mean="tokens", log_s_mean="answers")
    mean = lambda values, count: sum(v * p[count] for v, p in zip(values, parts)) / total[count].clamp(min=1)
    total |= {name: mean([p[name] for p in parts], count) for name, count in counts.items()}
    for x, count in (("log_w", "tokens"), ("log_s", "answers")):  # the mean of the variances + the variance of the means
        total[f"{x}_var"] = mean([p[f"{x}_var"] + (p[f"{x}_mean"] - total[f"{x}_mean"]) ** 2 for p in parts], count)
    return total | {"ratio_max": torch.stack([part["ratio_max"] for part in parts]).amax()}


def choose(argument, value, known):
    """value, which must be one of the known names: ValueError lists them, the nearest first."""
    if value not in known:
        distance = lambda name: (-SequenceMatcher(None, str(value), name).ratio(), len(set(str(value)) ^ set(name)))
        nearest = sorted(known, key=distance)
        raise ValueError(f"{argument} {value!r} is unknown; the nearest first: {', '.join(nearest)}")
    return value


def check_choices(name, advantages, mask, epsilon, epsilon_high, router_shift, dual_clip):
    """The band's edges; ValueError for what makes no sense together."""
    row, shape = OBJECTIVES[name], f"for mask {list(mask.shape)}"
    per_token = row.ratio in ("none", "token", "gspo-token")
    if advantages.shape != mask.shape[:1] and not (per_token and advantages.shape == mask.shape):
        raise ValueError(f"advantages is {list(advantages.shape)} {shape}: it must be [B]" +
                         (" or [B, T]" if per_token else f", {name} has one ratio per answer; gspo_token takes [B, T]"))
    if row.ratio == "log-shifted" and router_shift is None:
        raise ValueError(f"router_shift is missing {shape}: {name} multiplies w by it, [B, T] (see moe.router_shift)")
    for argument, value in (("epsilon", epsilon), ("epsilon_high", epsilon_high)):
        if value is not None and row.epsilon is None:
            raise ValueError(f"{argument} is {value} but {name} has no band")
        if value is not None and (value < 0 or argument == "epsilon" and row.clip == "min" and value > 1):
            raise ValueError(f"{argument} is {value}: the band is [1 - epsilon, 1 + epsilon_high], it starts at 0 or above")
    low, high = row.epsilon if epsilon is None else epsilon, row.epsilon_high if epsilon_high is None else epsilon_high
    if low is not None:
        low, high = (-low, high) if row.clip == "log-min" else (1 - low, 1 + high)
    if dual_clip is not None and ((row.ratio, row.clip) != ("token", "min") or dual_clip <= 1):
        raise ValueError(f"dual_clip is {dual_clip}: it must be > 1, with a token ratio and min clip "
                         f"({name}: {row.ratio}, {row.clip})")
    return low, high


if __name__ == "__main__":
    # Two answers to one query: a right one (A = +1) of 4 tokens, a wrong one (A = -1) of 2; w says how far each token has moved.
    w = torch.tensor([[1.00, 1.90, 0.40, 1.25], [1.05, 0.75, 1.00, 1.00]])
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    old_logp, advantages = torch.full((2, 4), -1.5), torch.tensor([1.0, -1.0])
    shift = torch.tensor([[1.00, 0.95, 0.90, 1.00], [0.80, 1.00, 1.00, 1.00]])       # made up; only rspo sees it

    print("One batch, every objective. Under each token: -d loss / d log π, how hard the update pushes it up (+) or down (-)\n")
    print(f"{'':56}{'clipped':>14}   {'right answer, A = +1':^32}{'wrong, A = -1':^16}")
    print(f"{'name':12}{'ratio':12}{'clip':8}{'reduction':17}{'loss':>7}{'low':>7}{'high':>7}   "
          + "".join(f"w {x:5.2f} " for x in w[mask].tolist()))
    for name, row in OBJECTIVES.items():
        logp = (old_logp + w.log()).requires_grad_()
        loss, stats = policy_loss(name, logp, old_logp, advantages, mask, group_size=2, max_length=4,
                                  router_shift=shift if name == "rspo" else None)
        push = -torch.autograd.grad(loss, logp)[0][mask]
        print(f"{name:12}{row.ratio:12}{row.clip:8}{row.reduction:17}{loss:7.3f}"
              f"{stats['clip_low']:7.0%}{stats['clip_high']:7.0%}   "
              + "".join(f"{x:+7.3f} " if x else "      · " for x in push.tolist()))
