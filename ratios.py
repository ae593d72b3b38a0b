"""Importance ratios: how much likelier is a response under the new policy than under the old one?

    token      w_t = π_new(y_t) / π_old(y_t)                    GRPO: one number per token
    product    Π_t w_t                                          unbiased; explodes with length
    sequence   s = (Π_t w_t)^(1/|y|) = exp(mean_t log w_t)      GSPO: one number per response
    GSPO-token s_t = sg[s] · π_new(y_t) / sg[π_new(y_t)]        the value of s, a gradient per token

`sg` stops the gradient. s is also a ratio of perplexities ("Rethinking GSPO"): with the
cross-entropy H = -mean_t log π and the perplexity exp(H), s = exp(H_old - H_new) =
perplexity_old / perplexity_new. GSPO therefore clips responses whose perplexity has changed.

All functions take logp and old_logp of shape [B, T], in nats, float32 (or float64), and mask
[B, T] bool, the loss mask: True at the loss tokens (the response with its EOS; not padding, and in
a conversation not what the environment writes). |y| counts the loss tokens only, as in verl and
TRL. Values outside the mask, NaN included, change neither a value nor a gradient. Other
shapes and types raise ValueError: bfloat16 would round GSPO's whole clip range to 1.0.

Next: advantages.py, the other factor of the loss.
"""

import math
import sys

import torch

LARGEST_LOG = 80.0   # exp overflows float32 at 88.7; inf would make a clipped gradient of 0 NaN


def check_per_token(mask, **tensors):
    """Raises ValueError unless mask is bool [B, T] and every other tensor is None, or [B, T] in
    float32 or float64."""
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}: it must be torch.bool [B, T]")
    for name, x in tensors.items():
        if x is not None and x.shape != mask.shape:
            raise ValueError(f"{name} is {list(x.shape)} but mask is {list(mask.shape)}")
        if x is not None and x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} {list(x.shape)} is {x.dtype}: it must be float32")


def mean_over_tokens(x, mask):
    """[B, T] -> [B]: the mean over a row's loss tokens, 0 for a row without any."""
    return x.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def masked_mean(x, mask):
    """The mean of the entries of x that the mask (of x's shape) keeps, a number; None if there are
    none."""
    chosen = x[mask]                                                                # [kept]
    return chosen.mean().item() if len(chosen) else None


def token_log_ratio(logp, old_logp, mask):
    """log w_t = log π_new(y_t) - log π_old(y_t), [B, T], 0 outside the mask."""
    check_per_token(mask, logp=logp, old_logp=old_logp)
    return (logp - old_logp).masked_fill(~mask, 0.0)                             # [B, T]


def sequence_log_ratio(logp, old_logp, mask):
    """log s = mean over the loss tokens of log w_t, [B], 0 for a row without loss tokens."""
    return mean_over_tokens(token_log_ratio(logp, old_logp, mask), mask)         # [B]


def token_ratio(logp, old_logp, mask):
    """The token ratio w_t, [B, T], 1 outside the mask. GRPO 2402.03300; GSPO 2507.18071 eq. 3."""
    return token_log_ratio(logp, old_logp, mask).clamp(max=LARGEST_LOG).exp()    # [B, T]


def sequence_ratio(logp, old_logp, mask):
    """The sequence ratio s, [B], 1 for a row without loss tokens. GSPO 2507.18071 eq. 7."""
    return sequence_log_ratio(logp, old_logp, mask).clamp(max=LARGEST_LOG).exp() # [B]


def gspo_token_ratio(logp, old_logp, mask):
    """s_t, [B, T]. Its value is s; its gradient is s with respect to log π_new(y_t) and 0 with
    respect to the log-prob of every other token. GSPO 2507.18071 eq. 14."""
    s = sequence_ratio(logp, old_logp, mask).detach()                            # [B]
    logp = logp.masked_fill(~mask, 0.0)                                          # [B, T]
    return s[:, None] * (logp - logp.detach()).exp()                             # [B, T]


