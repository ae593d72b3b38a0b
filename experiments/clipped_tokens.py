"""Does GSPO clip a hundred times more tokens than GRPO?

Claim: with bands (3e-4, 4e-4) and (0.2, 0.27), GSPO clips two orders of magnitude more tokens (GSPO
2507.18071, §5.1; its figure reads 15 % against 0.13 %; that it trains better all the same is
stability_map.py's question). "Rethinking GSPO" reports 9.5 % of answers, 4.9 % low and 4.6 % high.
Written down beforehand: at every rollout batch of a GSPO run, GRPO makes its own four updates from
the same policy, optimizer state and mini-batches, and, as a geometric mean over cold starts,

  confirmed   the shares of clipped loss tokens, averaged over batches and mini-batches, differ by a
              factor of 30 to 300
  refuted     the factor is below 30, or above 300

Shares count all loss tokens, as in the papers, and also only those of answers with A ≠ 0: the rest
have no gradient to remove. The first mini-batch is on-policy and clips nothing, so a mean over four
hides how much the last one clips.
"""

import math

from shared import claim, drift
from tools.style import BLUE, ORANGE, band, label, panels

ROW = dict(claim="GSPO clips about a hundred times more tokens than GRPO",
           source="GSPO §5.1 and its figure 2", reported="15 % against 0.13 %",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 12 rollout batches")
KEYS = ("low", "high", "signal", "steps", "minibatches")


def measure(seeds, quick):
    batches = 4 if quick else 12
    data = {name: {key: [] for key in KEYS} for name in ("gspo", "grpo")}
    for seed in seeds:
        records = drift.journey(seed, batches)
        for name, rows in data.items():
            share = lambda stat: claim.mean([m[stat] for r in records for m in r[name]])
            rows["low"].append(share("clip_low"))
            rows["high"].append(share("clip_high"))
            rows["signal"].append(share("clip_signal"))
            clipped = [[m["clip_low"] + m["clip_high"] for m in r[name]] for r in records]
            rows["steps"].append([claim.mean(batch) for batch in clipped])
            rows["minibatches"].append([claim.mean(column) for column in zip(*clipped)])
    return data


def judge(data):
    total = {name: [a + b for a, b in zip(rows["low"], rows["high"])]
             for name, rows in data.items()}
    factors = [a / max(b, 1e-9) for a, b in zip(total["gspo"], total["grpo"])]
    share = lambda name, key, form: format(claim.mean(data[name][key]), form)
    last = {name: claim.mean([r[3] for r in rows["minibatches"]]) for name, rows in data.items()}
    gspo, grpo = (claim.mean(total[name]) for name in ("gspo", "grpo"))
    measured = (f"GSPO {gspo:.1%} (low {share('gspo', 'low', '.1%')}, high "
                f"{share('gspo', 'high', '.1%')}) against GRPO {grpo:.2%} (low "
                f"{share('grpo', 'low', '.2%')}, high {share('grpo', 'high', '.2%')}); of answers "
                f"with A ≠ 0 {share('gspo', 'signal', '.1%')} against "
                f"{share('grpo', 'signal', '.2%')}; in the 4th mini-batch {last['gspo']:.0%} "
                f"against {last['grpo']:.1%}")
    answer = claim.verdict(list(map(math.log, factors)), held=(math.log(30), math.log(300)))
    return measured, claim.log_number(factors, "{:.0f}", "times GRPO's clipped share"), answer


def draw(data):
    figure, (left, right) = panels(1, 2, sharey=True)
    for name, colour, marker in (("gspo", BLUE, "o"), ("grpo", ORANGE, "s")):
        steps = data[name]["steps"]
        minis = data[name]["minibatches"]
        band(left, range(1, len(steps[0]) + 1), steps, name.upper(), colour, marker)
        band(right, (2, 3, 4), [row[1:] for row in minis], name.upper(), colour, marker)
    for axes, x in ((left, "rollout batch"), (right, "mini-batch of a rollout batch")):
        axes.set_yscale("symlog", linthresh=1e-4, linscale=.5)   # linear below: 0 is drawn
        axes.set_ylim(bottom=-2e-5)
        title = "Clipped loss tokens" if axes is left else "The first clips nothing (on-policy)"
        label(axes, title, x, "share" if axes is left else "")
        axes.axhline(.15, color=BLUE, linestyle=":", linewidth=1)
        axes.axhline(.0013, color=ORANGE, linestyle=":", linewidth=1)
    right.set_xticks([2, 3, 4])
    left.text(4, .09, "the paper's figure: 15 %", color=BLUE, fontsize=8)
    left.text(len(steps[0]) - .2, .0016, "0.13 %", color=ORANGE, fontsize=8, ha="right")
    right.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
