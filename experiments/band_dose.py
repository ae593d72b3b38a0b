"""Does the sequence ratio tolerate a coarse sampler once its band is as wide as its ratio?

Claim: sequence likelihoods tolerate precision differences better than token likelihoods, so GSPO
may use the inference engine's log-probs (GSPO 2507.18071, §5.4). sampler_noise ran it with the
paper's band only: GSPO lost 0.18 pass@1 by trusting an int4 sampler. A pilot on four cold starts
(shared by no run here) had a band 100 times as wide lose next to nothing. It chose the claim, so it
cannot confirm it.

Setting: that of sampler_noise: train.py's default task and policy, rate 4e-4, 4 mini-batches, 16
rollout batches; the sampler's weights rounded row by row to 3 or 4 bits and its log-probs trusted,
or a float32 sampler. Arms: GRPO (0.2, 0.27), GSPO with the paper's band, GSPO with 100 times the
paper's band. "Lost" is held-out pass@1 at the end with a float32 sampler minus that with the coarse
one, trusted, at the same cold start: one reference serves both doses. Cold starts 25 to 40, which
no other experiment used; differences are paired, with 95 % t intervals. Written down beforehand,
with D = lost(GRPO) - lost(GSPO, 100 times), the mean of int3 and int4 of a cold start:

  confirmed   D's interval lies above 0, and lost(GSPO, 100 times) at int4 lies below 0.05
  refuted     D's interval ends below 0.03
  undecided   otherwise, and with fewer than 8 cold starts that have all six runs of both arms

Two more, by the same intervals, reported beside it:

  band        lost(GSPO, the paper's band) - lost(GSPO, 100 times), at int4: held if the interval
              lies above 0.05, refuted if it lies below
  length      D at int4 with answers of about 60 tokens (`--verbose_answers`, same numbers of cold
              start) minus D at int4 with 20: held above 0, refuted below; with --full

Recomputed log-probs at int4 (what trusting alone costs, sampler_noise's "lost") come with --full
too. Planned are 16 cold starts, one after the other, until a time of day: what is reported is
every whole cold start made by then, whatever came out of it.
"""

import math

from shared import claim, maps
import stability_map
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="GSPO with 100 times the paper's band loses less than GRPO where a coarse sampler "
                 "is trusted",
           source="GSPO §5.4", reported="no figure",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 16 rollout batches")
LONG = "_60"                                                 # of an arm: answers of about 60 tokens
ALGORITHMS = {name: stability_map.ARMS[name] for name in ("grpo", "gspo", "gspo_x100")}
ARMS = {f"{name}{way}{length}": f"{algorithm}{trust}{verbose}"
        for name, algorithm in ALGORITHMS.items()
        for way, trust in (("", ""), ("_trusted", " --old_logp sampler"))
        for length, verbose in (("", ""), (LONG, " --verbose_answers"))}
NAMES = stability_map.NAMES
FLOAT = "float32"
DOSES = ("int3", "int4")
SEEDS = range(25, 41)
BATCHES = 16
BOUND = .05
NOTHING = .03
FILE = maps.runs_of("band_dose")
number = claim.counted


def grid(full):
    """The cells to run, one cold start after the other, so that complete cold starts remain
    wherever the experiment is stopped. The judged cells come first. --full adds those with answers
    of 60 tokens, and the recomputed log-probs at int4."""
    def cells(arms, bits, seed):
        return [maps.cell(arm, seed, bits=bits, batches=BATCHES) for arm in arms]
    for seed in SEEDS:
        yield from cells(("grpo", "gspo_x100", "gspo"), FLOAT, seed)
        yield from cells(("grpo_trusted", "gspo_x100_trusted", "gspo_trusted"), "int4", seed)
        yield from cells(("grpo_trusted", "gspo_x100_trusted"), "int3", seed)
    for seed in SEEDS[:claim.LEAST] if full else ():
        yield from cells(("grpo_60", "gspo_x100_60"), FLOAT, seed)
        yield from cells(("grpo_trusted_60", "gspo_x100_trusted_60"), "int4", seed)
    for seed in SEEDS[:claim.LEAST] if full else ():
        yield from cells(("grpo", "gspo_x100", "gspo"), "int4", seed)


# -------------------------------------------------------------------------------- what was found

def ends(runs, arm, bits):
    """Held-out pass@1 at the end of each run, as {cold start: pass@1}."""
    return maps.values(runs, arm=arm, bits=bits, seeds=SEEDS, batches=BATCHES)


def lost(runs, name, bits, length=""):
    """What an arm loses by trusting the coarse sampler: its pass@1 with a float32 sampler minus
    that with the coarse one, as {cold start: difference}."""
    return claim.paired(ends(runs, name + length, FLOAT),
                        ends(runs, f"{name}_trusted{length}", bits))


def gaps(runs, bits, length="", name="grpo"):
    """What an arm loses more than GSPO with 100 times the band does, as {cold start:
    difference}."""
    return claim.paired(lost(runs, name, bits, length), lost(runs, "gspo_x100", bits, length))


def both_doses(runs):
    """The D of the rule as {cold start: D}, for the cold starts with runs at int3 and at int4."""
    found = [gaps(runs, bits) for bits in DOSES]
    return {seed: claim.mean(gap[seed] for gap in found)
            for seed in sorted(set.intersection(*map(set, found)))}


