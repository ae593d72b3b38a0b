"""Does one fixed band clip short answers more than long ones, and does a band ∝ 1/√L repair it?

Claim: the right band depends on the typical length (an open question in the sources; FSPO
2509.09177 proposes a band that grows with length for whole-answer ratios). s is a mean over L
tokens, so its spread should fall as 1/√L and a fixed band should clip short answers more. Written
down beforehand, over answers of 7 to 259 tokens with A ≠ 0, three updates off-policy, with a fixed
band whose edges keep the paper's proportion 3 : 4 and which clips 15 % of them in all (the paper's
share; the paper's own numbers clip nearly all that can be here), as a geometric mean over cold
starts:

  confirmed   the shortest third of the lengths is clipped at least 1.5 times as often as the
              longest third
  refuted     less than 1.2 times, or the other way round

The paper's own band is far inside the spread of s at every length: the share that it clips is
about the same for short and long answers, which stands beside the number. log s is not only
narrower for a longer answer: its mean is about minus the KL per token, which averaging over more
tokens does not shrink.

And the rule under test: ε(L) = ε(L0)·√(L0/L), same total share. It works as far as its clip shares
vary less over lengths than the fixed band's. It also tells how far it carries: where log-ratios of
an answer's tokens go together, spreads fall more slowly than 1/√L.
"""

import math

import torch

from shared import claim, drift
from tools.style import BLUE, band, label, panels

ROW = dict(claim="A fixed band wide enough to clip 15 % clips short answers more than long ones",
           source="open question; FSPO 2509.09177", reported="no figure",
           regime=("width 64, 2 layers, answers of 7 to 259 tokens, three updates off-policy"))
RULES = {"fixed": "one band for all", "scaled": "band ∝ 1/√L",
         "paper": "the paper's band (3e-4, 4e-4)"}


def clipped(log_s, advantages, width):
    """Which answers lose their gradient to a clip range of [-3 width, 4 width] in log s, [B]
    bool."""
    return ((log_s > 4 * width) & (advantages > 0)) | ((log_s < -3 * width) & (advantages < 0))


def width_for(log_s, advantages, scale, share):
    """The width at which the clip range, multiplied by scale [B], clips this share of the answers.
    Found by bisection."""
    low = 0.0
    high = 10.0
    for _ in range(60):
        middle = (low + high) / 2
        too_many = clipped(log_s, advantages, middle * scale).float().mean() > share
        low, high = (middle, high) if too_many else (low, middle)
    return high


def measure(seeds, quick):
    data = dict(lengths=None, seeds=[], slopes=[], widths=[])
    for seed in seeds:
        _, _, answers = drift.lengths(seed)
        log_s = []
        A = []
        L = []
        kind = []
        for place, (rollout, batch) in enumerate(answers.values()):
            signal = batch["advantages"] != 0                                        # [B]
            lengths = rollout.mask.sum(-1).float()                                   # [B]
            log_s.append(((batch["new_logp"] - batch["old_logp"]).sum(-1) / lengths)[signal])
            A.append(batch["advantages"][signal])
            L.append(lengths[signal])
            kind.append(torch.full_like(A[-1], place))
        data["lengths"] = [x.mean().item() for x in L]
        data["slopes"].append(claim.slope(data["lengths"], [x.std().item() for x in log_s]))
        log_s, A, L, kind = map(torch.cat, (log_s, A, L, kind))                      # [answers]
        scales = {"fixed": torch.ones_like(L), "scaled": (50 / L).sqrt()}
        widths = {name: width_for(log_s, A, scale, .15) for name, scale in scales.items()}
        widths["paper"] = 1e-4
        scales["paper"] = scales["fixed"]
        data["widths"].append(widths)
        out = {name: clipped(log_s, A, widths[name] * scales[name]).float() for name in RULES}
        places = range(len(answers))
        data["seeds"].append({name: [out[name][kind == p].mean().item() for p in places]
                              for name in RULES})
    return data


def judge(data):
    third = lambda name, places: claim.mean([s[name][p] for s in data["seeds"] for p in places])
    least = 1 / 256                                          # of so many answers: none is not 0
    factors = [(s["fixed"][0] + s["fixed"][1]) / max(s["fixed"][-2] + s["fixed"][-1], least)
               for s in data["seeds"]]
    spread = {name: claim.mean([max(s[name]) - min(s[name]) for s in data["seeds"]])
              for name in RULES}
    measured = (f"with 15 % clipped in all: {third('fixed', (0, 1)):.0%} of the shortest answers, "
                f"{third('fixed', (-2, -1)):.0%} of the longest; over lengths the share varies by "
                f"{spread['fixed']:.2f}, with a band ∝ 1/√L by {spread['scaled']:.2f}; "
                f"std of log s ∝ L^{claim.mean(data['slopes']):.2f}; the paper's band clips "
                f"{third('paper', range(7)):.0%} at every length (varies by {spread['paper']:.2f})")
    answer = claim.verdict([math.log(max(f, least)) for f in factors],
                           held=(math.log(1.5), math.inf), refuted=(-math.inf, math.log(1.2)))
    own = [(s["paper"][0] + s["paper"][1]) / max(s["paper"][-2] + s["paper"][-1], least)
           for s in data["seeds"]]
    number = (f"{claim.log_number(factors, '{:.1f}')} times as often clipped if short; by the "
              f"paper's band {claim.log_number(own, '{:.1f}')}")
    return measured, number, answer


def draw(data):
    figure, axes = panels(1, 1, height=3.4, width=7)
    for name, marker, line in (("paper", "^", ":"), ("fixed", "s", "-"), ("scaled", "o", "--")):
        shares = [s[name] for s in data["seeds"]]
        band(axes, data["lengths"], shares, RULES[name], BLUE, marker, line)
    axes.axhline(.15, color="black", linewidth=.8)
    axes.text(1.01, .15, "15 %\nin all", transform=axes.get_yaxis_transform(), va="center",
              fontsize=8)
    axes.set_xscale("log")
    axes.set_ylim(0, .75)
    label(axes, "Who is clipped: answers with A ≠ 0, three updates off-policy", "tokens per answer",
          "share clipped")
    axes.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
