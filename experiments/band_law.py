"""How wide a band? In units of what log s does: ε = c · std(log s).

Where it comes from: stability_map's runs of GSPO at three bands, read off after they were made. The
clipped share and held-out pass@1 follow ε / std(log s), the mean of both edges over the median over
batches of the standard deviation of log s after a batch's updates: pass@1 is highest between 1 and
3. The paper's band is below 0.1 of a standard deviation in most of those runs. That reading chose
the claim and c = 2, so it cannot confirm it; these runs are made on cold starts that no other
experiment used.

Claim (ours, no paper has it): with a band of two standard deviations of log s (`--epsilon auto`,
plumbing/run/band.py) GSPO learns more than GRPO over a range of step sizes and is worse at none.
Setting: train.py's default task and policy, 10 rollout batches of 256 answers, six cells of
learning rate and mini-batches per rollout batch from mild to rough: (2e-4, 4), (4e-4, 4), (6e-4,
4), (8e-4, 8), (8e-4, 16), (16e-4, 2); cold starts 17 to 24 (16 tried the code); arms GRPO (0.2,
0.27), GSPO with the paper's band, 10 and 100 times as wide, and auto. Endpoint: held-out pass@1 at
the end; differences paired by cold start, 95 % t intervals. Written down beforehand, of auto minus
GRPO:

  confirmed   the mean over the six cells, one value per cold start, has an interval above 0, and no
              single cell's interval lies below 0
  refuted     the mean's interval lies below 0, or a cell's does
  undecided   otherwise, and with fewer than 8 cold starts that have all six cells of both

A mean whose interval lies within ±0.03 is called equal in the measurement. Reported beside it, by
the same intervals and without a verdict: every other arm minus GRPO; and where they were run, GMPO,
DPPO, GSPO without a clip (is it the clip at all?), c = 1 and c = 4. A cold start counts for an arm
once all six cells of it are there.
"""

import math

from shared import claim, maps
import stability_map
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="With a clip range of two standard deviations of log s GSPO learns more than GRPO "
                 "over a range of step sizes, and less at none",
           source="ours, read off the stability map", reported="no paper has it")
ARMS = {name: stability_map.ARMS[name] for name in ("grpo", "gspo", "gspo_x10", "gspo_x100")}
ARMS |= {"auto": "--algorithm gspo --epsilon auto"}
BESIDE = {name: stability_map.ARMS[name] for name in ("gmpo", "dppo", "gspo_free")}
BESIDE |= {f"auto_{c}": f"--algorithm gspo --epsilon auto:{c}" for c in (1, 4)}
NAMES = stability_map.NAMES | {"auto": "GSPO, auto (c = 2)", "auto_1": "GSPO, auto (c = 1)",
                               "auto_4": "GSPO, auto (c = 4)"}
CELLS = ((2e-4, 4), (4e-4, 4), (6e-4, 4), (8e-4, 8), (8e-4, 16), (16e-4, 2))
SEEDS = range(17, 25)
EQUAL = .03
FILE = maps.runs_of("band_law")
number = claim.counted
STEPS = [(rate, m) for rate in stability_map.ALL_RATES for m in stability_map.MINIBATCHES]
ROUGH = [(rate, m) for rate, m in STEPS if rate >= 8e-4 and m >= 8]
EDGES = {"gspo": 3.5e-4, "gspo_x10": 3.5e-3, "gspo_x100": 3.5e-2}    # ε: the mean of both edges
BINS = (0, .03, .1, .3, 1, 3, math.inf)


def grid(full):
    """The cells to run, one cold start after the other, so that complete cold starts remain
    wherever the experiment is stopped. --full adds the arms that are not judged."""
    for arms in (ARMS, BESIDE) if full else (ARMS,):
        for seed in SEEDS:
            for rate, minibatches in CELLS:
                yield from (maps.cell(arm, seed, rate=rate, minibatches=minibatches)
                            for arm in arms)


# -------------------------------------------------------------------------------- what was found

