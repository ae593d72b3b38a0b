"""What toy.py's policy of a thousand numbers says about ratio, rule, rate and length.

    python experiments/toy_rules.py              run what is missing, print the verdicts, draw
    python experiments/toy_rules.py --judge      print the verdicts of what has run, and draw

The rules, written before the runs
----------------------------------
Number: the exact pass rate, mean of 16 batches (late: of the last 8, reported only). Each arm is
compared at its own best learning rate, chosen on seeds 1001 …, and in a and e also at .05, both on
64 other seeds, 2001 …. Differences are paired by seed. *ahead* or *behind*: the 95 % interval
leaves 0, the mean is at least .01, and p < .05 after Holm's correction over all comparisons of the
question. *level*: the interval lies within ±.01. Else *undecided*. A best rate at the edge of its
grid is marked *. clip_signal: share of the loss tokens with Â ≠ 0, over all mini-batches. Every arm
is compared with GRPO; besides, w with the paper's drops, and w with as many responses dropped at
random, with the paper's range; s with w, both without a clip; w with wide's drops with wide.

Each question is followed by its prediction; a pilot and a look at 8 other seeds have been seen.

a   Arms × length, 4 mini-batches of 4 prompts; also 4 of 16 prompts, and 16 of 4.
    At .05 the paper's range is behind at 8, 24 and 80 digits, ahead at 240 and 800, and with 64
    prompts behind at both lengths; ×10 is ahead at 24, ×3 at 80 and 240; wide is level from 24 on.
    At own rates wide is ahead at every length, the paper's range behind at 8 and ahead from 24 on.
    w with the paper's drops is level with the paper's range everywhere, random drops behind it from
    80 on. s and w without a clip are level at .05.
b   Ranges of ×.1 to ×300 of the paper's, at rates .05 and .2.
    The best ε is 1 to 2 times std(log s) before the last mini-batch at every length.
c   SGD and sign-SGD, own rates.
    SGD: the paper's range is not ahead. Sign-SGD: it is ahead at 240.
d   16 mini-batches of one prompt, own rates.
    ×10 and wide are ahead of GRPO, no clip is behind.
e   First pass rates .1 and .7.
    At .05 and 240 digits the paper's range is behind at .1 and ahead at .7; at own rates wide is
    ahead.
f   Samples 2 and 8 batches old, own rates.
    Wide is ahead; w with wide's drops is level with wide: what is left out acts, not s.
g   GRPO with ε .05 and .02, own rates and .05. Added when a's results had been seen (there GRPO's
    .2 drops almost nothing and breaks first): a look, not a test.

Cut for time, before these runs: in a, 80 and 800 digits have seven arms, and 32 and 16 judged
seeds; 64 prompts have six arms, and 24 digits with 32 judged seeds or 240 with 16 (16 mini-batches
only at 24). c to f have 24 and 240 digits, five to seven arms and 32 judged seeds. Rates are chosen
on 16 seeds at 8 and 24 digits in a, else on 8. b: 16 seeds, which both choose and judge; 800 digits
at one rate, in half the steps. A second commit cut c to f from 64 judged seeds to 32, the bias from
4 policies to 2, and 16 mini-batches of 64 prompts at 240 digits, before any of them had run.

Bias of the estimate of ∇J by single responses. Samples of the start's policy, estimates at the
policy after one batch of GRPO (4 steps at rate .05 or .4), Â = r - J of the start's policy, 2
policies. Predicted: s is as biased as no ratio, w less, the product not beyond the noise; every
clip adds bias. The product is left out where std(log product) > 1: its second moment is then not
that of the samples.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import toy
from advantages import group_advantages
from losses import policy_loss
from tools import style

RESULTS = ROOT / "experiments/results/toy.json"
T95 = {16: 2.131, 32: 2.040, 64: 1.998}      # Student's t, for a 95 % interval over so many seeds
RANDOM = 4                                   # a stream of toy.uniforms: what is dropped at random


class Arm(NamedTuple):
    algorithm: str
    clip: tuple = (1, math.inf)      # epsilon and epsilon_high; these clip nothing
    drop: str = ""                   # whole responses: by "s", or as many at "random"
    times: float = 1                 # that range, in units of the paper's


def paper(times):
    """The paper's clip range of s, times a number."""
    return 3e-4 * times, 4e-4 * times


