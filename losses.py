"""The family of policy objectives. Each is one row of OBJECTIVES: ratio × advantage × clip ×
reduction.

    loss = -(weights * surrogate).sum()

The surrogate [B, T] is the clipped product of ratio and advantage of each token. The weights [B, T]
are constants that say how tokens are averaged. GRPO and GSPO differ in the ratio ("token" or
"sequence") and in the clip range. log s is a mean over |y| tokens, so it spreads about √|y| times
less than log w. The paper's clip range for s is narrower still, by choice: it removes the gradient
of the responses that moved most.

PPO's clip does not bound a ratio. It removes a gradient: that of good responses (A > 0) above the
clip range and that of bad responses (A < 0) below it. At ratio 1 GSPO's loss is minus the mean of
the advantages, which is 0; its gradient is not 0.

To add an objective, add a row to OBJECTIVES; if its ratio is new, an entry to RATIOS; if its clip
is new, a case to token_surrogate (and an entry to LIMITS if it does not limit a ratio). train.py
then accepts it as --algorithm NAME. A new entry in the stats of policy_loss needs one in
STATISTICS, which says how those of micro-batches are combined.

Next: rollout.py, where the log-probs come from.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ratios import (LARGEST_LOG, check_per_token, gspo_token_ratio, mean_over_tokens,
                    product_ratio, ratio_stats, sequence_log_ratio, sequence_ratio,
                    token_log_ratio, token_ratio)


@dataclass(frozen=True)
class Objective:
    ratio: str                   # a key of RATIOS
    clip: str                    # a case of token_surrogate
    epsilon: float | None        # the clip range is [1 - epsilon, 1 + epsilon_high] for a clip of w
    epsilon_high: float | None   # and [-epsilon, epsilon_high] for others (LIMITS); None: none
    reduction: str               # how tokens are averaged, see token_weights
    source: str = ""             # arXiv id and equation; "" if not published
    constants: dict = field(default_factory=dict)    # the constants of the clip, by name
    dual_clip: float | None = None         # c > 1: where A < 0, no gradient above w = c
                                           # (1912.09729; 2505.07291)
    off_policy_mask: float | None = None   # δ: drop responses with A < 0 and s < e^-δ
                                           # (DeepSeek-V3.2, 2512.02556)
    name: str = "this objective"           # for messages; see with_options

    @property
    def per_token(self):
        """Whether every token may have its own advantage, and be left out: not if a response has
        one ratio, nor if the clip averages log w over the response."""
        return RATIOS[self.ratio].per == "token" and self.limits != "log w"

    def clip_range(self, epsilon=None, epsilon_high=None):
        """(epsilon, epsilon_high) of the row with those that are given. epsilon alone sets both, as
        in TRL; epsilon_high alone leaves epsilon."""
        if epsilon_high is None:
            epsilon_high = self.epsilon_high if epsilon is None else epsilon
        return self.epsilon if epsilon is None else epsilon, epsilon_high

    @property
    def clips_s(self):
        """Whether the clip range is for the sequence ratio s, as in GSPO, or for another mean."""
        return RATIOS[self.ratio].mean and self.clip == "min"

    @property
    def limits(self):
        """What the clip range limits: w (any ratio), log w or π - μ, also as a KL."""
        return LIMITS.get(self.clip, "w")

    @property
    def pulls(self):
        """Whether it has a gradient where A = 0."""
        return self.clip == "square"


OBJECTIVES = {  # "constant" is meant for advantages that are not divided by a std. dppo, rollout_is
                # and dro are meant for the sampler's log-probs as old_logp.
    "reinforce":   Objective("none",        "none",    None, None,   "token-mean", "Williams 1992"),
    "ppo":         Objective("token",       "min",     0.2,  0.2,    "sequence-mean", "1707.06347"),
    "grpo":        Objective("token",       "min",     0.2,  0.2,    "sequence-mean", "2402.03300"),
    "dr_grpo":     Objective("token",       "min",     0.2,  0.2,    "constant", "2503.20783"),
    "dapo":        Objective("token",       "min",     0.2,  0.28,   "token-mean", "2503.14476"),
    "dapo_paper":  Objective("token",       "min",     0.2,  0.28,   "group-token-mean",
                             "2503.14476"),
    "gspo":        Objective("sequence",    "min",     3e-4, 4e-4,   "sequence-mean", "2507.18071"),
    "gspo_token":  Objective("gspo-token",  "min",     3e-4, 4e-4,   "sequence-mean", "2507.18071"),
    "gmpo":        Objective("log-token",   "log-min", 0.4,  0.4,    "sequence-mean", "2507.20673"),
    "rspo":        Objective("log-shifted", "log-min", 0.4,  0.4,    "sequence-mean", "2510.23027"),
    "cispo":       Objective("token",       "weight",  1.0,  0.28,   "token-mean", "2506.13585"),
    "dppo":        Objective("token",       "tv",      0.2,  0.2,    "token-mean", "2602.04879",
                             dict(cap=20.0)),
    "dppo_kl":     Objective("token",       "kl",      0.05, 0.05,   "token-mean", "2602.04879",
                             dict(cap=20.0)),
    "rollout_is":  Objective("token",       "two-sided", 0.2, 0.28,  "token-mean", "2602.15763"),
    "dro":         Objective("token",       "square",  None, None,   "token-mean", "2405.19107",
                             dict(beta=0.05)),
    "sapo":        Objective("token",       "sigmoid", None, None,   "sequence-mean", "2511.20347",
                             dict(tau_positive=1.0, tau_negative=1.05)),
    "luspo":       Objective("sequence",    "min",     2e-3, 2.5e-3, "sequence-sum", "2602.05261"),
    "vespo":       Objective("product",     "gamma",   None, None,   "token-mean", "2602.10693",
                             dict(k_positive=2.0, lambda_positive=3.0,
                                  k_negative=3.0, lambda_negative=2.0)),
    "sequence_is": Objective("product",     "min",     0.2,  0.2,    "sequence-mean", "textbook"),
}


@dataclass(frozen=True)
class Ratio:
    """What multiplies the advantage; for a clip of log w its logarithm."""
    function: Callable           # (logp, old_logp, mask) -> [B, T], or [B] if a response has one
    per: str                     # "token" if its gradient is that of the token alone, else
                                 # "response"
    mean: bool = False           # whether it is a mean over tokens, so that it spreads far less


RATIOS = {
    "none": Ratio(lambda logp, old_logp, mask: torch.ones_like(logp), "token"),
    "token": Ratio(token_ratio, "token"),
    "sequence": Ratio(sequence_ratio, "response", mean=True),
    "gspo-token": Ratio(gspo_token_ratio, "token", mean=True),
    "product": Ratio(product_ratio, "response"),
    "log-token": Ratio(token_log_ratio, "token"),
    "log-shifted": Ratio(token_log_ratio, "token"),  # log of w·γ̃, with RSPO's router shift γ̃
}
LEVELS = {"token": token_ratio, "seq": product_ratio, "geo": sequence_ratio}  # for mismatch weights


LIMITS = {"log-min": "log w", "tv": "π - μ", "kl": "π - μ"}     # clips of another number than w


def token_surrogate(clip, ratio, A, logp, old_logp, mask, low, high, constants):
    """(surrogate, below, above), [B, T] each. below and above, bool: whether the clip removed the
    gradient of a token because it is below or above the clip range. policy_loss counts them only
    where A is not 0.

    ratio, advantages A, logp, old_logp [B, T]. low, high: the ends of the clip range. constants:
    those of the objective's row."""
    none = torch.zeros_like(mask)                               # [B, T]
    if clip == "none":                                          # REINFORCE
        return A * logp, none, none
    if clip == "min":                                           # PPO eq. 7; GSPO eq. 5, 13
        surrogate = torch.min(ratio * A, ratio.clamp(low, high) * A)
        return surrogate, *find_clipped(ratio, A, low, high)
    if clip == "log-min":                                       # GMPO: a cut token is constant
        log_w = torch.where(A > 0, ratio.clamp(max=high), ratio.clamp(min=low))
        w = broadcast_to_tokens(mean_over_tokens(log_w, mask).clamp(max=LARGEST_LOG).exp(), mask)
        return w * A, *find_clipped(ratio, A, low, high)
    if clip == "weight":                                        # CISPO eq. 4, 5: drops no token
        return ratio.detach().clamp(low, high) * A * logp, none, none
    if clip in ("tv", "kl"):                                    # DPPO: a mask, not a minimum
        change = probability_change(clip, logp, old_logp)       # [B, T]
        below, above = find_clipped(change, A, low, high)
        surrogate = ratio.detach().clamp(max=constants["cap"]) * A * logp
        return surrogate.masked_fill(below | above, 0.0), below, above
    if clip == "two-sided":                                     # GLM-5: 0 whatever the sign of A
        below = ratio <= low
        above = ratio >= high
        return ratio.detach().masked_fill(below | above, 0.0) * A * logp, below, above
    if clip == "square":                                        # DRO: a pull in place of a clip
        return A * logp - constants["beta"] / 2 * (logp - old_logp).square(), none, none
    if clip == "sigmoid":                                       # SAPO: slope A at w = 1
        tau = torch.where(A > 0, constants["tau_positive"], constants["tau_negative"])
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A, none, none
    if clip == "gamma":                                         # VESPO: φ(W) = e^λ W^k e^-λW
        W = ratio.detach().clamp(1e-8, 4.85e8)                  # up to e^20
        k = torch.where(A >= 0, constants["k_positive"], constants["k_negative"])
        lam = torch.where(A >= 0, constants["lambda_positive"], constants["lambda_negative"])
        return (lam + k * W.log() - lam * W).exp() * A * logp, none, none
    raise ValueError(f"clip {clip!r} is unknown: token_surrogate has no case for it")


