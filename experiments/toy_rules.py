"""What toy.py's policy of a thousand numbers says about ratio, rule, rate and length.

    python experiments/toy_rules.py              run what is missing, print the verdicts, draw
    python experiments/toy_rules.py --judge      print the verdicts of what has run, and draw

The rules, written before the runs
----------------------------------
Number: the exact pass rate, mean of 16 batches (late: of the last 8, reported only). Each arm is
compared at its own best learning rate, chosen on seeds 1001 …, and at .05, both on 64 other seeds,
2001 …. Differences are paired by seed. *ahead* or *behind*: the 95 % interval leaves 0, the mean is
at least .01, and p < .05 after Holm's correction over all comparisons of the question. *level*: the
interval lies within ±.01. Else *undecided*. A best rate at the edge of its grid is marked *.
clip_signal: share of the loss tokens with Â ≠ 0, over all mini-batches. Every arm is compared with
GRPO; besides, w with the paper's drops, and w with as many responses dropped at random, with the
paper's range; s with w, both without a clip.

Predictions, after a pilot and a look at 8 other seeds:

a   Arms × length, 4 mini-batches of 4 prompts; also 4 of 16 prompts, and 16 of 4.
    At .05 the paper's range is behind at 8, 24 and 80 digits, ahead at 240 and 800, and with 64
    prompts behind at both lengths; ×10 is ahead at 24, ×3 at 80 and 240; wide is level from 24 on.
    At own rates wide is ahead at every length, the paper's range behind at 8 and ahead from 24 on.
    w with the paper's drops is level with the paper's range everywhere, random drops behind it from
    80 on. s and w without a clip are level at .05.
g   GRPO with ε .05 and .02, own rates and .05. Added when a's results had been seen (there GRPO's
    .2 drops almost nothing and breaks first): a look, not a test.

GRPO's range is .2 on both sides, where the transformer has .27 above; it drops .01 or less. 80 and
800 digits have seven arms, and 32 and 16 judged seeds; 64 prompts have six arms, and 24 digits with
32 judged seeds or 240 with 16 (16 mini-batches only at 24). Rates are chosen on 16 seeds at 8 and
24 digits, else on 8.

The results were recorded when group_advantages gave float64, now float32: recomputed numbers agree
to four digits, except those of random drops, to three, as their share then counted a response
without a signal. results/toy.json also has the runs of questions that are closed: b, the best ε; c,
other optimizers; d, 16 mini-batches of one prompt; e, first pass rates; f, old samples; and the
bias of the estimated gradient. Their code is that of commit 99b9041, their numbers are in
results/closed.json.
"""

import argparse
import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import intervals
import toy
from losses import find_clipped, policy_loss
from ratios import sequence_ratio
from tools import style

RESULTS = ROOT / "experiments/results/toy.json"
RANDOM = 4                       # a stream of toy.uniforms: what is dropped at random


class Arm(NamedTuple):
    algorithm: str
    clip: tuple = (1, math.inf)      # epsilon and epsilon_high; these clip nothing
    drop: str = ""                   # whole responses: by s and the paper's range, or at "random"


def paper(times):
    """The paper's clip range of s, times a number."""
    return 3e-4 * times, 4e-4 * times


ARMS = {
    "GRPO": Arm("grpo", (0.2, 0.2)), "paper": Arm("gspo", paper(1)), "×3": Arm("gspo", paper(3)),
    "×10": Arm("gspo", paper(10)), "wide": Arm("gspo", paper(100)),
    "w, paper's drops": Arm("grpo", drop="s"), "w, random drops": Arm("grpo", drop="random"),
    "w, no clip": Arm("grpo"), "s, no clip": Arm("gspo"),
    "GRPO .05": Arm("grpo", (0.05, 0.05)), "GRPO .02": Arm("grpo", (0.02, 0.02)),
}
OTHERS = {
    "w against s": ("w, paper's drops", "paper"), "random against s": ("w, random drops", "paper"),
    "s against w": ("s, no clip", "w, no clip"),
}


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
    fixed: float = 0.05              # a rate at which all arms are compared, too


Fewer = partial(Cell, choose=8, judge=32)
EVERY = tuple(ARMS)[:9]
SEVEN = EVERY[:6] + EVERY[7:8]
SIX = "GRPO", "paper", "×10", "wide", "w, paper's drops", "w, no clip"
SHORT = 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.9
LONG = 0.05, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0, 3.0
CELLS = [
    Cell("a", EVERY, SHORT, 24), Cell("a", EVERY, LONG, 240, choose=8), Cell("a", EVERY, SHORT, 8),
    Fewer("a", SEVEN, LONG, 80),
    *[Fewer("a", SIX, (0.2, 0.4, 0.7, 1.2, 2.0, 3.0), 24, minis, 64)
      for minis in (4, 16)],
    Cell("a", SIX, (0.2, 0.6, 1.2, 2.0, 3.0), 240, 4, 64, choose=8, judge=16),
    Cell("a", SEVEN, (0.4, 0.9, 2.0, 4.0), 800, choose=8, judge=16),
    Cell("g", ("GRPO", "×10", "wide", "GRPO .05", "GRPO .02"), SHORT, 24),
    Cell("g", ("GRPO", "×10", "wide", "GRPO .05", "GRPO .02"), LONG, 240, choose=8),
]
COLOURS = {"GRPO": style.ORANGE, "paper": style.BLUE, "×10": style.SKY, "wide": style.GREEN}


