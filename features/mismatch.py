"""Train/inference mismatch: what the sampler drew from is not quite what is trained, because of
another number format, another engine or old weights. The loss is weighted by the ratio of trainer
to sampler probability (truncated importance sampling), or tokens and responses whose ratio is out
of bounds are left out.

losses.py has the formulas (mismatch_weight, mismatch_mask); algorithms and their sources:
docs/family.md. With GSPO, whose ratio is a geometric mean, the level is geo.
"""

from dataclasses import dataclass

from features.feature import Feature, flag, refuse
from losses import mismatch_mask, mismatch_weight

RECOMPUTED = {"old_logp=recompute": "it compares the recomputed log-probs with the sampler's"}


@dataclass(frozen=True)
class Flags:
    mismatch: str | None = flag(
        None, "weight the loss by the ratio of trainer to sampler probability, at most "
              "--mismatch_high; the ratio is per token, or per response as a product (seq) or "
              "geometric mean (geo)", section="trainer and sampler", unset="no weights",
        choices=("token_truncate", "seq_truncate", "geo_truncate"), needs=RECOMPUTED)
    mismatch_high: float = flag(
        2.0, "upper limit of the --mismatch weights", above=0, needs="mismatch", read=float)
    mismatch_mask: str | None = flag(
        None, "drop tokens or responses whose ratio of trainer to sampler probability is outside "
              "--mismatch_mask_bounds; they stay in the divisor; the ratio is defined as for "
              "--mismatch; outlier drops a response if one of its tokens is outside",
        unset="drop nothing",
        choices=("token", "seq", "geo", "outlier"), needs=RECOMPUTED)
    mismatch_mask_bounds: list[float] = flag(
        [], "lower and upper bound of the ratio for --mismatch_mask",
        unset="0.5 5; for outlier 1e-4 100", needs="mismatch_mask",
        must=(lambda bounds: not bounds or len(bounds) == 2 and 0 <= bounds[0] <= bounds[1],
              "be two numbers: a lower bound of at least 0, and an upper bound not below it"),
        read=float)


class Mismatch(Feature):
    flags = Flags
    presets = {"minirl": dict(objective="grpo", epsilon_high=0.27, reduction="sequence-sum",
                              scale_rewards="none", mismatch="token_truncate", mismatch_high=5.0)}

    @classmethod
    def on(cls, settings):
        return bool(settings.mismatch or settings.mismatch_mask)

    @classmethod
    def check(cls, settings):
        if settings.mismatch_mask == "token" and not settings.row.per_token:
            refuse(settings, "mismatch_mask", "needs a ratio per token, as in gspo_token: a "
                   "response with one ratio is only scaled")

    def after_scoring(self, learner, batch, old):
        weights = mismatch_correction(self.settings, batch.old_logp, batch.rollout)     # [B, T]
        batch.extras["mismatch_weights"] = weights
        batch.scale_surrogate(weights)

    def metrics(self, batch, mini, new):
        """mismatch_ess = (Σw)² / (n·Σw²), the effective sample size as a share of the n loss tokens
        with weights w."""
        w = batch.extras["mismatch_weights"][batch.rollout.mask]                    # [n]
        size = w.sum() ** 2 / (len(w) * w.square().sum()).clamp(min=1e-30)          # []
        return {"mismatch_ess": size.item() if len(w) else None}


def read_mask_bounds(settings):
    """(low, high) of --mismatch_mask."""
    defaults = (1e-4, 100.0) if settings.mismatch_mask == "outlier" else (0.5, 5.0)
    return tuple(settings.mismatch_mask_bounds or defaults)


def mismatch_correction(settings, old_logp, rollout):
    """[B, T], the weight of --mismatch times the mask of --mismatch_mask, which correct for the
    difference between the sampler's and the policy's log-probs."""
    mask = rollout.mask                                                             # [B, T]
    sampler = rollout.sampler_logp                                                  # [B, T]
    weights = mask.float()                                                          # [B, T]
    if settings.mismatch:
        level = settings.mismatch.removesuffix("_truncate")
        weights = mismatch_weight(old_logp, sampler, mask, level, settings.mismatch_high)  # [B, T]
    if settings.mismatch_mask:
        weights = weights * mismatch_mask(old_logp, sampler, mask, settings.mismatch_mask,
                                          *read_mask_bounds(settings))              # [B, T]
    return weights
