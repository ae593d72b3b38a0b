"""Does clipping bound a ratio?

Claims: clipping every token's ratio to [0.8, 1.2] leaves their product free to range over [0.8^n, 1.2^n], and clipping s bounds s
directly (the slides; "Var[s] ≤ ε²" in "Rethinking GSPO", §4.1). Written down beforehand, for answers of 7 to 259 tokens, three updates
off-policy, and for a GSPO run of the default task:

  confirmed   the spread (standard deviation) of log ∏ clip(w, 0.8, 1.2) grows with length (slope above 0.25) while that of log s falls
              (slope below -0.25), and at least 5 % of answers have s outside GSPO's band before the last mini-batch's update: no ratio was bounded
  refuted     one of the three is not so

Clipping a surrogate removes a gradient. Where the ratio goes, in the same answer through other answers' updates, nobody stops.
"""

import claim
import drift
from plumbing.style import BLUE, COLOURS, GREY, ORANGE, RED, label, panels
from ratios import token_log_ratio


def measure(seeds, quick):
    rows, outside = [], {"s": [], "w": [], "w_grpo": []}
    for seed in seeds:
        _, _, answers = drift.lengths(seed)
        for rollout, batch in answers.values():
            log_w, lengths = token_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask), rollout.mask.sum(-1)   # [B, T], [B]
            clipped = log_w.exp().clamp(.8, 1.2).log()                                                       # [B, T]
            spread = lambda x: x.std(unbiased=False).item()
            rows.append(dict(seed=seed, length=lengths.float().mean().item(), product=spread(log_w.sum(-1)), clipped=spread(clipped.sum(-1)),
                             s=spread(log_w.sum(-1) / lengths)))
        records = drift.journey(seed, 4 if quick else 12)
        for name, run, ratio, low, high in (("s", "gspo", "log_s", -3e-4, 4e-4), ("w", "gspo", "log_w", -.2231, .239), ("w_grpo", "grpo", "log_w", -.2231, .239)):
            outside[name].append(claim.mean([not low <= x <= high for r in records for x in r["last"][run][ratio]]))
    slopes = {name: [claim.slope([r["length"] for r in rows if r["seed"] == s], [r[name] for r in rows if r["seed"] == s]) for s in seeds]
              for name in ("product", "clipped", "s")}
    average, share = {k: claim.mean(v) for k, v in slopes.items()}, {k: claim.mean(v) for k, v in outside.items()}
    held = average["clipped"] > .25 and average["s"] < -.25 and share["s"] >= .05
    longest = [claim.mean([r[name] for r in rows if r["length"] > 200]) for name in ("clipped", "s")]
    measured = (f"slope of the spread against length: log ∏w {average['product']:.2f}, with clipped tokens {average['clipped']:.2f}, log s {average['s']:.2f}; at over "
                f"200 tokens ±{longest[0]:.2f} against ±{longest[1]:.4f}; outside the band all the same: {share['s']:.0%} of s (GSPO), "
                f"{share['w_grpo']:.2%} of w (GRPO)")
    return measured, claim.span(outside["s"], "{:.0%}") + " (s outside)", claim.HELD if held else claim.NOT_HELD, dict(rows=rows, slopes=slopes, outside=outside)


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6, gridspec_kw=dict(width_ratios=[3, 2]))
    seeds = sorted({r["seed"] for r in data["rows"]})
    for name, title, colour, marker in (("product", "log ∏w", RED, "o"), ("clipped", "log ∏ clip(w, 0.8, 1.2)", ORANGE, "s"), ("s", "log s", BLUE, "D")):
        for seed in seeds:
            own = sorted((r["length"], r[name]) for r in data["rows"] if r["seed"] == seed)
            left.loglog(*zip(*own), color=colour, marker=marker, markersize=4, linewidth=1, label=title if seed == seeds[0] else None)
    left.axhspan(1e-4, 4e-4, color=GREY, alpha=.15)
    left.text(8, 2e-4, "GSPO's band", fontsize=8, color=GREY)
    label(left, "Spread of an answer's ratio after three updates", "tokens per answer", "standard deviation (nats)")
    left.legend(fontsize=8)
    names = ["s, GSPO's run\n(band 3e-4, 4e-4)", "w, GSPO's run\n(0.2, 0.27)", "w, GRPO's run\n(0.2, 0.27)"]
    for place, key in enumerate(("s", "w", "w_grpo")):
        right.bar(place, claim.mean(data["outside"][key]), color=[BLUE, COLOURS[5], ORANGE][place])
        right.plot([place] * len(seeds), data["outside"][key], "k.", markersize=5)
        right.text(place, max(data["outside"][key]) * 1.2, f"{claim.mean(data['outside'][key]):.2%}", ha="center", fontsize=9)
    right.set_xticks(range(3), names, fontsize=7.5)
    label(right, "Ratios outside their band", "4th mini-batch, before its update", "share")
    right.set_yscale("log")
    right.set_ylim(1e-3, 2)
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Clipping tokens does not bound the product of ratios, and clipping bounds no ratio at all", "slides; Rethinking GSPO §4.1",
               "product anywhere in [0.8^n, 1.2^n]; s directly bounded, Var[s] ≤ ε²", measure, draw)
