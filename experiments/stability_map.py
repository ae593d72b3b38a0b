"""Which step sizes does each algorithm survive, and which learns most at its best one? A map.

Claim: GSPO is more stable than GRPO and learns faster at equal training cost (GSPO 2507.18071, §5.1
and figure 1; its baseline on the Mixture of Experts is GRPO with routing replay). The answer may
depend on the learning rate, as a narrow band acts like a smaller step.

Setting: train.py's default task and policy (and, as a control, a dense one of equal active size),
10 rollout batches of 256 answers, every algorithm on the same grid of learning rates and
mini-batches per rollout batch. Endpoint: held-out pass@1 at the end. The map is drawn from cold
starts 0 to 3, which also choose each algorithm's best rate (of four at first, later of seven, and
the fresh cold starts were then run there); what is reported comes from the fresh cold starts 4 to
11, paired, with 95 % t intervals. Written down beforehand, GSPO at its own band
against GRPO, and against GRPO + replay where it was run (the source's own baseline); the claim
needs both:

  learns faster     GSPO minus GRPO, each at its best rate, fresh cold starts:
  confirmed         the interval lies above 0
  refuted           it lies below 0, or within ±0.03: then they are equal
  depends on the learning rate    at one of the two best rates, shared by both, GSPO minus GRPO lies
                                  above 0, at the other below 0
  undecided         otherwise, and with fewer than 8 cold starts

  more stable       the frontier, the largest rate of the grid that ends above its start (mean of
                    the map's four cold starts, so undecided); reported beside it, GSPO minus GRPO
                    at the largest rate

The bands are compared on the same fresh cold starts, each at its best rate: 10 and 100 times the
paper's against the paper's, GRPO and GRPO + replay ("equal" if the interval lies within ±0.03).

Clipping more and learning better (§5.1): over the same runs, does a larger clipped share go with a
higher pass@1? The scatter shows it: a point per run of GSPO at three bands.
"""

from shared import claim, drift, maps
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="GSPO with the paper's band learns faster than GRPO at equal budget",
           source="GSPO §5.1 and figure 1",
           reported="higher reward at the same compute (curves only)")
GRPO = " ".join(drift.GRPO)
ARMS = {"grpo": GRPO, "gspo": "--algorithm gspo",
        "gspo_x10": "--algorithm gspo --epsilon 3e-3 --epsilon_high 4e-3",
        "gspo_x100": "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04",
        "grpo_replay": " ".join((GRPO, *drift.REPLAY)),
        "gspo_free": "--algorithm gspo --epsilon 0.99 --epsilon_high 0.99",     # no s gets so far
        "gmpo": "--algorithm gmpo", "cispo": "--algorithm cispo", "dppo": "--algorithm dppo"}
NAMES = {"grpo": "GRPO", "gspo": "GSPO", "gspo_x10": "GSPO, 10× band",
         "gspo_x100": "GSPO, 100× band",
         "grpo_replay": "GRPO + replay", "gspo_free": "GSPO, no clip", "gmpo": "GMPO",
         "cispo": "CISPO", "dppo": "DPPO"}
SHORT = {"grpo": "GRPO", "grpo_replay": "replay", "gspo": "GSPO", "gspo_x10": "10×",
         "gspo_x100": "100×"}
RATES = (2e-4, 4e-4, 8e-4, 16e-4)                            # of the first look; then all of them
ALL_RATES = (1e-4, 2e-4, 4e-4, 6e-4, 8e-4, 12e-4, 16e-4)
MINIBATCHES = (2, 4, 8, 16)
MAIN = tuple(ARMS)[:5]
PAIR = ("grpo", "gspo")
BANDS = ("gspo", "gspo_x10", "gspo_x100")
BASELINES = ("grpo", "grpo_replay")
FILE = maps.runs_of("stability_map")
EQUAL = .03
number = claim.counted


