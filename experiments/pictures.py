"""The pictures of the pages: intervals of a question's rules, reuse of a batch, six objectives.

    python experiments/pictures.py               docs/figures/objectives_six.png
    python experiments/run.py                    docs/figures/NAME.png of the questions SHOWN
    python experiments/view_gif.py               docs/figures/view.gif, in a browser

Every curve of an objective is autograd through losses.policy_loss; no formula is repeated here.
"""

import argparse
import math
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES, policy_loss, varied                                   # noqa: E402
from tools import style                                                              # noqa: E402

SHOWN = ("steps", "depth")       # questions whose intervals docs/evidence.md shows
OLD = 0.3                        # old probability of the token; only clips of π - μ depend on it
SIX = {                          # of README: objectives that differ in kind, and how
    "grpo": "PPO's clip, per token", "gspo": "PPO's clip, per answer",
    "cispo": "weight capped", "dppo": "mask on π − π_old",
    "ipo": "mask, both signs of A", "sapo": "a smooth gate",
}
ROUND = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]


# ---------------------------------------------------------------------------------- of questions

def forest(name, question, found):
    """Means and 95 % intervals of the rules that have runs, in the unit of the first that decides;
    filled where a verdict is held. Grey: what counts as equal."""
    first = question.rules[(*question.decides, *question.rules)[0]]
    rows = [(rule, number) for rule, number in found.items()
            if number["mean"] is not None and question.rules[rule].form == first.form]
    if not rows:
        return
    figure, axes = style.panels(1, 1, height=.3 * len(rows) + 1.1, width=7.5)
    axes.axvspan(-first.nothing, first.nothing, color=style.GREY, alpha=.2)
    for y, (rule, number) in enumerate(reversed(rows)):
        colour = style.BLUE if rule in question.decides else style.GREY
        axes.plot([number["low"], number["high"]], [y, y], color=colour)
        axes.plot(number["mean"], y, "o", color=colour,
                  markerfacecolor=colour if number["verdict"] == "held" else "white")
    axes.axvline(1 if first.factor else 0, color=style.BLACK, linewidth=.8)
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

def zoom(name):
    """The magnification at which the clip range of `name` looks about as wide as PPO's: 1 if it is
    as wide, or if it is not one of the ratio. GSPO's: 500."""
    row = OBJECTIVES[name]
    if row.kind.of != "w" or not row.epsilon_high:
        return 1
    narrower = OBJECTIVES["ppo"].epsilon_high / row.epsilon_high
    return min(ROUND, key=lambda factor: abs(math.log(factor / narrower)))


def ratios(factor=1):
    """The ratios [x] that a panel shows: 0.005 to 2.5, or that range shrunk around 1 by
    `factor`."""
    return 1 + torch.linspace(-0.995, 1.5, 2496, dtype=torch.float64) / factor


def curves(name, A, ratio, **options):
    """(surrogate [x], weight [x]) of objective `name` for answers of one token, on which w, s and
    ∏w are the same ratio [x]. The surrogate is the derivative of the loss with respect to the
    token's weight, and the weight of ∇log π is its derivative with respect to log π, divided by
    A."""
    old = torch.full_like(ratio, OLD).log()[:, None]                                  # [x, 1]
    logp = (old + ratio.log()[:, None]).requires_grad_()                              # [x, 1]
    weights = torch.ones_like(logp).requires_grad_()                                  # [x, 1]
    loss, _ = policy_loss(varied(name, **options), logp, old, torch.full_like(ratio, A),
                          torch.ones_like(old).bool(), weights=weights)
    by_weight, by_logp = torch.autograd.grad(loss, (weights, logp))
    return -by_weight[:, 0].detach(), -by_logp[:, 0] / A


def climbed(name, A, ratio, **options):
    """The integral [x] of the gradient over the ratio [x], 0 at ratio 1: a function whose gradient
    is that of the loss. It is the surrogate less a constant, unless the objective multiplies log π
    by a weight without gradient: such a surrogate's value does not show where an update leads."""
    slope = A * curves(name, A, ratio, **options)[1] / ratio                          # [x]
    area = torch.cumulative_trapezoid(slope, ratio)                                   # [x - 1]
    area = torch.cat([torch.zeros_like(area[:1]), area])                              # [x]
    return area - area[(ratio - 1).abs().argmin()]


