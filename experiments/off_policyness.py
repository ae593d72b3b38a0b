"""Do importance ratios spread from mini-batch to mini-batch?

Claim: splitting a rollout batch into mini-batches makes the later ones off-policy, and that is what the ratio is there for (GSPO
2507.18071, §3). Written down beforehand: Var[log w] of mini-batch k before its update, for k = 1 … 4, in a GSPO run

  confirmed   it is 0 (below 1e-12) at k = 1 and larger at each k that follows, averaged over the run
  refuted     it is not 0 at k = 1, or falls from one k to the next

At k = 1 every ratio is 1 and the loss of group-normalised advantages about 0: that is right, the gradient is not 0.
"""

import claim
import drift
from plumbing.style import BLUE, GREEN, ORANGE, band, label, panels


def measure(seeds, quick):
    batches, data = 4 if quick else 12, {"log_w_var": [], "log_s_var": []}
    for seed in seeds:
        records = drift.journey(seed, batches)
        for name, rows in data.items():
            rows.append([claim.mean([r["gspo"][k][name] for r in records]) for k in range(4)])
    data["last"] = records[len(records) // 2 - 1]["last"]["gspo"]
    shares = [[claim.mean([not low <= x <= high for x in r["last"]["gspo"][name]]) for r in records] for name, low, high in
              (("log_s", -3e-4, 4e-4), ("log_w", -.223, .239))]
    w = [claim.mean(column) for column in zip(*data["log_w_var"])]
    held = w[0] < 1e-12 and w[0] < w[1] < w[2] < w[3]
    outside = [claim.mean(values) for values in shares]
    measured = (f"Var[log w] {w[0]:.0e}, {w[1]:.1e}, {w[2]:.1e}, {w[3]:.1e} in mini-batches 1 to 4; before the 4th update {outside[0]:.0%} of answers are outside "
                f"GSPO's band and {outside[1]:.2%} of tokens outside GRPO's")
    return measured, claim.span([row[3] for row in data["log_w_var"]], "{:.1e}") + " (4th)", claim.HELD if held else claim.NOT_HELD, data


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6)
    band(left, (2, 3, 4), [row[1:] for row in data["log_w_var"]], "tokens, log w", ORANGE, "s")
    band(left, (2, 3, 4), [row[1:] for row in data["log_s_var"]], "answers, log s", BLUE, "o")
    left.set_yscale("log")
    left.set_xticks([2, 3, 4])
    label(left, "Off-policy, more with every mini-batch", "mini-batch (the first: exactly 0)", "variance of the log-ratio")
    left.legend()
    edge, bins = .06, 61
    for values, colour, name in ((data["last"]["log_w"], ORANGE, "tokens, w"), (data["last"]["log_s"], BLUE, "answers, s")):
        inside = [2.718281828 ** x for x in values if abs(x) < edge]
        weight = 1 / len(values)
        right.hist(inside, bins=bins, range=(1 - edge, 1 + edge), weights=[weight] * len(inside), color=colour, alpha=.6, label=name)
    right.axvspan(1 - 3e-4, 1 + 4e-4, color=GREEN, alpha=.9, label="GSPO's band, to scale")
    right.set_yscale("log")
    outside = claim.mean([abs(x) >= edge for x in data["last"]["log_w"]])
    label(right, "A 4th mini-batch before its update", f"ratio ({outside:.1%} of w are beyond; GRPO's band is 0.8 to 1.27)", "share")
    right.xaxis.label.set_fontsize(8)
    right.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Ratios spread from the first mini-batch to the fourth", "GSPO §3", "later mini-batches are off-policy (no figure given)", measure, draw)
