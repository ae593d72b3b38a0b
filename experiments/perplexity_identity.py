"""s = perplexity_old / perplexity_new = exp(ΔH): is it an identity, and where do 4e-4 come from?

Claim: GSPO's ratio equals the ratio of perplexities; "Rethinking GSPO" (Table 1) measures the two
4.02e-4 apart on average, at most 1.2e-2, and calls that floating point and batch averaging. Written
down beforehand: exp(a - b) = exp(a) / exp(b) answer by answer, so, in 3 cold starts or more,

  confirmed   the largest difference over answers is below 2e-6 in float32 (a few roundings of 6e-8)
              and below 1e-14 in float64
  refuted     it is not; then something besides rounding separates the two

What reaches the size of 4e-4 is found by doing the same with other arithmetic: in bfloat16, and
with means over the batch instead of answer by answer, where the mean of ratios is compared with the
ratio of means, two different numbers.
"""

import math

import torch

from shared import claim, drift
from tools.style import BLACK, GREY, label, panels
from ratios import cross_entropy, perplexity, sequence_ratio

ROW = dict(claim="s = PPL_old / PPL_new = exp(ΔH), answer by answer",
           source="Rethinking GSPO, eq. 2 and Table 1",
           reported="mean difference 4.02e-4, largest 1.2e-2")
LEAST = 3                                # arithmetic: every answer is a test, whatever the policy
NAMES = {"float64": "per answer, float64", "float32": "per answer, float32",
         "bfloat16": "per answer, bfloat16", 
         "batch": "means over the batch:\nPPL_old / PPL_new",
         "batch_h": "means over the batch:\nexp(ΔH)"}


def errors(new, old, mask):
    """The differences between s and PPL_old / PPL_new, for each way of computing them, over answers
    or over batches."""
    found = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        n = new.to(dtype)
        o = old.to(dtype)
        quotient = perplexity(o, mask) / perplexity(n, mask)                         # [B]
        found[name] = (sequence_ratio(n, o, mask) - quotient).abs().tolist()
    h_new, h_old = (cross_entropy(x, mask).bfloat16() for x in (new, old))           # [B]
    found["bfloat16"] = ((h_old - h_new).exp() - h_old.exp() / h_new.exp()).abs().tolist()
    s = sequence_ratio(new, old, mask)
    p_new = perplexity(new, mask)
    p_old = perplexity(old, mask)
    delta_h = cross_entropy(old, mask) - cross_entropy(new, mask)                    # [B]
    found["batch"] = [(s.mean() - p_old.mean() / p_new.mean()).abs().item()]
    found["batch_h"] = [(s.mean() - delta_h.mean().exp()).abs().item()]
    return found


def measure(seeds, quick):
    data = {name: {"mean": [], "max": []} for name in NAMES}
    for seed in seeds:
        lab = drift.Lab(seed, "--steps", "12")
        differences = {name: [] for name in NAMES}
        for step in range(1, 3 if quick else 7):
            batch = lab.rollout(step)
            for mini in lab.minibatches(step, batch):
                lab.update(mini)
            found = errors(lab.logp(batch.rollout), batch.old_logp, batch.rollout.mask)
            for name, values in found.items():
                differences[name] += values
        for name, values in differences.items():
            data[name]["mean"].append(claim.mean(values))
            data[name]["max"].append(max(values))
    return data


def judge(data):
    worst = {name: max(data[name]["max"]) for name in NAMES}
    average = {name: claim.mean(data[name]["mean"]) for name in NAMES}
    bounds = {"float32": (-math.inf, 2e-6), "float64": (-math.inf, 1e-14)}
    answer = claim.all_of(*(claim.verdict(data[name]["max"], held=bound, least=LEAST)
                            for name, bound in bounds.items()))
    measured = (f"largest difference per answer {worst['float32']:.1e} in float32, "
                f"{worst['float64']:.1e} in float64; what reaches their size: batch means "
                f"{average['batch']:.1e}, bfloat16 arithmetic {average['bfloat16']:.1e} (mean)")
    return measured, claim.number(data["float32"]["max"], "{:.1e}", "apart at most"), answer


def draw(data):
    figure, axes = panels(1, 1, height=3.0)
    for place, name in enumerate(reversed(NAMES)):
        average = claim.mean(data[name]["mean"])
        largest = max(data[name]["max"])
        average = max(average, 1e-18)
        largest = max(largest, 1e-18)
        named = place == 0
        axes.plot([average, largest], [place, place], color=GREY, linewidth=1)
        axes.plot(average, place, "o", color=BLACK, label="mean" if named else None)
        axes.plot(largest, place, "D", color=GREY, label="largest" if named else None)
    axes.axvline(4.02e-4, color="black", linestyle=":", label="the paper's mean, 4.02e-4")
    axes.set_yticks(range(len(NAMES)), list(reversed(NAMES.values())))
    axes.set_xscale("log")
    label(axes, "How far apart are s and the ratio of perplexities?", "absolute difference", "")
    axes.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
