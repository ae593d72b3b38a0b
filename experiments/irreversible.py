"""Does a collapsed run come back from an earlier checkpoint, at half the rate?

Claim: once GRPO has collapsed, training cannot be saved, not even by going back to an earlier
checkpoint and tuning its hyper-parameters (GSPO 2507.18071, §1 and §3). Here GRPO collapses as in
moe_stability.py: rate 6e-4, constant, 16 mini-batches per rollout batch of 128 answers. From each
cold start 16 rollout batches; then 16 more at half the rate, once from the checkpoint before the
batch with the highest pass rate, once from the end.
Written down beforehand, held-out pass@1 after going back, minus that of the start of the whole:

  confirmed   the interval lies below 0: what was learnt stays lost
  refuted     it lies above 0: the run came back
  counted     (added after measuring) runs that collapsed as moe_stability.py defines it, a pass
              rate below half of its best for 4 batches running, and whose best checkpoint had
              learned something: a pass rate at least 0.1 above the start

and the same for going on from the end, which stands beside it. Without these conditions six of
eight "best checkpoints" came after one rollout batch, so that going back was starting again at a
milder rate, which tests nothing. Too few runs are left: the question needs runs that learn first
and collapse later.
"""

import math

from shared import claim, drift
from moe_stability import collapsed_at
from tools.style import BLACK, GREY, ORANGE, label, panels

ROW = dict(claim="A collapse cannot be undone, not even from an earlier checkpoint",
           source="GSPO §1, §3", reported="no figure",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 16 + 16 rollout batches "
                  "of 128 answers, rate 6e-4 then 3e-4, 16 mini-batches")
GAINED = .1
COLLAPSES = (*drift.GRPO, "--prompts_per_step", "16", "--steps_per_generation", "16",
             "--lr_scheduler_type", "constant_with_warmup")
ARMS = {"back": "back to the best checkpoint, half the rate",
        "on": "on from the end, half the rate"}


def measure(seeds, quick):
    steps = 3 if quick else 16
    data = dict(first=[], back=[], on=[], best=[])
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
    """(records, summary, last checkpoint) of one run. The folder has a short name of its own, as a
    name made of the flags would be too long."""
    folder = claim.RUNS / f"collapse-{steps}-{seed}-{name}"
    flags = [*COLLAPSES, "--learning_rate", f"{rate:g}"]
    flags += ["--model_name_or_path", str(start)] if start else []
    return *claim.trained(flags, seed, steps, folder), folder / "checkpoints" / f"step_{steps}"


def counted(data):
    """The indices of the runs that learned something and then collapsed."""
    return [i for i, (first, best) in enumerate(zip(data["first"], data["best"]))
            if collapsed_at(first["rates"]) and first["rates"][best] - first["before"] >= GAINED]


def gains(data, places):
    """Held-out pass@1 at the end minus that at the very start, as {arm: differences} for the runs
    at `places`."""
    return {name: [data[name][i]["after"] - data["first"][i]["before"] for i in places]
            for name in ARMS}


def judge(data):
    first = data["first"]
    everyone = range(len(data["first"]))
    collapsed = [i for i in everyone if collapsed_at(first[i]["rates"])]
    places = counted(data)
    whole = gains(data, everyone)
    lost = gains(data, collapsed)
    early = sum(best == 1 for best in data["best"])
    measured = (f"{len(collapsed)} of {len(first)} runs collapsed, "
                f"{len(places)} of them from a checkpoint that had learned something; in {early} "
                f"the best checkpoint is the one after the first rollout batch; all runs, against "
                f"their start: back at half the rate {claim.number(whole['back'], '{:+.2f}')}, on "
                f"from the end {claim.number(whole['on'], '{:+.2f}')}; of the collapsed ones "
                f"{sum(x < 0 for x in lost['on'])} stayed below their start from the end")
    if not places:
        return measured, "0 runs learned and then collapsed", claim.undecided(0)
    found = gains(data, places)["back"]
    answer = claim.verdict(found, held=(-math.inf, 0), refuted=(0, math.inf))
    number = (f"{len(places)} of {len(first)} runs learned and then collapsed; they came back to "
              + " and ".join(f"{x:+.2f}" for x in found))
    return measured, number, answer


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