def decide(D, wide):
    """The verdict, from D and from what GSPO with 100 times the band loses at int4."""
    if claim.verdict(D, held=(-math.inf, NOTHING)) == claim.HELD:
        return claim.Verdict(claim.REFUTED, claim.p_within(D, (-math.inf, NOTHING)))
    parts = (claim.verdict(D, held=(0, math.inf), refuted=(-math.inf, 0)),
             claim.verdict(wide, held=(-math.inf, BOUND)))
    if all(part == claim.HELD for part in parts):
        return claim.all_of(*parts)
    return claim.Verdict(claim.undecided(len(D)), max(part.p for part in parts)
                         if len(D) >= claim.LEAST else None)


def judge(runs):
    D = both_doses(runs)
    parts = [f"{bits}: lost by trusting {NAMES[name]} {number(found)}" for bits in reversed(DOSES)
             for name in ALGORITHMS if (found := lost(runs, name, bits).values())]
    parts += [f"{bits}: lost by GRPO minus lost by {NAMES['gspo_x100']} {number(found)}"
              for bits in reversed(DOSES) if (found := gaps(runs, bits).values())]
    band = gaps(runs, "int4", name="gspo").values()
    if band:
        parts.append(f"int4: lost with the paper's band minus lost with 100 times "
                     f"{number(band)}: {claim.verdict(band, held=(BOUND, math.inf))}")
    parts += recomputed(runs)
    parts += longer(runs)
    if not D:
        return "; ".join(parts), "no cold start has both doses", claim.undecided(0), 0
    wide = [lost(runs, "gspo_x100", "int4")[seed] for seed in D]
    return ("; ".join(parts),
            f"GRPO loses {claim.number(D.values(), '{:+.3f}')} more than 100 times the band, which "
            f"loses {claim.number(wide, '{:+.3f}')} at int4 (pass@1)",
            decide(list(D.values()), wide), len(D))


def recomputed(runs):
    """What recomputing the old log-probs gains over trusting those of the sampler, at int4."""
    for name in ALGORITHMS:
        gain = claim.differences(ends(runs, name, "int4"), ends(runs, f"{name}_trusted", "int4"))
        if gain:
            yield f"int4: {NAMES[name]} recomputed minus trusted {number(gain)}"


def longer(runs):
    """D at int4 with answers of 60 tokens, and the difference to D at int4 with 20."""
    D = gaps(runs, "int4", LONG)
    if D:
        more = claim.differences(D, gaps(runs, "int4"))
        yield (f"60 tokens, int4: lost by GRPO minus lost by {NAMES['gspo_x100']} "
               f"{number(D.values())}, minus that of 20 tokens {number(more)}: "
               f"{claim.verdict(more, held=(0, math.inf), refuted=(-math.inf, 0))}")


def takeaway(runs):
    """One sentence: what each arm loses by trusting an int4 sampler."""
    told = [f"{NAMES[name]} {claim.mean(found):+.2f}" for name in ALGORITHMS
            if (found := lost(runs, name, "int4").values())]
    return f"Lost by trusting an int4 sampler: {', '.join(told) or 'not run'}."


LOOK = {"grpo": (ORANGE, "s", ORANGE), "gspo": (BLUE, "o", BLUE), "gspo_x100": (BLUE, "D", "white")}
PLACES = [(bits, name) for bits in reversed(DOSES) for name in ALGORITHMS
          if (bits, name) != ("int3", "gspo")]               # not run: the rule does not need it


def draw(runs):
    """On the left pass@1 at the end of the runs by sampler, on the right what trusting the sampler
    costs, with intervals."""
    figure, (left, right) = panels(1, 2, height=4.2, width=9.4)
    samplers = ((FLOAT, ""), ("int4", "_trusted"), ("int3", "_trusted"))
    for i, name in enumerate(ALGORITHMS):
        found = [(x + .1 * (i - 1), list(ends(runs, name + way, bits).values()))
                 for x, (bits, way) in enumerate(samplers)]
        dots(left, [(x, values) for x, values in found if values], name, line="-")
    left.set_xticks(range(3), ["float32", "int4, trusted", "int3, trusted"], fontsize=8)
    label(left, f"After {BATCHES} batches (large: means)", "", "held-out pass@1")
    left.legend(loc="lower left", fontsize=8)
    costs = [(x, list(lost(runs, name, bits).values())) for x, (bits, name) in enumerate(PLACES)]
    for (x, values), (_, name) in zip(costs, PLACES):
        if len(values) > 1:
            dots(right, [(x, values)], name)
            middle, low, high = claim.interval(values)
            right.errorbar(x + .2, middle, [[middle - low], [high - middle]], color=LOOK[name][0],
                           capsize=3)
    right.axhline(0, color=GREY, linewidth=1)
    right.axhline(BOUND, color=GREY, linewidth=1, linestyle=":")
    right.set_xticks(range(len(PLACES)), [f"{stability_map.SHORT[name]}\n{bits}"
                                          for bits, name in PLACES], fontsize=8)
    label(right, "Lost by trusting the sampler", "", "pass@1, float32 minus coarse")
    return figure


def dots(axes, places, name, line=""):
    """Draw one small dot per cold start and a large one at their mean. places: [(x, values)]."""
    colour, marker, face = LOOK[name]
    look = dict(marker=marker, color=colour, markerfacecolor=face)
    for x, values in places:
        axes.plot([x] * len(values), values, linestyle="", alpha=.5, markersize=4, **look)
    axes.plot([x for x, _ in places], [claim.mean(values) for _, values in places],
              linestyle=line or "none", markersize=8, label=NAMES[name], **look)


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, maps.trained(ARMS), judge, takeaway, draw)
