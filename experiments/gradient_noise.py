"""Does GRPO's gradient noise grow with the length of answers while GSPO's stays constant?

Claim: noise ∝ length for GRPO, ≈ constant for GSPO (the slides); GSPO gives every token of an
answer one weight where GRPO gives each its own, and these accumulate (GSPO 2507.18071, §4.2).
Measured at one drifted policy per cold start (three updates off-policy) on answers of 7 to 259
tokens: the trace of the covariance of the gradient over groups of eight answers. A batch of a fixed
number of tokens holds 1/L as many answers, so its variance is that of a group times L. Written down
beforehand, slopes log-log against length, at fixed tokens:

  confirmed   GRPO's slope exceeds GSPO's by more than 0.5 (the sources say by 1)
  refuted     by less than 0.5
  cannot be tested here   (added after measuring, as "refuted" said of the claim what is true of the
              regime) the slope of GRPO minus that of a gradient without any ratio has an interval
              that covers 0: the ratios add no noise whose growth could be seen

A gradient that is shorter is less noisy without being better, so the signal-to-noise ratio stands
beside it: |mean gradient|² / trace of its covariance, per group, the mean's own noise subtracted.
Two controls: the plain gradient without any ratio, and GSPO without its clip. Where GRPO equals the
first, its ratios add no noise.
"""

import math

import torch

from shared import claim, drift
from losses import policy_loss, token_weights
from tools.style import BLUE, LINES, ORANGE, colour, label, panels
from ratios import sequence_ratio, token_ratio
from rollout import response_logp

ROW = dict(claim="Gradient noise grows with length for GRPO and not for GSPO",
           source="GSPO §4.2; slides",
           reported="noise ∝ length against ≈ constant",
           regime=("width 64, 2 layers, answers of 7 to 259 tokens, three updates off-policy"))
OBJECTIVES = {"GRPO": ("grpo", dict(epsilon_high=.27)), "GSPO": ("gspo", {}),
              "GSPO, no clip": ("gspo", dict(epsilon=1.0, epsilon_high=1e6)),
              "GMPO": ("gmpo", {}), "no ratio": ("reinforce", {}),
              "sequence IS, ∏w": ("sequence_is", {})}


def gradients(policy, rollout, batch):
    """The gradient of every group of eight answers, as {objective: [groups, parameters]}."""
    found = {name: [] for name in OBJECTIVES}
    for start in range(0, len(rollout.mask), 8):
        rows = slice(start, start + 8)
        part = rollout.rows(start, start + 8)
        logp = response_logp(policy, part).logp                                      # [8, T]
        weights = token_weights(part.mask, "sequence-mean")                          # [8, T]
        for name, (objective, options) in OBJECTIVES.items():
            loss, _ = policy_loss(objective, logp, batch["old_logp"][rows],
                                  batch["advantages"][rows], part.mask, weights=weights, **options)
            grads = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True,
                                        allow_unused=True)
            found[name].append(torch.cat([g.flatten() for g in grads if g is not None]))
    return {name: torch.stack(rows) for name, rows in found.items()}


def measure(seeds, quick):
    rows = []
    weights = None
    for seed in seeds:
        _, new, answers = drift.lengths(seed)
        for n, (rollout, batch) in answers.items():
            if quick and n not in (2, 8, 32):
                continue
            length = rollout.mask.sum(-1).float().mean().item()
            for name, g in gradients(new, rollout, batch).items():
                rows.append(dict(seed=seed, objective=name, length=length,
                                 variance=g.var(0).sum().item(), groups=len(g),
                                 mean=g.mean(0).square().sum().item()))
            if n == (8 if quick else 16) and weights is None:
                weights = token_strip(rollout, batch)
        claim.say(f"seed {seed}: gradients of {len(OBJECTIVES)} objectives")
    slopes = {name: [fixed_tokens(rows, name, seed) for seed in seeds] for name in OBJECTIVES}
    return dict(rows=rows, slopes=slopes, weights=weights)


def fixed_tokens(rows, name, seed):
    """The slope of variance · L over L, for one objective and one cold start."""
    own = [r for r in rows if (r["objective"], r["seed"]) == (name, seed) and r["variance"] > 0]
    return claim.slope([r["length"] for r in own], [r["variance"] * r["length"] for r in own])


