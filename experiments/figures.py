"""Figures: one style for all of them, the map of the family, and the panels of a run.

    python experiments/figures.py        draws docs/figures/family_map.png

Colours are Okabe and Ito's, which colour-blind readers can tell apart; no curve is told by its colour alone.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt                                                          # noqa: E402

BLUE, ORANGE, GREEN, RED, PINK, SKY, YELLOW, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#666666"
COLOURS = [BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY, "#000000"]
LINES = ["-", "--", "-.", ":"]
STYLE = {"figure.dpi": 100, "savefig.dpi": 130, "font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.grid": True,
         "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9,
         "axes.prop_cycle": plt.cycler(color=COLOURS), "figure.constrained_layout.use": True, "lines.linewidth": 1.8}


def panels(rows=1, columns=2, height=3.4, width=8.0, **options):
    """(figure, axes) in the one style, 8 inches wide: about the width of a README."""
    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def save(figure, file):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def label(axes, title, x, y):
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def band(axes, x, rows, name, colour, marker=None, line="-"):
    """A mean over seeds as a line and their range as a shade. rows: one sequence per seed."""
    columns = list(zip(*rows))
    axes.plot(x, [sum(c) / len(c) for c in columns], line, color=colour, label=name, marker=marker, markersize=4)
    if len(rows) > 1:
        axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.18, linewidth=0)


# ------------------------------------------------------------------------------------------------------------ the family

# (name, x, y): x from a ratio per token to one per answer, y from the objective as it was, patched, to another unit. Judged by losses.OBJECTIVES.
MAP = [("PPO", .10, .10), ("GRPO", .24, .10), ("Dr. GRPO", .13, .24), ("DAPO", .30, .24), ("SRPO", .40, .17), ("GRPO + routing replay", .22, .38),
       ("CISPO", .12, .66), ("SAPO", .30, .74), ("GMPO", .68, .30), ("RSPO", .84, .22), ("GSPO", .84, .82), ("GSPO-token", .68, .70), ("LUSPO", .86, .66),
       ("VESPO", .66, .90), ("sequence IS (∏w)", .86, .94)]


def family_map():
    figure, axes = panels(1, 1, height=4.6, width=7.0)
    axes.axhline(.5, color=GREY, linewidth=1)
    axes.axvline(.5, color=GREY, linewidth=1)
    for name, x, y in MAP:
        sequence = x > .5
        axes.text(x, y, name, ha="center", va="center", fontsize=11, color="white" if name == "GSPO" else "black",
                  bbox=dict(boxstyle="round,pad=0.3", facecolor=BLUE if name == "GSPO" else "#D6E9F5" if sequence else "#FBE8C4", edgecolor="none"))
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xticks=[.25, .75], yticks=[.25, .75])
    axes.set_xticklabels(["a ratio per token", "a ratio per answer\n(product or geometric mean of its tokens')"])
    axes.set_yticklabels(["patches\nPPO's clip", "replaces what\nis clipped"], rotation=90, va="center")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.set_title("The family: what is the ratio of, and is the clip patched or replaced?")
    return figure


# ------------------------------------------------------------------------------------------------------------- dashboard

DASHBOARD = [  # title, unit, metric names (a sum where there are several joined by +), logarithmic
    ("pass rate of the rollouts", "share", "pass_rate", False), ("clipped tokens", "share of loss tokens", "clip_low+clip_high", True),
    ("log-ratio spread, last mini-batch", "variance", "log_w_var log_s_var", True), ("length", "tokens", "length", False),
    ("entropy", "nats per token", "entropy", False), ("gradient norm, before the clip", "", "grad_norm", True),
    ("perplexity under the old policy", "", "perplexity_old", False), ("experts flipped by the updates", "share", "flip_rate", False),
    ("groups without signal", "share", "dead_groups", False), ("seconds per rollout batch", "s", "seconds_rollout seconds_logp seconds_update", False)]


def dashboard(runs):
    """One page of panels for runs, {name: [metrics records]}: a colour per run, a line style per metric of a panel."""
    figure, axes = panels(5, 2, height=13, width=9)
    for place, (title, unit, names, log) in zip(axes.flat, DASHBOARD):
        several = len(names.split()) > 1
        for colour, records in zip(COLOURS * len(runs), runs.values()):
            for line, name in zip(LINES, names.split()):
                parts = name.split("+")
                points = [(r["step"], sum(r[part] for part in parts)) for r in records if all(r.get(part) is not None for part in parts)]
                points = [(x, y) for x, y in points if y > 0 or not log]
                if points:
                    first = several and colour == COLOURS[0]
                    place.plot(*zip(*points), line, color=colour, label=name.removeprefix("seconds_") if first else None, marker="o" if len(points) == 1 else None)
        label(place, title, "rollout batch", unit)
        if not place.lines:
            place.text(.5, .5, "not measured in these runs", ha="center", transform=place.transAxes, color=GREY)
        elif log:
            place.set_yscale("log")
        if several and place.lines:
            place.legend()
    handles = [plt.Line2D([], [], color=colour, label=name if len(name) < 60 else f"…{name[-58:]}") for colour, name in zip(COLOURS * len(runs), runs)]
    figure.legend(handles=handles, loc="outside upper left")
    return figure


if __name__ == "__main__":
    target = Path(__file__).resolve().parent.parent / "docs/figures/family_map.png"
    save(family_map(), target)
    print("docs/figures/family_map.png")
