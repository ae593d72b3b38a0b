"""Do importance ratios spread from mini-batch to mini-batch?

Claim: splitting a rollout batch into mini-batches makes the later ones off-policy, and that is what
the ratio is there for (GSPO 2507.18071, §3). Written down beforehand: Var[log w] of mini-batch k
before its update, for k = 1 … 4, averaged over a GSPO run, over cold starts

  confirmed   it is 0 (below 1e-12) at k = 1, and grows from each k to the next (the interval of the
              logarithm's increase lies above 0)
  refuted     it is not 0 at k = 1, or falls from one k to the next

At k = 1 every ratio is 1 and the loss of group-normalised advantages about 0: that is right, the
gradient is not 0.
"""

import math

from shared import claim, drift
from tools.style import BLUE, ORANGE, band, label, panels

ROW = dict(claim="Ratios spread from the first mini-batch to the fourth",
           source="GSPO §3", reported="later mini-batches are off-policy (no figure given)",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 12 rollout batches")
BANDS = {"log_s": (math.log(1 - 3e-4), math.log(1 + 4e-4)), "log_w": (math.log(.8), math.log(1.27))}


def measure(seeds, quick):
    batches = 4 if quick else 12
    data = {"log_w_var": [], "log_s_var": []}
    outside = {name: [] for name in BANDS}
    for seed in seeds:
        records = drift.journey(seed, batches)
        for name, rows in data.items():
            rows.append([claim.mean([r["gspo"][k][name] for r in records]) for k in range(4)])
        for name, (low, high) in BANDS.items():
            outside[name].append(claim.mean([not low <= x <= high for r in records
                                             for x in r["last"]["gspo"][name]]))
    return data | {"outside": outside, "last": records[len(records) // 2 - 1]["last"]["gspo"]}


def judge(data):
    rows = data["log_w_var"]
    growth = [[math.log(row[k + 1] / row[k]) for row in rows] for k in (1, 2)]
    answer = claim.all_of(claim.verdict([row[0] for row in rows], held=(-math.inf, 1e-12)),
                          *(claim.verdict(values, held=(0, math.inf)) for values in growth))
    w = [claim.mean(column) for column in zip(*rows)]
    outside = {name: claim.mean(values) for name, values in data["outside"].items()}
    measured = (f"Var[log w] {w[0]:.0e}, {w[1]:.1e}, {w[2]:.1e}, {w[3]:.1e} in mini-batches 1 to "
                f"4; before the 4th update {outside['log_s']:.0%} of answers are outside GSPO's "
                f"band and {outside['log_w']:.2%} of tokens outside GRPO's")
    factors = [row[3] / row[1] for row in rows]
    return measured, claim.log_number(factors, "{:.1f}", "times from the 2nd to the 4th"), answer


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6)
    band(left, (2, 3, 4), [row[1:] for row in data["log_w_var"]], "tokens, log w", ORANGE, "s")
    band(left, (2, 3, 4), [row[1:] for row in data["log_s_var"]], "answers, log s", BLUE, "o")
    left.set_yscale("log")
    left.set_xticks([2, 3, 4])
    label(left, "Off-policy, more with every mini-batch", "mini-batch (the first: exactly 0)",
          "variance of the log-ratio")
    left.legend()
    for kind, colour, line, name in (("log_w", ORANGE, "--", "tokens, w"),
                                     ("log_s", BLUE, "-", "answers, s")):
        far = sorted(max(abs(math.expm1(x)), 1e-7) for x in data["last"][kind])
        right.step(far, [(i + 1) / len(far) for i in range(len(far))], line, where="post",
                   color=colour, label=name)
    for edge, colour, name in ((4e-4, BLUE, " GSPO's\n band"), (.27, ORANGE, "GRPO's \nband ")):
        right.axvline(edge, color=colour, linestyle=":", linewidth=1)
        right.text(edge, .5, name, ha="left" if colour == BLUE else "right", fontsize=8,
                   color=colour)
    right.set_xscale("log")
    right.set_ylim(0, 1.02)
    label(right, "A 4th mini-batch before its update", "distance of the ratio from 1",
          "share of ratios that are closer")
    right.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
