"""The reference policy of --beta: its KL in the loss or in the reward, and a reference that moves.

python -m pytest tests/features/test_reference_kl.py"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import models
import reference
import train
from features import critic
from features.moving import move_towards, pairs_of
from features.reference_kl import ReferenceKL
from plumbing.model import checksums
from plumbing.run.arguments import parse
from reference import G, penalized
from tiny_run import state
from tools import export

# ------------------------------------------------------------------------- the KL in the loss


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


@pytest.mark.parametrize("reduction", ["sequence-sum", "sequence-mean", "token-mean"])
def test_the_kl_is_averaged_as_the_loss_is_and_padding_has_none(reduction, calls, run):
    """TRL#6654: with sequence-sum a response's KL is the sum over its own tokens; the length enters
    once."""
    terms = calls(ReferenceKL, "in_loss")
    run(f"--steps 3 --warmup_steps 0 --beta 0.3 --reduction {reduction}")
    lengths = set()
    for (_, part, new, _), _, found in terms:
        kl = k3(new.logp.double(), part.more["ref_logp"].double())
        rows = [x[m].tolist() for x, m in zip(kl, part.rollout.mask)]
        lengths |= {len(row) for row in rows}
        every = sum(map(sum, rows))
        want = {"sequence-sum": every / len(rows), "token-mean": every / sum(map(len, rows)),
                "sequence-mean": sum(sum(row) / len(row) for row in rows) / len(rows)}[reduction]
        assert found["kl_loss"].item() == pytest.approx(0.3 * want, rel=1e-4, abs=1e-7)
    assert found["kl_loss"] > 0 and len(lengths) > 1, "unequal lengths, and a policy that has moved"


def test_groups_of_equal_rewards_keep_their_kl(calls, run):
    """TRL#5588: the KL does not depend on the advantage, so with --beta such groups are in every
    update; without, they are not."""
    terms = calls(ReferenceKL, "in_loss")
    records = run("--steps 3 --warmup_steps 0 --beta 0.3")
    parts = [part for (_, part, *_), *_ in terms]
    assert all(len(part.advantages) == 2 * G for part in parts)         # both of each mini-batch
    assert any(not part.advantages.view(2, G).any(-1).all() for part in parts)
    assert any(record["dead_groups"] for record in records)


# ------------------------------------------------------------------------- the KL in the reward

BETA = 0.5
MOVES = f"--beta {BETA} --steps 3 --warmup_steps 0 --learning_rate 0.003"


def rewards_of_tokens(rewards, inputs):
    """The reward of every loss token, in float64: a list of numbers per response."""
    gap = inputs["old_logp"].double() - inputs["ref_logp"].double()                 # [B, T]
    return [penalized(reward, BETA, d[m].tolist())
            for reward, d, m in zip(rewards.tolist(), gap, inputs["mask"])]


def test_an_advantage_per_response_reads_the_sum_over_the_tokens(calls, run):
    estimated = calls(train, "estimate_advantages")
    records = run(f"{MOVES} --use_kl_in_reward")
    for (_, rewards, *_), inputs, found in estimated:
        sums = torch.tensor([sum(row) for row in rewards_of_tokens(rewards, inputs)]).double()
        groups = sums.view(-1, 4)
        std = groups.std(-1, unbiased=False, keepdim=True)
        # where all rewards are equal, rounding decides: the first batch, whose KL is 0
        clear = (std > 1e-4).expand(groups.shape).flatten()
        want = ((groups - groups.mean(-1, keepdim=True)) / (std + 1e-6)).flatten()
        torch.testing.assert_close(found.double()[clear], want[clear], atol=2e-3, rtol=2e-3)
    assert clear.sum() > rewards.view(-1, 4).std(-1).gt(0).sum() * 4, "equal rewards, and a signal"
    assert all("kl_loss" not in record for record in records) and records[-1]["kl"] > 0
    assert [record["reward"] for record in records] == [
        pytest.approx(args[1].mean().item()) for args, *_ in estimated], "without the KL"


def test_gae_and_the_critics_targets_read_it_per_token(calls, run):
    estimated, targets = calls(train, "estimate_advantages"), calls(critic, "value_loss")
    run(f"{MOVES} --use_kl_in_reward --algorithm ppo --lam 0.8 --steps_per_generation 1")
    for ((_, rewards, *_), inputs, found), (target, *_) in zip(estimated, targets, strict=True):
        V = [values[m].tolist() for values, m in zip(inputs["values"], inputs["mask"])]
        rows = [reference.gae(row, values, 0.8)
                for row, values in zip(rewards_of_tokens(rewards, inputs), V)]
        advantages, returns = (sum(lists, []) for lists in zip(*rows))
        assert found[inputs["mask"]].tolist() == pytest.approx(advantages, abs=1e-5)
        seen = target[2][target[3]].tolist()                 # its groups come in another order
        assert sorted(seen) == pytest.approx(sorted(returns), abs=1e-5)
    assert len(estimated) == 3 and inputs["kl"].abs().max() > 1e-3


def test_reinforce_plus_plus_subtracts_it_without_the_flag(calls, run):
    """The returns-to-go of the rewards per token, whitened."""
    estimated = calls(train, "estimate_advantages")
    records = run(f"{MOVES} --algorithm reinforce_plus_plus")
    assert all("kl_loss" not in record for record in records) and records[-1]["kl"] > 0
    for (_, rewards, *_), inputs, found in estimated:
        rows = rewards_of_tokens(rewards, inputs)
        returns = torch.tensor([sum(row[k:]) for row in rows for k in range(len(row))]).double()
        want = (returns - returns.mean()) / returns.std(unbiased=False)                 # [tokens]
        torch.testing.assert_close(found[inputs["mask"]].double(), want, atol=1e-4, rtol=1e-4)


def test_equal_weights_of_rewards_matter_beside_the_kl(refused):
    Path("rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 3)
    line = "--model_name_or_path m --dataset_name rows.jsonl --reward_weights 2 --beta 0.1"
    assert "multiplies every reward" in refused(line)
    assert parse(f"{line} --use_kl_in_reward".split()).reward_weights == [2.0]


def test_trl_has_no_kl_in_the_reward():
    settings = parse("--algorithm grpo --beta 0.1 --use_kl_in_reward".split())
    assert "it has no KL in the reward" in export.exported(export.trl, settings)


# ------------------------------------------------------------------------- a reference that moves

SYNC = "--sync_ref_model --ref_model_sync_steps"


@pytest.mark.trl
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_the_reference_moves_by_its_share_as_trls_and_never_the_policy(share):
    """TRL's own step for sync_ref_model, which its SDPO also uses for the averaged teacher."""
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    policy, ours, theirs = (models.make("tiny_moe", seed=seed) for seed in (0, 1, 1))
    own = [p.detach().clone() for p in policy.parameters()]
    mine = SimpleNamespace(policy=ours)
    move_towards(mine, policy, share)
    callbacks.SyncRefModelCallback._sync_target_model(policy, theirs, share)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, own, policy.parameters()))
    assert len(pairs_of(mine, policy)) == len(own)


