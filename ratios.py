"""Importance ratios: how much more likely is an answer under the new policy than under the policy that wrote it?

    token      w_t = π_new(y_t) / π_old(y_t)                       GRPO: one noisy number per token
    product    Π_t w_t                                             the textbook's ratio of whole answers: explodes with length
    sequence   s = (Π_t w_t)^(1/|y|) = exp(mean_t log w_t)         GSPO: the geometric mean, one steady number per answer
    GSPO-token s_t = sg[s] · π_new(y_t) / sg[π_new(y_t)]           the value of s, the gradient of its own token only

`sg` stops the gradient. s has a second reading ("Rethinking GSPO"): with H = -mean_t log π, the cross-entropy in nats per token,
and perplexity exp(H), it is s = exp(H_old - H_new) = perplexity_old / perplexity_new: GSPO clips answers whose perplexity moved.

Everywhere: logp, old_logp [B, T] in nats, float32 (or float64); mask [B, T] bool, True at the loss tokens (the response with its
EOS, no padding, no tool output). What stands outside the mask, NaN included, changes neither a value nor a gradient. Shapes that
disagree, a mask that is not boolean and half-precision log-probs raise ValueError: bfloat16 rounds GSPO's whole band to 1.0.
"""

import math

import torch

LARGEST_LOG = 80.0  # exp overflows float32 at 88.7, and the inf would turn the zero gradient of a clipped ratio into NaN


def check_per_token(mask, **tensors):
    """Raise ValueError unless mask is bool [B, T] and every named tensor has its shape and is float32 or float64. None passes."""
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}: it must be torch.bool [B, T], True at the loss tokens")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} but mask is {list(mask.shape)}: both must be [B, T]")
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} {list(tensor.shape)} is {tensor.dtype}: it must be float32, in bfloat16 1 ± 4e-4 is 1.0")


def mean_over_tokens(x, mask):
    """[B, T] -> [B]: the mean over a row's loss tokens, 0 for a row without any."""
    return x.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def token_log_ratio(logp, old_logp, mask):
    """log w_t = log π_new(y_t) - log π_old(y_t), [B, T], 0 outside the mask."""
    check_per_token(mask, logp=logp, old_logp=old_logp)
    return (logp - old_logp).masked_fill(~mask, 0.0)                                    # [B, T]


def sequence_log_ratio(logp, old_logp, mask):
    """log s = mean over the loss tokens of log w_t, [B], 0 for a row without loss tokens."""
    return mean_over_tokens(token_log_ratio(logp, old_logp, mask), mask)                # [B]


def token_ratio(logp, old_logp, mask):
    """w_t, [B, T], 1 outside the mask."""
    return token_log_ratio(logp, old_logp, mask).clamp(max=LARGEST_LOG).exp()           # [B, T]  GRPO 2402.03300; GSPO eq. 3


def sequence_ratio(logp, old_logp, mask):
    """s, [B], 1 for a row without loss tokens."""
    return sequence_log_ratio(logp, old_logp, mask).clamp(max=LARGEST_LOG).exp()        # [B]     GSPO 2507.18071 eq. 7


def gspo_token_ratio(logp, old_logp, mask):
    """s_t, [B, T]: s in value, but its gradient is s with respect to log π_new(y_t) and 0 with respect to every other token's."""
    s = sequence_ratio(logp, old_logp, mask).detach()                                   # [B]
    logp = logp.masked_fill(~mask, 0.0)                                                 # [B, T]
    return s[:, None] * (logp - logp.detach()).exp()                                    # [B, T]  GSPO 2507.18071 eq. 14


def product_ratio(logp, old_logp, mask):
    """Π_t w_t, [B]: the unbiased ratio of whole answers. With length its logarithm spreads, where that of s narrows."""
    return token_log_ratio(logp, old_logp, mask).sum(-1).clamp(max=LARGEST_LOG).exp()   # [B]


def cross_entropy(logp, mask):
    """H = -mean over the loss tokens of log π(y_t), [B], in nats per token."""
    check_per_token(mask, logp=logp)
    return -mean_over_tokens(logp, mask)                                                # [B]