def find_clipped(x, A, low, high):
    """(below, above), [B, T] bool each: the tokens where x [B, T] has left the clip range in the
    direction in which the advantage pushes it, below it where A < 0 and above it where A > 0."""
    return (x < low) & (A < 0), (x > high) & (A > 0)


def probability_change(clip, logp, old_logp):
    """How far the probability π of a token is from its old probability μ, [B, T], signed and
    without gradient. "tv": π - μ. "kl": KL(μ || π) of the two-way distribution "this token or any
    other" (both DPPO, 2602.04879)."""
    logp = logp.detach()
    change = logp.exp() - old_logp.exp()                                         # [B, T]
    if clip == "tv":
        return change
    old_rest, rest = (-torch.expm1(x).clamp(max=-1e-8) for x in (old_logp, logp))    # 1 - μ, 1 - π
    kl = old_logp.exp() * (old_logp - logp) + old_rest * (old_rest / rest).log()     # [B, T]
    return kl * change.sign()


def policy_loss(name, logp, old_logp, advantages, mask, *, epsilon=None, epsilon_high=None,
                weights=None, group_size=None, max_length=None, router_shift=None, factors=None):
    """The loss of an objective and its statistics: (loss, stats). It does not synchronize with the
    GPU.

    name             a key of OBJECTIVES, or a row with options: see `with_options`
    logp, old_logp   [B, T] float32, log-probs of the sampled tokens in nats: under the new policy,
                     with gradient, and under the old policy
    advantages       [B], or [B, T] if the ratio is per token (gspo_token has one, gspo does not)
    mask             [B, T] bool, the loss mask; values outside it have no effect
    epsilon, _high   the clip range (see Objective.clip_range); None: the paper's
    weights          [B, T], from token_weights of the whole mini-batch, the rows of these
                     responses; None: these responses are the whole mini-batch (some reductions
                     then need group_size or max_length)
    router_shift     [B, T] RSPO's γ̃ (routes.router_shift), multiplied into w before the clip
    factors          [B, T] constants that multiply the clipped surrogate (mismatch_weight,
                     high_entropy_mask)

    stats, 0-dim tensors named in STATISTICS: clip_low and clip_high, the shares of loss tokens
    whose gradient was removed below and above the clip range (off_policy_mask counts as low,
    dual_clip as high); clip_signal, both together as a share of the signal_tokens (those with A
    not 0); ratio_stats."""
    row = name if isinstance(name, Objective) else with_options(name)
    check_per_token(mask, logp=logp, old_logp=old_logp, weights=weights, router_shift=router_shift,
                    factors=factors)
    low, high = check_clip_range(row, advantages, mask, epsilon, epsilon_high, router_shift)
    A = broadcast_to_tokens(advantages.detach(), mask).masked_fill(~mask, 0.0)   # [B, T]
    logp = logp.masked_fill(~mask, 0.0)                                          # [B, T]
    old_logp = old_logp.detach().masked_fill(~mask, 0.0)                         # [B, T]
    shifted = logp if router_shift is None else logp + router_shift.detach().log()   # RSPO's w·γ̃
    ratio = RATIOS[row.ratio].function(shifted, old_logp, mask)                  # [B] or [B, T]
    ratio = broadcast_to_tokens(ratio, mask)                                     # [B, T]
    surrogate, below, above = token_surrogate(
        row.clip, ratio, A, logp, old_logp, mask, low, high, row.constants)      # [B, T] each
    check_per_token(mask, surrogate=surrogate)
    if row.dual_clip is not None:
        surrogate = torch.where(A < 0, torch.max(surrogate, row.dual_clip * A), surrogate)
        above = above | (ratio > row.dual_clip) & (A < 0)                        # [B, T]
    if row.off_policy_mask is not None:
        log_s = sequence_log_ratio(logp.detach(), old_logp, mask)                # [B]
        drop = broadcast_to_tokens(-log_s, mask)                                 # [B, T]
        stale = (A < 0) & (drop > row.off_policy_mask)                           # [B, T]
        surrogate = surrogate.masked_fill(stale, 0.0)
        below = below | stale                                                    # [B, T]
        above = above & ~stale                                                   # [B, T]

    if weights is None:
        weights = token_weights(mask, row.reduction, group_size=group_size, max_length=max_length)
    if factors is not None:
        weights = weights * factors.detach()                                     # [B, T]
    loss = -(weights.masked_fill(~mask, 0.0) * surrogate).sum()
    signal = A != 0                                                              # [B, T]
    below = below & signal                                                       # [B, T]
    above = above & signal                                                       # [B, T]
    share = lambda removed, of: removed.sum() / of.sum().clamp(min=1)            # []
    stats = dict(clip_low=share(below, mask), clip_high=share(above, mask),
                 clip_signal=share(below | above, signal), signal_tokens=signal.sum())
    return loss, stats | ratio_stats(logp, old_logp, mask)


