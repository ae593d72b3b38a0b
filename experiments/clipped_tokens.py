"""Does GSPO clip a hundred times more tokens than GRPO?

Claim: with bands (3e-4, 4e-4) and (0.2, 0.27), GSPO clips two orders of magnitude more tokens and trains better (GSPO 2507.18071, §5.1;
its figure reads 15 % against 0.13 %). "Rethinking GSPO" reports 9.5 % of answers, 4.9 % low and 4.6 % high. Written down beforehand: at
every rollout batch of a GSPO run, GRPO makes its own four updates from the same policy, optimiser state and mini-batches, and

  confirmed   the shares of clipped loss tokens, averaged over batches and mini-batches, differ by a factor of 30 to 300
  refuted     the factor is below 30, or above 300

Shares count all loss tokens, as in the papers, and also only those of answers with A ≠ 0: the rest have no gradient to remove. The first
mini-batch is on-policy and clips nothing, so a mean over four hides how much the last one clips.
"""

import claim
import drift
from plumbing.style import BLUE, ORANGE, band, label, panels


def measure(seeds, quick):
    batches, data = 4 if quick else 12, {name: {key: [] for key in ("low", "high", "signal", "steps", "minibatches")} for name in ("gspo", "grpo")}
    for seed in seeds:
        records = drift.journey(seed, batches)
        for name, rows in data.items():
            share = lambda stat: claim.mean([m[stat] for r in records for m in r[name]])
            rows["low"].append(share("clip_low"))
            rows["high"].append(share("clip_high"))
            rows["signal"].append(share("clip_signal"))
            rows["steps"].append([claim.mean([m["clip_low"] + m["clip_high"] for m in r[name]]) for r in records])
            rows["minibatches"].append([claim.mean([r[name][k]["clip_low"] + r[name][k]["clip_high"] for r in records]) for k in range(4)])
    total = {name: [a + b for a, b in zip(rows["low"], rows["high"])] for name, rows in data.items()}
    factors = [a / max(b, 1e-9) for a, b in zip(total["gspo"], total["grpo"])]
    factor, m = claim.mean(total["gspo"]) / max(claim.mean(total["grpo"]), 1e-9), lambda name, key: claim.mean(data[name][key])
    measured = (f"GSPO {claim.mean(total['gspo']):.1%} (low {m('gspo', 'low'):.1%}, high {m('gspo', 'high'):.1%}) against GRPO {claim.mean(total['grpo']):.2%} "
                f"(low {m('grpo', 'low'):.2%}, high {m('grpo', 'high'):.2%}): {factor:.0f} times; of answers with A ≠ 0 {m('gspo', 'signal'):.1%} against "
                f"{m('grpo', 'signal'):.2%}; in the 4th mini-batch {claim.mean([r[3] for r in data['gspo']['minibatches']]):.0%} against "
                f"{claim.mean([r[3] for r in data['grpo']['minibatches']]):.1%}")
    return measured, claim.span(factors, "{:.0f}") + " (factor)", claim.HELD if 30 <= factor <= 300 else claim.NOT_HELD, data


def draw(data):
    figure, (left, right) = panels(1, 2, sharey=True)
    for name, colour, marker in (("gspo", BLUE, "o"), ("grpo", ORANGE, "s")):
        steps, minis = data[name]["steps"], data[name]["minibatches"]
        positive = lambda rows: [[max(x, 1e-5) for x in row] for row in rows]
        band(left, range(1, len(steps[0]) + 1), positive(steps), name.upper(), colour, marker)
        band(right, (2, 3, 4), [row[1:] for row in positive(minis)], name.upper(), colour, marker)
    for axes, x in ((left, "rollout batch"), (right, "mini-batch of a rollout batch")):
        axes.set_yscale("log")
        label(axes, "Clipped loss tokens" if axes is left else "The first clips nothing (on-policy)", x, "share" if axes is left else "")
        axes.axhline(.15, color=BLUE, linestyle=":", linewidth=1)
        axes.axhline(.0013, color=ORANGE, linestyle=":", linewidth=1)
    right.set_xticks([2, 3, 4])
    left.text(4, .09, "the paper's figure: 15 %", color=BLUE, fontsize=8)
    left.text(1.6, 9e-6, "(at the bottom: none)", color=ORANGE, fontsize=8) if any(x == 0 for row in data["grpo"]["steps"] for x in row) else None
    left.text(len(steps[0]) - .2, .0016, "0.13 %", color=ORANGE, fontsize=8, ha="right")
    right.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    claim.main(__file__, "GSPO clips about a hundred times more tokens than GRPO", "GSPO §5.1 and its figure 2", "15 % against 0.13 %", measure, draw)