def gaps(runs, arm, other="grpo"):
    """pass@1 of `arm` minus that of `other` as {cell: {cold start: difference}}, for the cold
    starts that have every cell."""
    found = {}
    for rate, minibatches in CELLS:
        ends = [maps.values(runs, arm=name, rate=rate, minibatches=minibatches, seeds=SEEDS)
                for name in (arm, other)]
        found[rate, minibatches] = {seed: ends[0][seed] - ends[1][seed]
                                    for seed in ends[0].keys() & ends[1].keys()}
    whole = set.intersection(*(set(cell) for cell in found.values()))
    return {cell: {seed: values[seed] for seed in sorted(whole)} for cell, values in found.items()}


def pooled(cells):
    """The mean over the cells, one value per cold start."""
    seeds = next(iter(cells.values()))
    return [claim.mean(values[seed] for values in cells.values()) for seed in seeds]


def judge(runs):
    parts = []
    for arm in (*ARMS, *BESIDE):
        cells = gaps(runs, arm)
        values = pooled(cells)
        if arm == "grpo" or not values:
            continue
        by_cell = ", ".join(f"{shown(cell)} {claim.number(found.values(), '{:+.3f}')}"
                            for cell, found in cells.items())
        middle, low, high = claim.interval(values)
        equal = " (equal)" if -EQUAL <= low and high <= EQUAL and len(values) > 1 else ""
        parts.append(f"{NAMES[arm]} minus GRPO {number(values)}{equal}; by cell {by_cell}")
    both = pooled(gaps(runs, "auto", "gspo_x100"))
    if both:
        parts.append(f"{NAMES['auto']} minus {NAMES['gspo_x100']} {number(both)}")
    parts.append("runs that ended below their start: " + ", ".join(
        f"{NAMES[arm]} {sum(x < 0 for x in found)} of {len(found)}" for arm in (*ARMS, *BESIDE)
        if (found := gained(runs, arm))))
    parts += [f"the map, exploratory: {text}" for text in explored(maps.read(stability_map.FILE))]
    cells = gaps(runs, "auto")
    values = pooled(cells)
    if not values:
        return "; ".join(parts), "no cold start has all six cells", claim.undecided(0), 0
    return ("; ".join(parts), f"auto minus GRPO {number(values)} pass@1, mean of six cells",
            decide(cells), len(values))


def decide(cells):
    """The verdict, from {cell: {cold start: auto minus GRPO}}."""
    mean = claim.verdict(pooled(cells), held=(0, 1), refuted=(-1, 0))
    worse = [claim.verdict(found.values(), held=(-1, 0)) == claim.HELD for found in cells.values()]
    return claim.REFUTED if any(worse) else mean


def gained(runs, arm):
    """pass@1 at the end minus that at the start, for every run of an arm."""
    return [run["after"] - run["before"] for run in runs if run["arm"] == arm]


def explored(runs):
    """What the runs of the stability map say about the band, as sentences. Every cell and every run
    counts; no best cell is selected."""
    runs = [r for r in runs if r["policy"] == "moe"]
    for arm in ("gspo", "gspo_x10", "gspo_x100", "gmpo", "dppo", "gspo_free"):
        gains = [claim.mean(values) for cell in STEPS
                 if len(values := against(runs, arm, "grpo", cell)) == len(maps.CHOOSE)]
        yield (f"{NAMES[arm]} minus GRPO over {len(gains)} cells of rate and mini-batches "
               f"{claim.mean(gains):+.3f} (worst {min(gains):+.3f}, best {max(gains):+.3f})")
    lost = in_rough_cells(runs, "gspo_free", "gspo")
    yield (f"GSPO without a clip minus GSPO at rates of 8e-4 and more with 8 or 16 mini-batches "
           f"{number(lost)}")
    points = [point for arm in EDGES for point in widths(runs, arm)]
    for low, high in zip(BINS, BINS[1:]):
        own = [run for width, run in points if low <= width < high]
        mean = lambda get: claim.mean(map(get, own))
        yield (f"ε / std(log s) from {low:g} to {high:g}: {len(own)} runs, clipped "
               f"{mean(lambda r: r['clipped']):.1%}, pass@1 {mean(lambda r: r['after']):.3f}, "
               f"{mean(lambda r: r['after'] < r['before']):.0%} ended below their start")


