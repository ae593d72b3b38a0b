"""Groups of equal rewards left out of the loss.

python -m pytest tests/features/test_zero_variance.py"""

import math

import pytest
from safetensors.torch import load_file

import train
from plumbing.run.arguments import parse
from tiny_run import state, unequal
from tools import export

BETA = 0.3
LONGEST = 7                      # --max_completion_length, for --reduction constant
KEPT = "--zero_variance_filter --lr_scheduler_type constant_with_warmup --warmup_steps 0 "
LINE = f"{KEPT}--algorithm grpo --learning_rate 0.005 --max_completion_length {LONGEST} "


def loops(rewards, lengths, gaps, reduction, beta):
    """(loss, KL's part of it) of a mini-batch whose new policy is still the old one, in float64.
    rewards: lists of G numbers, a list per prompt; lengths: likewise; gaps: likewise, of lists of
    log π - log π_ref of the tokens."""
    everyone = sum(map(len, rewards))
    live = [q for q, group in enumerate(rewards) if max(group) > min(group)]
    tokens = sum(sum(lengths[q]) for q in live)
    loss = kl = 0.0
    for q in live:
        mean = sum(rewards[q]) / len(rewards[q])
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards[q]) / len(rewards[q]))
        for r, length, gap in zip(rewards[q], lengths[q], gaps[q]):
            weight = {"sequence-mean": 1 / (everyone * length), "token-mean": 1 / tokens,
                      "group-token-mean": 1 / (len(rewards) * sum(lengths[q])),
                      "constant": 1 / (everyone * LONGEST), "sequence-sum": 1 / everyone}[reduction]
            loss -= sum(weight * (r - mean) / (std + 1e-6) for _ in range(length))
            kl += beta * sum(weight * (math.exp(-d) - 1 + d) for d in gap)
    return loss + kl, kl


@pytest.fixture
def updates(monkeypatch):
    """[(mini-batch, statistics of its update)] from now on."""
    seen = []
    update = train.update

    def watched(settings, learner, mini):
        seen.append((mini, update(settings, learner, mini)))
        return seen[-1][1]
    monkeypatch.setattr(train, "update", watched)
    return seen


def every_other_group(n, right, problem):
    """Rewards of groups of four: all equal, and 1, 0, 0.5, 1 in turn."""
    return 1.0 if n // 4 % 2 else (1.0, 0.0, 0.5, 1.0)[n % 4]


@pytest.mark.parametrize("plain", ["", " --plain", " --micro_batch_size 2"])
@pytest.mark.parametrize("reduction", ["sequence-mean", "token-mean", "group-token-mean",
                                       "constant", "sequence-sum"])
def test_loss_and_kl_are_those_of_the_other_groups(
        reduction, plain, run, judge, updates, monkeypatch):
    judge(every_other_group)
    sampled = []
    collect = train.collect

    def watched(*args):
        sampled.append(collect(*args))
        return sampled[-1]
    monkeypatch.setattr(train, "collect", watched)
    records = run(f"{LINE}--reduction {reduction} --beta {BETA} --steps 2 "
                  f"--steps_per_generation 1{plain}")
    for (mini, stats), (rollout, *_), record in zip(updates, sampled, records, strict=True):
        assert record["dead_groups"] == 0.5 and record["discarded_groups"] == 0
        assert record["reward"] == pytest.approx((1 + 2.5 / 4) / 2)
        assert record["length"] == pytest.approx(rollout.mask.sum(-1).float().mean().item())
        rewards = mini.rewards.view(4, 4).tolist()
        masks = mini.rollout.mask                                                   # [B, T]
        gaps = [(old - ref)[mask].double().tolist() for old, ref, mask
                in zip(mini.old_logp, mini.more["ref_logp"], masks)]
        lengths = [len(gap) for gap in gaps]
        for q, group in enumerate(rewards):
            rows = lengths[4 * q:4 * q + 4]
            assert all(rows) if max(group) > min(group) else not any(rows)
        grouped = lambda rows: [rows[4 * q:4 * q + 4] for q in range(4)]
        loss, kl = loops(rewards, grouped(lengths), grouped(gaps), reduction, BETA)
        assert stats["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert stats["kl_loss"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
    assert updates[-1][1]["kl_loss"] > 1e-4, "the policy has moved"


@pytest.mark.parametrize("reduction, same", [("sequence-mean", True), ("constant", True),
                                             ("group-token-mean", True), ("sequence-sum", True),
                                             ("token-mean", False)])
def test_without_other_terms_the_token_mean_alone_changes(reduction, same, run, judge):
    judge(every_other_group)
    line = f"--algorithm grpo --reduction {reduction} --steps 2 --warmup_steps 0 "
    run(line + "--steps_per_generation 1")
    run(f"{line} --steps_per_generation 1 --zero_variance_filter", folder="less")
    moments = [state(folder, 2)["optimizer"] for folder in ("run", "less")]
    weights = [load_file(f"{folder}/checkpoints/step_2/model.safetensors")
               for folder in ("run", "less")]
    assert (not unequal(*moments) and not unequal(*weights)) == same



def test_the_advantages_are_those_of_all_tokens(run, judge, monkeypatch):
    """REINFORCE++ whitens over them."""
    judge(every_other_group)
    seen = []
    estimate = train.estimate_advantages

    def watched(*args, **inputs):
        seen.append((inputs["mask"], estimate(*args, **inputs)))
        return seen[-1][1].clone()
    monkeypatch.setattr(train, "estimate_advantages", watched)
    run(f"{KEPT}--algorithm reinforce_plus_plus")
    [(mask, advantages)] = seen
    assert mask.any(-1).all() and abs(advantages[mask].mean()) < 1e-6


def test_a_mini_batch_of_such_groups_alone_makes_no_step(run, judge, updates):
    judge(lambda n, right, problem: 1.0)
    [record] = run(f"{KEPT}--algorithm ppo --beta 0.1")
    assert record["empty_minibatches"] == 2 and record["dead_groups"] == 1
    assert record["value_loss"] == 0 and record["pass_rate"] == 1


def test_neither_trl_nor_verl_has_it():
    settings = parse("--algorithm grpo --zero_variance_filter".split())
    for program in (export.trl, export.verl):
        said = export.exported(program, settings)
        assert "it has no groups of equal rewards left out of the loss" in said