ARMS = {
    "GRPO": Arm("grpo", (0.2, 0.2)), "paper": Arm("gspo", paper(1)), "×3": Arm("gspo", paper(3)),
    "×10": Arm("gspo", paper(10)), "wide": Arm("gspo", paper(100)),
    "w, paper's drops": Arm("grpo", drop="s"), "w, random drops": Arm("grpo", drop="random"),
    "w, no clip": Arm("grpo"), "s, no clip": Arm("gspo"),
    "w, wide's drops": Arm("grpo", drop="s", times=100),
    "GRPO .05": Arm("grpo", (0.05, 0.05)), "GRPO .02": Arm("grpo", (0.02, 0.02)),
}
RANGES = {f"range ×{10**(k / 4):.3g}": Arm("gspo", paper(10**(k / 4))) for k in range(-4, 11)}
BIASED = {
    "s": ARMS["s, no clip"], "w": ARMS["w, no clip"], "no ratio": Arm("reinforce", (None, None)),
    "product": Arm("sequence_is"), "w, clip .2": ARMS["GRPO"], "s, paper": ARMS["paper"],
    "w, paper's drops": ARMS["w, paper's drops"], "s, wide": ARMS["wide"],
}
OTHERS = [("w, paper's drops", "paper"), ("w, random drops", "paper"),
          ("s, no clip", "w, no clip"), ("w, wide's drops", "wide"), ("wide", "GRPO .05"),
          ("×10", "GRPO .05")]
QUOTED = {"w against s": OTHERS[0], "random against s": OTHERS[1], "s against w": OTHERS[2],
          "wide against GRPO .05": OTHERS[4]}


class Cell(NamedTuple):
    """A comparison of arms. All that follows `rates` is part of the name of its runs."""
    question: str
    arms: tuple
    rates: tuple                     # of which each arm's best is chosen
    length: int
    mini_batches: int = 4
    prompts: int = 16
    optimizer: str = "adam"
    pass_rate: float = 0.35
    lag: int = 0                     # samples are this many batches old
    choose: int = 16                 # seeds
    judge: int = 64
    fixed: float | None = 0.05       # a rate at which all arms are compared, too


EVERY = tuple(ARMS)[:9]
SEVEN = EVERY[:6] + EVERY[7:8]
SIX = "GRPO", "paper", "×10", "wide", "w, paper's drops", "w, no clip"
SHORT = 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.9
LONG = 0.05, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0, 3.0
FEW = {24: (0.1, 0.2, 0.4, 0.6, 0.9), 240: (0.2, 0.4, 0.8, 1.3, 2.0)}
CELLS = [
    Cell("a", EVERY, SHORT, 24), Cell("a", EVERY, LONG, 240, choose=8), Cell("a", EVERY, SHORT, 8),
    *[Cell("f", (*SIX, "w, wide's drops"), FEW[L], L, lag=lag, choose=8, judge=32, fixed=None)
      for L in FEW for lag in (2, 8)],
    *[Cell("e", SIX[:5], FEW[L], L, pass_rate=first, choose=8, judge=32)
      for L in FEW for first in (0.1, 0.7)],
    *[Cell("b", tuple(RANGES), (), L, judge=16, fixed=rate)
      for rate in (0.05, 0.2) for L in (8, 24, 80, 240)],
    *[Cell("c", SIX[:5], rates, L, optimizer=name, choose=8, judge=32, fixed=None)
      for L, name, rates in (
        (24, "sgd", (30, 60, 120, 240, 480)), (240, "sgd", (300, 600, 1200, 2400, 4800)),
        (24, "sign", (0.02, 0.05, 0.1, 0.2, 0.4)), (240, "sign", (0.05, 0.1, 0.2, 0.4, 0.8)))],
    *[Cell("d", SIX, (0.02, 0.05, 0.1, 0.2, 0.4, 0.8), L, 16, choose=8, judge=32, fixed=None)
      for L in FEW],
    Cell("a", SEVEN, LONG, 80, choose=8, judge=32),
    *[Cell("a", SIX, (0.2, 0.4, 0.7, 1.2, 2.0, 3.0), 24, minis, 64, choose=8, judge=32)
      for minis in (4, 16)],
    Cell("a", SIX, (0.2, 0.6, 1.2, 2.0, 3.0), 240, 4, 64, choose=8, judge=16),
    Cell("a", SEVEN, (0.4, 0.9, 2.0, 4.0), 800, choose=8, judge=16),
    Cell("b", tuple(RANGES)[::2], (), 800, judge=16),
    Cell("g", ("GRPO", "×10", "wide", "GRPO .05", "GRPO .02"), SHORT, 24),
    Cell("g", ("GRPO", "×10", "wide", "GRPO .05", "GRPO .02"), LONG, 240, choose=8),
]
BIAS = [(L, rate) for L in (8, 24, 60, 120, 240) for rate in (0.05, 0.4)]
COLOURS = {"GRPO": style.ORANGE, "paper": style.BLUE, "×10": style.SKY, "wide": style.GREEN}