def against(runs, arm, other, cell, seeds=maps.CHOOSE, name="after", of=float):
    """An arm minus another at one rate and number of mini-batches, one value per seed. name: the
    figure of a run to compare, held-out pass@1 by default."""
    found = [maps.values(runs, name, seeds, arm=one, rate=cell[0], minibatches=cell[1],
                         policy="moe") for one in (arm, other)]
    return claim.differences(*({seed: of(x) for seed, x in values.items()} for values in found))


def in_rough_cells(runs, arm, other, name="after", of=float):
    """The same difference, averaged over the cells of the map with large steps; one value per cold
    start."""
    return [claim.mean(values) for seed in maps.CHOOSE
            if (values := [x for cell in ROUGH
                           for x in against(runs, arm, other, cell, [seed], name, of)])]


def shown(cell):
    return f"{cell[0] * 1e4:g}e-4 × {cell[1]}"


def takeaway(runs):
    """One sentence: each arm minus GRPO, its mean over the cells and its worst cell."""
    told = []
    for arm in ("gspo", "gspo_x10", "gspo_x100", "auto"):
        cells = gaps(runs, arm)
        if pooled(cells):
            worst = min(claim.mean(found.values()) for found in cells.values())
            told.append(f"{NAMES[arm]} {claim.mean(pooled(cells)):+.3f}, worst cell {worst:+.3f}")
    return f"Minus GRPO, mean over the cells: {'; '.join(told) or 'not run'}."


READ_OFF = (1, 3)                # ε / std(log s) with the highest pass@1 on the stability map
FAINT = .25
MARKERS = {"gspo": "o", "gspo_x10": "^", "gspo_x100": "D", "auto": "*"}


def widths(runs, arm):
    """[(ε / std(log s), run)] of an arm's runs whose log s varied."""
    for run in runs:
        if run["arm"] == arm and run["policy"] == "moe" and run["log_s_var"]:
            fixed = EDGES.get(arm, 0) / math.sqrt(run["log_s_var"])
            yield run.get("epsilon_over_std") or fixed, run


def draw(runs):
    """pass@1 and the clipped share against ε / std(log s). Dark marks are runs of this experiment,
    faint ones those of the stability map, and the grey band is the range that was read off them;
    the legend says so."""
    figure, (left, right) = panels(1, 2, height=4.9, width=7.2)
    for axes, name in ((left, "after"), (right, "clipped")):
        for some, alpha, size in ((maps.read(stability_map.FILE), FAINT, 3), (runs, 1, 5)):
            for arm, marker in MARKERS.items():
                points = [(width, run[name]) for width, run in widths(some, arm)]
                if points:
                    axes.plot(*zip(*points), marker, color=BLUE, alpha=alpha, markersize=size,
                              markerfacecolor=BLUE if arm == "auto" else "white",
                              label=NAMES[arm] if some is runs else None)
        axes.set_xscale("log")
        axes.set_xticks((.01, .1, 1, 10), ("0.01", "0.1", "1", "10"))
        axes.axvspan(*READ_OFF, color=GREY, alpha=.15, linewidth=0,
                     label="where pass@1 was highest\nin the faint runs: 1 to 3")
    level = [run["after"] for run in runs if run["arm"] == "grpo"]
    if level:
        left.axhline(claim.mean(level), color=ORANGE,
                     label=f"GRPO, mean of the dark runs'\nstep sizes: {claim.mean(level):.2f}")
    left.plot([], [], "o", color=BLUE, markerfacecolor="white", markersize=5,
              label=f"dark: a run of this experiment,\ncold starts {SEEDS[0]} to {SEEDS[-1]}")
    left.plot([], [], "o", color=BLUE, markerfacecolor="white", markersize=3, alpha=FAINT,
              label="faint: a run of the stability map,\nearlier, other cold starts")
    width = "ε / std(log s), median over batches"
    label(left, "Learned", width, "held-out pass@1")
    label(right, "Clipped", width, "clipped share of tokens")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=9.5)
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, maps.trained(ARMS | BESIDE), judge, takeaway, draw)
