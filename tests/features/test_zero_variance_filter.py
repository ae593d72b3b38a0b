"""Groups of equal rewards left out of the loss.

python -m pytest tests/features/test_zero_variance_filter.py"""

import math
from statistics import pstdev

import pytest

import train
from reference import G, L_MAX, mean, weight

BETA = 0.3
KEPT = "--zero_variance_filter --lr_scheduler_type constant_with_warmup --warmup_steps 0 "
LINE = f"{KEPT}--algorithm grpo --learning_rate 0.005 --max_completion_length {L_MAX} "


def loops(rewards, gaps, reduction):
    """(loss, KL's part of it) of a mini-batch whose new policy is still the old one, in float64.
    gaps: of each response the log π - log π_ref of its tokens, none where the group is left out."""
    lengths = [len(gap) for gap in gaps]
    loss = kl = 0.0
    for i, gap in enumerate(gaps):
        group = rewards[i // G * G:][:G]
        share = weight(lengths, i, reduction)
        loss -= share * len(gap) * (rewards[i] - mean(group)) / (pstdev(group) + 1e-6)
        kl += BETA * share * sum(math.exp(-d) - 1 + d for d in gap)
    return loss + kl, kl


def every_other_group(n, right, problem):
    """Rewards of groups of four: all equal, and 1, 0, 0.5, 1 in turn."""
    return 1.0 if n // 4 % 2 else (1.0, 0.0, 0.5, 1.0)[n % 4]


@pytest.mark.parametrize("reduction, plain", [
    *((name, "") for name in ("sequence-mean", "token-mean", "group-token-mean", "constant",
                              "sequence-sum")),
    ("sequence-mean", " --plain"), ("token-mean", " --micro_batch_size 2")])
def test_loss_and_kl_are_those_of_the_other_groups(reduction, plain, run, judge, calls):
    judge(every_other_group)
    sampled, updates = calls(train, "collect"), calls(train, "update")
    records = run(f"{LINE}--reduction {reduction} --beta {BETA} --steps 2 "
                  f"--steps_per_generation 1{plain}")
    for ((*_, mini), _, stats), (*_, (rollout, *_)), record in zip(updates, sampled, records,
                                                                   strict=True):
        assert record["zero_variance_groups"] == 0.5 and record["discarded_groups"] == 0
        assert record["reward"] == pytest.approx((1 + 2.5 / 4) / 2)
        assert record["length"] == pytest.approx(rollout.mask.sum(-1).float().mean().item())
        gaps = [gap[mask].double().tolist() for gap, mask
                in zip(mini.old_logp - mini.extras["ref_logp"], mini.rollout.mask)]
        assert [bool(gap) for gap in gaps] == [mini.rewards[i // G * G:][:G].std() > 0
                                               for i in range(4 * G)]
        loss, kl = loops(mini.rewards.tolist(), gaps, reduction)
        assert stats["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert stats["kl_loss"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
    assert stats["kl_loss"] > 1e-4, "the policy has moved"


