"""The figures of the pages.

    python experiments/pictures.py               docs/figures/objectives_six
    python experiments/run.py                    docs/figures/NAME of the questions SHOWN
"""

import argparse
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from intervals import HELD, REFUTED, in_words, mean                                  # noqa: E402
from judging import split_terms                                                      # noqa: E402
from losses import policy_loss                                                       # noqa: E402
from tools import style                                                              # noqa: E402

SHOWN = ("curves", "guess", "variance", "offpolicy")
SEEDS = "line: mean; band: middle half of the seeds"
VARIANTS = {"GRPO": (style.ORANGE, "-"), "GSPO": (style.BLUE, "--"),
            "GSPO wide": (style.GREEN, "-."), "GSPO-token, turns": (style.SKY, "-")}
MARKS = {HELD: ("filled circle: supported", "o", True),
         REFUTED: ("filled square: contradicted", "s", True),
         "equal": ("filled diamond: equal", "D", True)}
OLD = 0.3                        # old probability of the token; only clips of π - μ depend on it
SIX = {                          # of README: objectives that differ in kind; drawn larger by
    "grpo": ("per token", 1), "gspo": ("per response", 500),
    "cispo": ("weight capped", 1), "dppo": ("mask on π − π_old", 1),
    "dro": ("a pull, no clip", 1), "sapo": ("a smooth gate", 1),
}


# ---------------------------------------------------------------------------------- of questions

def plot_seeds(axes, x, rows, name, colour, marker=None, line="-"):
    """Draw the mean over seeds as a line, and every seed as a thin line; of more than three seeds
    their middle half as a band. rows: one sequence per seed."""
    columns = [sorted(column) for column in zip(*rows)]
    if len(rows) > 3:
        quarter = len(rows) // 4
        axes.fill_between(x, [column[quarter] for column in columns],
                          [column[-1 - quarter] for column in columns], color=colour, alpha=.15,
                          linewidth=0)
    elif len(rows) > 1:
        for row in rows:
            axes.plot(x, row, line, color=colour, alpha=0.3, linewidth=0.8)
    means = [sum(column) / len(column) for column in columns]
    axes.plot(x, means, line, color=colour, label=name, marker=marker, markersize=4)


def save(figure, name):
    """Write a figure: one of a page into docs/figures, another into runs/questions. Returns its
    path."""
    folder = ROOT / ("runs/questions" if name not in (*SHOWN, "objectives_six") else "docs/figures")
    style.save(figure, folder / f"{name}.png")
    return folder / f"{name}.png"


def title(figure, question, verdict):
    """The question of a figure, with its verdict."""
    asked = f"{question.asks or question.claim} – {in_words(verdict)}"
    asked = textwrap.fill(asked, int(11.5 * figure.get_figwidth()), break_on_hyphens=False)
    figure.suptitle(asked, x=.01, ha="left", fontsize=10)


def forest(name, question, found, verdict):
    """Means and 95 % intervals of the rules that have runs, in the unit of the first that decides.
    Returns the file, None without such a rule."""
    first = question.rules[(*question.deciding, *question.rules)[0]]
    unit = describe_unit(first)
    names = [rule for rule in reversed(found) if found[rule]["mean"] is not None
             and describe_unit(question.rules[rule]) == unit]
    if not names:
        return None
    figure, axes = style.panels(1, 1, height=.3 * len(names) + 1.7, width=7.5)
    labelled = {}
    if first.nothing:
        labelled[f"grey: within ±{first.nothing:g}, equal"] = axes.axvspan(
            -first.nothing, first.nothing, color=style.GREY, alpha=.2)
    for y, rule in enumerate(names):
        number = found[rule]
        colour = style.BLUE if rule in question.deciding else style.GREY
        kind, marker, filled = MARKS.get(find_mark(question.rules[rule], number),
                                         ("open: no verdict", "o", False))
        labelled[kind], = axes.plot(
            [number[key] for key in ("low", "mean", "high")], [y] * 3, "-", color=colour,
            marker=marker, markevery=[1], markerfacecolor=colour if filled else "white")
    axes.axvline(0, color=style.BLACK, linewidth=.8)
    style.label(axes, "", unit, "")
    axes.set_yticks(range(len(names)), names)
    if question.decided_by:
        labelled["blue: decides"], = axes.plot([], [], color=style.BLUE)
    figure.legend(labelled.values(), labelled, loc="outside lower right", ncols=3,
                  title="mean and 95 % interval over seeds", title_fontsize=9)
    title(figure, question, verdict)
    return save(figure, name)


