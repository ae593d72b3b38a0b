"""A dose of sampler noise and its responses: when may the sampler's log-probs be trusted, and by which ratio?

Claim: sequence likelihoods tolerate precision differences better than token likelihoods, so GSPO may use the inference engine's
log-probs and save recomputing them (GSPO 2507.18071, §5.4). Newer accounts make this gap the cause of MoE collapse (2510.11370,
2512.01374, 2510.18855). Here the sampling copy's weights are rounded row by row to b bits, router and head included. The dose is
measured: KL(sampler || trainer) per token and the share of tokens whose experts differ, on the first batch of every cold start.

Setting: train.py's default task and policy (MoE, or the dense control of equal active size), rate 4e-4, 4 mini-batches, 16 rollout
batches. Seeds are independent cold starts (0 to 7). Endpoint: held-out pass@1 at the end; differences are paired by cold start with
95 % t intervals. "Lost" is recomputed minus trusted. Written down beforehand, per dose:

  tolerates   GSPO's loss is below 0.05: the interval's upper end is
  suffers     its loss is above 0.05: the interval's lower end is

  confirmed   GSPO tolerates every dose at which GRPO suffers, and there is such a dose
  refuted     GSPO suffers at every dose at which GRPO suffers, or GRPO suffers at none while GSPO suffers at one
  depends on the dose   GSPO tolerates at one dose and suffers at another
  undecided   otherwise, and with fewer than 8 cold starts

Reported beside it, by the same intervals: trusted GSPO minus trusted GRPO (does the sequence ratio protect?), recomputing and
recomputing with token weights in [0, 2] (TIS) as remedies, and the share of routes in it: replaying the sampler's routes (R3) or the
trainer's (R2) in the updates, a dense policy, and rounding all but router and head. Routes are a part of it if R3 gains over
recomputing and the MoE loses more than the dense policy at the same measured KL.
"""

import maps

GRPO, GSPO = "--algorithm grpo --epsilon_high 0.27", "--algorithm gspo"     # GRPO: the band of GSPO's own baseline, §5.1
TRUST, TIS = "--old_logp sampler", "--mismatch token_truncate --mismatch_high 2"
ARMS = {f"{name}{extra}": f"{algorithm} {flags}" for name, algorithm in (("grpo", GRPO), ("gspo", GSPO)) for extra, flags in (
    ("_trusted", TRUST), ("", ""), ("_tis", TIS), ("_r3", "--routing_replay rollout"), ("_r2", "--routing_replay old"))}
BITS = ("int3", "int4", "int5", "int6", "float8", "bfloat16", "float32")
SEEDS, BATCHES = range(8), 16
MAIN = ("grpo_trusted", "gspo_trusted", "grpo", "gspo", "grpo_tis", "gspo_tis")


def grid(full):
    """The doses that hurt first, seed by seed: stopping anywhere leaves whole rows."""
    def cells(arms, bits, seeds=SEEDS, **more):
        return [maps.cell(arm, seed, bits=b, batches=BATCHES, **more) for seed in seeds for b in bits for arm in arms]
    for seed in SEEDS:
        yield from cells(MAIN, ("int3",), [seed])
        yield from cells(MAIN[:5], ("int4",), [seed])
        yield from cells(("grpo", "gspo"), ("float32",), [seed])           # no noise: where the curves begin
    yield from cells(MAIN[:2], ("int5",))
    yield from cells(MAIN[:4], ("int3", "int4"), policy="dense")
    yield from cells(("grpo_r3", "gspo_r3", "grpo_r2"), ("int3", "int4"))
    if full:
        yield from cells(MAIN, ("int5", "int6", "float8", "bfloat16"))
        yield from cells(MAIN[:4], BITS, policy="dense")
        yield from cells(("grpo_r3", "gspo_r3", "grpo_r2", "gspo_r2"), BITS)


if __name__ == "__main__":
    maps.main(__file__, ARMS, grid, None, None, __doc__)
