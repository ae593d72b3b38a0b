"""Does credit for single tokens help where the verifier knows the first wrong step?

Claim: GSPO has no credit assignment within an answer; GSPO-token allows advantages per token, for
tasks that have them (GSPO 2507.18071, §4.3; a blog's critique). The built-in verifier marks the
first wrong step. With --advantage token_credit the tokens before it in a wrong answer are not
blamed; with equal advantages GSPO-token is GSPO. Written down beforehand, paired over cold starts,
same budget: held-out pass@1 after 10 rollout batches, with token credit minus without

  confirmed   the interval lies above 0
  refuted     it lies below 0.01: less than a point is gained

The mean pass rate over the rollout batches, which says how fast, stands beside it.
"""

import math

from shared import claim
from tools.style import BLUE, SKY, band, label, panels

ROW = dict(claim="Advantages per token help where the verifier knows the first wrong step",
           source="GSPO §4.3; blog critique", reported="no figure")
PLAIN = "GSPO"
CREDIT = "GSPO-token, first error blamed"
ARMS = {PLAIN: ["--algorithm", "gspo"], CREDIT: ["--algorithm", "gspo_token",
               "--advantage", "token_credit"]}


def measure(seeds, quick):
    steps = 4 if quick else 10
    data = {key: {name: [] for name in ARMS} for key in ("curves", "after", "clipped")}
    for seed in seeds:
        for name, flags in ARMS.items():
            records, summary = claim.trained(flags, seed, steps)
            data["curves"][name].append([r["pass_rate"] for r in records])
            clipped = [r["clip_low"] + r["clip_high"] for r in records]
            data["clipped"][name].append(claim.mean(clipped))
            data["after"][name].append(summary["pass_at_1_after"])
    return data


def judge(data):
    gain = [b - a for a, b in zip(data["after"][PLAIN], data["after"][CREDIT])]
    faster = [claim.mean(b) - claim.mean(a)
              for a, b in zip(data["curves"][PLAIN], data["curves"][CREDIT])]
    measured = (f"held out {claim.mean(data['after'][CREDIT]):.3f} with token credit against "
                f"{claim.mean(data['after'][PLAIN]):.3f}; mean pass rate over the batches "
                + claim.number(faster, "{:+.3f}"))
    answer = claim.verdict(gain, held=(0, math.inf), refuted=(-math.inf, .01))
    return measured, claim.number(gain, "{:+.3f}", "pass@1"), answer


def draw(data):
    figure, axes = panels(1, 1, height=3.3, width=7)
    for name, colour, marker, line in ((PLAIN, BLUE, "o", "-"), (CREDIT, SKY, "s", "--")):
        rows = data["curves"][name]
        title = f"{name} (held out {claim.mean(data['after'][name]):.3f})"
        band(axes, range(1, len(rows[0]) + 1), rows, title, colour, marker, line)
    label(axes, "Credit per token, where the verifier marks the first wrong step",
          "rollout batch of 256 answers", "pass rate (mean and seeds)")
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