def grid(full):
    """The cells to run: first those that are judged, then the rest; --full adds the remaining cells
    of the map."""
    def cells(arms, rates, minibatches=(4,), **more):
        return [maps.cell(arm, seed, rate=rate, minibatches=m, **more) for seed in maps.CHOOSE
                for m in minibatches for rate in rates for arm in arms]
    yield from cells(MAIN[:4], RATES)
    yield from fresh(maps.read(FILE))
    yield from cells(MAIN[:4], RATES, (8,))
    yield from cells(PAIR, RATES, policy="dense")
    yield from cells(MAIN[4:], RATES)
    yield from fresh(maps.read(FILE))                        # now GRPO + replay too
    yield from cells(tuple(ARMS)[5:], RATES)
    yield from cells(PAIR, RATES, (2, 16))
    yield from cells(ARMS, ALL_RATES)
    yield from fresh(maps.read(FILE))                        # now at the best of seven rates
    yield from cells(ARMS, RATES, MINIBATCHES)
    if full:
        yield from cells(ARMS, ALL_RATES, MINIBATCHES)
        yield from cells(ARMS, ALL_RATES, MINIBATCHES, policy="dense")


def fresh(runs):
    """Each arm at its best rate, and GRPO and GSPO also at each other's, on cold starts that did
    not choose the rates."""
    best = {arm: rate for arm in MAIN if (rate := best_rate(runs, arm))}
    shared = {best[arm] for arm in PAIR if arm in best}
    for seed in maps.REPORT:
        for arm, rate in best.items():
            for one in sorted({rate} | (shared if arm in PAIR else set())):
                yield maps.cell(arm, seed, rate=one)


# -------------------------------------------------------------------------------- what was found

def ends(runs, arm, rate, seeds, policy="moe", minibatches=4, name="after"):
    """Held-out pass@1 at the end of each run, as {seed: pass@1}."""
    return maps.values(runs, name, seeds, arm=arm, rate=rate, policy=policy,
                       minibatches=minibatches)


def best_rate(runs, arm, policy="moe"):
    """The rate with the highest mean over the cold starts that choose it, or None while some of
    these runs are missing."""
    found = {rate: ends(runs, arm, rate, maps.CHOOSE, policy) for rate in ALL_RATES}
    whole = [rate for rate in ALL_RATES if len(found[rate]) == len(maps.CHOOSE)]
    if not set(RATES) <= set(whole):
        return None
    return max(whole, key=lambda rate: sum(found[rate].values()))


def frontier(runs, arm, policy="moe", minibatches=4):
    """The largest rate at which the mean at the end is above that at the start, or None."""
    def gains(rate):
        place = (runs, arm, rate, maps.CHOOSE, policy, minibatches)
        return claim.differences(ends(*place), ends(*place, name="before"))
    above = [rate for rate in ALL_RATES if gains(rate) and claim.mean(gains(rate)) > 0]
    return max(above, default=None)


def gap(runs, rates, seeds=maps.REPORT, others=PAIR):
    """pass@1 of GSPO minus that of GRPO, each at its own rate."""
    grpo, gspo = (ends(runs, arm, rate, seeds) for arm, rate in zip(others, rates))
    return claim.differences(gspo, grpo)


