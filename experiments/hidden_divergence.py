"""Does length normalisation hide a large move of a few tokens?

Claim: an answer that has moved far on a few critical tokens still shows s near 1, because the rest has not moved (a blog's critique of
GSPO; its worked example has two tokens of 512 at 1.9 and 0.4 and calls s = 0.9995 "comfortably inside" the band). Written down
beforehand: in answers of 7 to 259 tokens, after three updates, one or two tokens are moved by 3 nats (20 times likelier).

  confirmed   s stays inside GSPO's band [1 - 3e-4, 1 + 4e-4] in at least half of the longest answers that were inside before
  refuted     in fewer than a tenth

Two tokens moved by 3 nats in opposite directions are shown beside it: their product is 1 at any length. How often the hiding happens by
itself: the share of answers inside the band that hold a token moved by more than log 1.27, GRPO's upper edge.
"""

import math

import claim
import drift
from plumbing.style import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, label, panels
from ratios import sequence_log_ratio, token_log_ratio


def measure(seeds, quick):
    rows, inside = [], lambda x: (x >= math.log(1 - 3e-4)) & (x <= math.log(1 + 4e-4))
    for seed in seeds:
        _, _, answers = drift.lengths(seed)
        for rollout, batch in answers.values():
            log_s = sequence_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask)                   # [B]
            largest = token_log_ratio(batch["new_logp"], batch["old_logp"], rollout.mask).abs().amax(-1)     # [B]
            lengths, calm = rollout.mask.sum(-1), inside(log_s)                                              # [B]
            stays = lambda nats: (inside(log_s + nats / lengths) & calm).sum().item() / max(int(calm.sum()), 1)
            rows.append(dict(seed=seed, length=lengths.float().mean().item(), calm=int(calm.sum()), one=stays(3.0), two=stays(6.0), opposite=stays(0.0),
                             shift=(3 / lengths).mean().item(), hidden=((largest > math.log(1.27)) & calm).sum().item() / max(int(calm.sum()), 1)))
    longest = [r for r in rows if r["length"] > 200 and r["calm"]]
    one, calm = claim.mean([r["one"] for r in longest]) if longest else 0.0, sum(r["calm"] for r in rows)
    hidden = sum(r["hidden"] * r["calm"] for r in rows) / max(calm, 1)
    needed = 3 / math.log(1 + 4e-4)
    verdict = claim.CANNOT if not longest else claim.HELD if one >= .5 else claim.NOT_HELD if one < .1 else claim.CANNOT
    measured = (f"one token up by 3 nats in about {claim.mean([r['length'] for r in rows if r['length'] > 200]):.0f}: s = {math.exp(claim.mean([r['shift'] for r in rows if r['length'] > 200])):.4f}, near "
                f"1 but outside the band for {1 - one:.0%} of answers (it fits from {needed:,.0f} tokens on); two that cancel stay inside at any length; "
                f"{hidden:.0%} of the answers inside the band hold a token moved beyond 1.27 or 1/1.27")
    return measured, claim.span([claim.mean([r["one"] for r in longest if r["seed"] == s] or [0]) for s in seeds], "{:.0%}") + " (stay inside)", verdict, dict(rows=rows)


def draw(data):
    figure, (top, bottom) = panels(2, 1, height=5.2, gridspec_kw=dict(height_ratios=[1, 2.2]))
    worked = {137: 1.9, 400: .4}
    top.vlines(range(1, 513), 0, [worked.get(t, 1) for t in range(1, 513)], color=[RED if t in worked else "#BBBBBB" for t in range(1, 513)],
               linewidth=[2.5 if t in worked else .8 for t in range(1, 513)])
    for t, w in worked.items():
        top.annotate(f"w = {w}", (t, w), textcoords="offset points", xytext=(6, 0), color=RED)
    s = math.exp(sum(map(math.log, worked.values())) / 512)
    top.axhline(s, color=BLUE, linewidth=1.2)
    top.text(512, s + .12, f"s = {s:.5f}", color=BLUE, ha="right")
    top.set_xlim(0, 515)
    label(top, f"Two outliers among 512 tokens: s = {s:.5f}, below the band's edge 0.9997", "token", "ratio")
    lengths = [2 ** k for k in range(3, 15)]
    for count, colour, marker in ((1, COLOURS[0], "o"), (2, ORANGE, "s"), (4, GREEN, "^")):
        bottom.loglog(lengths, [math.expm1(3 * count / n) for n in lengths], color=colour, marker=marker, markersize=4, label=f"{count} token{'s' * (count > 1)} up by 3 nats")
    bottom.axhspan(1e-4, 4e-4, color=GREY, alpha=.2)
    bottom.text(9, 1.6e-4, "inside GSPO's band", color=GREY)
    bottom.axvspan(min(r["length"] for r in data["rows"]), max(r["length"] for r in data["rows"]), color=GREY, alpha=.08)
    bottom.text(8.5, 4, "lengths measured", color=GREY, fontsize=8)
    bottom.set_ylim(1e-4, 10)
    label(bottom, "How far s moves, all other tokens unchanged", "tokens per answer", "s - 1")
    bottom.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Length normalisation hides a large move of a few tokens: s stays near 1", "blog critique of GSPO and its worked example",
               "s = 0.9995, 'comfortably inside' the band", measure, draw)
