"""Does GSPO hold where GRPO breaks in a mixture of 48 layers, and does that grow with depth?

Claim: in a 48-layer mixture about 10 % of the activated experts change with an update, GRPO then
needs routing replay to converge, and GSPO needs none (GSPO 2507.18071, §5.3).

Setting: a TinyMoE of 48 layers, width 48, 16 experts of which 2 are used (5.8 M parameters), sums
of 3 to 5 terms, a cold start of 500 steps at 1e-3 with o_proj and down_proj scaled by √(4/48); 16
rollout batches of 16 × 8 answers, 4 mini-batches each, constant rate. A pilot of six starts, which
are not used here, had flips of 7 to 10 %; every arm died at 4e-4 and lived at 1e-4, and at 2.8e-4
some runs broke: that is the deciding cell. Endpoint: held-out pass@1 after the last batch, 128
prompts × 4 answers. A run that train.py stops, as its updates are not finite, counts with its last
pass rate. Differences are paired by cold start, with 95 % t intervals. A seed whose cold start
train.py refuses (pass@1 below 0.3) is skipped in all arms, and the next seed takes its place.

Written down beforehand. In the deciding cell (48 layers, 2.8e-4, 4 mini-batches) on 32 cold starts
(seeds 200 and up), with D = GSPO with the paper's band minus GRPO:

  confirmed   D's interval lies above 0
  refuted     it lies below 0, or within ±0.03: then they are equal
  undecided   otherwise, and with fewer than 32 starts

The number of starts was fixed beforehand: intervals of fewer are shown, decide nothing and change
nothing about the plan. By the same three rules on the same starts, reported beside it: GRPO +
replay (R2) minus GRPO; GSPO with 100 times the band minus GRPO and minus GSPO. On 8 further starts
(seeds 300 and up, at least 8 for a verdict): GSPO with 10 times the band, GRPO + R3, GMPO and DPPO
minus GRPO.

  depth       D(48) - D(4), each at its depth's edge: the largest rate of the grid at which the
              mean of the first four arms still ends above their start on the four choosing starts
              (seeds 0 to 3); at 48 layers the edge is the deciding cell's 2.8e-4. Two independent
              samples of at least 8 starts, Welch's t: grows with depth if the interval lies above
              0, refuted if it lies below 0. Replay minus GRPO likewise. 16 layers are shown.
  flips       D(48) minus that of a dense policy of equal active size and depth, likewise; and,
              without a verdict, 1 - Var[log w] with replay / Var[log w] without
  best rates  each arm at its best rate, chosen on the seeds 0 to 3, on 8 fresh starts (seeds 400
              and up): GSPO minus GRPO by the rule of D with 8 starts
  survival    the largest rate at which an arm ends above its start, mean of the choosing starts: no
              verdict
  collapse    as in moe_stability.py: pass rate below half of its best so far for 4 batches running;
              shares with exact intervals, no verdict

Order: the deciding cell's first four arms, start by start, all arms of a start before the next
start (machines round differently); the other arms; the choosing starts; the best rates; 4 and 16
layers; dense. --full: 16 mini-batches, and 60 batches in the deciding cell. The map goes on where
it stopped, so that a later session adds starts.
"""

import math
import time
from functools import cache

import torch
from scipy import stats

from shared import claim, drift, maps
from moe_stability import collapsed_at, interval
from plumbing.data import tasks
from plumbing.model.cold_start import cold_start
from plumbing.run.arguments import parse
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="At 48 layers, where runs break, GSPO with the paper's band ends above GRPO",
           source="GSPO §5.3", reported="GRPO converges only with routing replay; GSPO needs none",
           regime="5.8 M parameters, 48 layers of 16 experts, answers of about 9 tokens, 16 "
                  "rollout batches")
