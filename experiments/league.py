"""The league: which member of the family learns most on the default task, each at its best?

    python experiments/league.py            every member, one after the other; resumes where it was
    python experiments/league.py NAME       one row of losses.OBJECTIVES or one preset, yours too
    python experiments/league.py --draw     make no runs: table and figure from those in the file

Claim (ours, no paper): the members differ by less than their step sizes do. family_rewards.py has
the family at one rate, which ranks nobody. Setting: train.py's default task and policy, 10 rollout
batches of 256 responses. Written down beforehand, the same budget for every member:

  choose      five rates (2e-4, 4e-4, 6e-4, 8e-4, 12e-4) and, where the member has a clip range,
              three widths of it, on the cold starts 0 to 3: the cell with the highest mean held-out
              pass@1. Widths: 1, 10 and 100 times the published one where the sequence ratio s is
              clipped, else 0.5, 1 and 2 times, below the largest that the clip allows
  report      that cell on 16 fresh cold starts (600 to 615), the same for all members
  ranks       by mean pass@1 on the fresh starts that all ranked members have; a rank's 95 %
              interval by a bootstrap over these starts (2000 draws)
  told apart  the paired difference of two members has a 95 % t interval without 0; the table says
              who cannot be told apart from a member. Hundreds of pairs are compared: some miss 0
              by chance, so a single pair is no verdict
  to 0.9      samples and seconds until the pass rate of a rollout batch reaches 0.9, median of the
              fresh starts; none if half of them never do
  samples     drawn in the whole run, median of the fresh starts: dynamic sampling draws more
  survived    the largest of the five rates at which the chosen width ends above its start

  confirmed   the best member minus the fifth best lies within 0 and 0.03 (interval of the pair)
  refuted     its interval lies above 0.03
  undecided   otherwise, and with fewer than 16 starts or fewer than ten members

gspo_token is left out: with one advantage per response it is GSPO. srpo's second stage begins after
5 batches. The other flags are those of the preset, its number of mini-batches among them.
"""

import argparse
import math
import os
import random
import statistics

from shared import claim, maps, which
from losses import OBJECTIVES
from plumbing.run.arguments import ALGORITHMS
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="Each at its best rate and clip range, the five best members of the family are "
                 "within 0.03 pass@1", source="ours, no paper", reported="no paper compares them")
OMITTED = {"gspo_token"}
MORE = {"srpo": "--stage2_step 5"}
MEMBERS = ["gspo", "grpo", *(name for name in ALGORITHMS if name not in OMITTED | {"gspo", "grpo"})]
RATES = (2e-4, 4e-4, 6e-4, 8e-4, 12e-4)
FRESH = range(600, 616)
BATCHES = 10
GOAL = .9
LEAST_MEMBERS = 10
FIFTH = 5
NEAR = .03
DRAWS = 2000
FILE = maps.runs_of("league")


def widths(name):
    """Factors of the published clip range that a member is tried with; (1,) if it has none."""
    low, high = clip_range(name)
    if low is None or high is None:
        return (1,)
    row = OBJECTIVES[ALGORITHMS[name]["objective"]]
    factors = (1, 10, 100) if row.clips_s else (.5, 1, 2)
    return tuple(f for f in factors if f <= 1 or f * max(low, high) < row.kind.widest)


def clip_range(name):
    preset = ALGORITHMS[name]
    row = OBJECTIVES[preset["objective"]]
    return preset.get("epsilon", row.epsilon), preset.get("epsilon_high", row.epsilon_high)


def arm(name, factor):
    return name if factor == 1 else f"{name} ×{factor:g}"


def member(arm):
    return arm.partition(" ×")[0]


def flags(arm):
    """train.py's flags of an arm."""
    name, _, factor = arm.partition(" ×")
    words = f"--algorithm {name} {MORE.get(name, '')}".strip()
    if factor:
        low, high = (float(factor) * edge for edge in clip_range(name))
        words += f" --epsilon {low:g} --epsilon_high {high:g}"
    return words


def cell(arm, rate, seed):
    """A run of an arm, with as many mini-batches as its preset has."""
    minibatches = ALGORITHMS[member(arm)].get("steps_per_generation", 4)
    return maps.cell(arm, seed, rate=rate, minibatches=minibatches, batches=BATCHES)


def choice(name):
    """The cells that choose a member's rate and width."""
    return [cell(arm(name, factor), rate, seed) for seed in maps.CHOOSE for factor in widths(name)
            for rate in RATES]


