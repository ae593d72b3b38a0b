"""The papers' formulas computed the slow way: one response and one token at a time, in float64,
without autograd. The tests compare ratios.py, losses.py and advantages.py with them.

    y.w[t]  y.s  y.product   the ratios of a response y: of a token, GSPO's, of the whole response
    y.A[t]                   the advantage of token t
    y.low, y.high            the ends of the clip range
    y.sg                     the same response with its gradient stopped: y.sg.s is the value of s,
                             y.s moves when the policy does

A gradient is a central difference: the log-prob of one token moves, y.sg stays as it is.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log
from typing import NamedTuple

import torch

G, L_MAX, STEP = 4, 16, 1e-5                     # group size, max_length, step of the differences


@dataclass
class Response:
    """The loss tokens of one response: lists of floats."""

    logp: list
    old_logp: list
    A: list
    low: float | None = None
    high: float | None = None
    shift: list | None = None                    # RSPO's γ̃
    c: dict = field(default_factory=dict)        # the constants of the clip
    stopped: "Response | None" = None

    @property
    def sg(self):
        return self.stopped or self

    @cached_property
    def p(self):
        return [exp(x) for x in self.logp]

    @cached_property
    def mu(self):
        return [exp(x) for x in self.old_logp]

    @cached_property
    def log_w(self):
        return [new - old for new, old in zip(self.logp, self.old_logp)]

    @cached_property
    def w(self):
        return [exp(x) for x in self.log_w]

    @cached_property
    def s(self):                                                        # GSPO 2507.18071 eq. 7
        return exp(mean(self.log_w))

    @cached_property
    def product(self):
        return exp(sum(self.log_w))

    def moved(self, t, step):
        """The response after an update of the policy that changed log π of token t alone."""
        logp = [x + step * (k == t) for k, x in enumerate(self.logp)]
        return replace(self, logp=logp, stopped=self.sg)


def mean(x):
    return sum(x) / len(x) if x else 0.0


def clip(x, low, high):
    return min(max(x, low), high)


def gradient(f, y):
    """d f(y) / d log π of each token."""
    return [(f(y.moved(t, STEP)) - f(y.moved(t, -STEP))) / (2 * STEP) for t in range(len(y.logp))]


# ------------------------------------------------------------------------------- the objectives

def reinforce(y, t):                                                    # Williams 1992
    return y.A[t] * y.logp[t]


def grpo(y, t):                                          # PPO 1707.06347 eq. 7; 2402.03300 eq. 3
    return min(y.w[t] * y.A[t], clip(y.w[t], y.low, y.high) * y.A[t])


def gspo(y, t):                                                         # 2507.18071 eq. 5
    return min(y.s * y.A[t], clip(y.s, y.low, y.high) * y.A[t])


def gspo_token(y, t):                                                   # 2507.18071 eq. 13, 14
    s = y.sg.s * y.p[t] / y.sg.p[t]
    return min(s * y.A[t], clip(s, y.low, y.high) * y.A[t])


def sequence_is(y, t):                                                  # textbook
    return min(y.product * y.A[t], clip(y.product, y.low, y.high) * y.A[t])


def gmpo(y, t):                                                         # 2507.20673
    return geometric_mean(y.log_w, y) * y.A[t]


def rspo(y, t):                                                         # 2510.23027: w·γ̃
    return geometric_mean([x + log(shift) for x, shift in zip(y.log_w, y.shift)], y) * y.A[t]


def geometric_mean(log_w, y):
    """Of the ratios, each cut first at the end of the range to which its advantage pushes it."""
    cut = [min(x, y.high) if a > 0 else max(x, y.low) for x, a in zip(log_w, y.A)]
    return exp(mean(cut))


def cispo(y, t):                                                        # 2506.13585 eq. 4, 5
    return clip(y.sg.w[t], y.low, y.high) * y.A[t] * y.logp[t]


def dppo(y, t):                                                         # 2602.04879: TV
    return masked(y.sg.p[t] - y.mu[t], y, t)


def dppo_kl(y, t):                                                      # 2602.04879: binary KL
    return masked(sign(y, t) * binary_kl(y.mu[t], y.sg.p[t]), y, t)


def masked(change, y, t):
    if change < y.low and y.A[t] < 0 or change > y.high and y.A[t] > 0:
        return 0.0
    return min(y.sg.w[t], y.c["cap"]) * y.A[t] * y.logp[t]


def sign(y, t):
    return 1 if y.sg.p[t] > y.mu[t] else -1


def binary_kl(p, q):
    """KL(p || q) of "this token or any other"."""
    rest, other = max(1 - p, 1e-8), max(1 - q, 1e-8)
    return p * log(p / q) + rest * log(rest / other)


def rollout_is(y, t):                                                   # GLM-5 2602.15763
    return y.sg.w[t] * (y.low < y.sg.w[t] < y.high) * y.A[t] * y.logp[t]


def dro(y, t):                                                          # 2405.19107
    return y.A[t] * y.logp[t] - y.c["beta"] / 2 * y.log_w[t] ** 2


def sapo(y, t):                                                         # 2511.20347
    tau = y.c["tau_positive" if y.A[t] > 0 else "tau_negative"]
    return 4 / tau / (1 + exp(-tau * (y.w[t] - 1))) * y.A[t]


def vespo(y, t):                                                        # 2602.10693
    side = "positive" if y.A[t] >= 0 else "negative"
    k, lam = y.c[f"k_{side}"], y.c[f"lambda_{side}"]
    W = clip(y.sg.product, 1e-8, exp(20))
    return exp(lam) * W ** k * exp(-lam * W) * y.A[t] * y.logp[t]


class Paper(NamedTuple):
    """A row of the table as its paper has it, written down a second time."""

    formula: object
    ratio: str
    epsilon: float | None
    epsilon_high: float | None
    reduction: str
    constants: dict = {}
    center: int = 1                              # of the clip range; 0: of log w or of π - μ


VESPO = dict(k_positive=2, lambda_positive=3, k_negative=3, lambda_negative=2)
PAPERS = {
    "reinforce": Paper(reinforce, "none", None, None, "token-mean"),
    "ppo": Paper(grpo, "token", 0.2, 0.2, "sequence-mean"),
    "grpo": Paper(grpo, "token", 0.2, 0.2, "sequence-mean"),
    "dr_grpo": Paper(grpo, "token", 0.2, 0.2, "constant"),
    "dapo": Paper(grpo, "token", 0.2, 0.28, "token-mean"),
    "dapo_paper": Paper(grpo, "token", 0.2, 0.28, "group-token-mean"),
    "gspo": Paper(gspo, "sequence", 3e-4, 4e-4, "sequence-mean"),
    "gspo_token": Paper(gspo_token, "gspo-token", 3e-4, 4e-4, "sequence-mean"),
    "gmpo": Paper(gmpo, "log-token", 0.4, 0.4, "sequence-mean", center=0),
    "rspo": Paper(rspo, "log-shifted", 0.4, 0.4, "sequence-mean", center=0),
    "cispo": Paper(cispo, "token", 1.0, 0.28, "token-mean"),
    "dppo": Paper(dppo, "token", 0.2, 0.2, "token-mean", dict(cap=20), 0),
    "dppo_kl": Paper(dppo_kl, "token", 0.05, 0.05, "token-mean", dict(cap=20), 0),
    "rollout_is": Paper(rollout_is, "token", 0.2, 0.28, "token-mean"),
    "dro": Paper(dro, "token", None, None, "token-mean", dict(beta=0.05)),
    "sapo": Paper(sapo, "token", None, None, "sequence-mean",
                  dict(tau_positive=1, tau_negative=1.05)),
    "luspo": Paper(gspo, "sequence", 2e-3, 2.5e-3, "sequence-sum"),
    "vespo": Paper(vespo, "product", None, None, "token-mean", VESPO),
    "sequence_is": Paper(sequence_is, "product", 0.2, 0.2, "sequence-mean"),
}


def gae(rewards, values, lam, gamma=1.0):                               # 1506.02438 eq. 16
    """(advantages, returns) of the tokens of a response, from the reward of each and the critic's
    value before each: Â_t = Σ_j (γλ)^j δ_{t+j}."""
    V = [*values, 0.0]
    errors = [r + gamma * V[t + 1] - V[t] for t, r in enumerate(rewards)]
    advantages = [sum((gamma * lam) ** j * error for j, error in enumerate(errors[t:]))
                  for t in range(len(errors))]
    return advantages, [A + value for A, value in zip(advantages, V)]


def at_the_end(reward, n):
    """The rewards of the n tokens of a response that is rewarded as a whole."""
    return [reward * (t == n - 1) for t in range(n)]


def penalized(reward, beta, kl):                                        # 1909.08593 eq. 2
    """The same minus beta times the KL of each token."""
    return [r - beta * d for r, d in zip(at_the_end(reward, len(kl)), kl)]


# --------------------------------------------------------------------- a loss of a whole batch

class Batch(NamedTuple):
    """What policy_loss reads. Outside the mask stand absurd numbers."""

    logp: torch.Tensor                           # [B, T]
    old_logp: torch.Tensor                       # [B, T]
    A: torch.Tensor                              # [B] or [B, T]
    mask: torch.Tensor                           # [B, T]
    shift: torch.Tensor                          # [B, T] RSPO's γ̃
    mismatch: torch.Tensor                       # [B, T]


def responses(batch):
    """(row, its loss tokens [T], its Response) for each row of a batch."""
    for i, m in enumerate(batch.mask):
        A = batch.A[i].expand(len(m))
        yield i, m, Response(*(x[m].double().tolist() for x in (
            batch.logp[i], batch.old_logp[i], A)), shift=batch.shift[i][m].double().tolist())


def weight(lengths, i, reduction):
    """The weight of each token of response i in the loss."""
    N, n = len(lengths), lengths[i]
    size = min(G, N)
    group = lengths[i // size * size:i // size * size + size]
    return {"sequence-mean": lambda: 1 / (N * n),                       # GRPO, GSPO
            "token-mean": lambda: 1 / sum(lengths),                     # DAPO as implemented
            "group-token-mean": lambda: 1 / (N / size * sum(group)),    # DAPO 2503.14476 eq. 8
            "constant": lambda: 1 / (N * L_MAX),                        # Dr. GRPO 2503.20783
            "sequence-sum": lambda: 1 / N}[reduction]() if n else 0.0   # LUSPO 2602.05261


def surrogate(formula, y, t, dual_clip=None, off_policy_mask=None):
    """A formula with what may be added to every objective."""
    value = formula(y, t)
    if dual_clip is not None and y.A[t] < 0:                            # 1912.09729
        value = max(value, dual_clip * y.A[t])
    return 0.0 if stale(y, t, off_policy_mask) else value


def stale(y, t, off_policy_mask):                                       # DeepSeek-V3.2 2512.02556
    return off_policy_mask is not None and y.A[t] < 0 and -log(y.sg.s) > off_policy_mask


def objective(name, batch, *, epsilon=None, epsilon_high=None, reduction=None, constants=None,
              mismatch=False, **options):
    """(loss, gradient [B, T], tokens below, tokens above the clip range) of a batch: a token is
    one or the other if its advantage is not 0 and its gradient is."""
    paper = PAPERS[name]
    if paper.epsilon is not None:
        low = paper.center - (paper.epsilon if epsilon is None else epsilon)
        both = paper.epsilon_high if epsilon is None else epsilon       # TRL: epsilon alone is both
        high = paper.center + (both if epsilon_high is None else epsilon_high)
    c = paper.constants | (constants or {})
    pulls = {key: 0 for key in ("beta",) if key in c}                   # towards the old policy
    lengths = batch.mask.sum(-1).tolist()
    loss, slopes, below, above = 0.0, torch.zeros(batch.mask.shape).double(), set(), set()
    for i, m, y in responses(batch):
        y.c = c
        if paper.epsilon is not None:
            y.low, y.high = low, high
        rho = batch.mismatch[i][m].tolist() if mismatch else [1.0] * lengths[i]
        factor = [weight(lengths, i, reduction or paper.reduction) * x for x in rho]

        def row(y):
            return -sum(f * surrogate(paper.formula, y, t, **options)
                        for t, f in enumerate(factor))
        loss += row(y)
        slope = gradient(row, y)
        slopes[i, m] = torch.tensor(slope).double()
        clipped = gradient(row, replace(y, c=c | pulls)) if pulls else slope
        change = [log(y.s if paper.ratio in ("sequence", "gspo-token", "product") else w)
                  for w in y.w]
        if paper.ratio == "log-shifted":
            change = [x + log(shift) for x, shift in zip(change, y.shift)]
        for t, place in enumerate(m.nonzero().flatten().tolist()):
            if y.A[t] and not clipped[t]:
                dropped = stale(y, t, options.get("off_policy_mask"))
                (below if dropped or change[t] < 0 else above).add((i, place))
    return loss, slopes, below, above


# ------------------------------------------------------------------------------------- batches

ABSURD = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]


def ragged(seed=0, dtype=torch.float64, absurd=ABSURD):
    """16 responses of up to 10 tokens. The log s of each row crosses the clip range of some
    objective, both signs of A on both sides. Holes as tool output leaves them, a row without loss
    tokens, rows of one token, an advantage of 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([10, 3, 7, 10, 9, 1, 8, 5, 4, 10, 0, 2, 6, 10, 8, 3])
    signs = torch.tensor([1, 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, 0])
    log_s = torch.tensor([0.5, -0.5, 2e-2, -2e-2, 1e-4, -1e-4, 2.2e-3, -2.2e-3] * 2).double()
    mask = torch.arange(10) < lengths[:, None]                                      # [B, T]
    mask[3, 2:5] = mask[9, 0:2] = mask[13, 6] = False
    log_w = 0.4 * normal(16, 10)                                                    # [B, T]
    off = log_s - (log_w * mask).sum(-1) / mask.sum(-1).clamp(min=1)                # [B]
    old_logp = -0.05 - 3 * uniform(16, 10)                                          # [B, T]
    noise = torch.tensor(absurd).double().repeat(160)[:160].view(16, 10)

    def outside(x, k):
        return torch.where(mask, x, noise.roll(k)).to(dtype)
    return Batch(outside(old_logp + log_w + off[:, None], 0), outside(old_logp, 1),
                 (signs * (0.3 + normal(16).abs())).to(dtype), mask,
                 outside(0.8 + 0.2 * uniform(16, 10), 2), outside(2 * uniform(16, 10), 3))


def only(rows, batch):
    """Some rows of a batch."""
    return Batch(*(x[rows] for x in batch))


def per_token(batch):
    """A batch with an advantage of each token's own, a fifth of them 0."""
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(batch.mask.shape, generator=generator).to(batch.logp.dtype)
    A[torch.rand(A.shape, generator=generator) < 0.2] = 0.0
    return batch._replace(A=A.masked_fill(~batch.mask, math.nan))


def emptied(batch):
    """A batch whose second group has no loss tokens, and whose other rows have one each."""
    first = (batch.mask.cumsum(-1) == 1) & batch.mask
    first[G:2 * G] = False
    return batch._replace(mask=first)


BATCHES = {
    "ragged": ragged(),
    "another": ragged(seed=1),
    "float32": ragged(dtype=torch.float32),
    "one token each": emptied(ragged()),
    "one response": only(slice(6, 7), ragged()),
    "one token, clipped": only(slice(12, 13), emptied(ragged())),
    "per token": per_token(ragged()),
}