STATISTICS = {  # of policy_loss: over what each is averaged; counts before means before variances
    "tokens": "count", "answers": "count", "signal_tokens": "count",     # these are added up
    "clip_low": "tokens", "clip_high": "tokens", "clip_signal": "signal_tokens",
    "log_w_mean": "tokens", "log_w_var": "tokens", "log_s_mean": "answers", "log_s_var": "answers",
    "ratio_max": "max",
}


def combine_stats(parts):
    """The exact stats of a mini-batch from those of its micro-batches, as STATISTICS says."""
    whole = {}
    for name in sorted(parts[0], key=[*STATISTICS].index):
        over = STATISTICS[name]
        values = [p[name] for p in parts]
        if over == "count":
            whole[name] = sum(values)
        elif over == "max":
            whole[name] = torch.stack(values).amax()
        else:
            if name.endswith("_var"):    # the variance within the parts, and between their means
                mean = name.removesuffix("var") + "mean"
                values = [x + (p[mean] - whole[mean]) ** 2 for x, p in zip(values, parts)]
            weighted = sum(x * p[over] for x, p in zip(values, parts))
            whole[name] = weighted / whole[over].clamp(min=1)
    return whole


def broadcast_to_tokens(x, mask):
    """[B] or [B, T] -> [B, T]: a value per response is repeated for each of its tokens."""
    return x if x.dim() == 2 else x[:, None].expand(mask.shape)


