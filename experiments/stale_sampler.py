"""How old may the samples be? A sampler that lags k rollout batches behind the policy.

Claim: updates on samples of an older policy are what the importance ratio is for; a ratio per token
is not valid off-policy and adds noise, a ratio per sequence corrects it (GSPO 2507.18071, §3 and
§4.1). The paper's samples are a few mini-batches old. Here the sampler holds a copy of the policy
of k batches ago (plumbing/engines/stale.py) and its log-probs are the old ones, so the ratio
contains the lag:

    python train.py --sampler plumbing/engines/stale.py:Stale2 --old_logp sampler

Setting: train.py's default task and policy, rate 4e-4, 4 mini-batches, 16 rollout batches of 256
answers; k = 0, 2, 8; cold starts 41 to 48, which no other experiment used. The first k
batches come from the policy at the start. Arms: GRPO (0.2, 0.27), GSPO with the paper's band, and
with a band 100 times as wide. "Lost" is held-out pass@1 at the end with k = 0 minus that with k;
differences are paired by cold start, with 95 % t intervals. Written down beforehand, with
D = lost(GRPO) - lost(GSPO), the mean over k = 2 and 8 of a cold start:

  confirmed             D's interval lies above 0 with the paper's band and with 100 times it
  refuted               D's interval lies below 0 with both
  depends on the band   it lies above 0 with one and below 0 with the other
  undecided             otherwise, and with fewer than 8 cold starts that have k = 0, 2 and 8

Reported beside it, without a verdict: what each arm loses at each k; and with --full, as far as
time goes, DPPO, which drops tokens by their probabilities and not by a ratio, MiniRL, which
recomputes the old log-probs and weights each token by trainer over sampler, and then k = 1 and 4.
"""

import math
import os

from shared import claim, maps
import stability_map
from tools.style import BLUE, GREEN, GREY, ORANGE, label, panels