def find_mark(rule, number):
    """The key of MARKS for a rule's number: its verdict, but "equal" for one that is contradicted
    because its whole interval lies within what counts as nothing."""
    within = rule.nothing and -rule.nothing <= number["low"] and number["high"] <= rule.nothing
    return "equal" if number["verdict"] == REFUTED and within else number["verdict"]


def describe_unit(rule):
    """What the number of a rule is: of "A - B", a difference in pass@1."""
    terms = split_terms(rule.of)
    figures = {figure.removeprefix("first_").removesuffix("_before") for *_, figure in terms}
    what = ("held-out pass@1" if figures <= {"", "after", "before"}
            else ", ".join(sorted(figures)).replace("_", " "))
    return f"difference in {what}" if len(terms) > 1 else what


def learning_curves(name, question, runs):
    """Pass rate of each rollout batch."""
    figure, axes = style.panels(1, 1, width=5.6 if len(question.seeds) == 1 else 7, height=3.6)
    names = {"GSPO": "GSPO, the paper's clip range", "GSPO wide": "GSPO, 0.03 / 0.04"}
    for variant, (colour, line) in VARIANTS.items():
        rows = [run["figures"]["pass_rates"] for (one, *_), run in runs.items() if one == variant]
        if rows:
            plot_seeds(axes, range(1, len(rows[0]) + 1), rows, names.get(variant, variant),
                       colour, line=line)
    style.label(axes, "", "rollout batch", "share of right responses in the batch")
    thin = "thick: mean; thin: a seed"
    if len(question.seeds) == 1:                             # its trend: means over nine batches
        thin = "one run; dashed: mean of nine batches"
        for drawn in axes.get_lines():
            values = [*drawn.get_ydata()]
            drawn.set_alpha(.4)
            axes.plot(drawn.get_xdata()[4:-4],
                      [sum(values[i:i + 9]) / 9 for i in range(len(values) - 8)], "--",
                      color=drawn.get_color(), linewidth=2.2)
    axes.legend(loc="lower right", title=thin, title_fontsize=8)
    ends = ", ".join(f"{names.get(variant, variant)} {mean(after):.2f}"
                     for variant in VARIANTS if (after := [
                         run["figures"]["after"] for (one, *_), run in runs.items()
                         if one == variant]))
    figure.suptitle(f"{question.asks}\nHeld out, at the end: {ends}", x=.01, ha="left", fontsize=10)
    return save(figure, name)


def regimes(rows, runs):
    """Above: the map, GSPO and GSPO wide against GRPO. rows: (where, GSPO - GRPO, GSPO wide -
    GRPO), numbers with intervals or None. Below: the mean pass rates of the batches of runs with
    usual steps and of runs with large ones."""
    figure = style.pyplot().figure(figsize=(6.6, 8.4))
    above, below = figure.subfigures(2, 1, height_ratios=(5, 3))
    axes = above.subplots()
    rows = rows[::-1]
    for variant, column, shift, marker in (("GSPO", 1, .15, "o"), ("GSPO wide", 2, -.15, "s")):
        look = dict(color=VARIANTS[variant][0], marker=marker, markersize=4)
        for y, row in enumerate(rows):
            if (number := row[column]) and number["mean"] is not None:
                axes.plot([number[key] for key in ("low", "mean", "high")], [y + shift] * 3, "-",
                          markevery=[1], **look)
        axes.plot([], [], "-", label=f"{variant} − GRPO", **look)
    axes.axvline(0, color=style.BLACK, linewidth=.8)
    words = [where.replace("`", "").replace(" × ", "\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}")
             for where, *_ in rows]
    axes.set_yticks(range(len(rows)), [textwrap.fill(text, 42) for text in words], fontsize=8)
    axes.legend(loc="upper right")
    style.label(axes, "", "difference: mean and 95 % interval over seeds", "")
    both = below.subplots(1, 2, sharey=True)
    for axes, setting in zip(both, ("usual steps", "large steps")):
        for variant in [*VARIANTS][:3]:
            colour, line = VARIANTS[variant]
            rates = [run["figures"]["pass_rates"] for (*place, _), run in runs.items()
                     if place == [variant, setting]]
            plot_seeds(axes, range(1, len(rates[0]) + 1), rates, variant, colour, line=line)
        axes.set(ylim=(0, 1), xticks=range(4, 17, 4))
        style.label(axes, f"offpolicy, {setting}", "rollout batch", "")
    both[0].set_ylabel("share of right responses")
    both[0].legend(loc="lower right", title=SEEDS, title_fontsize=8)
    figure.suptitle("GSPO minus GRPO, by experiment, all variants at one learning rate.\n"
                    "Below: pass rates with usual and with large steps", x=.01, ha="left",
                    fontsize=10)
    return save(figure, "offpolicy")


