"""Does Var[log s] fall as 1/L?

Claim: Var[log s] = Var[log w] / L ("Rethinking GSPO", eq. 19, for independent tokens). At L = 817
the paper reports Var[log w] = 8.14e-4 and Var[log s] = 6.80e-6, prints their quotient as 0.00436
and the theory as 0.00122; the quotient of its two variances is 0.00835, 6.8 times the theory
(docs/corrections.md). Written down beforehand, for answers of 7 to 997 tokens, three updates
off-policy, over cold starts:

  confirmed   the slope of Var[log s] / Var[log w] against L, log-log, lies in [-1.25, -0.75]
  refuted     it lies outside

The rest is correlation: Var[log s] · L / Var[log w] = 1 + 2 Σ_k (1 - k/L) ρ_k for stationary
tokens, so a factor above 1 says that log-ratios of one answer go together, below 1 that they
cancel.
"""

import torch

from shared import claim, drift
from tools.style import BLACK, GREY, GREYS, label, panels

ROW = dict(claim="Var[log s] = Var[log w] / L",
           source="Rethinking GSPO, eq. 19 and §5.3",
           reported="factor 0.00835 at L = 817 by its own variances (printed 0.00436), "
                    "theory 0.00122",
           regime=("width 64, 2 layers, answers of 7 to 997 tokens, three updates off-policy"))


def measure(seeds, quick):
    rows = []
    for seed in seeds:
        _, _, answers = drift.lengths(seed, longest=True)
        for rollout, batch in answers.values():
            log_w_var, log_s_var, inverse = drift.variances(batch, rollout.mask)
            log_w = (batch["new_logp"] - batch["old_logp"])                          # [B, T]
            both = rollout.mask[:, 1:]                                               # [B, T-1]
            pairs = torch.stack([log_w[:, :-1][both], log_w[:, 1:][both]])           # [2, pairs]
            rows.append(dict(seed=seed, length=1 / inverse, log_w_var=log_w_var,
                             log_s_var=log_s_var, factor=log_s_var / log_w_var,
                             neighbours=torch.corrcoef(pairs)[0, 1].item()))
    per_seed = [[r for r in rows if r["seed"] == seed] for seed in seeds]
    slopes = [claim.slope([r["length"] for r in own], [r["factor"] for r in own])
              for own in per_seed]
    return dict(rows=rows, slopes=slopes)


def judge(data):
    rows = data["rows"]
    slopes = data["slopes"]
    lengths = [r["length"] for r in rows]
    excess = sorted(r["factor"] * r["length"] for r in rows)
    measured = (f"slope {claim.mean(slopes):.2f} over {min(lengths):.0f} to {max(lengths):.0f} "
                f"tokens; factor times L between {excess[0]:.2f} and {excess[-1]:.2f}, median "
                f"{claim.median(excess):.2f} (1 if tokens were independent)")
    answer = claim.verdict(slopes, held=(-1.25, -.75))
    return measured, claim.number(slopes, "{:.2f}", "is the exponent of L"), answer


def draw(data):
    rows = data["rows"]
    figure, (left, right) = panels(1, 2)
    for place, seed in enumerate(sorted({r["seed"] for r in rows})):
        own = sorted((r for r in rows if r["seed"] == seed), key=lambda r: r["length"])
        style = dict(marker="osD^v"[place % 5], color=GREYS[place % 4], linewidth=1,
                     markersize=5, label="a cold start" if place == 0 else None)
        left.loglog([r["length"] for r in own], [r["factor"] for r in own], **style)
        right.loglog([r["length"] for r in own],
                       [r["factor"] * r["length"] for r in own], **style)
    ends = [min(r["length"] for r in rows), max(max(r["length"] for r in rows), 1000)]
    left.loglog(ends, [1 / x for x in ends], color="black", linestyle="--",
                label="1/L, independent tokens")
    left.plot([817], [8.35e-3], "*", color=BLACK, markersize=11, label="the paper's two variances")
    left.plot([817], [4.36e-3], "*", color=BLACK, markersize=11, fillstyle="none",
              label="the factor it prints")
    label(left, "Var[log s] / Var[log w]", "tokens per answer, L", "")
    left.legend(fontsize=8)
    right.axhline(1, color="black", linestyle="--")
    right.plot([817], [6.8], "*", color=BLACK, markersize=11)
    right.set_xlim(right=1300)
    right.axhspan(0, 1, color=GREY, alpha=.08)
    label(right, "… times L: 1 if tokens were independent", "tokens per answer, L", "")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
