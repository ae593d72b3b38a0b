"""Who learns faster at equal budget, against steps and against the clock?

Claim: GSPO trains more efficiently than GRPO, to higher rewards at the same compute (GSPO 2507.18071, §5.1, GRPO with routing replay
there). Here the whole family starts from the same cold starts, with each algorithm's published defaults, one learning rate (the
default run's 4e-4), and 10 rollout batches of 256 answers, a fifth of that run. Written down beforehand:

  confirmed   GSPO's held-out pass@1 exceeds GRPO's (band 0.2, 0.27), and the 95 % interval of the paired difference over seeds is above 0
  refuted     the interval lies below 0, or within ±0.03 of 0
  otherwise   cannot be told at this size; so too with fewer than three seeds

No algorithm was tuned, the learning rate is shared, and 10 batches show early learning: a ranking of the rest would be worth little.
GSPO-token with equal advantages is GSPO, and SRPO's second stage brings longer sums.
"""

import claim
import drift
from plumbing.style import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, band, label, panels

GSPO, GRPO = "GSPO", "GRPO"
FAMILY = {GSPO: ["gspo"], GRPO: list(drift.GRPO[1:]), "GRPO + replay": [*drift.GRPO[1:], "--routing_replay", "old"], "GMPO": ["gmpo"], "RSPO": ["rspo"], "DAPO": ["dapo"],
          "Dr. GRPO": ["dr_grpo"], "CISPO": ["cispo"], "SAPO": ["sapo"], "PPO": ["ppo"], "REINFORCE": ["reinforce"], "RLOO": ["rloo"],
          "REINFORCE++": ["reinforce_plus_plus"], "LUSPO": ["luspo"], "VESPO": ["vespo"], "SRPO": ["srpo", "--stage2_step", "5"], "sequence IS": ["sequence_is"]}


def measure(seeds, quick):
    steps, names = (4, [GSPO, GRPO]) if quick else (10, list(FAMILY))
    data = dict(steps=steps, curves={name: [] for name in names}, seconds={}, after={name: [] for name in names}, before=[])
    for seed, name in [(s, n) for s in seeds for n in (GSPO, GRPO)]:                     # the claim's two first, should this be stopped
        claim.trained(["--algorithm", *FAMILY[name]], seed, steps)
    for seed in seeds:
        for name in names:
            records, summary = claim.trained(["--algorithm", *FAMILY[name]], seed, steps)
            data["curves"][name].append([r["pass_rate"] for r in records])
            data["after"][name].append(summary["pass_at_1_after"])
        data["before"].append(summary["pass_at_1_before"])
    for name in names:                                       # timed in turn, after each other: the machine is the same for all
        records, _ = claim.trained(["--algorithm", *FAMILY[name], "--eval_samples", "0"], 0, 3)
        data["seconds"][name] = min(sum(r[k] for k in ("seconds_rollout", "seconds_logp", "seconds_update")) for r in records[1:])
    return *judge(data, seeds), data


def judge(data, seeds):
    """(measured, spread, verdict). An algorithm with fewer seeds than the others says so in brackets."""
    after, count = data["after"], len(seeds)
    gains = [a - b for a, b in zip(after[GSPO], after[GRPO])]
    middle, low, high = claim.interval(gains)
    refuted = high < 0 or (low > -.03 and high < .03)
    verdict = claim.CANNOT if count < 3 else claim.HELD if low > 0 else claim.NOT_HELD if refuted else claim.CANNOT
    ranked = sorted(after, key=lambda name: -claim.mean(after[name]))
    measured = (f"GSPO minus GRPO {middle:+.3f} [{low:+.3f}, {high:+.3f}] after {data['steps']} batches, from {claim.mean(data['before']):.3f}; "
                + ", ".join(f"{name} {claim.mean(after[name]):.3f}" + (f" ({len(after[name])} of {count} seeds)" if len(after[name]) < count else "") for name in ranked))
    return measured, claim.span(gains, "{:+.3f}") + " (GSPO minus GRPO)", verdict


def draw(data):
    figure, axes = panels(2, 2, height=7.6, width=9, gridspec_kw=dict(height_ratios=[1, 1.5]))
    whole = axes[1, 0].get_gridspec()
    for place in axes[1]:
        place.remove()
    bars, batches = figure.add_subplot(whole[1, :]), range(1, data["steps"] + 1)
    for name, colour, marker, line in ((GSPO, BLUE, "o", "-"), (GRPO, ORANGE, "s", "--"), ("GMPO", GREEN, "D", "-."), ("DAPO", RED, "^", ":"), ("PPO", COLOURS[4], "v", "--")):
        if name in data["curves"]:
            band(axes[0, 0], batches, data["curves"][name], name, colour, marker, line)
        if name in data["curves"] and name in data["seconds"]:
            band(axes[0, 1], [n * data["seconds"][name] for n in batches], data["curves"][name], name, colour, marker, line)
    label(axes[0, 0], f"Against steps ({len(data['before'])} cold starts: mean, range)", "rollout batch of 256 answers", "pass rate of rollouts")
    label(axes[0, 1], "Against the clock (seconds per batch, timed in turn)", "seconds of the loop", "")
    axes[0, 0].legend(ncols=2, fontsize=8)
    if not data["seconds"]:
        axes[0, 1].text(.5, .5, "not timed", ha="center", transform=axes[0, 1].transAxes, color=GREY)
    order = sorted(data["after"], key=lambda name: claim.mean(data["after"][name]))
    for place, name in enumerate(order):
        middle, low, high = claim.interval(data["after"][name])
        bars.plot([max(low, 0), min(high, 1)], [place, place], color=GREY, linewidth=1.5)
        bars.plot(data["after"][name], [place] * len(data["after"][name]), ".", color=GREY)
        bars.plot(middle, place, "o", color=BLUE if name == GSPO else ORANGE if name == GRPO else "black")
        bars.text(1.01, place, f"{data['seconds'][name]:.2f} s" if name in data["seconds"] else "", va="center", fontsize=8)
    bars.axvline(claim.mean(data["before"]), color=GREY, linestyle=":")
    bars.text(claim.mean(data["before"]) - .01, 0, "cold start", ha="right", va="center", fontsize=8, color=GREY)
    bars.set_yticks(range(len(order)), order, fontsize=9)
    bars.set_xlim(.2, 1.0)
    label(bars, f"Held out after {data['steps']} batches (95 % intervals over seeds; a lone dot: one seed)" + "; right: seconds per batch" * bool(data["seconds"]), "pass@1", "")
    return figure


if __name__ == "__main__":
    claim.main(__file__, "GSPO learns faster than GRPO at equal budget", "GSPO §5.1", "higher reward at the same compute (curves only)", measure, draw)
