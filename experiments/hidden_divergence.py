"""Does length normalisation hide a large move of a few tokens?

Claim: an answer that has moved far on a few critical tokens still shows s near 1, because the rest
has not moved (a blog's critique of GSPO; its worked example has two tokens of 512 at 1.9 and 0.4
and calls s = 0.9995 "comfortably inside" the band). Written down beforehand, for answers of 7 to
997 tokens, after three updates, over cold starts; of the longest taught (over 200 tokens) that are
inside the band [1 - 3e-4, 1 + 4e-4],

  large moves      the share that stays inside when one more token moves by 3 nats (20 times
                   likelier): hidden if above a half, not hidden if below a tenth
  moderate moves   the share that holds a token moved beyond 1.27 or 1/1.27 (GRPO's upper edge) as
                   it is: hidden if above a tenth, not hidden if below a hundredth

  confirmed        both are hidden
  refuted          neither is
  depends on the size of the move    one of them is

A token moved by Δ nats, all others unmoved, stays inside from L = Δ / log(1 + 4e-4) tokens on; two
that move in opposite directions do at any length, their product being 1.
"""

import math

from shared import claim, drift
from tools.style import BLUE, GREY, ORANGE, label, panels
from ratios import sequence_log_ratio, token_log_ratio

ROW = dict(claim="Length normalisation hides a large move of a few tokens: s stays near 1",
           source="blog critique of GSPO and its worked example",
           reported="s = 0.9995, 'comfortably inside' the band",
           regime=("width 64, 2 layers, answers of 7 to 997 tokens, three updates off-policy"))
BAND = math.log(1 - 3e-4), math.log(1 + 4e-4)
LENGTHS = (7, 13, 25, 49, 97, 193, 259, 997)                 # the longest that an answer can be


def measure(seeds, quick):
    rows = []
    inside = lambda x: (x >= BAND[0]) & (x <= BAND[1])
    for seed in seeds:
        _, _, answers = drift.lengths(seed, longest=True)
        for rollout, batch in answers.values():
            log_w = token_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask)     # [B, T]
            log_s = sequence_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask)     # [B]
            lengths = rollout.mask.sum(-1)                                                     # [B]
            calm = inside(log_s)                                                               # [B]
            outlier = log_w.abs().amax(-1) > math.log(1.27)                                    # [B]
            count = int(calm.sum())
            share = lambda chosen: (chosen & calm).sum().item() / max(count, 1)
            rows.append(dict(seed=seed, length=lengths.float().mean().item(), calm=count,
                             one=share(inside(log_s + 3 / lengths)), hidden=share(outlier),
                             shift=(3 / lengths).mean().item()))
    return dict(rows=rows)


def judge(data):
    longest = [r for r in data["rows"] if 200 < r["length"] < 300 and r["calm"]]
    large, moderate = ([r[name] for r in longest] for name in ("one", "hidden"))
    answers = (claim.verdict(large, held=(.5, math.inf), refuted=(-math.inf, .1)),
               claim.verdict(moderate, held=(.1, math.inf), refuted=(-math.inf, .01)))
    mixed = set(answers) == {claim.HELD, claim.REFUTED}
    by_length = {}
    for r in data["rows"]:
        place = by_length.setdefault(min(LENGTHS, key=lambda n: abs(n - r["length"])), [])
        place.append((r["hidden"] * r["calm"], r["calm"]))
    shares = {n: sum(h for h, _ in pairs) / max(sum(c for _, c in pairs), 1)
              for n, pairs in sorted(by_length.items())}
    tokens, shift = (claim.mean(r[name] for r in longest) for name in ("length", "shift"))
    measured = (f"one token up by 3 nats in about {tokens:.0f}: s = {math.exp(shift):.4f}, near 1 "
                f"but outside the band for {1 - claim.mean(large):.0%} of answers; a token of Δ "
                f"nats hides from Δ / {BAND[1]:.1e} tokens on, one of 3 nats from "
                f"{3 / BAND[1]:,.0f}; share of in-band answers that hold a token beyond 1.27 or "
                "1/1.27, by length: "
                + ", ".join(f"{n}: {share:.0%}" for n, share in shares.items()))
    answer = claim.depends("the size of the move") if mixed else claim.all_of(*answers)
    return measured, claim.number(moderate, "{:.0%}", "of in-band answers hold an outlier"), answer


def draw(data):
    figure, (top, bottom) = panels(2, 1, height=5.2, gridspec_kw=dict(height_ratios=[1, 2.2]))
    worked = {137: 1.9, 400: .4}
    tokens = range(1, 513)
    top.vlines(tokens, 0, [worked.get(t, 1) for t in tokens],
               color=[ORANGE if t in worked else "#BBBBBB" for t in tokens],
               linewidth=[2.5 if t in worked else .8 for t in tokens])
    for t, w in worked.items():
        top.annotate(f"w = {w}", (t, w), textcoords="offset points", xytext=(6, 0), color=ORANGE)
    s = math.exp(sum(map(math.log, worked.values())) / 512)
    top.axhline(s, color=BLUE, linewidth=1.2)
    top.text(512, s + .12, f"s = {s:.5f}", color=BLUE, ha="right")
    top.set_xlim(0, 515)
    top.set_ylim(0, 2.3)
    title = f"Two outliers among 512 tokens: s = {s:.5f}, below the band's edge 0.9997"
    label(top, title, "token", "ratio")
    lengths = [2 ** k for k in range(3, 15)]
    for count, line, marker in ((1, "-", "o"), (2, "--", "s"), (4, ":", "^")):
        bottom.loglog(lengths, [math.expm1(3 * count / n) for n in lengths], line, color=BLUE,
                      marker=marker, markersize=4,
                      label=f"{count} token{'s' * (count > 1)} up by 3 nats")
    bottom.axhspan(1e-4, 4e-4, color=GREY, alpha=.2)
    bottom.text(9, 1.6e-4, "inside GSPO's band", color=GREY)
    measured = [r["length"] for r in data["rows"]]
    bottom.axvspan(min(measured), max(measured), color=GREY, alpha=.08)
    bottom.text(8.5, 4, "lengths measured", color=GREY, fontsize=8)
    bottom.set_ylim(1e-4, 10)
    label(bottom, "How far s moves, all other tokens unchanged", "tokens per answer", "s - 1")
    bottom.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
