"""Who learns faster at equal budget? A first look at everyone.

Claim: GSPO trains more efficiently than GRPO, to higher rewards at the same compute (GSPO
2507.18071, §5.1, GRPO with routing replay there). Here the whole family starts from the same cold
starts, with each algorithm's published defaults, one learning rate (the default run's 4e-4), and 10
rollout batches of 256 answers, a fifth of that run. Written down beforehand, held-out pass@1 at the
end, paired over cold starts, GSPO minus GRPO (band 0.2, 0.27):

  confirmed   the interval lies above 0
  refuted     it lies below 0, or within ±0.03 of 0

No algorithm was tuned and the learning rate is shared, so this is one point of stability_map.py's
map, and a ranking of the rest would be worth little. GSPO-token with equal advantages is GSPO,
SRPO's second stage brings longer sums, and DAPO samples until every group of its batch is mixed.
All but these two train on the first three seeds: they are shown to learn, no more. Seconds per
batch are in benchmarks/scaling.py's table. It counts as a table, not as a claim of its own:
stability_map.py judges the same comparison, on some of the same cold starts.
"""

import os
import sys

from shared import claim, drift
from tools.style import BLUE, GREY, ORANGE, band, label, panels

ROW = dict(claim="GSPO learns faster than GRPO at equal budget and one shared learning rate",
           source="GSPO §5.1", reported="higher reward at the same compute (curves only)")
GSPO = "GSPO"
GRPO = "GRPO"
FAMILY = {GSPO: ["gspo"], GRPO: list(drift.GRPO[1:]),
          "GRPO + replay": [*drift.GRPO[1:], *drift.REPLAY], "GMPO": ["gmpo"], "RSPO": ["rspo"],
          "DAPO": ["dapo"], "Dr. GRPO": ["dr_grpo"], "CISPO": ["cispo"], "SAPO": ["sapo"],
          "PPO": ["ppo"], "REINFORCE": ["reinforce", "--steps_per_generation", "4"],
          "RLOO": ["rloo", "--steps_per_generation", "4"],
          "REINFORCE++": ["reinforce_plus_plus"], "LUSPO": ["luspo"], "VESPO": ["vespo"],
          "SRPO": ["srpo", "--stage2_step", "5"], "sequence IS": ["sequence_is"]}
LATER = {"DPPO": "dppo", "DPPO, KL": "dppo_kl", "MaxRL": "maxrl", "ScaleRL": "scalerl",
         "MiniRL": "minirl", "IPO": "ipo", "rollout IS": "rollout_is", "IcePop": "icepop",
         "DRO": "dro", "REINFORCE, one step": "reinforce", "RLOO, one step": "rloo"}


def measure(seeds, quick):
    steps, names = (4, [GSPO, GRPO]) if quick else (10, list(FAMILY))
    data = dict(steps=steps, curves={name: [] for name in names},
                after={name: [] for name in names}, before=[], later={})
    run = lambda name, seed: claim.trained(["--algorithm", *FAMILY[name]], seed, steps)
    for seed in seeds:
        for name in names if seed in seeds[:3] else (GSPO, GRPO):
            records, summary = run(name, seed)
            data["curves"][name].append([r["pass_rate"] for r in records])
            data["after"][name].append(summary["pass_at_1_after"])
        data["before"].append(summary["pass_at_1_before"])
    for name in [] if quick else LATER:
        data["later"][name] = later(name, steps, seeds[:3])
    return data


def later(name, steps, seeds=range(3)):
    """Held-out pass@1 at the end, one value per seed, of an algorithm that was added after the
    claim had been judged."""
    found = [claim.trained(["--algorithm", LATER[name]], seed, steps) for seed in seeds]
    return [summary["pass_at_1_after"] for _, summary in found]


def add_later():
    """`--later`: train the algorithms of LATER that are missing in the result, and draw its figure
    again."""
    os.chdir(claim.ROOT)
    found = claim.read_result(claim.places("family_rewards", False)[0])
    data = found["data"]
    for name in LATER:
        if name not in data["later"]:
            data["later"][name] = claim.rounded(later(name, data["steps"]))
    claim.write("family_rewards", ROW, judge(data), found["seeds"], found["seconds"], data, draw)


def judge(data):
    after = data["after"]
    gains = [a - b for a, b in zip(after[GSPO], after[GRPO])]
    answer = claim.verdict(gains, held=(0, 1), refuted=(-1, 0))
    if claim.verdict(gains, held=(-.03, .03)) == claim.HELD:
        answer = claim.REFUTED
    ranked = sorted(after, key=lambda name: -claim.mean(after[name]))
    shown = ", ".join(f"{name} {claim.mean(after[name]):.3f} ({len(after[name])})"
                      for name in ranked)
    before = claim.mean(data["before"])
    measured = f"after {data['steps']} batches at 4e-4, from {before:.3f}: {shown}"
    return measured, claim.number(gains, "{:+.3f}", "pass@1, GSPO minus GRPO"), answer


def draw(data):
    figure, (learning, end) = panels(1, 2, height=5.4, width=9)
    batches = range(1, data["steps"] + 1)
    for name, curves in data["curves"].items():
        if name not in (GSPO, GRPO, "DAPO"):                 # DAPO's batches: mixed groups only
            means = [claim.mean(column) for column in zip(*curves)]
            learning.plot(batches, means, color=GREY, alpha=.4, linewidth=.8)
    for name, colour, marker, line in ((GRPO, ORANGE, "s", "--"), (GSPO, BLUE, "o", "-")):
        band(learning, batches, data["curves"][name], name, colour, marker, line)
    label(learning, "Pass rate of rollouts; the others in grey", "rollout batch of 256 answers", "")
    learning.legend(loc="lower right")
    held_out(end, data)
    return figure


def held_out(axes, data):
    """Draw every cold start of every algorithm, with mean and interval."""
    after = data["after"] | data["later"]
    order = sorted(after, key=lambda name: claim.mean(after[name]))
    for place, name in enumerate(order):
        middle, low, high = claim.interval(after[name])
        axes.plot([max(low, 0), min(high, 1)], [place, place], color=GREY, linewidth=1.5)
        axes.plot(after[name], [place] * len(after[name]), ".", color=GREY)
        colour = BLUE if name == GSPO else ORANGE if name == GRPO else "black"
        axes.plot(middle, place, "o", color=colour)
    before = claim.mean(data["before"])
    axes.axvline(before, color=GREY, linestyle=":")
    axes.text(before + .01, 0, "cold start", va="center", fontsize=8, color=GREY)
    axes.set_yticks(range(len(order)), order, fontsize=8.5)
    axes.set_xlim(.45, 1.0)
    label(axes, f"Held out after {data['steps']} batches, 95 % intervals", "pass@1", "")


if __name__ == "__main__":
    if "--later" in sys.argv and len(sys.argv) == 2:
        sys.exit(add_later())
    claim.main(__file__, ROW, measure, judge, draw)
