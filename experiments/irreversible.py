"""Does a collapsed run come back from an earlier checkpoint, at half the rate?

Claim: once GRPO has collapsed, training cannot be saved, not even by going back to an earlier
checkpoint and tuning its hyper-parameters (GSPO 2507.18071, §1 and §3). Here GRPO collapses as in
moe_stability.py: rate 6e-4, constant, 16 mini-batches per rollout batch of 128 answers. From each
cold start 16 rollout batches; then 16 more at half the rate, once from the checkpoint before the
batch with the highest pass rate, once from the end.
A run collapsed if it ends below its start, held-out pass@1; only those count. Written down
beforehand, held-out pass@1 after going back, minus that of the start of the whole:

  confirmed   the interval lies below 0: what was learnt stays lost
  refuted     it lies above 0: the run came back

and the same for going on from the end, which stands beside it.
"""

import math

from shared import claim
from shared import drift
from tools.style import BLACK, GREY, ORANGE, label, panels

ROW = dict(claim="A collapse cannot be undone, not even from an earlier checkpoint",
           source="GSPO §1, §3", reported="no figure")
COLLAPSES = (*drift.GRPO, "--prompts_per_step", "16", "--steps_per_generation", "16",
             "--lr_scheduler_type", "constant_with_warmup")
ARMS = {"back": "back to the best checkpoint, half the rate",
        "on": "on from the end, half the rate"}


def measure(seeds, quick):
    steps, data = 3 if quick else 16, dict(first=[], back=[], on=[], best=[])
    for seed in seeds:
        records, summary, end = run(seed, "first", steps, 6e-4)
        rates = [r["pass_rate"] for r in records]
        best = max(range(1, steps), key=lambda t: rates[t])
        again, _, checkpoint = run(seed, "best", best, 6e-4)
        if [r["pass_rate"] for r in again] != rates[:best]:
            raise ValueError(f"seed {seed}: a run of {best} batches is not the beginning of "
                             f"one of {steps}")
        data["best"].append(best)
        data["first"].append(dict(before=summary["pass_at_1_before"], rates=rates,
                                  after=summary["pass_at_1_after"]))
        for name, start in (("back", checkpoint), ("on", end)):
            records, summary, _ = run(seed, name, steps, 3e-4, start)
            data[name].append(dict(rates=[r["pass_rate"] for r in records],
                                   after=summary["pass_at_1_after"]))
    return data


def run(seed, name, steps, rate, start=None):
    """(records, summary, its last checkpoint) of one run; their flags would be too long a name."""
    folder = claim.RUNS / f"collapse-{steps}-{seed}-{name}"
    flags = [*COLLAPSES, "--learning_rate", f"{rate:g}"]
    flags += ["--model_name_or_path", str(start)] if start else []
    return *claim.trained(flags, seed, steps, folder), folder / "checkpoints" / f"step_{steps}"


def gains(data):
    """{arm: held-out pass@1 minus that of the start of the whole, of the runs that collapsed}"""
    return {name: [run["after"] - first["before"] for run, first in zip(data[name], data["first"])
                   if first["after"] < first["before"]] for name in ARMS}


def judge(data):
    found, first = gains(data), data["first"]
    collapsed = len(found["back"])
    measured = (f"{collapsed} of {len(first)} runs collapsed, from "
                f"{claim.mean(f['before'] for f in first):.2f} to "
                f"{claim.mean(f['after'] for f in first):.2f}")
    if not collapsed:
        return measured, "0 of these runs collapsed", claim.undecided(0)
    measured += f"; on from the end at half the rate {claim.number(found['on'], '{:+.2f}')}"
    answer = claim.verdict(found["back"], held=(-math.inf, 0), refuted=(0, math.inf))
    what = "pass@1 against the start, from the best checkpoint at half the rate"
    return measured, claim.number(found["back"], "{:+.2f}", what), answer


def draw(data):
    figure, axes = panels(1, 2, height=3.6, sharey=True)
    for place, (name, title) in zip(axes, ARMS.items()):
        for first, best, after in zip(data["first"], data["best"], data[name]):
            steps = len(first["rates"])
            place.plot(range(1, steps + 1), first["rates"], color=GREY, linewidth=.9)
            begin = best if name == "back" else steps
            place.plot(range(begin + 1, begin + 1 + len(after["rates"])), after["rates"],
                       color=ORANGE, linewidth=.9)
        place.axhline(claim.mean(f["before"] for f in data["first"]), color=BLACK, linestyle=":",
                      linewidth=1)
        place.set_ylim(0, 1)
        label(place, title, "rollout batch", "pass rate" if name == "back" else "")
    axes[0].plot([], [], color=GREY, label="GRPO at 6e-4")
    axes[0].plot([], [], color=ORANGE, label="then at 3e-4")
    axes[0].plot([], [], color=BLACK, linestyle=":", label="held out at the start")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
