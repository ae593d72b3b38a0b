"""Does GSPO tolerate a sampler whose numbers are not the trainer's?

Claim: sequence likelihoods tolerate precision differences better than token likelihoods, so the inference engine's log-probs may be
used and recomputing them saved (GSPO 2507.18071, §5.4). The sampler here is the same policy with weights and arithmetic in bfloat16, or
with weights rounded to 8 bits (float8 e4m3). Written down beforehand, held-out pass@1 after 8 rollout batches with a bfloat16 sampler:

  confirmed   with --old_logp sampler GSPO loses less than 0.05 against recompute (mean over seeds), and GRPO at least 0.05 more than GSPO
  refuted     GSPO loses 0.05 or more, or GRPO tolerates it as well (loses less than 0.05): then it is no advantage of GSPO's
  otherwise   cannot be told at this size; so too with fewer than three seeds

Beside it, by length: the errors σ_w of log w and σ_s of log s that the sampler alone makes. If tokens' errors are independent,
σ_s = σ_w/√L, and they fit inside GSPO's band from L = (σ_w/3e-4)² tokens on.
"""

import copy

import torch

import claim
import drift
from plumbing.style import BLUE, COLOURS, GREY, ORANGE, label, panels
from rollout import response_logp

ARMS = {f"{name.upper()}, {old}": [*flags, "--sampler_dtype", "bfloat16", "--old_logp", old]
        for name, flags in (("gspo", ["--algorithm", "gspo"]), ("grpo", list(drift.GRPO))) for old in ("recompute", "sampler")}


@torch.no_grad()
def coarse(policy, kind):
    """A copy of the policy as a sampler holds it."""
    copied = copy.deepcopy(policy)
    if kind == "bfloat16":
        return copied.to(torch.bfloat16)
    for p in copied.parameters():
        scale = p.abs().max() / 448                          # the largest number of float8 e4m3
        p.copy_((p / scale).to(torch.float8_e4m3fn).float() * scale)
    return copied


@torch.no_grad()
def measure(seeds, quick):
    rows, scores = [], {name: [] for name in ARMS}
    for seed in seeds:
        old, _, answers = drift.lengths(seed)
        samplers = {kind: coarse(old, kind) for kind in ("bfloat16", "float8")}
        for rollout, batch in answers.values():
            for kind, sampler in samplers.items():
                error, lengths = response_logp(sampler, rollout).logp - batch["old_logp"], rollout.mask.sum(-1)     # [B, T], [B]
                rows.append(dict(seed=seed, sampler=kind, length=lengths.float().mean().item(), sigma_w=error[rollout.mask].std().item(),
                                 sigma_s=(error.sum(-1) / lengths).std().item()))
    if not quick:
        with torch.enable_grad():
            for seed in seeds:
                for name, flags in ARMS.items():
                    scores[name].append(claim.trained(flags, seed, 8)[1]["pass_at_1_after"])
    sigma = {kind: claim.mean([r["sigma_w"] for r in rows if r["sampler"] == kind]) for kind in ("bfloat16", "float8")}
    ratio = claim.mean([r["sigma_s"] / r["sigma_w"] * r["length"] ** .5 for r in rows])
    measured = "; ".join(f"{kind}: σ_w {s:.1e} nats, inside the band from {(s / 3e-4) ** 2:,.0f} tokens on" for kind, s in sigma.items())
    measured += f"; σ_s·√L/σ_w {ratio:.2f} on average (1 if independent)"
    verdict, spread = claim.CANNOT, claim.span([claim.mean([r["sigma_w"] for r in rows if r["sampler"] == "bfloat16" and r["seed"] == s]) for s in seeds], "{:.1e}") + " (σ_w in bfloat16)"
    if not quick:
        loss = {a: [x - y for x, y in zip(scores[f"{a}, recompute"], scores[f"{a}, sampler"])] for a in ("GSPO", "GRPO")}
        gspo, grpo = (claim.interval(loss[a]) for a in ("GSPO", "GRPO"))
        measured += f"; pass@1 lost by trusting the sampler: GSPO {gspo[0]:+.3f} [{gspo[1]:+.3f}, {gspo[2]:+.3f}], GRPO {grpo[0]:+.3f} [{grpo[1]:+.3f}, {grpo[2]:+.3f}]"
        spread = claim.span(loss["GSPO"], "{:+.3f}") + " (GSPO's loss)"
        refuted = gspo[0] >= .05 or grpo[0] < .05
        verdict = claim.CANNOT if len(seeds) < 3 else claim.NOT_HELD if refuted else claim.HELD if grpo[0] >= gspo[0] + .05 else claim.CANNOT
    return measured, spread, verdict, dict(rows=rows, scores=scores)


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6, gridspec_kw=dict(width_ratios=[3, 2]))
    for kind, marker in (("bfloat16", "o"), ("float8", "s")):
        for name, colour, line in (("sigma_w", ORANGE, "--"), ("sigma_s", BLUE, "-")):
            own = [r for r in data["rows"] if r["sampler"] == kind]
            seeds = sorted({r["seed"] for r in own})
            columns = list(zip(*[[(r["length"], r[name]) for r in own if r["seed"] == s] for s in seeds]))
            left.loglog([claim.mean([x for x, _ in c]) for c in columns], [claim.mean([y for _, y in c]) for c in columns], line, color=colour, marker=marker,
                        markersize=5, label=f"{'log w' if name == 'sigma_w' else 'log s'}, {kind} sampler")
    left.axhspan(1e-4, 4e-4, color=GREY, alpha=.2)
    left.text(8, 1.6e-4, "GSPO's band", fontsize=8, color=GREY)
    label(left, "Error that the sampler's numbers alone make", "tokens per answer", "standard deviation (nats)")
    left.legend(fontsize=8)
    shown = {name: values for name, values in data["scores"].items() if values}
    for place, (name, values) in enumerate(shown.items()):
        right.bar(place, claim.mean(values), color=[BLUE, COLOURS[5], ORANGE, COLOURS[6]][place])
        right.plot([place] * len(values), values, "k.", markersize=5)
    right.set_xticks(range(len(shown)), [name.replace(", ", "\n") for name in shown], fontsize=8)
    label(right, "bfloat16 sampler: held-out pass@1", "old log-probs from", "after 8 rollout batches")
    if not shown:
        right.text(.5, .5, "not measured with --quick", ha="center", transform=right.transAxes, color=GREY)
    return figure


if __name__ == "__main__":
    claim.main(__file__, "GSPO tolerates the sampler's numerics, so old log-probs need no recomputation", "GSPO §5.4", "no figure", measure, draw)
