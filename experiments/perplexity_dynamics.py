"""Does RL with GSPO lower the perplexity of the policy's own answers?

Claim: perplexity falls from 4.59 to 1.14 and cross-entropy from 0.698 to 0.128 nats over a GSPO run ("Rethinking GSPO", §5.4). The two
cannot describe the same thing: exp(0.698) = 2.01 and exp(0.128) = 1.14. A mean of exponentials is not the exponential of a mean, so both
are measured here. Written down beforehand, for a GSPO run from the cold start, on the answers it samples:

  confirmed   both averages are lower in the last rollout batch than in the first, for every seed
  refuted     one of them is not

RL sharpens what it samples; this is no evidence that "GSPO optimises perplexity": any objective that reinforces answers lowers it.
"""

import math

import claim
import drift
from plumbing.style import BLUE, ORANGE, band, label, panels


def measure(seeds, quick):
    data = {name: [] for name in ("mean_of_exp", "exp_of_mean", "exp_of_token_mean", "largest")}
    for seed in seeds:
        records = drift.journey(seed, 4 if quick else 12)
        data["mean_of_exp"].append([claim.mean([math.exp(h) for h in r["cross_entropy"]]) for r in records])
        data["exp_of_mean"].append([math.exp(claim.mean(r["cross_entropy"])) for r in records])
        data["exp_of_token_mean"].append([math.exp(sum(h * n for h, n in zip(r["cross_entropy"], r["lengths"])) / sum(r["lengths"])) for r in records])
        data["largest"].append([math.exp(max(r["cross_entropy"])) for r in records])
    ends = {name: [claim.mean([row[place] for row in rows]) for place in (0, -1)] for name, rows in data.items()}
    held = all(row[-1] < row[0] for name in ("mean_of_exp", "exp_of_mean") for row in data[name])
    measured = (f"mean of exp(H) {ends['mean_of_exp'][0]:.3f} to {ends['mean_of_exp'][1]:.3f}, exp(mean H) {ends['exp_of_mean'][0]:.3f} to "
                f"{ends['exp_of_mean'][1]:.3f}: they differ by {ends['mean_of_exp'][0] - ends['exp_of_mean'][0]:.3f} at the start, for answers of similar length")
    return measured, claim.span([row[-1] for row in data["mean_of_exp"]], "{:.3f}") + " (mean of exp, last batch)", claim.HELD if held else claim.NOT_HELD, data


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.4)
    steps = range(1, len(data["mean_of_exp"][0]) + 1)
    band(left, steps, data["mean_of_exp"], "mean of exp(H) over answers", BLUE, "o")
    band(left, steps, data["exp_of_mean"], "exp of the mean H", ORANGE, "s", "--")
    label(left, "Perplexity of sampled answers in a GSPO run", "rollout batch", "perplexity")
    top = 1 + 1.6 * (max(map(max, data["exp_of_mean"])) - 1)
    left.set_ylim(1, top)
    for step, values in zip(steps, zip(*data["mean_of_exp"])):
        if max(values) > top:                                # a single answer can do that: exp(H) of one token is 1/p
            left.text(step + 1.2, top, f"{max(values):.0f} in one seed", va="top", fontsize=8)
    left.legend(loc="lower left")
    paper = [("mean of exp(H)", [4.59, 1.14], BLUE, "o"), ("exp(H) of its H", [math.exp(.698), math.exp(.128)], ORANGE, "s")]
    for name, values, colour, marker in paper:
        right.plot([0, 1], values, marker=marker, color=colour, label=name, linestyle="-" if marker == "o" else "--")
        right.annotate(f"{values[0]:.2f}", (0, values[0]), textcoords="offset points", xytext=(8, 4))
    right.set_xticks([0, 1], ["start", "end"])
    right.set_xlim(-.15, 1.15)
    label(right, "The paper's two series (1140 updates)", "", "perplexity")
    right.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Perplexity falls over a GSPO run", "Rethinking GSPO, §5.4", "perplexity 4.59 to 1.14, cross-entropy 0.698 to 0.128", measure, draw)
