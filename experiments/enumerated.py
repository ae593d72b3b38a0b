"""Which weight makes the off-policy gradient exact? All responses of three binary tokens.

    python experiments/enumerated.py             # prints the table, writes results/enumerated.json

Responses come from π_old, and the gradient of the expected reward under π_θ is estimated by
Σ_t weight_t · A_t · ∇log π_θ(y_t | y_<t), in expectation over all responses. A is the outcome, the
response's reward, or Q, its expectation under π_θ given the tokens so far; either as it is or minus
a baseline, the mean reward under π_old. Log-odds of π_old are N(0, 1) for each prefix, those of
π_θ differ by N(0, 0.4²), rewards are 0 or 1.
"""

import itertools
import sys
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import logsigmoid

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from ratios import product_ratio, sequence_ratio, token_ratio                        # noqa: E402
from timing import command_line, publish, table                                      # noqa: E402

DRAWS, SHIFT = 300, 0.4
Y = torch.tensor(list(itertools.product((0, 1), repeat=3)))                          # [8, 3]
PREFIX = torch.stack([0 * Y[:, 0], 1 + Y[:, 0], 3 + 2 * Y[:, 0] + Y[:, 1]], 1)       # [8, 3] of 7
MASK = torch.ones(8, 3, dtype=torch.bool)                                            # [8, 3]
WEIGHTS = {
    "1": lambda new, old: torch.ones_like(new),                                      # [8, 3]
    "w_t": lambda new, old: token_ratio(new, old, MASK),                             # [8, 3]
    "∏_{k≤t} w_k": lambda new, old: token_ratio(new, old, MASK).cumprod(1),          # [8, 3]
    "s": lambda new, old: sequence_ratio(new, old, MASK)[:, None].expand(8, 3),      # [8, 3]
    "∏w": lambda new, old: product_ratio(new, old, MASK)[:, None].expand(8, 3),      # [8, 3]
}


def log_probs(odds):
    """Log-probs of the tokens of all responses, [8, 3], from the log-odds [7] of a 1 after each
    prefix."""
    chosen = odds[PREFIX]                                                            # [8, 3]
    return torch.where(Y == 1, logsigmoid(chosen), logsigmoid(-chosen))              # [8, 3]


def expected_rest(value, probabilities):
    """Q: the mean of value [8] over the responses that begin with the same t tokens, [8, 3]."""
    columns = []
    for t in range(1, 4):
        same = (Y[:, None, :t] == Y[None, :, :t]).all(-1).double()                   # [8, 8]
        columns.append((same * probabilities * value).sum(1) / (same * probabilities).sum(1))
    return torch.stack(columns, 1)                                                   # [8, 3]


def errors(generator):
    """{(weight, "outcome" or "Q", baseline or not): relative error} of one draw of policies and
    rewards, None where all rewards are equal."""
    normal = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)
    odds = normal(7)                                                                 # [7]
    new_odds = (odds + SHIFT * normal(7)).requires_grad_()                           # [7]
    rewards = (normal(8) > 0).double()                                               # [8]
    if rewards.min() == rewards.max():
        return None
    old, new = log_probs(odds), log_probs(new_odds)                                  # [8, 3] each
    p_old, p_new = old.sum(1).exp(), new.sum(1).exp()                                # [8] each
    exact, = torch.autograd.grad((p_new * rewards).sum(), new_odds, retain_graph=True)   # [7]
    found = {}
    for baseline in (False, True):
        value = rewards - baseline * (p_old * rewards).sum()                         # [8]
        advantages = {"outcome": value[:, None].expand(8, 3),                        # [8, 3]
                      "Q": expected_rest(value, p_new.detach())}                     # [8, 3]
        for (name, weight), (kind, A) in itertools.product(WEIGHTS.items(), advantages.items()):
            surrogate = (p_old[:, None] * weight(new, old).detach() * A * new).sum()     # []
            gradient, = torch.autograd.grad(surrogate, new_odds, retain_graph=True)  # [7]
            found[name, kind, baseline] = ((gradient - exact).norm() / exact.norm()).item()
    return found


def measure(draws=DRAWS, seed=0):
    """[errors] of independent draws."""
    generator = torch.Generator().manual_seed(seed)
    return list(filter(None, (errors(generator) for _ in range(draws))))


def texts(found):
    """What docs/corrections.md quotes."""
    percent = lambda name, kind, baseline: f"{median(d[name, kind, baseline] for d in found):.0%}"
    rows = [(f"`{name}`", *(percent(name, kind, baseline) for kind in ("outcome", "Q")
                            for baseline in (True, False))) for name in WEIGHTS]
    head = ("weight of a token", "outcome − mean", "outcome", "Q − mean", "Q")
    worse = lambda baseline: sum(
        d["s", "outcome", baseline] > d["w_t", "outcome", baseline] for d in found) / len(found)
    return {"enumerated": table(head, *rows), "s worse with a baseline": f"{worse(True):.0%}",
            "s worse without": f"{worse(False):.0%}"}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    options = command_line(__doc__, "enumerated.json").parse_args()
    publish(options.json, {}, lambda _: texts(measure()))
