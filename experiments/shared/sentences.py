"""Sentences of the sources without an experiment of their own, read off the stability map's runs.

Nothing is trained for them and no rule was written beforehand, so they have no verdict: a mean over
cold starts and its 95 % interval. experiments/readme.py puts them into docs/claims.md.
"""

import band_law
import stability_map

from . import claim, maps

def rows():
    """(sentence and source, what was computed, mean with interval, cold starts) each."""
    runs = maps.read(claim.ROOT / stability_map.FILE)
    yield ("Clipping more, GSPO learns better (GSPO §5.2)",
           "Kendall's rank correlation of clipped share and pass@1 over GSPO's three bands, each "
           "at its best rate; minus: more clipping goes with less learning",
           *shown(clipping_against_learning(runs)))
    yield ("GSPO's reward rises steadily, GRPO's drops (GSPO §5.1)",
           "largest drop of a run's pass rate below its best so far, GSPO minus GRPO, each at its "
           "best rate", *shown(drops(runs)))
    yield ("the same", "the same at rates of 8e-4 and more with 8 or 16 mini-batches",
           *shown(band_law.in_rough_cells(runs, "gspo", "grpo", "pass_rates", drop)))
    yield ("GSPO is stable by its formulation, not by its clip (Rethinking GSPO)",
           "pass@1 of GSPO without a clip minus GSPO, at rates of 8e-4 and more with 8 or 16 "
           "mini-batches", *shown(band_law.in_rough_cells(runs, "gspo_free", "gspo")))
    yield ("For short answers of dense models GRPO is enough (two of the blogs)",
           "pass@1 of GSPO minus GRPO on the dense policy, each at its best rate there",
           *shown(dense(runs)))


def shown(values):
    return claim.number(values, "{:+.2f}"), len(values)


def clipping_against_learning(runs):
    """One value per fresh cold start."""
    found = []
    for seed in maps.REPORT:
        points = []
        for arm in stability_map.BANDS:
            place = (runs, arm, stability_map.best_rate(runs, arm), [seed])
            points.append([stability_map.ends(*place, name=name)[seed]
                           for name in ("clipped", "after")])
        found.append(kendall(points))
    return found


def kendall(points):
    """The share of pairs ordered alike by both coordinates minus that of those ordered opposite."""
    signs = [(a[0] > b[0]) - (a[0] < b[0]) == (a[1] > b[1]) - (a[1] < b[1])
             for i, a in enumerate(points) for b in points[:i]]
    return 2 * sum(signs) / len(signs) - 1


def drop(rates):
    """How far the pass rate of a batch fell below the best one before it."""
    return max(max(rates[:i + 1]) - rate for i, rate in enumerate(rates))


def drops(runs):
    """One value per fresh cold start."""
    found = [stability_map.ends(runs, arm, stability_map.best_rate(runs, arm), maps.REPORT,
                                name="pass_rates") for arm in ("gspo", "grpo")]
    return claim.differences(*({seed: drop(rates) for seed, rates in one.items()}
                               for one in found))


def dense(runs):
    """One value per cold start that also chose the rates."""
    return claim.differences(*(
        stability_map.ends(runs, arm, stability_map.best_rate(runs, arm, "dense"), maps.CHOOSE,
                           "dense") for arm in ("gspo", "grpo")))
