"""The pictures and numbers of docs/lesson.md.

    python experiments/lesson.py

Recorded are docs/notebooks/recorded_batch.json (one rollout batch before and after updates on
GSPO's loss without a clip) and results/lesson.json: who is clipped in a run of ten batches, a game
of a run of recipes/turns.yaml, expert flips of a default run; the code that measured them is that
of commit 99b9041.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from statistics import pstdev

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES                                                        # noqa: E402
from tools import style                                                              # noqa: E402

RECORDED = ROOT / "experiments/results/lesson.json"
PAPER = OBJECTIVES["gspo"]
EDGES = math.log(1 - PAPER.epsilon), math.log(1 + PAPER.epsilon_high)


def read_batch():
    """log w of every response of the recorded batch: a list of lists."""
    batch = json.loads((ROOT / "docs/notebooks/recorded_batch.json").read_text(encoding="utf-8"))
    return [[new - old for new, old in zip(*rows)]
            for rows in zip(batch["logp"], batch["old_logp"])]


# ------------------------------------------------------------------------------------ the numbers

def is_clipped(s, A):
    return s > EDGES[1] if A > 0 else s < EDGES[0]


def describe(record):
    """Every figure that experiments/fill.py writes into pages from this file's record."""
    still, moved = record["flips"]["any"]
    log_w = read_batch()
    return {"lesson std w": f"{pstdev([x for row in log_w for x in row]):.3f}",
            "lesson std product": f"{pstdev(map(sum, log_w)):.2f}",
            "lesson flips move": f"{moved / still:.1f}"}


# ----------------------------------------------------------------------------------- the pictures

def save(figure, name):
    style.save(figure, ROOT / f"docs/figures/{name}.png")


def draw_regions():
    """Section 3: what the clip leaves of the gradient, by the sign of Â and the place of the
    ratio."""
    from matplotlib.patches import Rectangle
    figure, axes = style.panels(1, 1, height=2.6, width=6.4)
    cells = (("push up", "push up", "nothing"), ("nothing", "push down", "push down"))
    colours = {"push up": style.BLUE, "push down": style.RED, "nothing": style.GREY}
    for row, texts in enumerate(cells):
        for column, text in enumerate(texts):
            axes.add_patch(Rectangle((column, -row), 1, 1, edgecolor="white", linewidth=3,
                                     facecolor=colours[text],
                                     alpha=.15 if text == "nothing" else .55))
            axes.text(column + .5, .5 - row, text, ha="center", va="center", fontsize=12)
    axes.set(xlim=(0, 3), ylim=(-1, 1))
    axes.set_xticks([.5, 1.5, 2.5], ["below 1 − ε", "inside", "above 1 + ε_high"], fontsize=10)
    axes.set_yticks([.5, -.5], ["good: Â > 0", "bad: Â < 0"], fontsize=10)
    axes.tick_params(length=0)
    style.label(axes, "What does the clip leave of the gradient?", "where the ratio is", "")
    save(figure, "lesson_regions")


def draw_clip(dots):
    """Section 5: the responses before the update on mini-batch 4. Equal responses of a group have
    one point, whose area is their number."""
    figure, axes = style.panels(1, 1, height=4.6, width=5.4)
    axes.axvspan(*(1e4 * edge for edge in EDGES), color=style.GREY, alpha=.4,
                 label="the paper's clip range")
    for sign, name, colour in ((1, "right", style.BLUE), (-1, "wrong", style.RED)):
        for gone in (False, True):
            some = Counter((1e4 * s, A) for s, A in dots
                           if A * sign > 0 and is_clipped(s, A) == gone)
            axes.scatter(*zip(*some), s=[14 * n for n in some.values()], edgecolors=colour,
                         linewidths=1, facecolors="none" if gone else colour,
                         alpha=1 if gone else .5,
                         label=f"{name}, {'clipped' if gone else 'kept'}: {some.total()}")
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks([-100, -10, 0, 10, 100], ["−100", "−10", "0", "10", "100"])
    style.label(axes, "Who has left the range before being used?\nArea: number of equal responses",
                "log s · 10⁴ (logarithmic beyond ±10)", "Â")
    legend = figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    for mark in legend.legend_handles[1:]:
        mark.set_sizes([40])                                 # of points of many sizes
    save(figure, "lesson_clip")