GRPO = " ".join(drift.GRPO)
ARMS = {"grpo": GRPO, "grpo_replay": " ".join((GRPO, *drift.REPLAY)), "gspo": "--algorithm gspo",
        "gspo_x100": "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04",
        "gspo_x10": "--algorithm gspo --epsilon 3e-3 --epsilon_high 4e-3",
        "grpo_r3": f"{GRPO} --routing_replay rollout",
        "gmpo": "--algorithm gmpo", "dppo": "--algorithm dppo"}
NAMES = {"grpo": "GRPO", "grpo_replay": "GRPO + replay", "gspo": "GSPO",
         "gspo_x100": "GSPO, 100× band", "gspo_x10": "GSPO, 10× band", "grpo_r3": "GRPO + R3",
         "gmpo": "GMPO", "dppo": "DPPO"}
FIRST = tuple(ARMS)[:4]
OTHERS = ("grpo", *tuple(ARMS)[4:])
SHAPE = ("--hidden_size 48 --num_experts 16 --num_experts_per_tok 2 --min_terms 3 --max_terms 5 "
         "--cold_start_steps 500 --cold_start_learning_rate 1e-3 --prompts_per_step 16 "
         "--lr_scheduler_type constant_with_warmup")
POLICIES = {f"{layers} layers": f"{SHAPE} --num_hidden_layers {layers}" for layers in (4, 16, 48)}
DEEP = "48 layers"
DENSE = "48 layers, dense"
POLICIES[DENSE] = f"{POLICIES[DEEP]} --num_experts 1 --num_experts_per_tok 1"
RATES = (5e-5, 7e-5, 1e-4, 1.4e-4, 2e-4, 2.8e-4, 4e-4)       # 48 layers, where it breaks: by √2
MORE_RATES = (*RATES, 5.6e-4, 8e-4, 11e-4, 16e-4)            # for fewer layers and the dense policy
RATE, BATCHES, EQUAL = 2.8e-4, 16, .03                       # of the deciding cell
STARTS, ELSEWHERE = 32, claim.LEAST                          # cold starts a verdict needs
CHOOSE, DECIDE, REST, BEST, DEPTH = 0, 200, 300, 400, 500    # first seeds of the cold starts
CHOICES = 4                                                  # cold starts to choose on
CHOOSING = range(CHOOSE, CHOOSE + 100)
FILE = maps.runs_of("depth")
number = claim.counted


def grid(full):
    """The cells to run, in the order of the rules."""
    def cells(arms, seeds, rates=(RATE,), policy=DEEP, **more):
        return [maps.cell(arm, seed, policy=policy, rate=rate, **{"batches": BATCHES} | more)
                for seed in seeds for rate in rates for arm in arms]

    def fresh(policy, first, count):
        """The first `count` seeds with a usable cold start, each made when it is needed."""
        usable = 0
        for seed in range(first, first + 100):
            if usable < count and has_cold_start(policy, seed):
                usable += 1
                yield seed

    yield from one_by_one(cells, FIRST, fresh(DEEP, DECIDE, STARTS))
    yield from one_by_one(cells, OTHERS, fresh(DEEP, REST, ELSEWHERE))
    yield from one_by_one(cells, ARMS, fresh(DEEP, CHOOSE, CHOICES), rates=RATES)
    for seed in fresh(DEEP, BEST, ELSEWHERE):
        for arm in ARMS:
            if rate := best_rate(maps.read(FILE), arm):
                yield from cells([arm], [seed], (rate,))
    for policy in ("4 layers", "16 layers", DENSE):
        yield from one_by_one(cells, FIRST, fresh(policy, CHOOSE, CHOICES), rates=MORE_RATES,
                              policy=policy)
        if rate := edge(maps.read(FILE), policy):
            yield from one_by_one(cells, FIRST, fresh(policy, DEPTH, ELSEWHERE), rates=(rate,),
                                  policy=policy)
    if full:
        yield from one_by_one(cells, FIRST, fresh(DEEP, CHOOSE, CHOICES), rates=RATES,
                              minibatches=16)
        yield from one_by_one(cells, FIRST, fresh(DEEP, DECIDE, ELSEWHERE), batches=60)