ROW = dict(claim="A ratio per sequence tolerates samples of an older policy better than a ratio "
                 "per token",
           source="GSPO §3 and §4.1", reported="no figure",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 16 rollout batches")
LAGS = (0, 1, 2, 4, 8)                                       # k: all
JUDGED = (2, 8)                                              # and those of the verdict
ALGORITHMS = {name: stability_map.ARMS[name] + " --old_logp sampler"
              for name in ("grpo", "gspo", "gspo_x100")}
BESIDE = {"dppo": "--algorithm dppo", "minirl": "--algorithm minirl"}
NAMES = stability_map.NAMES | {"minirl": "MiniRL"}
BANDS = ("gspo", "gspo_x100")
SEEDS = range(41, 49)
BATCHES = 16
FILE = maps.runs_of("stale_sampler")
number = claim.counted


def grid(full):
    """The cells to run, the judged ones first and cold start by cold start, so that complete cold
    starts remain wherever the experiment is stopped."""
    def cells(arms, lags):
        return [maps.cell(f"{arm}_k{k}", seed, batches=BATCHES)
                for seed in SEEDS for k in lags for arm in arms]
    yield from cells(ALGORITHMS, (0, *JUDGED))
    if full:
        yield from cells(BESIDE, (0, *JUDGED))
        yield from cells(ALGORITHMS | BESIDE, (1, 4))


def make(c):
    """Make one run. The name of its arm ends with the lag."""
    name, _, k = c["arm"].rpartition("_k")
    file = os.path.relpath(claim.ROOT / "plumbing" / "engines" / "stale.py")
    return maps.one_run(c, f"{(ALGORITHMS | BESIDE)[name]} --sampler {file}:Stale{k}")


# -------------------------------------------------------------------------------- what was found

def ends(runs, name, k):
    """Held-out pass@1 at the end of each run, as {cold start: pass@1}."""
    return maps.values(runs, arm=f"{name}_k{k}", seeds=SEEDS, batches=BATCHES)


def lost(runs, name, k):
    """What a lag of k batches costs: pass@1 without a lag minus that with it, as {cold start:
    difference}."""
    return claim.paired(ends(runs, name, 0), ends(runs, name, k))


def gaps(runs, name, other="grpo"):
    """What `other` loses minus what arm `name` loses, averaged over the judged lags; one value per
    cold start that has all of them."""
    found = [(lost(runs, other, k), lost(runs, name, k)) for k in JUDGED]
    whole = set.intersection(*(set(one) & set(two) for one, two in found))
    return [claim.mean(one[seed] - two[seed] for one, two in found) for seed in sorted(whole)]


def decide(bands):
    """The verdict, from the D of each clip range."""
    answers = [claim.verdict(values, held=(0, math.inf), refuted=(-math.inf, 0))
               for values in bands]
    if {claim.HELD, claim.REFUTED} <= set(answers):
        return claim.depends("the band")
    if len(set(answers)) == 1 and answers[0] in (claim.HELD, claim.REFUTED):
        return claim.Verdict(answers[0], max(answer.p for answer in answers))
    seeds = min(map(len, bands))
    sure = seeds >= claim.LEAST
    return claim.Verdict(claim.undecided(seeds), max(a.p for a in answers) if sure else None)


def judge(runs):
    arms = [name for name in ALGORITHMS | BESIDE if ends(runs, name, 0)]
    parts = [f"k = {k}: lost by {NAMES[name]} {number(found)}" for k in LAGS[1:] for name in arms
             if (found := lost(runs, name, k).values())]
    parts += [f"k = {k}: {NAMES[name]} minus GRPO {number(found)}" for k in LAGS for name in arms
              if name != "grpo" and (found := claim.differences(ends(runs, name, k),
                                                                ends(runs, "grpo", k)))]
    parts += [f"mean of k = 2 and 8: lost by GRPO minus lost by {NAMES[name]} {number(found)}"
              for name in arms if name != "grpo" and (found := gaps(runs, name))]
    D = [gaps(runs, name) for name in BANDS]
    if not all(D):
        return "; ".join(parts), "no cold start has k = 0, 2 and 8", claim.undecided(0), 0
    told = ", ".join(f"{claim.number(values, '{:+.3f}')} with {words}" for values, words in
                     zip(D, ("the paper's band", "100 times it")))
    return "; ".join(parts), f"lost by GRPO minus lost by GSPO {told}", decide(D), min(map(len, D))


def takeaway(runs):
    """One sentence: pass@1 of each arm without a lag and with the largest one."""
    told = [f"{NAMES[name]} {claim.mean(fresh):.2f} and {claim.mean(stale):.2f}"
            for name in ALGORITHMS | BESIDE if (fresh := ends(runs, name, 0).values())
            and (stale := ends(runs, name, LAGS[-1]).values())]
    return (f"pass@1 without a lag and with one of {LAGS[-1]} batches: "
            f"{', '.join(told) or 'not run'}.")


LOOK = {"grpo": (ORANGE, "s", ORANGE, "-"), "gspo": (BLUE, "o", BLUE, "-"),
        "gspo_x100": (BLUE, "D", "white", "-"), "dppo": (GREEN, "^", GREEN, ":"),
        "minirl": (GREEN, "v", "white", ":")}


def draw(runs):
    """On the left pass@1 at the end of the runs against the lag, on the right what the lag costs,
    mean and interval."""
    figure, (left, right) = panels(1, 2, height=4.2, width=9.4)
    lags = [k for k in LAGS if any(ends(runs, name, k) for name in LOOK)]
    for i, (name, (colour, marker, face, line)) in enumerate(LOOK.items()):
        look = dict(marker=marker, color=colour, markerfacecolor=face)
        found = [(x + .09 * (i - 2), list(ends(runs, name, k).values()))
                 for x, k in enumerate(lags)]
        found = [(x, values) for x, values in found if values]
        for x, values in found:
            left.plot([x] * len(values), values, linestyle="", alpha=.5, markersize=3, **look)
        if found:
            left.plot([x for x, _ in found], [claim.mean(values) for _, values in found], line,
                      markersize=7, label=NAMES[name], **look)
        costs = [(x + .09 * (i - 2), claim.interval(values)) for x, k in enumerate(lags[1:], 1)
                 if len(values := lost(runs, name, k).values()) > 1]
        for x, (middle, low, high) in costs:
            right.errorbar(x, middle, [[middle - low], [high - middle]], capsize=3, **look)
    for axes in (left, right):
        axes.set_xticks(range(len(lags)), lags)
        axes.set_xlim(-.5, len(lags) - .5)
    right.axhline(0, color=GREY, linewidth=1)
    label(left, f"After {BATCHES} batches (large: means)", "lag k, rollout batches",
          "held-out pass@1")
    left.legend(loc="lower left", fontsize=8)
    label(right, "Lost by the lag", "lag k, rollout batches", "pass@1, k = 0 minus k")
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw)
