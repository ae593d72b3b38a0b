"""Does RL with GSPO lower the perplexity of the policy's own answers?

Claim: perplexity falls from 4.59 to 1.14 and cross-entropy from 0.698 to 0.128 nats over a GSPO run
("Rethinking GSPO", §5.4). The two cannot describe the same thing: exp(0.698) = 2.01 and exp(0.128)
= 1.14. A mean of exponentials is not the exponential of a mean, and one answer with an unlikely
token moves it: so the mean and the median of H are judged. Written down beforehand, for a GSPO run
from each cold start, on the answers it samples, last quarter of the rollout batches minus first
quarter:

  confirmed   the interval lies below 0 for the mean of H over answers and for the median
  refuted     it lies above 0 for one of them

RL sharpens what it samples; this is no evidence that "GSPO optimises perplexity": any objective
that reinforces answers lowers it. The cold start here is sure of itself (perplexity near 1), so how
far it can fall is another matter than in a model that begins at 4.59: SmolLM2's reference runs
(reference_runs.py smollm2), which begin unsure, stand beside it.
"""

import json
import math

from shared import claim, drift
from tools.style import BLACK, GREY, band, label, panels

ROW = dict(claim="Perplexity falls over a GSPO run", source="Rethinking GSPO, §5.4",
           reported="perplexity 4.59 to 1.14, cross-entropy 0.698 to 0.128",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 12 rollout batches")


def measure(seeds, quick):
    data = {name: [] for name in ("mean_of_exp", "exp_of_mean", "median", "largest")}
    for seed in seeds:
        records = drift.journey(seed, 4 if quick else 12)
        batches = [r["cross_entropy"] for r in records]                             # [answers] each
        data["mean_of_exp"].append([claim.mean(map(math.exp, h)) for h in batches])
        data["exp_of_mean"].append([math.exp(claim.mean(h)) for h in batches])
        data["median"].append([math.exp(claim.median(h)) for h in batches])
        data["largest"].append([math.exp(max(h)) for h in batches])
    runs = json.loads((claim.ROOT / "results/reference_runs.json").read_text())["smollm2"]["runs"]
    return data | {"smollm2": [run["curve"]["perplexity_new"] for run in runs]}


def judge(data):
    quarter = len(data["median"][0]) // 4

    def ends(name):
        """Mean log perplexity in the first and in the last quarter of the run, one pair per cold
        start."""
        logs = [[math.log(x) for x in row] for row in data[name]]
        return [(claim.mean(row[:quarter]), claim.mean(row[-quarter:])) for row in logs]

    falls = {name: [b - a for a, b in ends(name)] for name in ("exp_of_mean", "median")}
    answer = claim.all_of(*(claim.verdict(v, held=(-math.inf, 0)) for v in falls.values()))
    shown = {name: [math.exp(claim.mean(column)) for column in zip(*ends(name))]
             for name in ("mean_of_exp", "exp_of_mean", "median")}
    measured = "; ".join(f"{what} {shown[name][0]:.4f} to {shown[name][1]:.4f}" for name, what in
                         (("exp_of_mean", "exp(mean H)"), ("median", "median of exp(H)"),
                          ("mean_of_exp", "mean of exp(H)")))
    measured += f"; the largest of one answer is {max(map(max, data['largest'])):.3g}"
    first, last = (claim.median(claim.median(row[part]) for row in data["smollm2"])
                   for part in (slice(0, 5), slice(-5, None)))
    measured += (f"; SmolLM2, {len(data['smollm2'])} seeds, medians of the first and last five "
                 f"batches {first:.2f} to {last:.2f}")
    return measured, claim.number(falls["exp_of_mean"], "{:+.4f}", "nats of mean H"), answer


def draw(data):
    figure, (left, middle, right) = panels(1, 3, width=10)
    steps = range(1, len(data["mean_of_exp"][0]) + 1)
    band(left, steps, data["mean_of_exp"], "mean of exp(H) over answers", BLACK, "o")
    band(left, steps, data["exp_of_mean"], "exp of the mean H", GREY, "s", "--")
    label(left, "Perplexity of sampled answers", "rollout batch", "perplexity")
    top = 1 + 1.6 * (max(map(max, data["exp_of_mean"])) - 1)
    left.set_ylim(1, top)
    for step, values in zip(steps, zip(*data["mean_of_exp"])):
        if max(values) > top:                                # one answer can move it far
            left.text(step + .2, top, f"{max(values):.1f} in one seed", va="top", fontsize=8)
    left.legend(loc="lower left")
    for row in data["smollm2"]:
        middle.plot(range(1, len(row) + 1), row, color=BLACK, alpha=.6, linewidth=.9)
    middle.set_yscale("log")
    label(middle, "SmolLM2, mean of exp(H), each seed", "rollout batch", "")
    paper = [("mean of exp(H)", [4.59, 1.14], BLACK, "o", "-"),
             ("exp(H) of its H", [math.exp(.698), math.exp(.128)], GREY, "s", "--")]
    for name, values, colour, marker, line in paper:
        right.plot([0, 1], values, line, marker=marker, color=colour, label=name)
        right.annotate(f"{values[0]:.2f}", (0, values[0]), textcoords="offset points",
                       xytext=(8, 4))
    right.set_xticks([0, 1], ["start", "end"])
    right.set_xlim(-.15, 1.15)
    right.set_ylim(1, 5)
    label(right, "The paper's, 1140 updates", "", "")
    right.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
