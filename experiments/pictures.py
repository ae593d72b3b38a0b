"""The figures of questions, and of the objectives.

    python experiments/pictures.py               docs/figures/objectives_six
    python experiments/run.py NAME               runs/questions/NAME.png
"""

import argparse
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from judging import split_terms                                                      # noqa: E402
from losses import policy_loss                                                       # noqa: E402
from tools import style                                                              # noqa: E402

OLD = 0.3                        # old probability of the token; only clips of π - μ depend on it
SIX = {                          # of README: objectives that differ in kind; drawn larger by
    "grpo": ("per token", 1), "gspo": ("per response", 500),
    "cispo": ("weight capped", 1), "dppo": ("mask on π − π_old", 1),
    "dro": ("a pull, no clip", 1), "sapo": ("a smooth gate", 1),
}


# ---------------------------------------------------------------------------------- of questions

def forest(name, question, found, line):
    """Means and intervals of the rules that have runs, in the unit of the first. Returns the file,
    None without such a rule."""
    unit = describe_unit(next(iter(question.rules.values())))
    names = [rule for rule in reversed(found) if found[rule]["mean"] is not None
             and describe_unit(question.rules[rule]) == unit]
    if not names:
        return None
    figure, axes = style.panels(1, 1, height=.3 * len(names) + 1.7, width=7.5)
    for y, rule in enumerate(names):
        decided = found[rule]["verdict"] in ("ahead", "behind", "level")
        axes.plot([found[rule][key] for key in ("low", "mean", "high")], [y] * 3, "-",
                  color=style.BLUE, marker="o", markevery=[1],
                  markerfacecolor=style.BLUE if decided else "white")
    axes.axvline(0, color=style.BLACK, linewidth=.8)
    style.label(axes, "", f"{unit}: mean and interval over seeds; filled: decided", "")
    axes.set_yticks(range(len(names)), names)
    figure.suptitle(textwrap.fill(f"{question.asks or question.claim} – {line}", 86), x=.01,
                    ha="left", fontsize=10)
    file = ROOT / f"runs/questions/{name}.png"
    style.save(figure, file)
    return file


def describe_unit(rule):
    """What the number of a rule is: of "A - B", a difference in pass@1."""
    terms = split_terms(rule.of)
    figures = {figure or "after" for *_, figure in terms}
    what = ("held-out pass@1" if figures <= {"after", "before"}
            else ", ".join(sorted(figures)).replace("_", " "))
    return f"difference in {what}" if len(terms) > 1 else what


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
    style.save(objectives_six(), ROOT / "docs/figures/objectives_six.png")