def grid(name):
    """The cells of a member: the choice, then the fresh starts at what was chosen."""
    yield from choice(name)
    chosen, rate = best(maps.read(FILE), name)
    yield from (cell(chosen, rate, seed) for seed in FRESH)


def make(c):
    return maps.one_run(c, flags(c["arm"]))


# -------------------------------------------------------------------------------- what was found

def ends(runs, arm, rate, seeds, name="after"):
    return maps.values(runs, name, seeds, arm=arm, rate=rate, batches=BATCHES,
                       minibatches=cell(arm, rate, 0)["minibatches"])


def best(runs, name):
    """(arm, rate) with the highest mean on the choosing starts, or None before all are run."""
    means = {}
    for factor in widths(name):
        for rate in RATES:
            found = ends(runs, arm(name, factor), rate, maps.CHOOSE)
            if len(found) < len(maps.CHOOSE):
                return None
            means[arm(name, factor), rate] = claim.mean(found.values())
    return max(means, key=means.get)


def survived(runs, arm):
    """The largest rate at which an arm ends above its start, on the choosing starts; None: none."""
    gains = {rate: claim.differences(ends(runs, arm, rate, maps.CHOOSE),
                                     ends(runs, arm, rate, maps.CHOOSE, "before"))
             for rate in RATES}
    return max((rate for rate in RATES if claim.mean(gains[rate]) > 0), default=None)


def entered(runs):
    """{member: {fresh start: pass@1}} of the members that have all fresh starts, best first."""
    found = {}
    for name in dict.fromkeys(member(r["arm"]) for r in runs):
        if chosen := best(runs, name):
            values = ends(runs, *chosen, FRESH)
            if len(values) == len(FRESH):
                found[name] = values
    mean = lambda name: claim.mean(found[name][seed] for seed in FRESH)
    return {name: found[name] for name in sorted(found, key=mean, reverse=True)}


def rank_intervals(found, seed=0):
    """{member: (rank, low, high)}: the rank of its mean, and its 95 % interval under resampled
    starts."""
    rng = random.Random(seed)
    starts = list(FRESH)
    drawn = {name: [] for name in found}

    def ranks(of):
        means = {name: claim.mean(values[s] for s in of) for name, values in found.items()}
        ordered = sorted(means, key=lambda name: -means[name])
        return {name: place for place, name in enumerate(ordered, 1)}
    for _ in range(DRAWS):
        for name, place in ranks(rng.choices(starts, k=len(starts))).items():
            drawn[name].append(place)
    places = {name: sorted(values) for name, values in drawn.items()}
    cut = round(DRAWS * .025)
    return {name: (place, places[name][cut], places[name][-cut - 1])
            for name, place in ranks(starts).items()}


def to_goal(runs, chosen):
    """(samples, seconds) until a rollout batch's pass rate reaches the goal, medians of the fresh
    starts; None if half of them never reach it."""
    curves, spent, samples = ([*ends(runs, *chosen, FRESH, name).values()]
                              for name in ("pass_rates", "batch_seconds", "batch_samples"))
    first = [next((i for i, x in enumerate(curve) if x >= GOAL), None) for curve in curves]
    seconds = [math.inf if i is None else sum(s[:i + 1]) for i, s in zip(first, spent)]
    drawn = [math.inf if i is None else sum(s[:i + 1]) for i, s in zip(first, samples)]
    if statistics.median(drawn) == math.inf:
        return None
    return round(statistics.median(drawn)), round(statistics.median(seconds), 1)


def samples_drawn(runs, arm, rate):
    """Samples drawn in a whole run, median of the fresh starts."""
    return round(statistics.median(map(sum, ends(runs, arm, rate, FRESH,
                                                 "batch_samples").values())))


def table(runs):
    """A row per entered member, the best first."""
    found = entered(runs)
    rows = []
    places = rank_intervals(found) if found else {}
    for name in found:
        chosen, rate = best(runs, name)
        middle, low, high = claim.interval(found[name].values())
        near = [other for other in found if other != name and not apart(found, name, other)]
        rows.append(dict(member=name, rank=places[name], arm=chosen, flags=flags(chosen),
                         rate=rate, mean=middle, low=low, high=high,
                         near=sorted(near, key=lambda other: places[other][0]),
                         to_goal=to_goal(runs, (chosen, rate)), survived=survived(runs, chosen),
                         samples=samples_drawn(runs, chosen, rate)))
    return rows


