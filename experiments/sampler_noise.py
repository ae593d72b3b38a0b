"""A dose of sampler noise and its responses: when may the sampler's log-probs be trusted?

Claim: sequence likelihoods tolerate precision differences better than token likelihoods, so GSPO
may use the inference engine's log-probs and save recomputing them (GSPO 2507.18071, §5.4). Newer
accounts make this gap the cause of MoE collapse (2510.11370, 2512.01374, 2510.18855). Here the
sampling copy's weights are rounded row by row to b bits, router and head included. The dose is
measured: KL(sampler || trainer) per token and the share of chosen experts that differ, on each cold
start's first batch.

Setting: train.py's default task and policy (MoE, or a dense control of equal active size), rate
4e-4, 4 mini-batches, 16 rollout batches. Differences are paired by cold start (0 to 7), with 95 % t
intervals. "Lost" is held-out pass@1 at the end, recomputed minus trusted. Written down beforehand,
per dose:

  tolerates   the loss is below 0.05: the interval's upper end is
  suffers     it is above 0.05: the interval's lower end is

  confirmed   GSPO tolerates every dose at which GRPO suffers, and there is such a dose
  refuted     GSPO suffers at every dose at which GRPO suffers, or GRPO suffers at none while GSPO
              suffers at one
  depends on the dose   GSPO tolerates at one dose and suffers at another
  undecided   otherwise, and with fewer than 8 cold starts

Beside it, by the same intervals: trusted GSPO minus trusted GRPO (does the sequence ratio
protect?), recomputing and recomputing with token weights in [0, 2] (TIS) as remedies, and the share
of routes in it: replaying the sampler's routes (R3) or the trainer's (R2) in the updates, and a
dense policy. Routes are a part of it if R3 gains over recomputing and the MoE loses more than the
dense policy. Whether a bfloat16 sampler harms at all: GSPO recomputed, against a float32 one.
"""

import math
import time

import torch

from shared import claim, drift, maps
from plumbing.model.actor import Actor
from plumbing.engines.samplers import sampling_copy
from tools.style import BLUE, GREY, ORANGE, label, panels
from routes import flip_rate

ROW = dict(claim="GSPO tolerates the sampler's numerics, so old log-probs need no recomputation",
           source="GSPO §5.4", reported="no figure",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 16 rollout batches, "
                  "rate 4e-4")
GRPO = " ".join(drift.GRPO)
GSPO = "--algorithm gspo"
WAYS = {"_trusted": "--old_logp sampler", "": "", "_tis": " ".join(drift.TIS),
        "_r3": "--routing_replay rollout", "_r2": " ".join(drift.REPLAY)}
ARMS = {f"{name}{way}": f"{algorithm} {flags}" for way, flags in WAYS.items()
        for name, algorithm in (("grpo", GRPO), ("gspo", GSPO))}
DOSES = ("int3", "int4", "int5", "int6", "float8", "bfloat16", "float32")
SEEDS = range(8)
BATCHES = 16
LOSS = .05
FILE = maps.runs_of("sampler_noise")


def grid(full):
    """The cells to run, the coarsest samplers first and seed by seed, so that complete rows remain
    wherever the experiment is stopped."""
    def cells(arms, doses, seeds=SEEDS, **more):
        return [maps.cell(arm, seed, bits=bits, batches=BATCHES, **more)
                for seed in seeds for bits in doses for arm in arms]
    main = ("grpo_trusted", "gspo_trusted", "grpo", "gspo")
    for seed in SEEDS:
        yield from cells((*main, "grpo_tis"), ("int3",), [seed])
        yield from cells(main, ("int4",), [seed])
        yield from cells(("dose",), DOSES[:-1], [seed])
    yield from cells(("grpo_r3", "gspo_r3"), ("int4",))
    yield from cells(("grpo_r3", "gspo_r3", "grpo_r2"), ("int3",))
    yield from cells(main, ("int3",), policy="dense")
    yield from cells(("dose",), DOSES[:-1], policy="dense")
    yield from cells(main[:2], ("int5",))
    yield from cells(main, ("bfloat16",))                    # the dose that people have
    yield from cells(("gspo",), ("float32",))                # and none
    if full:
        yield from cells([a for a in ARMS if a != "grpo_trusted"], DOSES)
        yield from cells(main, DOSES, policy="dense")


def make(c):
    return measure_dose(c) if c["arm"] == "dose" else maps.one_run(c, ARMS[c["arm"]])