# ---------------------------------------------------------------------------------------- the runs

def drop_by_s(arm, logp, old_logp, A, mask):
    """The responses that an arm leaves out because GSPO's clip does, [B] bool."""
    s = sequence_ratio(logp.detach(), old_logp, mask)                            # [B]
    epsilon, epsilon_high = paper(1) if arm.drop else (math.inf, math.inf)
    below, above = find_clipped(s, A, 1 - epsilon, 1 + epsilon_high)             # [B] each
    return below | above


def run(arm, cell, rate, first, count):
    """The record of an arm at a rate over seeds first, first + 1, …; results of runs that
    choose a rate hold the mean alone. seeds: the pass rates in 1/10,000. std_log_s: the median,
    over batches and seeds, of the std of log s of the responses with Â ≠ 0 before the last
    mini-batch's step."""
    arm = ARMS[arm]
    seeds = torch.arange(first, first + count)                                   # [S]
    calls = itertools.count()
    spreads = []

    def objective(algorithm, logp, old_logp, A, mask, **options):
        batch, part = divmod(next(calls), cell.mini_batches)
        live = (A != 0).view(count, -1)                                          # [S, b]
        out = drop_by_s(arm, logp, old_logp, A, mask)                            # [S·b]
        if arm.drop == "random":
            share = out.view(count, -1).sum(1) / live.sum(1).clamp(min=1)        # [S]
            rows = toy.split(seeds, batch, cell.prompts, cell.mini_batches)[part]
            u = toy.uniforms(seeds, batch, RANDOM, cell.prompts * toy.G).flatten()[rows]
            out = ((u.view(count, -1) < share[:, None]) & live).flatten()        # [S·b]
        if part == cell.mini_batches - 1:
            log_s = (logp - old_logp).detach().mean(-1).view(count, -1)          # [S, b]
            spreads.extend(x[of].std(correction=0) for x, of in zip(log_s, live) if of.any())
        loss, stats = policy_loss(algorithm, logp, old_logp, A, mask, **options,
                                  factors=(mask & ~out[:, None]).double())
        stats["clip_signal"] += out.sum() / live.sum().clamp(min=1)
        return loss, stats

    rates, clip_signal, _ = toy.train(
        arm.algorithm, cell.length, rate, *arm.clip, cell.mini_batches, cell.prompts, 16, seeds,
        cell.optimizer, cell.pass_rate, cell.lag, objective)                     # [S, 16]
    numbers = dict(mean=rates.mean(), late=rates[:, 8:].mean(), clip_signal=clip_signal,
                   std_log_s=torch.stack(spreads).median())
    return ({name: float(f"{x:.4g}") for name, x in numbers.items()}
            | {"seeds": (1e4 * rates.mean(1)).round().int().tolist()})


def key(arm, cell, rate, first):
    return " ".join(map(str, (*cell[3:9], arm, rate, first)))


def best_rate(found, arm, cell):
    """The best of the rates to choose from."""
    return max(cell.rates, key=lambda rate: found[key(arm, cell, rate, 1001)]["mean"])


def run_all(found):
    """Every run that is missing in `found` {key: record}, which is written after each."""
    def fill(name, make, *args):
        if name not in found:
            found[name] = make(*args)
            text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
            RESULTS.write_text(text.replace('},"', '},\n"') + "\n")
    for cell in CELLS:
        for arm in cell.arms:
            for rate in cell.rates:
                fill(key(arm, cell, rate, 1001), run, arm, cell, rate, 1001, cell.choose)
            for rate in (best_rate(found, arm, cell), cell.fixed):
                fill(key(arm, cell, rate, 2001), run, arm, cell, rate, 2001, cell.judge)


# ------------------------------------------------------------------------------------ the verdicts

def judged(found, cell, arm, fixed):
    """The record of an arm at its best rate, or at the one at which all arms are compared."""
    return found[key(arm, cell, cell.fixed if fixed else best_rate(found, arm, cell), 2001)]


def differences(found, cell, arm, other, fixed):
    """The pass rates of an arm minus those of another, one per seed."""
    pairs = zip(*(judged(found, cell, name, fixed)["seeds"] for name in (arm, other)))
    return [(one - two) / 1e4 for one, two in pairs]


def interval(values):
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*intervals.interval(values)).replace("-", "−")