@pytest.fixture
def kl(run):
    """kl("--flags", "folder") is the KL of every batch of a run."""
    line = ("--learning_rate 0.003 --warmup_steps 0 --beta 0.1 "
            "--lr_scheduler_type constant_with_warmup")
    return lambda more, folder: [r["kl"] for r in run(f"{line} {more}", folder=folder)]


def test_a_moving_reference_is_the_policy_of_the_batch_before_at_alpha_1(kl):
    """k = 2, α = 1: before batches 3 and 5 the reference becomes the policy, so their KL is 0."""
    moving = kl(f"--steps 5 {SYNC} 2 --ref_model_mixup_alpha 1", "moving")
    assert max(moving[::2]) < 1e-9 < 1e-7 < min(moving[1::2])
    fixed = kl("--steps 5", "fixed")
    assert fixed[:2] == moving[:2] and min(fixed[1:]) > 1e-7
    assert moving[2] < kl(f"--steps 5 {SYNC} 2", "half")[2] < fixed[2]


def test_adapters_of_the_reference_move_too(kl):
    pytest.importorskip("peft")
    lora = "--steps 3 --use_peft --learning_rate 0.01"
    assert max(kl(f"{lora} {SYNC} 1 --ref_model_mixup_alpha 1", "moving")) < 1e-9
    assert kl(lora, "fixed")[2] > 1e-7


def test_a_checkpoint_without_the_reference_that_moved_is_refused_in_one_line(run):
    run(f"--beta 0.1 {SYNC} 1")
    folder = Path("run/checkpoints/step_1")
    kept = state("run", 1)
    kept["extras"] = kept.pop("features")["ReferenceKL"]     # where older versions kept it
    torch.save(kept, folder / "state.pt")
    (folder / checksums.NAME).unlink()
    checksums.seal(folder)
    said = run.refused("--output_dir run --resume --steps 2", begun=True)
    assert "has no reference policy, which --sync_ref_model moves" in said
