"""The family of policy objectives: ratio × advantage × clip × reduction, a row of OBJECTIVES each.

    loss = -(weights * surrogate).sum()

The surrogate [B, T] says what a token is worth under the new policy, the weights [B, T], constants,
how tokens are averaged. From GRPO to GSPO the ratio changes from "token" to "sequence", and with it
the band: a sequence's ratio, a mean over its tokens, moves hundreds of times less.

Clipping does not bound a ratio, it removes a gradient: of good answers (A > 0) above the band, of
bad ones (A < 0) below it. At ratio 1 the loss of advantages of mean 0 is 0; its gradient is not.
"""

from dataclasses import dataclass

import torch

from ratios import (LARGEST_LOG, check_per_token, gspo_token_ratio, mean_over_tokens,
                    product_ratio, ratio_stats, sequence_log_ratio, sequence_ratio,
                    token_log_ratio, token_ratio)


@dataclass(frozen=True)
class Objective:
    ratio: str                   # a key of RATIOS
    clip: str                    # a case of token_surrogate
    epsilon: float | None        # the band is [1 - epsilon, 1 + epsilon_high];
    epsilon_high: float | None   # [-epsilon, epsilon_high] where clip is in AROUND_0
    reduction: str               # how tokens are averaged, see token_weights


OBJECTIVES = {  # "constant" is meant for advantages without std, dppo for the sampler's log-probs
    "reinforce":   Objective("none",        "none",    None, None,   "token-mean"),
    "ppo":         Objective("token",       "min",     0.2,  0.2,    "sequence-mean"),  # 1707.06347
    "grpo":        Objective("token",       "min",     0.2,  0.2,    "sequence-mean"),  # 2402.03300
    "dr_grpo":     Objective("token",       "min",     0.2,  0.2,    "constant"),       # 2503.20783
    "dapo":        Objective("token",       "min",     0.2,  0.28,   "token-mean"),     # 2503.14476
    "dapo_paper":  Objective("token",       "min",     0.2,  0.28,   "group-token-mean"),    # eq. 8
    "gspo":        Objective("sequence",    "min",     3e-4, 4e-4,   "sequence-mean"),  # 2507.18071
    "gspo_token":  Objective("gspo-token",  "min",     3e-4, 4e-4,   "sequence-mean"),      # eq. 13
    "gmpo":        Objective("log-token",   "log-min", 0.4,  0.4,    "sequence-mean"),  # 2507.20673
    "rspo":        Objective("log-shifted", "log-min", 0.4,  0.4,    "sequence-mean"),  # 2510.23027
    "cispo":       Objective("token",       "weight",  1.0,  0.28,   "token-mean"),     # 2506.13585
    "dppo":        Objective("token",       "tv",      0.2,  0.2,    "token-mean"),     # 2602.04879
    "dppo_kl":     Objective("token",       "kl",      0.05, 0.05,   "token-mean"),     # 2602.04879
    "sapo":        Objective("token",       "sigmoid", None, None,   "sequence-mean"),  # 2511.20347
    "luspo":       Objective("sequence",    "min",     2e-3, 2.5e-3, "sequence-sum"),   # 2602.05261
    "vespo":       Objective("product",     "gamma",   None, None,   "token-mean"),     # 2602.10693
    "sequence_is": Objective("product",     "min",     0.2,  0.2,    "sequence-mean"),  # textbook
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
AROUND_0 = ("log-min", "tv", "kl")   # the band bounds log w or a change of probability, not w
LEVELS = {"token": token_ratio, "seq": product_ratio, "geo": sequence_ratio}  # of mismatch weights


def token_surrogate(clip, ratio, A, logp, mask, low, high):
    """What each token is worth, [B, T]. ratio, advantages A [B, T]; the band from low to high."""
    if clip == "none":                                          # REINFORCE
        return A * logp
    if clip == "min":                                           # PPO eq. 7; GSPO eq. 5, 13
        return torch.min(ratio * A, ratio.clamp(low, high) * A)
    if clip == "log-min":                                       # GMPO: a cut token is constant
        log_w = torch.where(A > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        return spread(mean_over_tokens(log_w, mask).clamp(max=LARGEST_LOG).exp(), mask) * A
    if clip == "weight":                                        # CISPO eq. 4, 5: drops no token
        return ratio.detach().clamp(low, high) * A * logp
    if clip in ("tv", "kl"):                                    # DPPO; policy_loss masks it
        return ratio.detach().clamp(max=20.0) * A * logp
    if clip == "sigmoid":                                       # SAPO: slope A at w = 1
        tau = torch.where(A > 0, 1.0, 1.05)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
    if clip == "gamma":                                         # VESPO: φ(W) = e^λ W^k e^-λW
        W = ratio.detach().clamp(1e-8, 4.85e8)                  # up to e^20
        k, lam = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
        return (lam + k * W.log() - lam * W).exp() * A * logp


def probability_change(clip, logp, old_logp):
    """DPPO (2602.04879): how far the probability π of a token is from its anchor μ, [B, T], signed
    and without gradient. "tv": π - μ; "kl": KL(μ || π) of "this token" against "any other"."""
    logp = logp.detach()
    change = logp.exp() - old_logp.exp()                                         # [B, T]
    if clip == "tv":
        return change
    rest, old_rest = (-torch.expm1(x).clamp(max=-1e-8) for x in (logp, old_logp))    # 1 - π, 1 - μ
    kl = old_logp.exp() * (old_logp - logp) + old_rest * (old_rest / rest).log()     # [B, T]
    return kl * change.sign()


def policy_loss(name, logp, old_logp, advantages, mask, *, epsilon=None, epsilon_high=None,
                weights=None, group_size=None, max_length=None, router_shift=None, mismatch=None,
                dual_clip=None, off_policy_mask=None):
    """The loss of objective `name` and what it did: (loss, stats). Never waits for the GPU.

    logp, old_logp   [B, T] float32, log-probs (nats) of the sampled tokens, new with gradient, old
    advantages       [B], or [B, T] where the ratio is per token (not gspo; gspo_token)
    mask             [B, T] bool, the loss tokens; what is outside changes nothing
    epsilon, _high   the edges of the band (see Objective); None: the paper's
    weights          [B, T], cut from token_weights of the whole mini-batch; None: this is all of it
                     (group_size, max_length: what its reduction may need)
    router_shift     [B, T] RSPO's γ̃ (moe.router_shift), multiplied into w before the clip
    mismatch         [B, T] constants on the clipped surrogate (mismatch_weight, high_entropy_mask)
    dual_clip        c > 1: where A < 0 nothing pushes down above w = c (1912.09729; 2505.07291)
    off_policy_mask  δ: drop answers with A < 0 and s < e^-δ (DeepSeek-V3.2, 2512.02556)

    stats, 0-dim tensors: clip_low, clip_high, the shares of loss tokens whose gradient was removed
    below and above the band (off_policy_mask is low, dual_clip high); clip_signal, both as a share
    of the signal_tokens (A not 0); ratio_stats."""
    row = OBJECTIVES[choose("name", name, OBJECTIVES)]
    check_per_token(mask, logp=logp, old_logp=old_logp, weights=weights, router_shift=router_shift,
                    mismatch=mismatch)
    low, high = check_band(name, advantages, mask, epsilon, epsilon_high, router_shift, dual_clip)
    A = spread(advantages.detach(), mask).masked_fill(~mask, 0.0)                # [B, T]
    logp = logp.masked_fill(~mask, 0.0)                                          # [B, T]
    old_logp = old_logp.detach().masked_fill(~mask, 0.0)                         # [B, T]
    shifted = logp if router_shift is None else logp + router_shift.detach().log()   # RSPO's w·γ̃
    ratio = spread(RATIOS[row.ratio](shifted, old_logp, mask), mask)             # [B, T]
    surrogate = token_surrogate(row.clip, ratio, A, logp, mask, low, high)       # [B, T]

    below = above = torch.zeros_like(mask)                                       # [B, T]
    if row.clip in ("min", "log-min"):
        below, above = (ratio < low) & (A < 0), (ratio > high) & (A > 0)
    if row.clip in ("tv", "kl"):
        change = probability_change(row.clip, logp, old_logp)                    # [B, T]
        below, above = (change < low) & (A < 0), (change > high) & (A > 0)
        surrogate = surrogate.masked_fill(below | above, 0.0)
    if dual_clip is not None:
        surrogate = torch.where(A < 0, torch.max(surrogate, dual_clip * A), surrogate)
        above = above | (ratio > dual_clip) & (A < 0)
    if off_policy_mask is not None:
        log_s = spread(sequence_log_ratio(logp.detach(), old_logp, mask), mask)  # [B, T]
        stale = (A < 0) & (-log_s > off_policy_mask)                             # [B, T]
        surrogate = surrogate.masked_fill(stale, 0.0)
        below, above = below | stale, above & ~stale                             # [B, T] each

    if weights is None:
        weights = token_weights(mask, row.reduction, group_size=group_size, max_length=max_length)
    if mismatch is not None:
        weights = weights * mismatch.detach()                                    # [B, T]
    loss = -(weights.masked_fill(~mask, 0.0) * surrogate).sum()
    share = lambda removed, of: removed.sum() / of.sum().clamp(min=1)            # []
    stats = dict(clip_low=share(below, mask), clip_high=share(above, mask),
                 clip_signal=share(below | above, A != 0), signal_tokens=(A != 0).sum())
    return loss, stats | ratio_stats(logp, old_logp, mask)


def spread(x, mask):
    """[B] or [B, T] -> [B, T]: what belongs to an answer stands at each of its tokens."""
    return x if x.dim() == 2 else x[:, None].expand(mask.shape)


def token_weights(mask, reduction, *, group_size=None, max_length=None):
    """How a reduction averages the loss tokens: a constant weight per token, [B, T], 0 outside the
    mask. Made once for a whole mini-batch (N rows, empty ones included) and cut with it, so that
    no split into micro-batches or over devices can change a loss.

        sequence-mean     mask / (N·|y_i|)                         GRPO, GSPO
        token-mean        mask / Σ_j |y_j|                         DAPO as implemented
        group-token-mean  mask / (prompts · Σ_{j in group} |y_j|)  DAPO as printed
        constant          mask / (N·max_length)                    Dr. GRPO
        sequence-sum      mask / N                                 LUSPO
    """
    choose("reduction", reduction,
           ("sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"))
    check_per_token(mask)
    lengths, N = mask.sum(-1, keepdim=True), len(mask)                           # [B, 1]
    if reduction == "sequence-mean":
        return mask / (N * lengths).clamp(min=1)                                 # [B, T]
    if reduction == "token-mean":
        return mask / lengths.sum().clamp(min=1)
    if reduction == "sequence-sum":
        return mask / N
    if reduction == "constant" and max_length:
        return mask / (N * max_length)
    if reduction == "group-token-mean" and group_size and N % group_size == 0:
        groups = lengths.view(-1, group_size).sum(-1)                            # [prompts]
        return mask / (len(groups) * groups.repeat_interleave(group_size)[:, None]).clamp(min=1)
    raise ValueError(f"max_length is {max_length}, group_size is {group_size}, mask "
                     f"{list(mask.shape)}: {reduction} needs whole groups (constant: max_length)")


def kl_penalty(logp, ref_logp, mask, estimator="k3", old_logp=None):
    """Per-token estimates of KL(π_θ || π_ref), [B, T], 0 outside the mask; the loss gets
    + beta * (weights * kl).sum(). With d = log π_θ - log π_ref, gradients as factors of ∇log π_θ:

        k1      d             gradient 1         zero in expectation: as a loss it does nothing
        k2      d²/2          gradient d         RIGHT for tokens of π_θ, though the value is biased
        k3      e^-d - 1 + d  gradient 1 - e^-d  that of the forward KL; GRPO 2402.03300 eq. 4
        k3_is   w·k3          gradient w·d       RIGHT for tokens of π_old, w = π_θ/π_old; old_logp
        k3_st   k3            gradient d         RIGHT for tokens of π_θ: k3's value, k2's gradient
    """
    if estimator == "k3_is" and old_logp is None:
        raise ValueError("old_logp is missing: k3_is weights k3 by exp(logp - old_logp)")
    d = token_log_ratio(logp, ref_logp, mask)                                    # [B, T]
    k2, k3 = d**2 / 2, torch.expm1((-d).clamp(max=LARGEST_LOG)) + d              # exact at small d
    w = 1 if old_logp is None else token_ratio(logp, old_logp, mask)             # [B, T]
    kl = {"k1": d, "k2": k2, "k3": k3, "k3_is": w * k3, "k3_st": k3.detach() + k2 - k2.detach()}
    return kl[choose("estimator", estimator, kl)]                                # [B, T]


def mismatch_weight(old_logp, sampler_logp, mask, mode, low, high):
    """Weights for ρ = π_old / π_sampler, the gap between trainer and sampler: [B, T], detached, 0
    outside the mask. mode: a level, `token` ρ_t, `seq` Π_t ρ_t or `geo` (Π_t ρ_t)^(1/|y|), and what
    happens outside [low, high]: `_truncate` clamps (TIS: token, 0, 2), `_mask` gives 0 (IcePop:
    token, 0.5, 5; geo_mask weighs the answers it keeps by ρ_t). A product rejects long answers."""
    modes = [f"{level}_{action}" for level in LEVELS for action in ("truncate", "mask")]
    level, action = choose("mode", mode, modes).split("_")
    ratio = LEVELS["token" if mode == "geo_mask" else level]
    rho = spread(ratio(old_logp, sampler_logp, mask).detach(), mask)             # [B, T]
    if action == "truncate":
        return rho.clamp(low, high).masked_fill(~mask, 0.0)                      # [B, T]
    return rho * mismatch_mask(old_logp, sampler_logp, mask, level, low, high)   # [B, T]


def mismatch_mask(old_logp, sampler_logp, mask, level, low, high):
    """Rejection: the loss tokens whose ρ of this level is within [low, high], [B, T] bool."""
    ratio = LEVELS[choose("level", level, LEVELS)]
    rho = spread(ratio(old_logp, sampler_logp, mask), mask)                      # [B, T]
    return mask & (rho >= low) & (rho <= high)                                   # [B, T]


def high_entropy_mask(entropy, mask, quantile):
    """80/20 (2506.01939): the loss tokens at or above this quantile of their entropies, [B, T]
    bool; as a factor of policy_loss's mismatch it leaves the denominators as they are."""
    return mask & (entropy >= torch.quantile(entropy[mask], quantile))           # [B, T]


def choose(argument, value, known):
    """value, which must be one of the known names."""
    if value not in known:
        raise ValueError(f"{argument} {value!r} is unknown; known: {', '.join(known)}")
    return value


def check_band(name, advantages, mask, epsilon, epsilon_high, router_shift, dual_clip):
    """The edges of the band, None without one. ValueError: what makes no sense together."""
    row = OBJECTIVES[name]
    per_token = row.ratio in ("none", "token", "gspo-token") and advantages.shape == mask.shape
    if advantages.shape != mask.shape[:1] and not per_token:
        raise ValueError(f"advantages is {list(advantages.shape)}, mask {list(mask.shape)}: it is "
                         f"[B], or [B, T] with a ratio per token (gspo_token); not for {name}")
    if row.ratio == "log-shifted" and router_shift is None:
        raise ValueError(f"router_shift is missing: {name} needs it, [B, T] (moe.router_shift)")
    if dual_clip is not None and ((row.ratio, row.clip) != ("token", "min") or dual_clip <= 1):
        raise ValueError(f"dual_clip is {dual_clip}: it must be > 1, with token, min; not {name}")
    low = row.epsilon if epsilon is None else epsilon
    high = row.epsilon_high if epsilon_high is None else epsilon_high
    if (row.epsilon, low, high) == (None, None, None):
        return None, None
    if row.epsilon is None or min(low, high) < 0 or row.clip == "min" and low > 1:
        raise ValueError(f"epsilon is {low}, epsilon_high is {high}: {name} has no band, or a band "
                         "[1 - epsilon, 1 + epsilon_high] that starts at 0 or above")
    return (-low, high) if row.clip in AROUND_0 else (1 - low, 1 + high)


if __name__ == "__main__":
    # Two answers to one query, a right one of 4 tokens and a wrong one of 2; w: how far each moved
    w = torch.tensor([[1.00, 1.90, 0.40, 1.25], [1.05, 0.75, 1.00, 1.00]])
    mask, A = torch.tensor([[True] * 4, [True] * 2 + [False] * 2]), torch.tensor([1.0, -1.0])
    old_logp, shift = torch.full((2, 4), -1.5), torch.full((2, 4), 0.9)
    print("Under each token: -d loss / d log π, how hard an update pushes it up (+) or down (-)\n")
    print(f"{'name':12}{'ratio':12}{'clip':8}{'loss':>6}{'clip_low':>9}{'_high':>6}  "
          + "".join(f"  w {x:4.2f}" for x in w[mask].tolist()) + "   (A = +1 four times, then -1)")
    for name, row in OBJECTIVES.items():
        logp = (old_logp + w.log()).requires_grad_()
        loss, stats = policy_loss(name, logp, old_logp, A, mask, group_size=2, max_length=4,
                                  router_shift=shift if name == "rspo" else None)
        push = -torch.autograd.grad(loss, logp)[0][mask]
        print(f"{name:12}{row.ratio:12}{row.clip:8}{loss:6.2f}{stats['clip_low']:9.0%}"
              f"{stats['clip_high']:6.0%}  "
              + "".join(f"{x:+8.3f}" if x else "       ·" for x in push.tolist()))