def judge(runs):
    best = {arm: best_rate(runs, arm) for arm in MAIN}
    edges = [f"{NAMES[arm]} {shown(frontier(runs, arm))}" for arm in MAIN if best[arm]]
    parts = [f"largest rate that ends above its start (4 cold starts, undecided): "
             f"{', '.join(edges) or 'not run'}"]
    largest = gap(runs, (RATES[-1],) * 2, maps.CHOOSE)
    if largest:
        parts.append(f"at {shown(RATES[-1])} GSPO minus GRPO {number(largest)}")
    found = {other: compare(runs, best, other) for other in BASELINES if best[other]}
    found = {other: gaps for other, gaps in found.items() if gaps[0]}
    if "grpo" not in found:
        return "; ".join(parts), "fresh cold starts not run", claim.undecided(0), 0
    answers = {other: decide(*gaps) for other, gaps in found.items()}
    parts += [f"GSPO minus {NAMES[other]}, each at its best: {answer}"
              for other, answer in answers.items()]
    parts += [f"fresh cold starts, GSPO minus {NAMES[other]}, both at {shown(rate)}: "
              f"{number(values)}" for other in BASELINES for rate in ALL_RATES
              if (values := gap(runs, (rate, rate), others=(other, "gspo")))]
    for arm in MAIN:
        if best[arm]:
            values = ends(runs, arm, best[arm], maps.REPORT).values()
            if values:
                parts.append(f"{NAMES[arm]} at its best, {shown(best[arm])}: "
                             f"{claim.number(values, '{:.3f}')}")
    parts += wider(runs, best)
    dense = {rate: claim.differences(*(ends(runs, arm, rate, maps.CHOOSE, "dense") for arm in
                                 reversed(PAIR))) for rate in RATES}
    parts += [f"dense, both at {shown(rate)}: {number(values)}" for rate, values in dense.items()
              if values]
    told = ", ".join(f"{claim.number(gaps[0], '{:+.3f}')} against {NAMES[other]}"
                     for other, gaps in found.items())
    return "; ".join(parts), told, claim.all_of(*answers.values()), len(found["grpo"][0])


def compare(runs, best, other):
    """GSPO minus another arm on fresh cold starts -> (each at its best rate, [both at the same
    rate])."""
    if not (best["gspo"] and best[other]):
        return [], []
    rates = best[other], best["gspo"]
    shared = [gap(runs, (rate, rate), others=(other, "gspo")) for rate in sorted(set(rates))]
    return gap(runs, rates, others=(other, "gspo")), [values for values in shared if values]


def wider(runs, best):
    """GSPO's wider clip ranges minus the paper's, GRPO and GRPO + replay; and replay minus no
    replay."""
    for arm in (*BANDS[1:], BASELINES[1]):
        for other in ("gspo", *BASELINES)[arm == BASELINES[1]:]:
            if arm != other and best[arm] and best[other]:
                values = gap(runs, (best[other], best[arm]), others=(other, arm))
                equal = claim.verdict(values, held=(-EQUAL, EQUAL)) == claim.HELD if values else 0
                if values:
                    yield (f"{NAMES[arm]} minus {NAMES[other]} {number(values)}"
                           + " (equal)" * equal)


def takeaway(runs):
    """One sentence: pass@1 of each algorithm at its best rate on fresh cold starts, wider clip
    ranges included."""
    best = {arm: rate for arm in MAIN if (rate := best_rate(runs, arm))}
    found = {arm: ends(runs, arm, rate, maps.REPORT).values() for arm, rate in best.items()}
    told = [f"{NAMES[arm]} {claim.mean(values):.3f} at {shown(best[arm])}"
            for arm, values in found.items() if values]
    clipped = {arm: ends(runs, arm, rate, maps.REPORT, name="clipped").values()
               for arm, rate in best.items() if arm in BANDS}
    shares = [f"{NAMES[arm]} {claim.mean(values):.1%}" for arm, values in clipped.items() if values]
    return (f"On the fresh cold starts, each at its best rate: {', '.join(told)}; clipped: "
            f"{', '.join(shares)}.")


def decide(own, shared):
    """The verdict, from the differences at the best rates and at the shared ones."""
    signs = {claim.verdict(values, held=(0, 1), refuted=(-1, 0)) for values in shared}
    if {claim.HELD, claim.REFUTED} <= signs:
        return claim.depends("the learning rate")
    equal = claim.verdict(own, held=(-EQUAL, EQUAL))
    if equal == claim.HELD:
        return claim.Verdict(claim.REFUTED, equal.p)
    return claim.verdict(own, held=(0, 1), refuted=(-1, 0))


def shown(rate):
    return "none" if rate is None else f"{rate * 1e4:g}e-4"


