"""Does clipping bound a ratio?

Claims: clipping every token's ratio to [0.8, 1.2] leaves their product free to range over [0.8^n,
1.2^n] (the slides), and clipping s bounds s directly (the slides; "Var[s] ≤ ε²" in "Rethinking
GSPO", §4.1). Written down beforehand, over cold starts, for answers of 7 to 259 tokens, three
updates off-policy, and for a GSPO run of the default task; the first sentence

  confirmed   the spread (standard deviation) of log ∏ clip(w, 0.8, 1.2) grows with length, slope
              above 0.25, while that of log s falls, slope below -0.25
  refuted     one of the two is not so

and the second one

  confirmed   less than 1 % of answers have s outside GSPO's band before the last mini-batch's
              update
  refuted     more than 5 % do: no ratio was bounded

The row's verdict is on both: what the sources say of clipping. Clipping a surrogate removes a
gradient. Where the ratio goes, in the same answer through other answers' updates, nobody stops.
"""

import math

from shared import claim, drift
from tools.style import BLUE, GREY, ORANGE, colour, label, panels
from ratios import token_log_ratio

ROW = dict(claim="Clipping tokens leaves the product of ratios unbounded; clipping s bounds s",
           source="slides; Rethinking GSPO §4.1",
           reported="product anywhere in [0.8^n, 1.2^n]; s directly bounded, Var[s] ≤ ε²",
           regime="slopes: width 64, 2 layers, answers of 7 to 259 tokens; shares: 1 M parameters, "
                  "4 layers, about 20 tokens, 12 rollout batches")
S_BAND = (math.log(1 - 3e-4), math.log(1 + 4e-4))
W_BAND = (math.log(.8), math.log(1.27))
OUTSIDE = {"s": ("gspo", "log_s", S_BAND), "w": ("gspo", "log_w", W_BAND),
           "w_grpo": ("grpo", "log_w", W_BAND)}


def measure(seeds, quick):
    rows = []
    outside = {"s": [], "w": [], "w_grpo": []}
    for seed in seeds:
        _, _, answers = drift.lengths(seed)
        for rollout, batch in answers.values():
            log_w = token_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask)     # [B, T]
            lengths = rollout.mask.sum(-1)                                                     # [B]
            clipped = log_w.exp().clamp(.8, 1.2).log()                                      # [B, T]
            spread = lambda x: x.std(unbiased=False).item()
            rows.append(dict(seed=seed, length=lengths.float().mean().item(),
                             product=spread(log_w.sum(-1)), clipped=spread(clipped.sum(-1)),
                             s=spread(log_w.sum(-1) / lengths)))
        records = drift.journey(seed, 4 if quick else 12)
        for name, (run, ratio, (low, high)) in OUTSIDE.items():
            ratios = [x for r in records for x in r["last"][run][ratio]]
            outside[name].append(claim.mean([not low <= x <= high for x in ratios]))
    per_seed = [[r for r in rows if r["seed"] == seed] for seed in seeds]
    slopes = {name: [claim.slope([r["length"] for r in own], [r[name] for r in own])
                     for own in per_seed] for name in ("product", "clipped", "s")}
    return dict(rows=rows, slopes=slopes, outside=outside)


def judge(data):
    slopes = data["slopes"]
    outside = data["outside"]
    product = claim.all_of(claim.verdict(slopes["clipped"], held=(.25, math.inf)),
                           claim.verdict(slopes["s"], held=(-math.inf, -.25)))
    bounded = claim.verdict(outside["s"], held=(-math.inf, .01), refuted=(.05, math.inf))
    average = {name: claim.mean(values) for name, values in slopes.items()}
    share = {name: claim.mean(values) for name, values in outside.items()}
    longest = [claim.mean([r[name] for r in data["rows"] if r["length"] > 200])
               for name in ("clipped", "s")]
    measured = (f"the product: {product}; slope of the spread against length: log ∏w "
                f"{average['product']:.2f}, with clipped tokens {average['clipped']:.2f}, log s "
                f"{average['s']:.2f}; at over 200 tokens ±{longest[0]:.2f} against "
                f"±{longest[1]:.4f}. s bounded: {bounded}; outside their bands all the same "
                f"{share['s']:.0%} of s (GSPO), {share['w_grpo']:.2%} of w (GRPO)")
    number = claim.number(outside["s"], "{:.0%}", "of answers have s outside the band")
    return measured, number, claim.all_of(product, bounded)


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6, gridspec_kw=dict(width_ratios=[3, 2]))
    seeds = sorted({r["seed"] for r in data["rows"]})
    whole = colour("sequence_is")
    kinds = (("product", "log ∏w", whole, "o-"),
             ("clipped", "log ∏ clip(w, 0.8, 1.2)", whole, "s:"), ("s", "log s", BLUE, "D-"))
    for name, title, ink, line in kinds:
        for seed in seeds:
            own = sorted((r["length"], r[name]) for r in data["rows"] if r["seed"] == seed)
            left.loglog(*zip(*own), line, color=ink, markersize=4, linewidth=1,
                        label=title if seed == seeds[0] else None)
    left.axhspan(1e-4, 4e-4, color=GREY, alpha=.15)
    left.text(8, 2e-4, "GSPO's band", fontsize=8, color=GREY)
    label(left, "Spread of an answer's ratio after three updates", "tokens per answer",
          "standard deviation (nats)")
    left.set_ylim(bottom=2e-5)
    left.legend(fontsize=8, loc="lower right", ncols=3)
    names = ["s, GSPO's run\n(band 3e-4, 4e-4)", "w, GSPO's run\n(0.2, 0.27)",
             "w, GRPO's run\n(0.2, 0.27)"]
    for place, key in enumerate(("s", "w", "w_grpo")):
        share = data["outside"][key]
        ink = (BLUE, BLUE, ORANGE)[place]
        right.plot([place] * len(share), share, ".", color=GREY, markersize=5)
        right.plot(place, claim.mean(share), "os"[key != "s"], color=ink, markersize=8)
        right.text(place, max(share) * 1.35, f"{claim.mean(share):.2%}", ha="center", fontsize=9)
    right.set_xticks(range(3), names, fontsize=7.5)
    label(right, "Ratios outside their band", "4th mini-batch, before its update", "share")
    right.set_yscale("log")
    right.set(xlim=(-.5, 2.5), ylim=(1e-3, 2))
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