def draw_flips(flips):
    """Section 10: how far tokens move whose experts changed, and their numbers."""
    figure, axes = style.panels(1, 1, height=3.6, width=5.4)
    rows = [*flips["layers"], flips["any"]]
    for flipped, name, colour in ((0, "the same experts", style.GREY),
                                  (1, "an expert changed", style.RED)):
        axes.bar([i + .4 * flipped - .2 for i in range(len(rows))], [row[flipped] for row in rows],
                 .38, color=colour, label=name)
    names = [*(f"layer {i}" for i in range(len(rows) - 1)), "any layer"]
    axes.set_xticks(range(len(rows)), [f"{name}\n{count} of\n{flips['tokens']}" for name, count in
                                       zip(names, flips["counts"])])
    style.label(axes, "Do tokens move more where an expert changed?", "tokens with a change",
                "mean |log w|")
    axes.legend(loc="upper right")
    save(figure, "lesson_flips")


def split_turns(prompt, response):
    """Each turn of a game as (what is asked, what is answered, its first answered token)."""
    turns, previous = [[prompt, "", None]], False
    for t, (text, loss_token) in enumerate(zip(response["tokens"], response["mask"])):
        if previous and not loss_token:
            turns.append(["", "", None])
        turns[-1][loss_token] += text
        if loss_token and not previous:
            turns[-1][2] = t
        previous = loss_token
    return [(asked.strip(), answer.strip(), t) for asked, answer, t in turns]


def find_right_turns(prompt, response):
    """Whether each turn of a game of recipes/turns.py has the right last digits of the sums, which
    continue from turn to turn."""
    total, right = 0, []
    for asked, answer, _ in split_turns(prompt, response):
        wanted = []
        for term in filter(str.isdigit, asked):
            total += int(term)
            wanted.append(str(total % 10))
        right.append([*filter(str.isdigit, answer)] == wanted)
    return right


def draw_game(game):
    """Section 9: the turns of three games, colored by their advantage."""
    from matplotlib.patches import Rectangle
    figure, grid = style.panels(2, 1, height=5, width=5.4)
    titles = ("gspo: one advantage for the response", "gspo_token with turn_returns: one per turn")
    for axes, name, key in zip(grid, titles, ("response", "turns")):
        for row, one in enumerate(game["responses"]):
            turns = split_turns(game["prompt"], one)
            rights = find_right_turns(game["prompt"], one)
            axes.text(-.06, .45 - row, f"reward\n{one['reward']:g}", ha="right", va="center")
            for turn, ((asked, answer, t), right) in enumerate(zip(turns, rights)):
                A = one[key] if key == "response" else one[key][t]
                axes.add_patch(Rectangle((turn, -row), .96, .92, alpha=min(.8, abs(A) / 2),
                                         facecolor=style.BLUE if A > 0 else style.RED))
                axes.text(turn + .48, .64 - row, answer, ha="center", va="center",
                          family="monospace", fontsize=11)
                axes.text(turn + .48, .22 - row, f"{A:+.2f} {'✓' if right else '✗'}", ha="center",
                          va="center")
                if row == 0:
                    axes.text(turn + .48, 1.16, asked, ha="center", va="center",
                              family="monospace", color=style.GREY)
        axes.set(xlim=(-.55, len(turns)), ylim=(1 - len(game["responses"]), 1.35))
        axes.axis("off")
        axes.set_title(name)
    figure.suptitle("Which turns does an advantage credit?\n"
                    "Blue: more likely, orange: less; ✓ right, ✗ wrong", fontsize=10.5, x=.01,
                    ha="left")
    save(figure, "lesson_game")


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    draw_regions()
    draw_clip(record["clip"])
    draw_game(record["game"])
    draw_flips(record["flips"])
    record["texts"] = describe(record)
    RECORDED.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
