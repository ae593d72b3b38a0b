"""The pictures and numbers of docs/lesson.md.

    python experiments/lesson.py                     from what is recorded
    python experiments/lesson.py --flips runs/gspo   measures a default run's expert flips again
    python experiments/lesson.py --game runs/turns   a game of a run of recipes/turns.yaml
    python experiments/lesson.py --clip runs/clip    who is clipped in a run with --save_minibatches
    python experiments/lesson.py --drift runs/clip   what earlier updates have done in such a run

Recorded are docs/notebooks/recorded_batch.json (one rollout batch before and after updates on
GSPO's loss without a clip) and results/lesson.json, which this writes.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, median, pstdev

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import judging                                                                       # noqa: E402
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

def measure_flips(run):
    """Mean |log w| of a run's tokens whose experts changed and of the others, per layer and for any
    layer, from its tokens.jsonl (one group per rollout batch)."""
    found = {}
    for line in (Path(run) / "tokens.jsonl").read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        for i, mask in enumerate(group["mask"]):
            for t in [t for t, loss_token in enumerate(mask) if loss_token]:
                moved = abs(group["new_logp"][i][t] - group["old_logp"][i][t])
                layers = [set(old[t]) != set(new[t]) for old, new in
                          zip(group["old_experts"][i], group["new_experts"][i])]
                for layer, flipped in enumerate([*layers, any(layers)]):
                    found.setdefault((layer, flipped), []).append(moved)
    last = max(layer for layer, _ in found)
    rows = [[mean(found[layer, flipped]) for flipped in (False, True)] for layer in range(last + 1)]
    share = len(found[last, True]) / (len(found[last, True]) + len(found[last, False]))
    medians = [median(found[last, flipped]) for flipped in (False, True)]
    counts = [len(found[layer, True]) for layer in range(last + 1)]
    return dict(layers=rows[:-1], any=rows[-1], share=share, medians=medians, counts=counts,
                tokens=counts[last] + len(found[last, False]))


def measure_clip(run, batches=10):
    """[[log s, Â]] of the responses with Â ≠ 0 before the update on mini-batch 4, of the first
    batches of a run with --save_minibatches."""
    with open(Path(run) / "minibatches.jsonl", encoding="utf-8") as file:
        minis = [json.loads(line)["minibatches"][3] for _, line in zip(range(batches), file)]
    dots = [(mean(map(float.__sub__, one["logp"], one["old_logp"])), one["advantage"])
            for mini in minis for one in mini if one["advantage"]]
    return [[round(s, 7), round(A, 3)] for s, A in dots]


def measure_drift(run, batches=10):
    """Of a run with --save_minibatches: what earlier updates have done to mini-batches 2 to 4 of
    the first batches."""
    with open(Path(run) / "minibatches.jsonl", encoding="utf-8") as file:
        records = [json.loads(line)["minibatches"] for _, line in zip(range(batches), file)]
    return {"minis": [[measure_mini(mini) for mini in minis[1:]] for minis in records]}


def measure_mini(mini):
    """Moments and shares of the responses of a mini-batch with Â ≠ 0; `zero`: the share of the
    others."""
    rows = [([new - old for new, old in zip(one["logp"], one["old_logp"])], one["advantage"])
            for one in mini if one["advantage"]]
    tokens = [x for row, _ in rows for x in row]
    dots = [(mean(row), A) for row, A in rows]
    share = lambda flags: sum(flags) / len(dots)
    found = {"zero": 1 - len(rows) / len(mini), "v": pstdev(tokens)**2, "mean": mean(tokens),
             "sigma": pstdev(s for s, _ in dots),
             "outside": share(not EDGES[0] <= s <= EDGES[1] for s, _ in dots),
             "clipped": share(is_clipped(s, A) for s, A in dots)}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def is_clipped(s, A):
    return s > EDGES[1] if A > 0 else s < EDGES[0]


def read_game(run):
    """A response of a run of recipes/turns.yaml whose last turn alone is wrong, beside one that won
    and one that lost: what it wrote, its reward, and both kinds of advantages."""
    for line in (Path(run) / "tokens.jsonl").read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        rewards = group["rewards"]
        spoiled = [i for i, r in enumerate(rewards) if r == .75 and group["advantages"][i][-1] < 0]
        if spoiled and {1, .25} <= {*rewards} and group["advantages"][spoiled[0]][0] > .5:
            break
    chosen = (rewards.index(1), spoiled[0], rewards.index(.25))
    responses = [{"tokens": group["tokens"][i], "mask": group["mask"][i], "reward": rewards[i],
                  "turns": group["advantages"][i],
                  "response": (rewards[i] - mean(rewards)) / pstdev(rewards)} for i in chosen]
    return {"step": group["step"], "prompt": group["prompt"].strip(), "responses": responses}


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
    """Section 2: what the clip leaves of the gradient, by the sign of Â and the place of the
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
    """Section 9: how far tokens move whose experts changed, and their numbers."""
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


def draw_turns():
    """Section 6: games won against games played, with one advantage per response and per turn."""
    runs = {}
    for (variant, _, _), run in judging.read("turns").items():
        runs.setdefault(variant, []).append(run["figures"]["pass_rates"])
    figure, axes = style.panels(1, 1, height=3.6, width=5.4)
    for name, colour in (("GSPO wide", style.GREEN), ("GRPO", style.ORANGE), ("GSPO", style.BLUE)):
        for variant, line in ((f"{name}, turns", "-"), (name, "--")):
            means = [mean(values) for values in zip(*runs[variant])]
            axes.plot([128 * i for i in range(len(means))], means, line, color=colour,
                      label=variant)
    style.label(axes, "Does an advantage for every turn help?", "games played", "share won")
    axes.legend(loc="lower right")
    save(figure, "turns")


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
    """Section 8: the turns of three games, colored by their advantage."""
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


MEASURES = {"flips": measure_flips, "game": read_game, "clip": measure_clip,
            "drift": measure_drift}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in MEASURES:
        parser.add_argument(f"--{name}", metavar="FOLDER")
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    for name, folder in vars(parser.parse_args()).items():
        if folder:
            record[name] = MEASURES[name](folder)
    draw_regions()
    draw_clip(record["clip"])
    draw_game(record["game"])
    draw_turns()
    draw_flips(record["flips"])
    record["texts"] = describe(record)
    RECORDED.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
