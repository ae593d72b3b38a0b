"""Does GSPO's best clip range follow the length of responses, and who is ahead after 100 batches?

Claim (ours; the argument is Rethinking GSPO's, §5.3: Var[log s] falls as 1/L): the best clip range
of GSPO falls with the length L of the responses, as std(log s) ~ 1/√L does.

Setting: train.py's tiny MoE at responses of about 20, 60, 130 and 260 tokens: the default sums, and
verbose sums of 8 to 12, 20 to 24 and 41 to 43 terms, where every step is written as a+b=c. The
longer sums begin from a cold start of 640 steps, and where train.py refuses it (pass@1 below 0.3)
the length is reported as out of reach. 16 rollout batches of 256 responses at 4e-4, 4 mini-batches.
Arms: GSPO with 1, 3, 10, 30 and 100 times the paper's clip range, and GRPO. Endpoint: held-out
pass@1 at the end. Written down beforehand:

  choice      every length's best clip range ε* on the cold starts 0 to 3
  decision    8 fresh cold starts (700 to 707): pass@1 of the best range at 20 tokens minus that of
              the best range at the longest length that trains, both run at that longest length
  confirmed   ε* is smaller at the longest length, and the difference lies below 0: the range
              chosen on short responses is worse there
  refuted     the difference lies within ±0.03, or above 0
  undecided   otherwise, where the same range is best at both lengths, and with fewer than 8 cold
              starts

Reported beside it, without a verdict: ε* by length and the slope of log ε* against log L; std(log
s) by length; and the duration: GRPO and GSPO with the paper's range and 100 times it after 10 and
after 100 batches from one cold start each of the seeds 700 to 703, sums of 10 to 14 terms at 2e-4,
a task that is not solved in ten.

Order: the choice from short to long, the fresh starts, the duration.
"""

import math
import statistics

from shared import claim, maps
import stability_map
from tools.style import BLUE, ORANGE, label, panels

ROW = dict(claim="The best clip range of GSPO falls with the length of the responses",
           source="ours; Rethinking GSPO §5.3", reported="no figure",
           regime="1 M parameters, 4 layers, answers of 20 to 260 tokens, 16 rollout batches")
TIMES = (1, 3, 10, 30, 100)
ARMS = {"grpo": stability_map.GRPO} | {
    f"gspo_x{t}": f"--algorithm gspo --epsilon {3e-4 * t:g} --epsilon_high {4e-4 * t:g}"
    for t in TIMES}
VERBOSE = "--verbose_answers --cold_start_steps 640"
POLICIES = {"20 tokens": "", "60 tokens": "--verbose_answers",
            "130 tokens": f"{VERBOSE} --min_terms 20 --max_terms 24",
            "260 tokens": f"{VERBOSE} --min_terms 41 --max_terms 43",
            "duration": "--min_terms 10 --max_terms 14"}
LENGTHS = {name: int(name.split()[0]) for name in POLICIES if name.endswith("tokens")}
FRESH = range(700, 708)
LONG_RUNS = range(700, 704)
BATCHES = 16
RATE = 4e-4
EQUAL = .03
DURATIONS = (10, 100)
DURATION_ARMS = ("grpo", "gspo_x1", "gspo_x100")
FILE = maps.runs_of("length_duration")
number = claim.counted


def grid(full):
    """The cells to run, in the order of the rules."""
    for length in LENGTHS:
        for seed in maps.CHOOSE:
            yield from (maps.cell(arm, seed, policy=length, rate=RATE, batches=BATCHES)
                        for arm in ARMS)
    for seed in FRESH:
        for arm in compared(maps.read(FILE)):
            yield maps.cell(arm, seed, policy=longest(maps.read(FILE)), rate=RATE,
                            batches=BATCHES)
    for seed in LONG_RUNS:
        for batches in DURATIONS:
            yield from (maps.cell(arm, seed, policy="duration", rate=2e-4, batches=batches)
                        for arm in DURATION_ARMS)


def make(c):
    """Make one run. A cold start that train.py refuses is a record without a pass@1 at the end."""
    try:
        return maps.one_run(c, ARMS[c["arm"]], POLICIES)
    except maps.Refused as error:
        return c | {"refused": str(error), "after": 0.0, "seconds": 0.0}