def one_by_one(cells, arms, seeds, **more):
    """All cells of a cold start before the next cold start is made."""
    for seed in seeds:
        yield from cells(arms, [seed], **more)


@cache
def has_cold_start(policy, seed):
    """Whether train.py accepts this cold start, which is made here if no run has needed it yet."""
    if any(r["policy"] == policy and r["seed"] == seed for r in maps.read(FILE)):
        return True
    began = time.process_time()
    args = parse(f"--device cpu --seed {seed} {POLICIES[policy]}".split())
    task = tasks.from_arguments(args)
    device = torch.device("cpu")
    try:
        claim.quietly(lambda flags: cold_start(args, task, device), None)
    except ValueError as error:
        claim.say(f"{policy}, seed {seed} is skipped: {error}")
        return False
    claim.say(f"{policy}, seed {seed}: cold start, {time.process_time() - began:.0f} core-seconds")
    return True


# -------------------------------------------------------------------------------- what was found

def ends(runs, arm, rate=RATE, seeds=range(DECIDE, DECIDE + 100), policy=DEEP, name="after",
         minibatches=4, batches=BATCHES):
    """Held-out pass@1 at the end of each run, as {cold start: pass@1}."""
    return maps.values(runs, name, seeds, arm=arm, rate=rate, policy=policy,
                       minibatches=minibatches, batches=batches)


def place(policy, runs):
    """(rate, seeds) of the fresh runs at the edge of a policy's rates."""
    if policy == DEEP:
        return RATE, range(DECIDE, DECIDE + 100)
    return edge(runs, policy), range(DEPTH, DEPTH + 100)


def gap(runs, arm, other="grpo", policy=DEEP):
    """pass@1 of one arm minus that of another on fresh starts, at the policy's edge."""
    rate, seeds = place(policy, runs)
    return claim.differences(*(ends(runs, one, rate, seeds, policy) for one in (arm, other)))


def gain(runs, arm, rate, policy=DEEP):
    """What an arm gained from its start on each of the choosing starts."""
    where = (runs, arm, rate, CHOOSING, policy)
    return claim.differences(ends(*where), ends(*where, name="before"))


def best_rate(runs, arm):
    """The rate with the highest mean over the choosing starts, or None before all are run."""
    means = {rate: ends(runs, arm, rate, CHOOSING) for rate in RATES}
    if any(len(found) < CHOICES for found in means.values()):
        return None
    return max(RATES, key=lambda rate: claim.mean(means[rate].values()))


def edge(runs, policy, arms=FIRST):
    """The largest rate at which the arms, on average, end above their start on the choosing
    starts; None before all are run."""
    rates = RATES if policy == DEEP else MORE_RATES
    gains = {rate: [gain(runs, arm, rate, policy) for arm in arms] for rate in rates}
    if any(len(values) < CHOICES for of_arms in gains.values() for values in of_arms):
        return None
    above = [rate for rate in rates if claim.mean(sum(gains[rate], [])) > 0]
    return max(above, default=rates[0])


def decide(values, least):
    """The rule for a difference of two arms."""
    equal = claim.verdict(values, held=(-EQUAL, EQUAL), least=least) if values else None
    if equal == claim.HELD:
        return claim.Verdict(claim.REFUTED, equal.p)
    if len(values) < 2:
        return claim.Verdict(claim.undecided(len(values)))
    return claim.verdict(values, held=(0, math.inf), refuted=(-math.inf, 0), least=least)


def in_words(values, least):
    """The answer of `decide`, where "refuted" is one of two: equal to 0, or below it."""
    answer = decide(values, least)
    if answer == claim.REFUTED:
        _, low, high = claim.interval(values)
        return f"equal within {EQUAL:g}" if -EQUAL < low and high < EQUAL else "below 0"
    return "above 0" if answer == claim.HELD else answer