def measure_dose(c):
    """How much the log-probs and the experts of the sampler differ from the trainer's, on the first
    rollout batch of a cold start."""
    began = time.perf_counter()
    shape = maps.POLICIES[c["policy"]].split()
    lab = drift.Lab(c["seed"], "--sampler_dtype", c["bits"], *shape)
    batch = lab.rollout(1, routes=True)
    rollout = batch.rollout
    mask = batch.rollout.mask                                                        # [B, T]
    error = (batch.old_logp - rollout.sampler_logp)[mask]                            # [loss tokens]
    copied = Actor(sampling_copy(lab.policy, c["bits"]).float(), lab.args)
    theirs = lab.learner.score(rollout, scorer=copied).routes
    indices = [r.indices for r in (batch.routes, theirs)]                            # [L, B, T, K]
    flips = flip_rate(*indices, mask).mean().item() if c["policy"] == "moe" else None
    kl = (torch.expm1(error) - error).mean().item()          # the estimator that is never negative
    return c | {"after": kl, "kl": kl, "sigma_w": error.std().item(), "flips": flips,
                "seconds": time.perf_counter() - began}


# -------------------------------------------------------------------------------- what was found

def outcomes(runs, arm, bits, policy="moe"):
    """Held-out pass@1 at the end of each run, as {seed: pass@1}."""
    return maps.values(runs, arm=arm, bits=bits, policy=policy, batches=BATCHES)


def whole(values):
    """The values of an arm, or [] if some of its cold starts are missing, so that no arm is ranked
    on a few of them."""
    return values if len(values) >= claim.LEAST else []


def lost(runs, name, bits, policy="moe"):
    """What trusting the sampler costs: pass@1 with recomputed log-probs minus that with trusted
    ones, paired by cold start."""
    return claim.differences(outcomes(runs, name, bits, policy),
                       outcomes(runs, f"{name}_trusted", bits, policy))


def judge(runs):
    doses = [bits for bits in DOSES if lost(runs, "grpo", bits) and lost(runs, "gspo", bits)]
    answers = {name: {bits: claim.verdict(lost(runs, name, bits), held=(-math.inf, LOSS))
                      for bits in doses} for name in ("grpo", "gspo")}
    seeds = max(min(len(lost(runs, name, bits)) for name in ("grpo", "gspo")) for bits in doses)
    parts = []
    for bits in doses:
        trusted = [outcomes(runs, f"{name}_trusted", bits) for name in ("gspo", "grpo")]
        protects = claim.differences(*trusted)
        parts.append(f"{bits}: lost by trusting GRPO {number(lost(runs, 'grpo', bits))}, GSPO "
                     f"{number(lost(runs, 'gspo', bits))}; trusted GSPO minus trusted GRPO "
                     f"{number(protects)}")
    parts += [text for bits in doses for text in remedies(runs, bits)]
    halved = whole(claim.differences(*(outcomes(runs, "gspo", bits)
                                       for bits in ("bfloat16", "float32"))))
    if halved:
        parts.append(f"GSPO recomputed, bfloat16 sampler minus a float32 one {number(halved)}")
    return "; ".join(parts), headline(runs, doses), decide(*answers.values(), seeds), seeds


def decide(grpo, gspo, seeds):
    """The verdict from the answers of GRPO and GSPO, {dose: HELD (tolerates it), REFUTED (suffers)
    or undecided}."""
    suffers = [bits for bits, answer in grpo.items() if answer == claim.REFUTED]
    if suffers and all(gspo[bits] == claim.HELD for bits in suffers):
        return claim.HELD
    if claim.REFUTED in gspo.values() and all(gspo[bits] == claim.REFUTED for bits in suffers):
        return claim.REFUTED
    if {claim.HELD, claim.REFUTED} <= set(gspo.values()):
        return claim.depends("the dose")
    return claim.undecided(seeds)


def headline(runs, doses):
    """What trusting the sampler costs GSPO at the finest dose, and at the dose where it costs
    most."""
    worst = max(doses, key=lambda bits: claim.mean(lost(runs, "gspo", bits)))
    costs = [f"{claim.number(lost(runs, 'gspo', bits), '{:+.2f}')} ({bits})"
             for bits in dict.fromkeys((doses[-1], worst))]
    return f"trusting costs GSPO {', '.join(costs)} pass@1"