# -------------------------------------------------------------------------------- what was found

def ends(runs, length, arm, seeds, name="after", **more):
    kept = [r for r in runs if "refused" not in r]
    return maps.values(kept, name, seeds, policy=length, arm=arm, **more)


def best(runs, length):
    """The factor of the clip range with the highest mean on the choosing starts, or None before all
    are run."""
    means = {t: ends(runs, length, f"gspo_x{t}", maps.CHOOSE) for t in TIMES}
    if any(len(found) < len(maps.CHOOSE) for found in means.values()):
        return None
    return max(TIMES, key=lambda t: claim.mean(means[t].values()))


def longest(runs):
    return max((length for length in LENGTHS if best(runs, length)), key=LENGTHS.get,
               default=None)


def compared(runs):
    """The two arms of the decision: the best clip ranges at 20 tokens and at the longest length."""
    if longest(runs) in (None, "20 tokens"):
        return ()
    return tuple(dict.fromkeys(f"gspo_x{best(runs, length)}"
                               for length in ("20 tokens", longest(runs))))


def judge(runs):
    parts = [f"{length}: best clip range {best(runs, length)} times the paper's" for length in
             LENGTHS if best(runs, length)]
    for length in LENGTHS:
        spread = ends(runs, length, "gspo_x100", maps.CHOOSE, "log_s_var").values()
        if spread:
            parts.append(f"{length}: std(log s) {statistics.median(spread) ** .5:.2g} (median)")
    found = {length: t for length in LENGTHS if (t := best(runs, length))}
    if len(found) > 2:
        slope = claim.slope([LENGTHS[length] for length in found], found.values())
        parts.append(f"slope of log ε* against log L {slope:+.2f}")
    for batches in DURATIONS:
        ends_of = {arm: ends(runs, "duration", arm, LONG_RUNS, batches=batches)
                   for arm in DURATION_ARMS}
        parts += [f"after {batches} batches, {arm} minus GRPO {number(gap)}"
                  for arm in DURATION_ARMS[1:]
                  if (gap := claim.differences(ends_of[arm], ends_of["grpo"]))]
    refused = [r for r in runs if "refused" in r]
    parts.append(f"{len(runs)} runs made, {len(refused)} cold starts refused")
    arms = compared(runs)
    if not arms:
        return "; ".join(parts), f"{len(runs)} runs of the choice", claim.undecided(0), 0
    shorter = best(runs, longest(runs)) < best(runs, "20 tokens")
    gap = claim.differences(*(ends(runs, longest(runs), arm, FRESH) for arm in arms[:2])) \
        if len(arms) == 2 else []
    told = claim.number(gap, "{:+.3f}", "pass@1") if gap else "the same clip range is best"
    return "; ".join(parts), told, decide(gap, shorter), len(gap)


def decide(gap, shorter):
    """The verdict, from the difference on fresh starts. shorter: whether ε* is smaller at the
    longest length."""
    if len(gap) < claim.LEAST:
        return claim.undecided(len(gap))
    equal = claim.verdict(gap, held=(-EQUAL, EQUAL))
    if equal == claim.HELD:
        return claim.Verdict(claim.REFUTED, equal.p)
    answer = claim.verdict(gap, held=(-math.inf, 0), refuted=(0, math.inf))
    return answer if shorter or answer != claim.HELD else claim.undecided(len(gap))


def takeaway(runs):
    told = [f"{best(runs, length)} times at {length}" for length in LENGTHS if best(runs, length)]
    return f"Best clip range in units of the paper's: {', '.join(told) or 'not run'}."


def draw(runs):
    """pass@1 against the clip range, a line per length; GRPO as a dashed level."""
    figure, axes = panels(1, len(LENGTHS), height=3, width=11)
    for place, length in zip(axes.flat, LENGTHS):
        points = [(t, value) for t in TIMES
                  for value in ends(runs, length, f"gspo_x{t}", None).values()]
        if points:
            place.plot(*zip(*points), "o", color=BLUE, markersize=4)
        for value in ends(runs, length, "grpo", maps.CHOOSE).values():
            place.axhline(value, color=ORANGE, linestyle="--", linewidth=.8)
        place.set_xscale("log")
        label(place, length, "clip range, times the paper's", "held-out pass@1")
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw)
