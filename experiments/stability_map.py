"""Which step sizes does each algorithm survive, and which learns most at its best one? A map instead of a point.

Claim: GSPO is more stable than GRPO and learns faster at equal training cost (GSPO 2507.18071, §5.1 and figure 1; its baseline on the
Mixture of Experts is GRPO with routing replay). The answer may depend on the learning rate, as a narrow band acts like a smaller step.

Setting: train.py's default task and policy (and, as a control, a dense one of equal active size), 10 rollout batches of 256 answers.
Learning rates times mini-batches per rollout batch, every algorithm on the same grid. Seeds are independent cold starts. Endpoint:
held-out pass@1 at the end. The map is drawn from cold starts 0 to 3, which also choose each algorithm's best cell; what is reported
comes from the fresh cold starts 4 to 11, paired, with 95 % t intervals. Written down beforehand, GSPO at its own band against GRPO
and, where it was run, against GRPO + replay:

  learns faster   GSPO minus GRPO, each at its best cell, fresh cold starts:
  confirmed       the interval lies above 0
  refuted         it lies below 0, or within ±0.03: then they are equal
  depends on the rate   neither, or the comparison at shared cells decides otherwise: above 0 at GSPO's best cell and below 0 at
                  GRPO's best cell
  undecided       otherwise, and with fewer than 8 cold starts

  more stable     the frontier (largest rate of the grid that ends above its start, mean of the map's cold starts) of GSPO lies
                  beyond GRPO's; reported with the mean over cold starts at the largest rate, paired, with its interval

Clipping more and learning better (GSPO §5.1): over the same runs, does a larger clipped share go with a higher pass@1? Confirmed if
the rank correlation over bands at each band's best cell is positive with its bootstrap interval above 0, refuted if below 0.
"""

import maps

GRPO = "--algorithm grpo --epsilon_high 0.27"                # the band of GSPO's own baseline, §5.1
ARMS = {"grpo": GRPO, "grpo_replay": GRPO + " --routing_replay old", "gspo": "--algorithm gspo",
        "gspo_x10": "--algorithm gspo --epsilon 3e-3 --epsilon_high 4e-3",
        "gspo_x100": "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04",
        "gspo_free": "--algorithm gspo --epsilon 0.99 --epsilon_high 0.99",       # no answer's s gets so far
        "gmpo": "--algorithm gmpo", "cispo": "--algorithm cispo"}
RATES, MINIBATCHES = (2e-4, 4e-4, 8e-4, 16e-4), (4, 8)
FULL_RATES, FULL_MINIBATCHES = (1e-4, 2e-4, 4e-4, 6e-4, 8e-4, 12e-4, 16e-4), (2, 4, 8, 16)
MAIN = ("grpo", "gspo", "gspo_x10", "gspo_x100", "grpo_replay")


def grid(full):
    def cells(arms, rates, minibatches, seeds, **more):
        return [maps.cell(arm, seed, rate=rate, minibatches=m, **more)
                for seed in seeds for m in minibatches for rate in rates for arm in arms]
    yield from cells(MAIN[:4], RATES, MINIBATCHES, maps.CHOOSE)
    yield from fresh()
    yield from cells(MAIN[:2], RATES, MINIBATCHES[:1], maps.CHOOSE, policy="dense")
    yield from cells(MAIN[4:], RATES, MINIBATCHES[:1], maps.CHOOSE)
    if full:
        yield from cells(ARMS, FULL_RATES, FULL_MINIBATCHES, maps.CHOOSE)
        yield from cells(ARMS, FULL_RATES, FULL_MINIBATCHES, maps.CHOOSE, policy="dense")


def fresh():
    """Each arm at its best cell, and GRPO and GSPO at each other's, once the map's own cold starts are there to choose by."""
    best = {arm: chosen(arm) for arm in MAIN}
    shared = {best[arm] for arm in ("grpo", "gspo") if best[arm]}
    wanted = {arm: ({best[arm]} | (shared if arm in ("grpo", "gspo") else set())) - {None} for arm in MAIN}
    for seed in maps.REPORT:
        for arm in MAIN:
            yield from (maps.cell(arm, seed, rate=rate, minibatches=m) for rate, m in sorted(wanted[arm]))


def chosen(arm):
    """(rate, mini-batches) with the highest mean pass@1 over all cold starts that choices are made on; None before all are there."""
    runs = [r for r in maps.read(FILE) if r["policy"] == "moe"]
    places = [(rate, m) for m in (MINIBATCHES if arm in MAIN[:4] else MINIBATCHES[:1]) for rate in RATES]
    scores = {p: maps.values(runs, arm=arm, rate=p[0], minibatches=p[1], seeds=maps.CHOOSE) for p in places}
    if any(len(found) < len(maps.CHOOSE) for found in scores.values()):
        return None
    return max(places, key=lambda p: sum(scores[p].values()))


FILE = "results/stability_map_runs.jsonl"

if __name__ == "__main__":
    maps.main(__file__, ARMS, grid, None, None, __doc__)