def welch(a, b):
    """(difference of means, low, high) of two independent samples, 95 % by Welch's t."""
    found = stats.ttest_ind(a, b, equal_var=False)
    return (claim.mean(a) - claim.mean(b), *found.confidence_interval(0.95))


def judge(runs):
    D = gap(runs, "gspo")
    answer = decide(D, STARTS)
    parts = [f"deciding cell: {NAMES[arm]} minus {NAMES[other]} {number(values)}: "
             f"{in_words(values, STARTS)}"
             for arm, other in (("gspo", "grpo"), ("grpo_replay", "grpo"), ("gspo_x100", "grpo"),
                                ("gspo_x100", "gspo"))
             if len(values := gap(runs, arm, other)) > 1]
    parts += [f"further starts: {NAMES[arm]} minus GRPO {number(values)}: "
              f"{in_words(values, ELSEWHERE)}" for arm in OTHERS[1:]
              if len(values := others_gap(runs, arm)) > 1]
    parts += [f"mean of {NAMES[arm]} {claim.number(values.values(), '{:.3f}')}, of its start "
              f"{claim.mean(ends(runs, arm, name='before').values()):.3f}"
              for arm in FIRST if len(values := ends(runs, arm)) > 1]
    parts += collapses(runs)
    parts += mechanism(runs)
    parts += depths(runs)
    parts += at_best(runs)
    edges = [f"{NAMES[arm]} {rate:g}" for arm in ARMS if (rate := edge(runs, DEEP, (arm,)))]
    if edges:
        parts.append(f"largest rate that ends above its start (4 cold starts, no verdict): "
                     f"{', '.join(edges)}")
    one = claim.number(D, "{:+.3f}", "pass@1, GSPO minus GRPO, 48 layers") if D else "not run"
    return "; ".join(parts), one, answer, len(D)


def others_gap(runs, arm):
    seeds = range(REST, REST + 100)
    return claim.differences(ends(runs, arm, seeds=seeds), ends(runs, "grpo", seeds=seeds))


def collapses(runs):
    """How many runs of the deciding cell collapsed, with exact intervals."""
    for arm in FIRST:
        curves = ends(runs, arm, name="pass_rates").values()
        if curves:
            fell = sum(collapsed_at(curve) is not None for curve in curves)
            low, high = interval(fell, len(curves))
            yield f"collapsed: {NAMES[arm]} {fell} of {len(curves)} [{low:.2f}, {high:.2f}]"


def mechanism(runs):
    """Flips, and what replay removes of Var[log w], medians over the batches of a run."""
    flips = ends(runs, "grpo", name="flips").values()
    if flips:
        yield f"flips of GRPO {claim.mean(flips):.1%}"
    without, with_replay = (ends(runs, arm, name="kl") for arm in ("grpo", "grpo_replay"))
    shares = [1 - with_replay[seed] / without[seed] for seed in without.keys() & with_replay.keys()]
    if len(shares) > 1:
        yield (f"1 - Var[log w] with replay / without, median of the starts "
               f"{claim.median(shares):.0%}")


def depths(runs):
    """D at every depth's edge, and the comparison of 48 layers with 4 and with dense."""
    for policy in POLICIES:
        for arm in ("gspo", "grpo_replay"):
            if policy != DEEP and len(values := gap(runs, arm, policy=policy)) > 1:
                yield (f"{policy} at {place(policy, runs)[0]:g}: {NAMES[arm]} minus GRPO "
                       f"{number(values)}")
    for policy in ("4 layers", DENSE):
        for arm in ("gspo", "grpo_replay"):
            if found := beyond(runs, arm, policy):
                deep, other, (middle, low, high) = found
                least = min(len(deep), len(other))
                enough = len(deep) >= STARTS and len(other) >= ELSEWHERE
                told = (claim.HELD if low > 0 else claim.REFUTED if high < 0 else
                        claim.undecided(least)) if enough else claim.undecided(least)
                yield (f"{NAMES[arm]} minus GRPO at 48 layers minus that of {policy} "
                       f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]: {told}")