def kept(name):
    """The edges of the clip range: the ratios at which the gradient of good and of bad answers
    ends; None where it does not."""
    row = OBJECTIVES[name]
    if row.clip == "weight":
        return max(1 - row.epsilon, 0), 1 + row.epsilon_high
    options = {"constants": {row.kind.pulls: 0.0}} if row.kind.pulls else {}  # acts outside too
    ratio = torch.cat([ratios(), ratios(zoom(name))]).sort()[0]                       # [x]
    above, below = (curves(name, A, ratio, **options)[1] == 0 for A in (1.0, -1.0))   # [x] bool
    low = ratio[below & (ratio < 1)].max().item() if (below & (ratio < 1)).any() else None
    high = ratio[above & (ratio > 1)].min().item() if (above & (ratio > 1)).any() else None
    return low, high


def edge(ratio):
    """An edge of a clip range as text: two decimals, or four where 1 is that close."""
    return f"{round(ratio, 4 if abs(ratio - 1) < 0.01 else 2):g}"


def draw_member(figure, place, name, title, size):
    """Draw the surrogate above and the weight below, with the clip range shaded. A clip range that
    is too narrow to see is drawn larger, and so is the surrogate, around its value at ratio 1.
    size: of the smallest text. Returns both axes."""
    inner = place.subgridspec(2, 1, hspace=0.12, height_ratios=(1.25, 1))
    top = figure.add_subplot(inner[0])
    bottom = figure.add_subplot(inner[1])
    factor = zoom(name)
    ratio = ratios(factor)
    low, high = kept(name)
    for A, line in ((1.0, "-"), (-1.0, "--")):
        look = dict(linestyle=line, color=style.colour(name), linewidth=1.6)
        top.plot(ratio, A + factor * climbed(name, A, ratio), **look)
        bottom.plot(ratio, curves(name, A, ratio)[1], **look)
    for axes in (top, bottom):
        if low is not None:
            axes.axvspan(low, high, color=style.GREY, alpha=0.25, linewidth=0.8)
        axes.axvline(1, color=style.GREY, linewidth=0.5)
        at = [1 + step / factor for step in (-1, 0, 1)]
        axes.set_xticks(at, [f"{x:g}" for x in at] if axes is bottom else ())
        axes.set_xlim(1 - 1 / factor, 1 + 1.5 / factor)
        axes.tick_params(labelsize=size, length=2, pad=2)
    if low is not None:
        bottom.text(0.03, 0.97, f"{edge(low)} to {edge(high)}", fontsize=size, va="top",
                    transform=bottom.transAxes)
    top.set(ylim=(-2.6, 2.6), yticks=(-1, 1))
    bottom.set(ylim=(-0.1, 2.6), yticks=(0, 1, 2))
    top.set_title(title, fontsize=size + 1.5, pad=3)
    return top, bottom


def objectives_six():
    """Six objectives that differ in kind, on one screen, for README."""
    figure = style.pyplot().figure(figsize=(6.2, 5), layout="none")
    grid = figure.add_gridspec(2, 3, left=0.09, right=0.985, top=0.815, bottom=0.085, hspace=0.5,
                               wspace=0.2)
    for place, (name, kind) in zip(grid, SIX.items()):
        factor = zoom(name)
        row = OBJECTIVES[name]
        top, bottom = draw_member(figure, place, name, f"{name.upper()}\n{kind}", 8.5)
        if name == "grpo":
            for x, y, text in ((1.25, 1.5, "no gradient"), (0.03, -1.9, "no gradient"),
                               (1.4, -0.9, "kept"), (0.03, 1.0, "kept")):
                top.text(x, y, text, fontsize=8.5)
        if place.is_first_col():
            top.set_ylabel("surrogate", fontsize=9.5)
            bottom.set_ylabel("weight", fontsize=9.5)
        note = f", drawn × {factor}" if factor > 1 else ""
        note = f", at π_old = {OLD}" if row.kind.of == "π - μ" else note
        bottom.set_xlabel(("s" if row.clips_s else "w") + note, fontsize=9.5, labelpad=1)
    top.plot([], [], "-", color=style.BLACK, label="A > 0")
    top.plot([], [], "--", color=style.BLACK, label="A < 0")
    top.fill_between([], [], color=style.GREY, alpha=0.25, linewidth=0, label="the band")
    figure.legend(*top.get_legend_handles_labels(), loc="upper right", ncols=3, fontsize=9.5,
                  bbox_to_anchor=(1, 0.935), borderaxespad=0)
    figure.suptitle("Six ways to limit an update. Above: the surrogate, flat where there is no "
                    "gradient.\nBelow: the weight of ∇log π.", fontsize=10, x=0.01, ha="left",
                    y=0.992)
    return figure


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    style.save(objectives_six(), ROOT / "docs/figures/objectives_six.png")