def variance(question, verdict, points):
    """Var[log s] / Var[log w] against 1/L. points: {model: [(1/L, factor)]}. The line: 1/L, as for
    tokens that move independently of each other."""
    figure, axes = style.panels(1, 1, width=5.4, height=4)
    for colour, (model, pairs) in zip(style.COLOURS, points.items()):
        axes.plot(*zip(*pairs), "o", color=colour, markersize=3, label=model)
        for x, y in pairs:
            if y > 1:                                # its mean 1/L tells how many: two or three
                axes.annotate("two or three of 128 responses\nended after one token", (x, y),
                              fontsize=9, textcoords="offset points", xytext=(8, -8))
    ends = [x for pairs in points.values() for x, _ in pairs]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=style.BLACK, linewidth=.8,
              label="1 / L: independent tokens")
    axes.set(xscale="log", yscale="log")
    style.label(axes, "", "mean of 1 / L", "Var[log s] / Var[log w]")
    axes.legend(loc="upper left")
    title(figure, question, verdict)
    return save(figure, "variance")


# ---------------------------------------------------------------------------------- of objectives

def weight(name, A, ratio):
    """The weight [x] of ∇log π in the gradient of objective `name`, by autograd through its loss:
    of answers of one token, on which w, s and ∏w are the same ratio [x]."""
    old = torch.full_like(ratio, OLD).log()[:, None]                                  # [x, 1]
    logp = (old + ratio.log()[:, None]).requires_grad_()                              # [x, 1]
    loss, _ = policy_loss(name, logp, old, torch.full_like(ratio, A),
                          torch.ones_like(old).bool(), weights=torch.ones_like(old))
    return -torch.autograd.grad(loss, logp)[0][:, 0] / A


def list_ratios(larger):
    """The ratios of a curve, drawn so many times larger: between the thousandths, on which the ends
    of clip ranges are, so that rounding does not decide on which side of one a ratio is."""
    return 1 + torch.linspace(-.9945, 1.4995, 2495, dtype=torch.float64) / larger     # [x]


def objectives_six():
    """The weight of six objectives that differ in kind against their ratio."""
    figure, grid = style.panels(3, 2, height=6.4, width=5.6, sharey=True)
    for axes, (name, (limit, larger)) in zip(grid.flat, SIX.items()):
        ratio = list_ratios(larger)                                                   # [x]
        for A, line, width, colour, sign in ((1.0, "-", 4, style.SKY, "Â > 0"),
                                             (-1.0, "--", 1.6, style.BLACK, "Â < 0")):
            axes.plot(ratio, weight(name, A, ratio), line, linewidth=width, color=colour,
                      label=sign)
        if larger > 1:
            axes.text(.03, .8, f"x axis magnified\n{larger} times",
                      transform=axes.transAxes)
        style.label(axes, f"{name.upper()}: {limit}", "ratio", "")
    grid[0, 0].legend(loc="upper left")
    figure.supylabel("weight of ∇log π", fontsize=10)
    return figure


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    save(objectives_six(), "objectives_six")