def perplexity(logp, mask):
    """exp(H), [B]. sequence_ratio == perplexity(old) / perplexity(new) == exp(H_old - H_new)."""
    return cross_entropy(logp, mask).exp()                                              # [B]


@torch.no_grad()
def ratio_stats(logp, old_logp, mask):
    """How far the new policy is from the old one, as a dict of 0-dim tensors: log_w_mean, log_w_var and ratio_max (the largest w)
    over the loss tokens, log_s_mean and log_s_var over the answers that have any (population variances), and how many these are:
    tokens, answers.
    """
    log_w = token_log_ratio(logp, old_logp, mask)                                       # [B, T]
    log_s, answers = mean_over_tokens(log_w, mask), mask.any(-1)                        # [B], [B] bool
    stats = dict(tokens=mask.sum(), answers=answers.sum(), ratio_max=log_w.masked_fill(~mask, -torch.inf).amax().exp())
    for name, x, counted in (("log_w", log_w, mask), ("log_s", log_s, answers)):
        count = counted.sum().clamp(min=1)
        mean = x.sum() / count                                                          # x is 0 where it is not counted
        stats |= {f"{name}_mean": mean, f"{name}_var": ((x - mean) ** 2 * counted).sum() / count}
    return stats


if __name__ == "__main__":
    # One answer of 512 tokens; the update changed two of them, one to 1.9 times its old probability and one to 0.4 times.
    T, band, tokens = 512, (1 - 3e-4, 1 + 4e-4), {137: 1.9, 400: 0.4}
    mask = torch.ones(1, T, dtype=torch.bool)
    old_logp = -4 * torch.rand(1, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_w = torch.zeros(1, T, dtype=torch.float64)
    for position, w in tokens.items():
        log_w[0, position] = math.log(w)
    new_logp = old_logp + log_w

    print("An answer of 512 tokens after an update. '·' w = 1,  '▲' w = 1.9,  '▼' w = 0.4\n")
    w = token_ratio(new_logp, old_logp, mask)[0]
    strip = "".join("▲" if x > 1.5 else "▼" if x < 0.5 else "·" for x in w.tolist())
    print("\n".join("  " + strip[i:i + 128] for i in range(0, T, 128)))

    s = sequence_ratio(new_logp, old_logp, mask).item()
    print(f"\n  token ratio      w   {w.min():.2f} … {w.max():.2f}     outside GRPO's band [0.8, 1.2] at two tokens of 512")
    print(f"  product          Πw  {product_ratio(new_logp, old_logp, mask).item():.5f}")
    print(f"  sequence ratio   s   {s:.5f}         outside GSPO's band [{band[0]:.4f}, {band[1]:.4f}]: below its lower edge")
    print("\n  which gradient is removed    A = +1                              A = -1")
    print("  GRPO, clip per token         the token at 1.9 (1.9 > 1.2)        the token at 0.4 (0.4 < 0.8)")
    print(f"  GSPO, clip per answer        none: {s:.5f} is not above {band[1]:.4f}   all 512 tokens: {s:.5f} < {band[0]:.4f}")

    h_old, h_new = cross_entropy(old_logp, mask).item(), cross_entropy(new_logp, mask).item()
    ratio = (perplexity(old_logp, mask) / perplexity(new_logp, mask)).item()
    print("\nThe same number three times: GSPO's ratio is a ratio of perplexities\n")
    print(f"  old   H = {h_old:.6f} nats per token   perplexity = {perplexity(old_logp, mask).item():.6f}")
    print(f"  new   H = {h_new:.6f} nats per token   perplexity = {perplexity(new_logp, mask).item():.6f}")
    print(f"  s = {s:.7f}    perplexity_old / perplexity_new = {ratio:.7f}    exp(H_old - H_new) = "
          f"{math.exp(h_old - h_new):.7f}")

    print("\nWhy float32: the two edges of GSPO's band and what they become\n")
    for dtype in (torch.float32, torch.bfloat16):
        low, high = (torch.tensor(edge).to(dtype).item() for edge in band)
        print(f"  {str(dtype)[6:]:9}{low:.4f}   {high:.4f}")
