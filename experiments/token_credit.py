"""Does credit for single tokens help where the verifier knows the first wrong step?

Claim: GSPO has no credit assignment within an answer; GSPO-token allows advantages per token, for tasks that have them (GSPO 2507.18071,
§4.3; a blog's critique). The built-in verifier marks the first wrong step. With --token_credit, the tokens before it in a wrong answer
are not blamed; with equal advantages GSPO-token is GSPO. Written down beforehand, over seeds, same budget and cold starts:

  confirmed   mean pass rate over the rollout batches is higher with token credit, and the 95 % interval of the paired difference is above 0
  refuted     the interval lies below 0, or the mean difference is below 0.005 with an interval narrower than ±0.02
  otherwise   cannot be told at this size; so too with fewer than three seeds
"""

import claim
from plumbing.style import BLUE, ORANGE, band, label, panels

ARMS = {"GSPO": ["--algorithm", "gspo"], "GSPO-token, first error blamed": ["--algorithm", "gspo_token", "--token_credit"]}


def measure(seeds, quick):
    steps = 4 if quick else 10
    data = dict(curves={name: [] for name in ARMS}, after={name: [] for name in ARMS}, clipped={name: [] for name in ARMS})
    for seed in seeds:
        for name, flags in ARMS.items():
            records, summary = claim.trained(flags, seed, steps)
            data["curves"][name].append([r["pass_rate"] for r in records])
            data["clipped"][name].append(claim.mean([r["clip_low"] + r["clip_high"] for r in records]))
            data["after"][name].append(summary["pass_at_1_after"])
    plain, credit = ARMS
    gain = [claim.mean(b) - claim.mean(a) for a, b in zip(data["curves"][plain], data["curves"][credit])]
    middle, low, high = claim.interval(gain)
    refuted = high < 0 or (middle < .005 and (high - low) / 2 < .02)
    verdict = claim.CANNOT if len(seeds) < 3 else claim.HELD if low > 0 else claim.NOT_HELD if refuted else claim.CANNOT
    measured = (f"mean pass rate {middle:+.3f} [{low:+.3f}, {high:+.3f}] with token credit; held out after {steps} batches "
                + " against ".join(f"{claim.mean(data['after'][name]):.3f} ({name})" for name in reversed(ARMS)))
    return measured, claim.span(gain, "{:+.3f}") + " (gain)", verdict, data


def draw(data):
    figure, axes = panels(1, 1, height=3.3, width=7)
    for (name, rows), colour, marker, line in zip(data["curves"].items(), (BLUE, ORANGE), "os", ("-", "--")):
        band(axes, range(1, len(rows[0]) + 1), rows, f"{name} (held out {claim.mean(data['after'][name]):.3f})", colour, marker, line)
    label(axes, "Credit per token, where the verifier marks the first wrong step", "rollout batch of 256 answers", "pass rate (mean, range of seeds)")
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Advantages per token help where the verifier knows the first wrong step", "GSPO §4.3; blog critique", "no figure", measure, draw)