def draw(runs):
    """One map per algorithm, all on the same color scale and empty where nothing was run; then the
    dense control. Below them the runs that decide the verdict, and the clipped share."""
    places = [(arm, "moe") for arm in ARMS] + [(arm, "dense") for arm in PAIR]
    figure, axes = panels(5, 3, height=13, width=9.5)
    for axis, (arm, policy) in zip(axes.flat, places):
        image = heat_map(axis, runs, arm, policy)
    figure.colorbar(image, ax=axes[:3, -1], label="held-out pass@1", shrink=.6)
    fresh_dots(axes.flat[-3], runs)
    scatter(axes.flat[-2], runs)
    axes.flat[-4].axis("off")
    axes.flat[-1].axis("off")
    return figure


def heat_map(axis, runs, arm, policy):
    """Draw mean pass@1 over the map's cold starts. The white line is the frontier."""
    table = [[whole(ends(runs, arm, rate, maps.CHOOSE, policy, m).values()) for rate in ALL_RATES]
             for m in MINIBATCHES]
    image = axis.imshow(table, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(table):
        edge = frontier(runs, arm, policy, MINIBATCHES[y])
        if edge and edge != ALL_RATES[-1]:
            x = ALL_RATES.index(edge) + .5
            axis.plot([x, x], [y - .5, y + .5], color="white", linewidth=3)
        for x, value in enumerate(row):
            if value == value:                                          # it is no NaN
                axis.text(x, y, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=7,
                          color="black" if value > .5 else "white")
    axis.set_xticks(range(len(ALL_RATES)), [f"{rate * 1e4:g}" for rate in ALL_RATES])
    axis.set_yticks(range(len(MINIBATCHES)), MINIBATCHES)
    axis.grid(False)
    name = NAMES[arm] + (", dense" if policy == "dense" else "")
    label(axis, name, "learning rate, 1e-4", "mini-batches")
    return image


def whole(values):
    """Their mean, or NaN if some cold starts of the map are missing."""
    return claim.mean(values) if len(values) == len(maps.CHOOSE) else float("nan")


def fresh_dots(axes, runs):
    """Draw each algorithm at its best rate on fresh cold starts: all values, and their mean with a
    95 % interval."""
    arms = [arm for arm in ("grpo", "grpo_replay", *BANDS) if best_rate(runs, arm)]
    for x, arm in enumerate(arms):
        found = list(ends(runs, arm, best_rate(runs, arm), maps.REPORT).values())
        if len(found) > 1:
            colour, marker = (BLUE, "o") if arm in BANDS else (ORANGE, "s")
            axes.plot([x + .15] * len(found), found, marker, color=colour, alpha=.5, markersize=4)
            middle, low, high = claim.interval(found)
            axes.errorbar(x - .1, middle, [[middle - low], [high - middle]], fmt=marker,
                          color=colour, capsize=3)
    axes.set_xticks(range(len(arms)),
                    [f"{SHORT[arm]}\n{shown(best_rate(runs, arm))}" for arm in arms], fontsize=7)
    axes.set_xlim(-.5, len(arms) - .5)
    label(axes, "Best rates, fresh cold starts", "", "held-out pass@1")


def scatter(axes, runs):
    """Draw pass@1 against the clipped share, for every run of GSPO at the map's rates."""
    for arm, marker in zip(BANDS, "o^D"):
        own = [r for r in runs
               if r["arm"] == arm and r["policy"] == "moe" and r["seed"] in maps.CHOOSE]
        if own:
            axes.plot([r["clipped"] for r in own], [r["after"] for r in own], marker, color=BLUE,
                      markerfacecolor="white" if arm != "gspo" else BLUE, markersize=4,
                      label=NAMES[arm])
    axes.axvline(.15, color=GREY, linestyle=":")                # what GSPO reports: 15 %
    axes.set_xscale("symlog", linthresh=.01)
    axes.set_xlim(left=0)
    label(axes, "Clipped and learnt", "clipped share of tokens", "held-out pass@1")
    axes.legend(loc="lower left", fontsize=8)


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, maps.trained(ARMS), judge, takeaway, draw)