def token_weights(mask, reduction, *, group_size=None, max_length=None):
    """How a reduction averages the loss tokens: a constant weight per token, [B, T], 0 outside the
    mask. The weights are computed once for a whole mini-batch (N rows, empty rows included) and
    split with it, so that the loss is the same for every split into micro-batches or over devices.

        sequence-mean     mask / (N·|y_i|)                         GRPO, GSPO
        token-mean        mask / Σ_j |y_j|                         DAPO as implemented
        group-token-mean  mask / (prompts · Σ_{j in group} |y_j|)  DAPO as printed
        constant          mask / (N·max_length)                    Dr. GRPO
        sequence-sum      mask / N                                 LUSPO
    """
    validate_choice("reduction", reduction,
           ("sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"))
    lengths = mask.sum(-1, keepdim=True)                                         # [B, 1]
    N = len(mask)
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

        k1      d             gradient 1         zero in expectation: as a loss it has no effect
        k2      d²/2          gradient d         exact for tokens of π_θ; the value is biased
        k3      e^-d - 1 + d  gradient 1 - e^-d  that of the forward KL; GRPO 2402.03300 eq. 4
        k3_is   w·k3          gradient w·d       exact for tokens of π_old, w = π_θ/π_old; old_logp
        k3_st   k3            gradient d         exact for tokens of π_θ: k3's value, k2's gradient

    "exact": the expected gradient is the gradient of KL(π_θ || π_ref)."""
    if estimator == "k3_is" and old_logp is None:
        raise ValueError("old_logp is missing: k3_is weights k3 by exp(logp - old_logp)")
    d = token_log_ratio(logp, ref_logp, mask)                                    # [B, T]
    k2 = d**2 / 2
    k3 = torch.expm1((-d).clamp(max=LARGEST_LOG)) + d                            # exact at small d
    w = 1 if old_logp is None else token_ratio(logp, old_logp, mask)             # [B, T]
    kl = {"k1": d, "k2": k2, "k3": k3, "k3_is": w * k3, "k3_st": k3.detach() + k2 - k2.detach()}
    return kl[validate_choice("estimator", estimator, kl)]                                # [B, T]


def mismatch_weight(old_logp, sampler_logp, mask, level, high):
    """Truncated importance weights ρ = π_old / π_sampler, at most `high`, which correct for the
    difference between trainer and sampler: [B, T], detached, 0 outside the mask. Level: `token`
    ρ_t (TIS, high 2), `seq` Π_t ρ_t or `geo` (Π_t ρ_t)^(1/|y|)."""
    ratio = LEVELS[validate_choice("level", level, LEVELS)]
    rho = broadcast_to_tokens(ratio(old_logp, sampler_logp, mask).detach(), mask)  # [B, T]
    return rho.clamp(0.0, high).masked_fill(~mask, 0.0)                          # [B, T]


def mismatch_mask(old_logp, sampler_logp, mask, level, low, high):
    """Rejection: the loss tokens whose ρ, computed at this level, is within [low, high], [B, T]
    bool (IcePop: token, 0.5, 5). Level `seq` rejects most long responses, because the product grows
    or shrinks with length; `outlier` drops a whole response if the ρ of any of its tokens is not
    within (SkyRL's outlier_token_is_threshold, verl's seq_max)."""
    ratio = LEVELS["token" if level == "outlier" else validate_choice("level", level, LEVELS)]
    rho = broadcast_to_tokens(ratio(old_logp, sampler_logp, mask), mask)     # [B, T]
    kept = (rho >= low) & (rho <= high)                                          # [B, T]
    if level == "outlier":
        kept = (kept | ~mask).all(-1, keepdim=True)                              # [B, 1]
    return mask & kept                                                           # [B, T]


def high_entropy_mask(entropy, mask, quantile):
    """The 80/20 rule (2506.01939): the loss tokens whose entropy is at or above this quantile, up
    to rounding, [B, T] bool. It is passed to policy_loss in `factors`, so that the denominators of
    the averages still count all loss tokens."""
    if not mask.any():                                       # all responses are masked
        return mask                                                              # [B, T]
    ordered = entropy[mask].sort().values                                        # [N]
    rank = quantile * (len(ordered) - 1)     # torch.quantile refuses more than 2^24 values
    below = ordered[math.floor(rank)]                                            # []
    above = ordered[math.ceil(rank)]                                             # []
    least = torch.lerp(below, above, rank % 1) * (1 - 2e-6)      # equal ones are rounded apart  []
    return mask & (entropy >= least)                                             # [B, T]


def validate_choice(argument, value, known):
    """Return value if it is one of the known names; raise ValueError otherwise."""
    if value not in known:
        raise ValueError(f"{argument} {value!r} is unknown; known: {', '.join(known) or 'none'}")
    return value


def with_options(name, **options):
    """The row `name` of OBJECTIVES with options: dual_clip, off_policy_mask, constants. Raises
    ValueError for an unknown name."""
    return replace(OBJECTIVES[validate_choice("name", name, OBJECTIVES)], name=name, **options)


def check_clip_range(row, advantages, mask, epsilon, epsilon_high, router_shift):
    """(low, high), the ends of the clip range; None each for an objective without one. Raises
    ValueError for arguments that are out of range or contradict each other."""
    per_token = row.per_token and advantages.shape == mask.shape
    if advantages.shape != mask.shape[:1] and not per_token:
        raise ValueError(f"advantages has shape {list(advantages.shape)}, mask {list(mask.shape)}: "
                         f"{row.name} takes advantages of shape [B]; [B, T] needs a ratio per "
                         "token, as in gspo_token")
    if row.ratio == "log-shifted" and router_shift is None:
        raise ValueError(f"router_shift is missing: {row.name} needs routes.router_shift, [B, T]")
    if row.dual_clip is not None and (
            (row.ratio, row.clip) != ("token", "min") or row.dual_clip <= 1):
        raise ValueError(f"dual_clip is {row.dual_clip}: it must be > 1 and needs an objective "
                         f"with the token ratio and PPO's clip, which {row.name} does not have")
    low, high = row.clip_range(epsilon, epsilon_high)
    if (row.epsilon, low, high) == (None, None, None):
        return None, None
    if row.epsilon is None:
        raise ValueError(f"epsilon is {low}, epsilon_high is {high}: {row.name} has no clip range")
    if not (low >= 0 and high >= 0) or row.clip == "min" and low > 1:          # or NaN
        raise ValueError(f"epsilon is {low}, epsilon_high is {high}: the clip range [1 - epsilon, "
                         "1 + epsilon_high] must contain 1 and start at 0 or above")
    center = 1 if row.limits == "w" else 0       # of a policy that has not changed
    return center - low, center + high


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    # Two responses to one prompt: a right one of 4 tokens and a wrong one of 2. w: the token ratios
    w = torch.tensor([[1.00, 1.90, 0.40, 1.25], [1.05, 0.75, 1.00, 1.00]])
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    A = torch.tensor([1.0, -1.0])
    old_logp = torch.full((2, 4), -1.5)
    shift = torch.full((2, 4), 0.9)
    print("Under each token: -d loss / d log π, how hard an update pushes it up (+) or down (-)\n")
    names = 1 + max(map(len, OBJECTIVES))
    clips = 1 + max(len(row.clip) for row in OBJECTIVES.values())
    print(f"{'name':{names}}{'ratio':12}{'clip':{clips}}{'loss':>6}{'clip_low':>9}{'_high':>6}  "
          + "".join(f"  w {x:4.2f}" for x in w[mask].tolist()) + "   (A = +1 four times, then -1)")
    for name, row in OBJECTIVES.items():
        logp = (old_logp + w.log()).requires_grad_()
        loss, stats = policy_loss(name, logp, old_logp, A, mask, group_size=2, max_length=4,
                                  router_shift=shift if row.ratio == "log-shifted" else None)
        push = -torch.autograd.grad(loss, logp)[0][mask]
        print(f"{name:{names}}{row.ratio:12}{row.clip:{clips}}{loss:6.2f}{stats['clip_low']:9.0%}"
              f"{stats['clip_high']:6.0%}  "
              + "".join(f"{x:+8.3f}" if x else "       ·" for x in push.tolist()))