def apart(found, name, other):
    """Whether the interval of the paired difference of two members is without 0."""
    _, low, high = claim.interval(claim.differences(found[name], found[other]))
    return low > 0 or high < 0


def judge(runs):
    found = entered(runs)
    rows = table(runs)
    parts = [f"{row['member']} {row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}], rank "
             f"{row['rank'][0]} [{row['rank'][1]}, {row['rank'][2]}]" for row in rows]
    waiting = [name for name in MEMBERS if name not in found]
    parts.append(f"not entered yet: {len(waiting)} of {len(MEMBERS)}")
    if len(rows) < LEAST_MEMBERS:
        number = f"{len(rows)} of {len(MEMBERS)} members entered"
        return "; ".join(parts), number, claim.undecided(0), 0
    first = rows[0]["member"]
    fifth = rows[FIFTH - 1]["member"]
    gap = claim.differences(found[first], found[fifth])
    answer = claim.verdict(gap, held=(-math.inf, NEAR), refuted=(NEAR, math.inf),
                           least=len(FRESH))
    return ("; ".join(parts), claim.number(gap, "{:+.3f}", f"pass@1, {first} minus {fifth}, the "
                                           "best and the fifth"), answer, len(FRESH))


def takeaway(runs):
    rows = table(runs)
    if not rows:
        return "No member has all of its runs yet."
    return (f"{rows[0]['member']} has the highest mean, {rows[0]['mean']:.3f}; "
            f"{len(rows[0]['near'])} of {len(rows) - 1} others cannot be told apart from it.")


def draw(runs):
    """All fresh starts of every member, with mean and interval, the best on top."""
    rows = table(runs)
    found = entered(runs)
    figure, axes = panels(1, 1, height=max(2.4, .3 * len(rows) + 1.2), width=7)
    axes = getattr(axes, "flat", [axes])[0]
    for place, row in enumerate(reversed(rows)):
        colour = {"gspo": BLUE, "grpo": ORANGE}.get(row["member"], "black")
        values = list(found[row["member"]].values())
        axes.plot(values, [place] * len(values), ".", color=GREY)
        axes.plot([row["low"], row["high"]], [place, place], color=colour)
        axes.plot(row["mean"], place, "o", color=colour)
    axes.set_yticks(range(len(rows)), [f"{row['arm']}, {which.rate(row['rate'])}"
                                       for row in reversed(rows)], fontsize=8)
    label(axes, f"{len(FRESH)} fresh cold starts, mean and 95 % interval", "held-out pass@1", "")
    return figure


# ------------------------------------------------------------------------------ the command line

def forecast(runs, names):
    """How many runs are missing, and a sentence that says how long they take here."""
    done = set(map(maps.key, runs))
    cells = [c for name in names for c in choice(name)]
    fresh = sum(len(FRESH) - len(ends(runs, *chosen, FRESH) if (chosen := best(runs, name)) else ())
                for name in names)
    missing = sum(maps.key(c) not in done for c in cells) + fresh
    spent = [r["seconds"] for r in runs] or [10]
    minutes = missing * statistics.median(spent) / 60
    return missing, (f"{', '.join(names) if len(names) < 4 else f'{len(names)} members'}: "
                     f"{missing} runs, about {minutes:.0f} minutes on one core "
                     f"({statistics.median(spent):.0f} s a run so far) and as many cold starts "
                     "as are not cached, half a minute each")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="experiments/league.py", description=ROW["claim"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="members (default: all)")
    parser.add_argument("--most", type=int, default=math.inf, metavar="N",
                        help="make at most N runs now; the next call goes on")
    parser.add_argument("--draw", action="store_true", help="make no runs")
    options = parser.parse_args(argv)
    os.chdir(claim.ROOT)
    names = options.names or MEMBERS
    for name in names:
        if name not in ALGORITHMS:
            parser.error(f"{name} is no row of losses.OBJECTIVES and no preset; known: "
                         f"{', '.join(ALGORITHMS)}")
    if not options.draw:
        claim.say(forecast(maps.read(FILE), names)[1])
        for name in names:
            options.most -= maps.run_all(FILE, grid(name), make, most=options.most)
    maps.write(__file__, ROW, judge, takeaway, draw, data=lambda runs: dict(table=table(runs)))


if __name__ == "__main__":
    main()
