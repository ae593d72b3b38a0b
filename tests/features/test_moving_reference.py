"""--sync_ref_model: a reference that moves towards the policy.
python -m pytest tests/features/test_moving_reference.py"""

from types import SimpleNamespace

import pytest
import torch

import models
from plumbing.model.actor import move_towards, pairs_of
from tiny_run import differences, state

MOVES = ("--learning_rate 0.003 --warmup_steps 0 --beta 0.1 "
         "--lr_scheduler_type constant_with_warmup")
EVERY_TWO = "--sync_ref_model --ref_model_sync_steps 2"


def policy_and_reference():
    return models.make("tiny_moe"), SimpleNamespace(policy=models.make("tiny_moe", seed=1))


def copied(model):
    return [p.detach().clone() for p in model.parameters()]


def test_the_reference_moves_by_its_share_and_never_the_policy():
    policy, reference = policy_and_reference()
    before, own = copied(reference.policy), copied(policy)
    move_towards(reference, policy, 0.3)
    for old, new, now in zip(before, own, reference.policy.parameters()):
        torch.testing.assert_close(now.detach(), 0.3 * new + 0.7 * old, rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, own, policy.parameters()))
    assert len(pairs_of(reference, policy)) == len(own)


@pytest.mark.trl
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_the_reference_moves_as_trls(share):
    """TRL's own step for sync_ref_model, which its SDPO also uses for the averaged teacher."""
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    (policy, mine), (_, theirs) = policy_and_reference(), policy_and_reference()
    move_towards(mine, policy, share)
    callbacks.SyncRefModelCallback._sync_target_model(policy, theirs.policy, share)
    for own, other in zip(copied(mine.policy), copied(theirs.policy), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


@pytest.fixture
def kl(run):
    """kl("--flags", "folder") is the KL of every batch of a run."""
    return lambda line, folder: [r["kl"] for r in run(f"{MOVES} {line}", folder=folder)]


def test_a_moving_reference_is_the_policy_of_the_batch_before_at_alpha_1(kl):
    """k = 2, α = 1: before batches 3 and 5 the reference becomes the policy, so their KL is 0."""
    moving = kl(f"--steps 5 {EVERY_TWO} --ref_model_mixup_alpha 1", "moving")
    assert max(moving[::2]) < 1e-9 < 1e-7 < min(moving[1::2])
    fixed = kl("--steps 5", "fixed")
    assert fixed[:2] == moving[:2] and min(fixed[1:]) > 1e-7
    assert moving[2] < kl(f"--steps 5 {EVERY_TWO}", "half")[2] < fixed[2]


def test_adapters_of_the_reference_move_too(kl):
    pytest.importorskip("peft")
    lora = "--steps 3 --use_peft --learning_rate 0.01"
    at_once = "--sync_ref_model --ref_model_sync_steps 1 --ref_model_mixup_alpha 1"
    assert max(kl(f"{lora} {at_once}", "moving")) < 1e-9
    assert kl(lora, "fixed")[2] > 1e-7


def test_what_moves_is_part_of_a_checkpoint(run):
    line = f"{MOVES} --save_steps 1 --sync_ref_model --ref_model_sync_steps 1"
    run(f"{line} --steps 4", folder="whole")
    run(f"{line} --steps 2")
    run("--resume --steps 4")
    assert differences("whole", "run", 4) == []
    kept = state("run", 4)["features"]["ReferenceKL"]["reference"]
    assert kept and all(isinstance(x, torch.Tensor) for x in kept)