def remedies(runs, bits):
    """What importance weights and replayed routes gain over recomputing alone, and what the dense
    control shows."""
    names = {"tis": "TIS", "r3": "R3", "r2": "R2"}
    for arm in ("grpo", "gspo"):
        for way, name in names.items():
            ends = [outcomes(runs, name, bits) for name in (f"{arm}_{way}", arm)]
            gain = whole(claim.differences(*ends))
            if gain:
                yield f"{bits}: {arm.upper()} recomputed + {name} minus recomputed {number(gain)}"
        dense = lost(runs, arm, bits, "dense")
        if dense:
            yield f"{bits}, dense: lost by trusting {arm.upper()} {number(dense)}"


def takeaway(runs):
    """One sentence: which arm does best at the coarsest dose, on average and on its worst cold
    start."""
    bits = next(bits for bits in DOSES if outcomes(runs, "grpo", bits))
    found = {name: whole(outcomes(runs, arm, bits).values()) for arm, (name, *_) in LOOK.items()}
    found = {name: values for name, values in found.items() if values}
    ranked = sorted(found, key=lambda name: -claim.mean(found[name]))
    return (f"With the sampler's weights at {bits}, mean and worst cold start: "
            + ", ".join(f"{name} {claim.mean(found[name]):.2f} and {min(found[name]):.2f}"
                        for name in ranked) + ".")


def number(values):
    return claim.counted(values, "{:+.2f}")


LOOK = {"grpo_trusted": ("GRPO, trusted", ORANGE, "o", ":"),
        "grpo": ("GRPO, recomputed", ORANGE, "s", "-"),
        "grpo_tis": ("GRPO, recomputed + TIS", ORANGE, "^", "--"),
        "gspo_trusted": ("GSPO, trusted", BLUE, "o", ":"),
        "gspo": ("GSPO, recomputed", BLUE, "s", "-"),
        "grpo_r3": ("GRPO, recomputed + R3", ORANGE, "D", "-."),
        "gspo_r3": ("GSPO, recomputed + R3", BLUE, "D", "-.")}


def draw(runs):
    doses = [bits for bits in reversed(DOSES) if any(outcomes(runs, arm, bits) for arm in LOOK)]
    figure, (left, right) = panels(1, 2, height=4.4, width=9.4)
    for i, (arm, (name, colour, marker, line)) in enumerate(LOOK.items()):
        face = "white" if "trusted" in arm else colour
        look = dict(marker=marker, color=colour, markerfacecolor=face)
        shown = [(x, whole(outcomes(runs, arm, bits).values())) for x, bits in enumerate(doses)]
        shown = [(x + .07 * (i - 3), list(found)) for x, found in shown if found]
        for x, found in shown:
            left.plot([x] * len(found), found, linestyle="", alpha=.5, markersize=4, **look)
        left.plot([x for x, _ in shown], [claim.mean(found) for _, found in shown], line,
                  markersize=8, label=name, **look)
    left.set_xticks(range(len(doses)), [tick(runs, bits) for bits in doses], fontsize=8)
    left.set_xlim(-.4, len(doses) - .6)
    losses(right, runs, doses)
    label(left, f"After {BATCHES} batches (large: means)", "", "held-out pass@1")
    left.legend(loc="lower left", fontsize=7.5)
    left.set_ylim(0, 1)
    before = claim.mean(maps.values(runs, "before", policy="moe").values())
    left.axhline(before, color=GREY, linewidth=1)
    left.text(len(doses) - .7, before + .01, "cold start", fontsize=8, color=GREY, ha="right")
    return figure


def losses(axes, runs, doses):
    """Draw what trusting costs against the measured dose, one point per cold start and dose."""
    for name, colour, marker in (("grpo", ORANGE, "s"), ("gspo", BLUE, "o")):
        points = []
        for bits in doses:
            kl = maps.values(runs, "kl", arm="dose", bits=bits, policy="moe")
            good, bad = (outcomes(runs, arm, bits) for arm in (name, f"{name}_trusted"))
            both = sorted(kl.keys() & good.keys() & bad.keys())
            points += [(kl[seed], good[seed] - bad[seed]) for seed in both]
        axes.plot(*zip(*points), marker, color=colour, markersize=5, label=name.upper())
    axes.axhline(LOSS, color=GREY, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    label(axes, "Lost by trusting the sampler", "KL(sampler || trainer), first batch, nats a token",
          "pass@1, recomputed - trusted")
    axes.legend(loc="upper left", fontsize=8)


def tick(runs, bits):
    """The label of a dose: its name and, where it was measured, the share of chosen experts that
    differ."""
    flips = maps.values(runs, "flips", arm="dose", bits=bits, policy="moe")
    return f"{bits}\n{claim.mean(flips.values()):.0%} of experts" if flips else bits


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw)