def product_ratio(logp, old_logp, mask):
    """Π_t w_t, [B]: the unbiased ratio of whole responses. The variance of its logarithm grows with
    the length of the response; the variance of log s shrinks."""
    return token_log_ratio(logp, old_logp, mask).sum(-1).clamp(max=LARGEST_LOG).exp()    # [B]


def turn_numbers(mask):
    """The turn of each loss token, [B, T] int64: 0, 1, …, and -1 outside the mask. A turn is a run
    of loss tokens; between two turns stand tokens of the environment."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]                       # [B, T]
    begun = (mask & ~before).cumsum(-1)                                          # [B, T]
    return (begun - 1).masked_fill(~mask, -1)                                    # [B, T]


def cross_entropy(logp, mask):
    """H = -mean over the loss tokens of log π(y_t), [B], in nats per token."""
    check_per_token(mask, logp=logp)
    return -mean_over_tokens(logp, mask)                                         # [B]


def perplexity(logp, mask):
    """exp(H), [B]. sequence_ratio == perplexity(old) / perplexity(new) == exp(H_old - H_new)."""
    return cross_entropy(logp, mask).exp()                                       # [B]


@torch.no_grad()
def ratio_stats(logp, old_logp, mask):
    """How far apart the two policies are, as 0-dim tensors: mean and population variance of log w
    over the loss tokens, mean and population variance of log s over the responses with loss tokens,
    the number of these tokens and responses ("answers"), and the largest w."""
    log_w = token_log_ratio(logp, old_logp, mask)                                # [B, T]
    log_s = mean_over_tokens(log_w, mask)                                        # [B]
    answers = mask.any(-1)                                                       # [B]
    stats = dict(tokens=mask.sum(), answers=answers.sum(),
                 ratio_max=log_w.masked_fill(~mask, -torch.inf).amax().exp())
    for name, x, counted in (("log_w", log_w, mask), ("log_s", log_s, answers)):
        count = counted.sum().clamp(min=1)
        mean = x.sum() / count                                                   # x is 0 elsewhere
        variance = ((x - mean) ** 2 * counted).sum() / count
        stats |= {f"{name}_mean": mean, f"{name}_var": variance}
    return stats


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    # One response of 512 tokens. The update changed two of them, to 1.9 and to 0.4 times their old
    # probability.
    log_w = torch.zeros(1, 512, dtype=torch.float64)
    log_w[0, 137] = math.log(1.9)
    log_w[0, 400] = math.log(0.4)
    mask = torch.ones(1, 512, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    old_logp = -4 * torch.rand(1, 512, dtype=torch.float64, generator=generator)
    new_logp = old_logp + log_w

    print("A response of 512 tokens after an update. '·' w = 1,  '▲' w = 1.9,  '▼' w = 0.4\n")
    w = token_ratio(new_logp, old_logp, mask)[0]
    strip = "".join("▲" if x > 1.5 else "▼" if x < 0.5 else "·" for x in w.tolist())
    print("\n".join("  " + strip[i:i + 96] for i in range(0, 512, 96)))

    s = sequence_ratio(new_logp, old_logp, mask).item()
    print(f"\n  token ratio     w  {w.min():.2f} … {w.max():.2f}   GRPO's clip range is 0.8 … 1.2"
          f"\n  product         Πw {product_ratio(new_logp, old_logp, mask).item():.5f}"
          f"\n  sequence ratio  s  {s:.5f}       GSPO's clip range is 0.9997 … 1.0004")

    quotient = (perplexity(old_logp, mask) / perplexity(new_logp, mask)).item()
    H_old, H_new = (cross_entropy(logp, mask).item() for logp in (old_logp, new_logp))
    print("\nThe same number three times: s, perplexity_old / perplexity_new, exp(H_old - H_new)\n"
          f"\n  {s:.7f}   {quotient:.7f}   {math.exp(H_old - H_new):.7f}")
