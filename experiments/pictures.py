"""The pictures of the pages: intervals of a question's rules, reuse of a batch, six objectives.

    python experiments/pictures.py               docs/figures/objectives_six.png
    python experiments/view_gif.py               docs/figures/view.gif, in a browser
    python experiments/run.py                    docs/figures/NAME.png of the questions SHOWN
"""

import argparse
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import policy_loss                                                       # noqa: E402
from tools import style                                                              # noqa: E402

SHOWN = ("steps", "depth")       # questions whose intervals docs/evidence.md shows
OLD = 0.3                        # old probability of the token; only clips of π - μ depend on it
SIX = {                          # of README: objectives that differ in kind; drawn larger by
    "grpo": ("PPO's clip, per token", 1), "gspo": ("PPO's clip, per answer", 500),
    "cispo": ("weight capped", 1), "dppo": ("mask on π − π_old", 1),
    "ipo": ("mask, both signs of A", 1), "sapo": ("a smooth gate", 1),
}


# ---------------------------------------------------------------------------------- of questions

def forest(name, question, found):
    """Means and 95 % intervals of the rules that have runs, in the unit of the first that decides;
    filled where a verdict is held. Grey: what counts as equal."""
    first = question.rules[(*question.decides, *question.rules)[0]]
    rows = [(rule, number) for rule, number in found.items()
            if number["mean"] is not None and question.rules[rule].form == first.form]
    figure, axes = style.panels(1, 1, height=.3 * len(rows) + 1.1, width=7.5)
    axes.axvspan(-first.nothing, first.nothing, color=style.GREY, alpha=.2)
    for y, (rule, number) in enumerate(reversed(rows)):
        colour = style.BLUE if rule in question.decides else style.GREY
        axes.plot([number[key] for key in ("low", "mean", "high")], [y] * 3, "-o", color=colour,
                  markevery=[1], markerfacecolor=colour if number["verdict"] == "held" else "white")
    axes.axvline(0, color=style.BLACK, linewidth=.8)
    axes.set_yticks(range(len(rows)), [rule for rule, _ in reversed(rows)], fontsize=8)
    style.label(axes, "", "mean, 95 % interval; filled: held; blue: decides", "")
    figure.suptitle(textwrap.fill(question.claim, 80), x=.01, ha="left", fontsize=10)
    style.save(figure, ROOT / f"docs/figures/{name}.png")


def reuse(curves):
    """Reward against samples and against optimizer steps. curves: {(arm, "μ4"): mean pass rates of
    the batches}, of fresh starts at the chosen rates."""
    figure, both = style.panels(1, 2, sharey=True, width=8.6)
    colours = {"GRPO": style.ORANGE, "GSPO": style.BLUE, "GSPO ×100": style.GREEN}
    for (arm, group), rates in curves.items():
        mu = int(group.removeprefix("μ"))
        for axes, each in zip(both, (256, 4 * mu)):
            axes.plot([each * i for i in range(len(rates))], rates, {1: ":", 2: "--", 4: "-"}[mu],
                      color=colours[arm], label=f"{arm}, μ = {mu}")
    style.label(both[0], "A batch used μ times", "samples drawn before", "pass rate of a batch")
    style.label(both[1], "The same by optimizer steps", "steps before", "")
    both[1].legend(loc="lower right", fontsize=7)
    style.save(figure, ROOT / "docs/figures/reuse.png")


def variance(points):
    """Var[log s] / Var[log w] against 1/L. points: {model: [(1/L, factor)]}. The line: 1/L, as for
    tokens that move independently of each other."""
    figure, axes = style.panels(1, 1, width=6.2)
    for colour, (model, pairs) in zip(style.COLOURS, points.items()):
        axes.plot(*zip(*pairs), "o", color=colour, markersize=3, label=model)
    ends = [x for pairs in points.values() for x, _ in pairs]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=style.BLACK, linewidth=.8)
    axes.set(xscale="log", yscale="log")
    style.label(axes, "", "1 / L", "Var[log s] / Var[log w]")
    axes.legend(fontsize=8)
    style.save(figure, ROOT / "docs/figures/variance.png")


# ---------------------------------------------------------------------------------- of objectives

def weight(name, A, ratio):
    """The weight [x] of ∇log π in the gradient of objective `name`, by autograd through its loss:
    of answers of one token, on which w, s and ∏w are the same ratio [x]."""
    old = torch.full_like(ratio, OLD).log()[:, None]                                  # [x, 1]
    logp = (old + ratio.log()[:, None]).requires_grad_()                              # [x, 1]
    loss, _ = policy_loss(name, logp, old, torch.full_like(ratio, A),
                          torch.ones_like(old).bool(), weights=torch.ones_like(old))
    return -torch.autograd.grad(loss, logp)[0][:, 0] / A


def objectives_six():
    """The weight of six objectives that differ in kind against their ratio."""
    figure, grid = style.panels(2, 3, height=4.2, sharey=True)
    for axes, (name, (limit, larger)) in zip(grid.flat, SIX.items()):
        ratio = 1 + torch.linspace(-.995, 1.5, 2496, dtype=torch.float64) / larger    # [x]
        for A, line, sign in ((1.0, "-", "A > 0"), (-1.0, "--", "A < 0")):
            axes.plot(ratio, weight(name, A, ratio), line, color=style.colour(name), label=sign)
        drawn = f", drawn {larger} times larger" if larger > 1 else ""
        style.label(axes, f"{name.upper()}: {limit}", f"ratio{drawn}", "")
    grid[0, 0].legend(loc="upper left")
    figure.supylabel("weight of ∇log π", fontsize=10)
    return figure


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    style.save(objectives_six(), ROOT / "docs/figures/objectives_six.png")
