"""Who learns faster at equal budget, against steps and against the clock? A first look at everyone.

Claim: GSPO trains more efficiently than GRPO, to higher rewards at the same compute (GSPO
2507.18071, §5.1, GRPO with routing replay there). Here the whole family starts from the same cold
starts, with each algorithm's published defaults, one learning rate (the default run's 4e-4), and 10
rollout batches of 256 answers, a fifth of that run. Written down beforehand, held-out pass@1 at the
end, paired over cold starts, GSPO minus GRPO (band 0.2, 0.27):

  confirmed   the interval lies above 0
  refuted     it lies below 0, or within ±0.03 of 0

No algorithm was tuned and the learning rate is shared, so this is one point of stability_map.py's
map, and a ranking of the rest would be worth little. GSPO-token with equal advantages is GSPO, and
SRPO's second stage brings longer sums.
"""

import claim
import drift
from plumbing.style import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, band, label, panels

ROW = dict(claim="GSPO learns faster than GRPO at equal budget and one shared learning rate",
           source="GSPO §5.1", reported="higher reward at the same compute (curves only)")
GSPO, GRPO = "GSPO", "GRPO"
FAMILY = {GSPO: ["gspo"], GRPO: list(drift.GRPO[1:]),
          "GRPO + replay": [*drift.GRPO[1:], *drift.REPLAY], "GMPO": ["gmpo"], "RSPO": ["rspo"],
          "DAPO": ["dapo"], "Dr. GRPO": ["dr_grpo"], "CISPO": ["cispo"], "SAPO": ["sapo"],
          "PPO": ["ppo"], "REINFORCE": ["reinforce"], "RLOO": ["rloo"],
          "REINFORCE++": ["reinforce_plus_plus"], "LUSPO": ["luspo"], "VESPO": ["vespo"],
          "SRPO": ["srpo", "--stage2_step", "5"], "sequence IS": ["sequence_is"]}
SECONDS = ("seconds_rollout", "seconds_logp", "seconds_update")


def measure(seeds, quick):
    steps, names = (4, [GSPO, GRPO]) if quick else (10, list(FAMILY))
    data = dict(steps=steps, curves={name: [] for name in names}, seconds={},
                after={name: [] for name in names}, before=[])
    run = lambda name, seed: claim.trained(["--algorithm", *FAMILY[name]], seed, steps)
    for seed, name in [(s, n) for s in seeds for n in (GSPO, GRPO)]:     # the claim's two first
        run(name, seed)
    for seed in seeds:
        for name in names:
            records, summary = run(name, seed)
            data["curves"][name].append([r["pass_rate"] for r in records])
            data["after"][name].append(summary["pass_at_1_after"])
        data["before"].append(summary["pass_at_1_before"])
    for name in names:                                       # timed one after the other
        flags = ["--algorithm", *FAMILY[name], "--eval_samples", "0"]
        records, _ = claim.trained(flags, 0, 3)
        data["seconds"][name] = min(sum(r[k] for k in SECONDS) for r in records[1:])
    return data


def judge(data):
    after = data["after"]
    gains = [a - b for a, b in zip(after[GSPO], after[GRPO])]
    answer = claim.verdict(gains, held=(0, 1), refuted=(-1, 0))
    if claim.verdict(gains, held=(-.03, .03)) == claim.HELD:
        answer = claim.REFUTED
    ranked = sorted(after, key=lambda name: -claim.mean(after[name]))
    shown = ", ".join(f"{name} {claim.mean(after[name]):.3f}" for name in ranked)
    before = claim.mean(data["before"])
    measured = f"after {data['steps']} batches at 4e-4, from {before:.3f}: {shown}"
    return measured, claim.number(gains, "{:+.3f}", "pass@1, GSPO minus GRPO"), answer


def draw(data):
    heights = dict(height_ratios=[1, 1.5])
    figure, axes = panels(2, 2, height=7.6, width=9, gridspec_kw=heights)
    whole = axes[1, 0].get_gridspec()
    for place in axes[1]:
        place.remove()
    bars, batches = figure.add_subplot(whole[1, :]), range(1, data["steps"] + 1)
    for name, colour, marker, line in (
            (GSPO, BLUE, "o", "-"), (GRPO, ORANGE, "s", "--"), ("GMPO", GREEN, "D", "-."),
            ("DAPO", RED, "^", ":"), ("PPO", COLOURS[4], "v", "--")):
        curves = data["curves"].get(name)
        if curves:
            band(axes[0, 0], batches, curves, name, colour, marker, line)
        if curves and name in data["seconds"]:
            clock = [n * data["seconds"][name] for n in batches]
            band(axes[0, 1], clock, curves, name, colour, marker, line)
    label(axes[0, 0], f"Against steps ({len(data['before'])} cold starts)",
          "rollout batch of 256 answers", "pass rate of rollouts")
    label(axes[0, 1], "Against the clock (seconds per batch, timed in turn)",
          "seconds of the loop", "")
    axes[0, 0].legend(ncols=2, fontsize=8)
    if not data["seconds"]:
        axes[0, 1].set_title("Against the clock: not timed")
    held_out(bars, data)
    return figure


def held_out(axes, data):
    """Every algorithm's cold starts, mean and interval."""
    order = sorted(data["after"], key=lambda name: claim.mean(data["after"][name]))
    for place, name in enumerate(order):
        values = data["after"][name]
        middle, low, high = claim.interval(values)
        axes.plot([max(low, 0), min(high, 1)], [place, place], color=GREY, linewidth=1.5)
        axes.plot(values, [place] * len(values), ".", color=GREY)
        colour = BLUE if name == GSPO else ORANGE if name == GRPO else "black"
        axes.plot(middle, place, "o", color=colour)
        if name in data["seconds"]:
            axes.text(1.01, place, f"{data['seconds'][name]:.2f} s", va="center", fontsize=8)
    before = claim.mean(data["before"])
    axes.axvline(before, color=GREY, linestyle=":")
    axes.text(before - .01, 0, "cold start", ha="right", va="center", fontsize=8, color=GREY)
    axes.set_yticks(range(len(order)), order, fontsize=9)
    axes.set_xlim(.2, 1.0)
    seconds = "; right: seconds per batch" * bool(data["seconds"])
    label(axes, f"Held out after {data['steps']} batches, 95 % intervals{seconds}", "pass@1", "")


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw, seeds=3)