def beyond(runs, arm, policy):
    """(differences to GRPO at 48 layers, those of another policy, their Welch interval); None until
    each has two starts."""
    deep = gap(runs, arm)
    other = gap(runs, arm, policy=policy)
    return (deep, other, welch(deep, other)) if min(len(deep), len(other)) > 1 else None


def best_gap(runs, arm):
    """pass@1 of an arm at its best rate on fresh starts, minus that of GRPO at its best; [] before
    both rates are known."""
    rate = best_rate(runs, arm)
    of_grpo = best_rate(runs, "grpo")
    if not (rate and of_grpo):
        return []
    seeds = range(BEST, BEST + 100)
    return claim.differences(ends(runs, arm, rate, seeds), ends(runs, "grpo", of_grpo, seeds))


def at_best(runs):
    """Each arm at its best rate on fresh starts, minus GRPO at its best."""
    for arm in tuple(ARMS)[1:]:
        values = best_gap(runs, arm)
        if len(values) > 1:
            yield (f"best rates, {NAMES[arm]} at {best_rate(runs, arm):g} minus GRPO at "
                   f"{best_rate(runs, 'grpo'):g} {number(values)}: {in_words(values, ELSEWHERE)}")


def takeaway(runs):
    """One sentence: the arms' means in the deciding cell."""
    told = [f"{NAMES[arm]} {claim.mean(values.values()):.2f}" for arm in FIRST
            if (values := ends(runs, arm))]
    starts = len(ends(runs, "gspo"))
    return (f"48 layers at {RATE:g}, where runs break, mean pass@1 of {starts} of {STARTS} planned "
            f"starts: {', '.join(told)}.")


def draw(runs):
    """On the left pass@1 in the deciding cell by arm, a grey line per cold start; on the right the
    differences to GRPO with intervals."""
    figure, (left, right) = panels(1, 2, height=4.2, width=9.4)
    found = {arm: ends(runs, arm) for arm in FIRST}
    for seed in found["grpo"]:
        points = [(x, found[arm][seed]) for x, arm in enumerate(FIRST) if seed in found[arm]]
        left.plot(*zip(*points), color=GREY, linewidth=.6)
    for x, arm in enumerate(FIRST):
        values = list(found[arm].values())
        colour, marker = (BLUE, "o") if arm.startswith("gspo") else (ORANGE, "s")
        left.plot([x] * len(values), values, marker, color=colour, alpha=.5, markersize=4)
        bar(left, x, values, colour, marker)
        if arm != "grpo":
            bar(right, x, gap(runs, arm), colour, marker)
    left.set_xticks(range(len(FIRST)), [NAMES[arm].replace(", ", ",\n") for arm in FIRST],
                    fontsize=8)
    right.set_xticks(range(1, len(FIRST)), [NAMES[arm].replace(", ", ",\n") for arm in FIRST[1:]],
                     fontsize=8)
    left.set_ylim(0, 1)
    right.axhline(0, color=GREY, linewidth=1)
    right.axhspan(-EQUAL, EQUAL, color=GREY, alpha=.2)
    label(left, f"48 layers at {RATE:g}, {len(found['gspo'])} cold starts", "", "held-out pass@1")
    label(right, "Minus GRPO (grey: equal)", "", "pass@1, 95 % interval")
    return figure


def bar(axes, x, values, colour, marker):
    """Draw a mean with its interval."""
    if len(values) > 1:
        middle, low, high = claim.interval(values)
        axes.errorbar(x + .15, middle, [[middle - low], [high - middle]], fmt=marker, color=colour,
                      capsize=3)


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, maps.trained(ARMS, POLICIES), judge, takeaway, draw)