def signal_to_noise(data, name):
    """The signal-to-noise ratio of a group's gradient, averaged over lengths, one value per cold
    start. The signal is |mean|² without the part that noise adds to it: E|ḡ|² = |mean|² + variance
    / groups."""
    own = [r for r in data["rows"] if r["objective"] == name and r["variance"] > 0]
    ratio = lambda r: (r["mean"] - r["variance"] / r.get("groups", drift.GROUPS)) / r["variance"]
    return [claim.mean(ratio(r) for r in own if r["seed"] == seed)
            for seed in sorted({r["seed"] for r in own})]


def judge(data):
    slopes = data["slopes"]
    gap = [a - b for a, b in zip(slopes["GRPO"], slopes["GSPO"])]
    better = [a - b for a, b in zip(*(signal_to_noise(data, name) for name in ("GRPO", "GSPO")))]
    measured = ("slope of the variance at fixed tokens: "
                + ", ".join(f"{name} {claim.mean(values):.2f}" for name, values in slopes.items())
                + " (at a fixed number of answers: one less each); signal to noise of a group: "
                + ", ".join(f"{name} {claim.mean(signal_to_noise(data, name)):.3f}" for name in
                            ("GRPO", "GSPO", "no ratio"))
                + f", GRPO minus GSPO {claim.number(better, '{:+.3f}')}")
    added = [a - b for a, b in zip(slopes["GRPO"], slopes["no ratio"])]
    measured += f"; slope of GRPO minus that of no ratio {claim.number(added, '{:+.2f}')}"
    answer = claim.verdict(gap, held=(.5, math.inf))
    _, low, high = claim.interval(added)
    if len(added) >= claim.LEAST and low < 0 < high:
        answer = f"{claim.CANNOT}: ratios stay near 1, GRPO's noise is that of no ratio at all"
    return measured, claim.number(gap, "{:+.2f}", "in the slope, GRPO minus GSPO"), answer


def token_strip(rollout, batch):
    """Weights of the tokens of one answer with A > 0, as multiples of A / (N·|y|): GRPO's w, or 0
    where it is clipped, and GSPO's s. The answer is the one whose token ratios vary most, among
    those that GSPO does not clip."""
    w, s = (ratio(batch["new_logp"], batch["old_logp"], rollout.mask)
            for ratio in (token_ratio, sequence_ratio))                              # [B, T], [B]
    clipped = (batch["advantages"] <= 0) | (s > 1 + 4e-4)                            # [B]
    spread = w.log().masked_fill(~rollout.mask, 0.0).std(-1).masked_fill(clipped, -1.0)      # [B]
    row = int(spread.argmax())
    return dict(w=w[row][rollout.mask[row]].tolist(), s=s[row].item())


def draw(data):
    figure, (left, right) = panels(1, 2, width=9)
    w = data["weights"]["w"]
    s = data["weights"]["s"]
    left.vlines(range(len(w)), 1, [0 if x > 1.27 else x for x in w], color=ORANGE, linewidth=1.4)
    left.plot(range(len(w)), [0 if x > 1.27 else x for x in w], "o", color=ORANGE, markersize=3,
              label="GRPO: w, 0 where clipped")
    left.axhline(s, color=BLUE, label=f"GSPO: s = {s:.4f} for all")
    label(left, "Weight of each token of one good answer (A > 0)", "token",
          "weight, in units of A / (N·|y|)")
    left.legend(loc="lower left", fontsize=8)
    seeds = sorted({r["seed"] for r in data["rows"]})
    for i, name in enumerate(OBJECTIVES):
        rows = [sorted((r["length"], r["variance"] * r["length"]) for r in data["rows"]
                       if (r["objective"], r["seed"]) == (name, seed)) for seed in seeds]
        lengths, means = ([claim.mean(point[axis] for point in column) for column in zip(*rows)]
                          for axis in (0, 1))
        right.loglog(lengths, means, LINES[i % 4], color=colour(OBJECTIVES[name][0]),
                     marker="soD^vP"[i], markersize=4,
                     label=f"{name} ({claim.mean(data['slopes'][name]):.2f})")
    label(right, "Gradient variance at equal numbers of tokens", "tokens per answer",
          "trace of covariance · length")
    right.legend(fontsize=7.5, title="objective (slope)", title_fontsize=8, loc="upper left")
    right.set_ylim(top=right.get_ylim()[1] * 1e4)
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