def judge(found):
    """Print every arm's rate, level and share, the comparisons with their verdicts, and biases."""
    for question in "ag":
        rows = {(cell, fixed, arm, other): differences(found, cell, arm, other, fixed)
                for cell in CELLS if cell.question == question
                for fixed in (False, True) for arm in cell.arms
                for one, other in ((arm, "GRPO"), *OTHERS.values())
                if one == arm and other in cell.arms}
        ps = intervals.holm([None if arm == other else intervals.p_zero(values)
                             for (_, _, arm, other), values in rows.items()])
        print(f"\n{question}   digits, mini-batches, prompts, optimizer, first pass rate, lag")
        for ((cell, fixed, arm, other), values), p in zip(rows.items(), ps):
            own = best_rate(found, arm, cell)
            edge = "*" if own in (cell.rates[0], cell.rates[-1]) else ""
            verdict = intervals.compare(values, 0.01)
            if verdict in ("ahead", "behind") and p >= 0.05:
                verdict = "undecided"
            record = judged(found, cell, arm, fixed)
            print(*cell[3:9], f"at {cell.fixed}" if fixed else f"own {own}{edge}", f" {arm} ",
                  *[f"{name} {record[name]:.4f}" for name in list(record)[:4]],
                  f" - {other}: {interval(values)} {verdict}")


def log_axis(axes, values):
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def draw_bias(found):
    """docs/figures/toy_bias: the bias of the estimate of ∇J after a usual step, by length."""
    figure, axes = style.panels(1, 1, height=4.2, width=4.6)
    lengths = 8, 24, 60, 120, 240
    for rule, line, name in (
            ("s, paper", "s--", "s, the paper's range"), ("w, clip .2", "^-", "w, GRPO's clip"),
            ("s", "D-.", "s, no clip (no ratio: within 0.02)"), ("w", "o:", "w, no clip")):
        biases = [found[f"bias {length} 0.05"][rule][0] for length in lengths]
        color = style.BLUE if rule[0] == "s" else style.ORANGE
        axes.plot(lengths, biases, line, color=color, markersize=5, label=name)
    log_axis(axes, lengths)
    style.label(axes, "In the toy both clips add bias", "digits of a response",
                "bias after a usual step, in units of |∇J|")
    figure.legend(loc="outside lower center", ncols=1)
    style.save(figure, ROOT / "docs/figures/toy_bias.png")


def draw_rates(found):
    """docs/figures/toy_rates: the pass rate against the learning rate."""
    figure, both = style.panels(2, 1, height=6.6, width=4.2, sharey=True)
    for axes, cell in zip(both, CELLS[:2]):
        for arm, line in (("GRPO", "o-"), ("paper", "s--"), ("×10", "D:"), ("wide", "^-.")):
            means = [found[key(arm, cell, rate, 1001)]["mean"] for rate in cell.rates]
            axes.plot(cell.rates, means, line, color=COLOURS[arm], markersize=5,
                      label=arm if arm == "GRPO" else f"GSPO, {arm}")
        log_axis(axes, cell.rates)
        style.label(axes, f"{cell.length} digits", "learning rate", "exact pass rate, 16 batches")
    both[0].legend(loc="lower center")
    style.save(figure, ROOT / "docs/figures/toy_rates.png")


# ------------------------------------------------------------------------- what the pages quote

def texts(found):
    """{name: text} for fill.py. AT is "own" (each arm at its best rate) or "at .05":

        toy [64] ARM L AT              difference from GRPO (64: prompts per batch)
        toy [64] level ARM L AT        its pass rate
        toy [64] share ARM L AT        clip_signal
        toy [64] rate ARM L            its best rate
        toy [64] late difference ARM L AT  difference of the last 8 batches' pass rates
        toy [64] NAME L AT             a difference of OTHERS
        toy g ARM L                    question g, own rates
    """
    names = {}
    for cell in [cell for cell in CELLS if cell.question == "a" and cell.mini_batches == 4]:
        L, of = cell.length, "toy 64" if cell.prompts == 64 else "toy"
        for arm, (fixed, at) in itertools.product(cell.arms, enumerate(("own", "at .05"))):
            record, grpo = (judged(found, cell, name, fixed) for name in (arm, "GRPO"))
            names |= {
                f"{of} {arm} {L} {at}": interval(differences(found, cell, arm, "GRPO", fixed)),
                f"{of} level {arm} {L} {at}": f"{record['mean']:.3f}",
                f"{of} share {arm} {L} {at}": f"{record['clip_signal']:.2f}",
                f"{of} rate {arm} {L}": f"{best_rate(found, arm, cell):g}",
                f"{of} late difference {arm} {L} {at}":
                    f"{record['late'] - grpo['late']:+.3f}".replace("-", "−")}
            names |= {f"{of} {name} {L} {at}": interval(differences(found, cell, *pair, fixed))
                      for name, pair in OTHERS.items() if {*pair} <= {*cell.arms}}
    for cell in CELLS:
        if cell.question == "g":
            names |= {f"toy g {arm} {cell.length}":
                      interval(differences(found, cell, arm, "GRPO", False)) for arm in cell.arms}
    return names


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--judge", action="store_true", help="run nothing")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text())
    if not options.judge:
        run_all(found)
    judge(found)
    draw_bias(found)
    draw_rates(found)


if __name__ == "__main__":
    main()