# ---------------------------------------------------------------------------------------- the runs

def drop_by_s(logp, old_logp, A, times):
    """The responses that GSPO's clip leaves out at a multiple of the paper's range, [B] bool."""
    s = (logp - old_logp).mean(-1).detach().exp()                                # [B]
    low, high = paper(times)
    return (A > 0) & (s > 1 + high) | (A < 0) & (s < 1 - low)                    # [B]


def arm_loss(arm, logp, old_logp, A, weights, out):
    """policy_loss of an arm without the responses `out` [B], and its clip_signal as two numbers of
    tokens."""
    mask = torch.ones_like(logp, dtype=torch.bool)
    loss, stats = policy_loss(arm.algorithm, logp, old_logp, A, mask, epsilon=arm.clip[0],
                              epsilon_high=arm.clip[1], weights=weights,
                              factors=(~out)[:, None].expand(mask.shape).double())
    signal = stats["signal_tokens"]
    return loss, stats["clip_signal"] * signal + out.sum() * mask.shape[1], signal


def train(arm, cell, rate, seeds):
    """toy.train with an arm's loss and a cell's samples. Responses with Â = 0 count in the mean,
    but their log-probs are not computed. Returns the exact pass rates [S, 16], the tokens of
    clip_signal, and per batch and seed the std of log s over the responses with Â ≠ 0 before the
    last mini-batch's step."""
    arm, L, S = ARMS.get(arm) or RANGES[arm], cell.length, len(seeds)
    logits = toy.start(seeds, L, cell.pass_rate).requires_grad_()                # [S, 10, 10, 10]
    optimizers = toy.OPTIMIZERS | {"sign": torch.optim.SGD}       # sign: of the gradient's signs
    stepper = optimizers[cell.optimizer]([logits], rate)
    policies, spreads, dropped, signal = [], [], 0, 0
    for batch in range(16):
        policies.append(logits.detach().clone())
        sampler = policies[max(0, batch - cell.lag)]
        chosen, rewards = toy.draw(sampler, seeds, batch, L, cell.prompts)       # [S·B, L], [S·B]
        advantages = group_advantages(rewards, toy.G)                            # [S·B]
        old_logp = sampler.log_softmax(-1).take(chosen)                          # [S·B, L]
        u = toy.uniforms(seeds, batch, RANDOM, len(rewards) // S).flatten()      # [S·B]
        for rows in toy.split(seeds, batch, cell.prompts, cell.mini_batches):    # [S·b]
            live = rows[(advantages[rows] != 0) | (rows == rows[0])]     # no batch may be empty
            own = live * S // len(rewards)                                       # [n] the seed
            A, old = advantages[live], old_logp[live]                            # [n], [n, L]
            logp = logits.log_softmax(-1).take(chosen[live])                     # [n, L]
            out = drop_by_s(logp, old, A, arm.times) & bool(arm.drop)            # [n]
            if arm.drop == "random":
                share = own[out].bincount(minlength=S) / own.bincount(minlength=S).clamp(min=1)
                out = (u[live] < share[own]) & (A != 0)
            weights = torch.full_like(logp, S / (len(rows) * L))                 # sequence-mean
            loss, *tokens = arm_loss(arm, logp, old, A, weights, out)
            grad, = torch.autograd.grad(loss, logits)
            logits.grad = grad.sign() if cell.optimizer == "sign" else grad.renorm(2, 0, 1.0)
            stepper.step()
            dropped += tokens[0]
            signal += tokens[1]
        log_s = (logp - old).detach().mean(-1)[A != 0]                           # [n']
        spreads += [x.std(correction=0) for x in log_s.split(own[A != 0].bincount().tolist())
                    if len(x)]
    rates = torch.stack([toy.exact_pass_rate(policy, L) for policy in policies], 1)
    return rates, dropped, signal, spreads


def run(arm, cell, rate, first, count):
    """The record of an arm at a rate over seeds first, first + 1, …; of the runs that choose a
    rate, the mean alone. seeds: the pass rates in 1/10,000, where differences are paired."""
    parts = [train(arm, cell, rate, seeds)
             for seeds in torch.arange(first, first + count).split(16)]
    rates = torch.cat([rates for rates, *_ in parts])                            # [S, 16]
    numbers = dict(mean=rates.mean())
    if first == 2001:
        spreads = torch.stack([spread for *_, spreads in parts for spread in spreads])
        numbers |= dict(
            late=rates[:, 8:].mean(), std_log_s=spreads.nanmedian(),
            clip_signal=sum(part[1] for part in parts) / sum(part[2] for part in parts))
    record = {name: float(f"{x:.4g}") for name, x in numbers.items()}
    if first == 2001 and cell.rates:
        record["seeds"] = (1e4 * rates.mean(1)).round().int().tolist()
    return record


def key(arm, cell, rate, first):
    return " ".join(map(str, (*cell[3:9], arm, rate, first)))


def best_rate(found, arm, cell):
    return max(cell.rates, key=lambda rate: found[key(arm, cell, rate, 1001)]["mean"])


def judged_rates(found, arm, cell):
    """An arm's own best rate, and the one at which all arms are compared."""
    own = {best_rate(found, arm, cell)} if cell.rates else set()
    return sorted(own | {cell.fixed} - {None})


def run_all(found):
    """Every run that is missing in `found` {key: record}, which is written after each."""
    def fill(name, make, *args):
        if name not in found:
            found[name] = make(*args)
            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            RESULTS.write_text(text.replace('},"', '},\n"') + "\n")
    for length, rate in BIAS:
        fill(f"bias {length} {rate}", bias, length, rate)
    for cell in CELLS:
        for arm in cell.arms:
            for rate in cell.rates:
                fill(key(arm, cell, rate, 1001), run, arm, cell, rate, 1001, cell.choose)
            for rate in judged_rates(found, arm, cell):
                fill(key(arm, cell, rate, 2001), run, arm, cell, rate, 2001, cell.judge)


def bias(length, rate, seeds=2, batches=20):
    """{rule: [bias, its noise floor, std]} of one response's estimate of ∇J, as shares of |∇J|."""
    squares = {}                                     # rule: [seeds] of (bias², floor², variance)
    for seed in torch.arange(3001, 3001 + seeds)[:, None]:
        old = toy.start(seed, length)
        new = toy.train("grpo", length, rate, batches=1, seeds=seed)[2].requires_grad_()
        target, = torch.autograd.grad(toy.exact_pass_rate(new, length).sum(), new)
        target = target.flatten()                                                # [1000]
        parts = {}                                   # rule: (sum, sum of squares) of each batch
        spread = []
        for batch in range(batches):
            chosen, rewards = toy.draw(old, seed, 1000 + batch, length, 250)
            A = rewards - toy.exact_pass_rate(old, length)                       # [n]
            old_logp = old.log_softmax(-1).take(chosen)                          # [n, L]
            logp = new.detach().log_softmax(-1).take(chosen).requires_grad_()    # [n, L]
            spread.append((logp - old_logp).sum(-1).detach())
            for rule, arm in BIASED.items():
                # without a change of the policy every rule is then Â Σ_t ∇log π(y_t)
                scale = 1 / length if rule == "product" else 1
                out = drop_by_s(logp, old_logp, A, arm.times) & bool(arm.drop)
                loss, *_ = arm_loss(arm, logp, old_logp, A, torch.full_like(logp, scale), out)
                push = -torch.autograd.grad(loss, logp)[0]                       # [n, L]
                counts = torch.zeros(len(A), 1000, dtype=torch.float64)
                rows = counts.scatter_add_(1, chosen, push).view(-1, 100, 10)
                p = new.detach().softmax(-1).view(100, 10)
                each = (rows - rows.sum(-1, keepdim=True) * p).flatten(1)        # [n, 1000]
                parts.setdefault(rule, []).append((each.mean(0), each.square().sum(-1).mean()))
        if torch.cat(spread).std() > 1:
            del parts["product"]                     # its second moment is not that of the samples
        for rule, pairs in parts.items():
            means = torch.stack([mean for mean, _ in pairs])                     # [batches, 1000]
            mean = means.mean(0)
            floor = means.var(0).sum() / batches
            square = torch.stack([square for _, square in pairs]).mean() - mean.square().sum()
            error = (mean - target).square().sum() - floor
            squares.setdefault(rule, []).append(
                torch.stack([error, floor, square]) / target.square().sum())
    return {rule: [round(x, 4) for x in torch.stack(of).mean(0).clamp(min=0).sqrt().tolist()]
            for rule, of in squares.items()}


# ------------------------------------------------------------------------------------ the verdicts

def compare(found, cell, arm, other, fixed):
    """(mean, low, high, p) of the paired differences of two arms; each at its best rate, or all at
    the fixed one. p: normal approximation."""
    rates = [cell.fixed if fixed else best_rate(found, name, cell) for name in (arm, other)]
    one, two = (torch.tensor(found[key(name, cell, rate, 2001)]["seeds"]) / 1e4
                for name, rate in zip((arm, other), rates))                      # [S]
    d = one - two
    mean, error = d.mean().item(), d.std().item() / len(d)**0.5
    p = math.erfc(abs(mean) / max(error, 1e-9) / 2**0.5)
    return mean, mean - T95[len(d)] * error, mean + T95[len(d)] * error, p


def holm(ps):
    """p-values after Holm's correction, in the order given."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    steps = (ps[i] * (len(ps) - rank) for rank, i in enumerate(order))
    adjusted = dict(zip(order, itertools.accumulate(steps, max)))
    return [adjusted[i] for i in range(len(ps))]


def verdict(mean, low, high, p):
    if (low > 0 or high < 0) and abs(mean) >= 0.01 and p < 0.05:
        return "ahead" if mean > 0 else "behind"
    return "level" if low > -0.01 and high < 0.01 else "undecided"


def judge(found):
    """Print every arm's rate, level and share, the comparisons with their verdicts, and biases."""
    for question in "acdefg":
        rows = [(cell, fixed, arm, other, *compare(found, cell, arm, other, fixed))
                for cell in CELLS if cell.question == question
                for fixed in (False, True)[:1 + bool(cell.fixed)] for arm in cell.arms
                for other in ["GRPO"] + [b for a, b in OTHERS if a == arm and b in cell.arms]]
        ps = holm([row[-1] for row in rows if row[2] != row[3]])
        print(f"\n{question}   digits, mini-batches, prompts, optimizer, first pass rate, lag")
        for cell, fixed, arm, other, mean, low, high, _ in rows:
            rate = cell.fixed if fixed else best_rate(found, arm, cell)
            edge = "*" if not fixed and rate in (cell.rates[0], cell.rates[-1]) else " "
            numbers = "  ".join(f"{name} {found[key(arm, cell, rate, 2001)][name]:.4f}"
                                for name in ("mean", "late", "clip_signal", "std_log_s"))
            print(*cell[3:9], f" {'at ' if fixed else 'own'} {rate:<5}{edge} {arm:17} {numbers}",
                  "" if arm == other else f" - {other}: {mean:+.3f} [{low:+.3f}, {high:+.3f}] "
                                          + verdict(mean, low, high, ps.pop(0)))
    print("\nb   digits, rate: the best range, its ε / std(log s), and that of the widest range")
    for cell in [cell for cell in CELLS if cell.question == "b"]:
        records = {arm: found[key(arm, cell, cell.fixed, 2001)] for arm in cell.arms}
        best = max(records, key=lambda arm: records[arm]["mean"])
        print(cell.length, cell.fixed, best,
              *[f"{RANGES[best].clip[0] / records[arm]['std_log_s']:.2f}"
                for arm in (best, cell.arms[-1])],
              *[f" {arm} {record['mean']:.3f} ({record['clip_signal']:.2f})"
                for arm, record in records.items()])
    print("\nbias (its noise floor; std of one estimate), as shares of |∇J|")
    for length, rate in BIAS:
        print(length, rate, *[f" {rule} {bias:.2f} ({floor:.2f}; {std:.0f})" for rule, (
            bias, floor, std) in found[f"bias {length} {rate}"].items()])


def draw_bias(found):
    """docs/figures/toy_bias: bias and standard deviation of the estimate against length."""
    figure, rows = style.panels(4, 1, height=12, width=4.2, sharex=True)
    steps = (0.05, "after a usual step"), (0.4, "after a large step")
    for axes, (what, (rate, step)) in zip(rows, itertools.product(("bias", "std"), steps)):
        records = {L: found[f"bias {L} {rate}"] for L, r in BIAS if r == rate}
        for rule, line in zip(BIASED, ("D-", "s-", "o--", "v-", "^-", "<-", ">--", "P:")):
            points = {L: record[rule] for L, record in records.items() if rule in record}
            axes.plot(list(points), [numbers[2 * (what == "std")] for numbers in points.values()],
                      line, markersize=5, label=rule)
        style.label(axes, f"{what}, {step}", "", "in units of |∇J|")
        if what == "bias":
            axes.fill_between(list(records), [record["s"][1] for record in records.values()],
                              color=style.GREY, alpha=0.3, label="noise of s (subtracted)")
        else:
            axes.set_yscale("log")
            axes.set_yticks([4, 6, 8, 12, 16, 24, 32], [4, 6, 8, 12, 16, 24, 32])
        axes.set_xscale("log")
        axes.set_xticks(list(records), list(records))
        axes.minorticks_off()
    axes.set_xlabel("digits of a response")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    style.save(figure, ROOT / "docs/figures/toy_bias.png", ROOT / "docs/figures/toy_bias.svg")


def draw_rates(found):
    """docs/figures/toy_rates: the pass rate against the learning rate."""
    figure, both = style.panels(2, 1, height=6.6, width=4.2, sharey=True)
    for axes, cell in zip(both, CELLS[:2]):
        for arm, line in (("GRPO", "o-"), ("paper", "s--"), ("×10", "D:"), ("wide", "^-.")):
            means = [found[key(arm, cell, rate, 1001)]["mean"] for rate in cell.rates]
            axes.plot(cell.rates, means, line, color=COLOURS[arm], markersize=5,
                      label=arm if arm == "GRPO" else f"GSPO, {arm}")
        axes.set_xscale("log")
        axes.set_xticks(cell.rates, [f"{rate:g}" for rate in cell.rates])
        axes.minorticks_off()
        style.label(axes, f"{cell.length} digits", "learning rate", "exact pass rate, 16 batches")
    both[0].legend(loc="lower center")
    style.save(figure, ROOT / "docs/figures/toy_rates.png", ROOT / "docs/figures/toy_rates.svg")


# ------------------------------------------------------------------------- what the pages quote

def texts(found):
    """{name: text} for fill.py. AT is "own" (each arm at its best rate) or "at .05":

        toy [64] ARM L AT              difference from GRPO (64: prompts per batch)
        toy [64] level ARM L AT        mean pass rate
        toy [64] share ARM L AT        clip_signal
        toy [64] rate ARM L            its best rate
        toy [64] late ARM L AT         pass rate of the last 8 batches; late difference: from GRPO
        toy [64] w against s L AT      w with the paper's drops minus the paper's range
        toy [64] random against s L AT     w with random drops minus the paper's range
        toy g ARM L                    question g, own rates; toy g wide against GRPO .05 L
        toy epsilon L RATE             best ε / std(log s); best share: clip_signal with that range
        toy bias ESTIMATE L STEP       as a share of |∇J|; floor L STEP: of s; std ESTIMATE L STEP
    """
    names = {}
    for cell in [cell for cell in CELLS if cell.question in "ag" and cell.mini_batches == 4]:
        L, toy_ = cell.length, "toy g " if cell.question == "g" else "toy " + "64 " * (
            cell.prompts == 64)
        for arm, fixed in itertools.product(cell.arms, (False, True)):
            own = best_rate(found, arm, cell)
            one, grpo = (found[key(name, cell, rate, 2001)] for name, rate in (
                (arm, cell.fixed if fixed else own),
                ("GRPO", cell.fixed if fixed else best_rate(found, "GRPO", cell))))
            at = f"{L} at .05" if fixed else f"{L}" if cell.question == "g" else f"{L} own"
            names |= {
                f"{toy_}{arm} {at}": difference(found, cell, arm, "GRPO", fixed),
                f"{toy_}level {arm} {at}": f"{one['mean']:.3f}",
                f"{toy_}share {arm} {at}": f"{one['clip_signal']:.2f}",
                f"{toy_}rate {arm} {L}": f"{own:g}",
                f"{toy_}late {arm} {at}": f"{one['late']:.3f}",
                f"{toy_}late difference {arm} {at}": signed(one["late"] - grpo["late"])}
            names |= {f"{toy_}{name} {at}": difference(found, cell, arm, other, fixed)
                      for name, (first, other) in QUOTED.items()
                      if first == arm and other in cell.arms}
    for cell in [cell for cell in CELLS if cell.question == "b"]:
        at, best = f"{cell.length} {cell.fixed:g}".replace(" 0", " "), best_range(found, cell)
        record = found[key(best, cell, cell.fixed, 2001)]
        names |= {f"toy epsilon {at}": f"{RANGES[best].clip[0] / record['std_log_s']:.1f}",
                  f"toy best share {at}": f"{record['clip_signal']:.2f}"}
    for length, rate in BIAS:
        at = f"{length} {'usual' if rate == 0.05 else 'large'}"
        of = found[f"bias {length} {rate}"]
        names[f"toy floor {at}"] = f"{of['s'][1]:.2f}"
        names |= {f"toy bias {rule} {at}": f"{bias:.2f}" for rule, (bias, _, _) in of.items()}
        names |= {f"toy std {rule} {at}": f"{std:.0f}" for rule, (_, _, std) in of.items()}
    return names


def best_range(found, cell):
    return max(cell.arms, key=lambda arm: found[key(arm, cell, cell.fixed, 2001)]["mean"])


def signed(x):
    return f"{x:+.3f}".replace("-", "−")


def difference(found, cell, arm, other, fixed):
    mean, low, high, _ = compare(found, cell, arm, other, fixed)
    return f"{signed(mean)} [{signed(low)}, {signed(high)}]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", action="store_true", help="run nothing")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not parser.parse_args().judge:
        run_all(found)
    judge(found)
    draw_bias(found)
    draw_rates(found)


if __name__ == "__main__":
    main()
