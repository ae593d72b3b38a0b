"""What several frameworks share: a reference that moves, responses with an outlier token, the
likelihood of right responses. python -m pytest tests/loop/test_family.py"""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from advantages import whiten
from features.mismatch import bounds_of
from losses import high_entropy_mask, mismatch_mask
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.actor import move_towards, pairs_of
from plumbing.model.cold_start import tiny_config
from plumbing.run.arguments import parse
from moe import TinyMoE
from tiny_run import TINY, differences, metrics

TINY_MODEL = ["--hidden_size", "16", "--num_hidden_layers", "1"]
CUT = ["--max_completion_length", "3", "--mask_truncated_completions"]      # answers of one number have three tokens, of two, five


def run(name, *flags):
    train.main([*TINY, "--output_dir", name, *flags])
    return metrics(name)


def weights(name, step):
    return Path(f"{name}/checkpoints/step_{step}/model.safetensors").read_bytes()


def test_functions_of_the_loss_mask_take_an_empty_one():
    mask, x = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4)
    assert not high_entropy_mask(x, mask, 0.5).any() and whiten(x, mask).eq(0).all()


# ------------------------------------------------------------------------------------------- a reference that moves

def test_the_reference_moves_by_its_share_and_never_the_policy():
    torch.manual_seed(0)
    config = tiny_config(parse(TINY_MODEL), builtin_tokenizer())
    policy, reference = TinyMoE(config), SimpleNamespace(policy=TinyMoE(config))
    before, own = [p.detach().clone() for p in reference.policy.parameters()], [p.detach().clone() for p in policy.parameters()]
    move_towards(reference, policy, 0.3)
    for old, new, now, kept in zip(before, own, reference.policy.parameters(), policy.parameters()):
        torch.testing.assert_close(now.detach(), 0.3 * new + 0.7 * old, rtol=1e-6, atol=1e-7)
        assert torch.equal(kept, new)
    assert len(pairs_of(reference, policy)) == len(own)


@pytest.mark.trl
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_the_reference_moves_as_trls(share):
    """TRL's own step for sync_ref_model, which its SDPO also uses for the averaged teacher."""
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    torch.manual_seed(0)
    config = tiny_config(parse(TINY_MODEL), builtin_tokenizer())
    policy, mine, theirs = TinyMoE(config), SimpleNamespace(policy=TinyMoE(config)), TinyMoE(config)
    theirs.load_state_dict(mine.policy.state_dict())
    move_towards(mine, policy, share)
    callbacks.SyncRefModelCallback._sync_target_model(policy, theirs, share)
    for own, other in zip(mine.policy.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


REFERENCE = ["--learning_rate", "0.003", "--warmup_steps", "0", "--beta", "0.1", "--lr_scheduler_type", "constant_with_warmup"]


def test_a_moving_reference_is_the_policy_of_the_batch_before_at_alpha_1(workplace):
    """k = 2 and α = 1: before batches 3 and 5 the reference becomes the policy, so their KL is 0."""
    kl = [r["kl"] for r in run("run", "--steps", "5", *REFERENCE, "--sync_ref_model", "--ref_model_sync_steps", "2", "--ref_model_mixup_alpha", "1")]
    assert kl[0] < 1e-9 and kl[2] < 1e-9 and kl[4] < 1e-9 < 1e-7 < min(kl[1], kl[3])
    fixed = [r["kl"] for r in run("fixed", "--steps", "5", *REFERENCE)]
    assert fixed[:2] == kl[:2] and min(fixed[1:]) > 1e-7
    half = [r["kl"] for r in run("half", "--steps", "5", *REFERENCE, "--sync_ref_model", "--ref_model_sync_steps", "2")]
    assert kl[2] < half[2] < fixed[2]


def test_what_moves_is_part_of_a_checkpoint(workplace):
    flags = ["--learning_rate", "0.003", "--lr_scheduler_type", "constant_with_warmup", "--save_steps", "1",
             "--beta", "0.1", "--sync_ref_model", "--ref_model_sync_steps", "1"]
    run("whole", "--steps", "4", *flags)
    run("parts", "--steps", "2", *flags)
    train.main([*TINY, "--steps", "4", *flags, "--output_dir", "parts", "--resume"])
    assert differences("whole", "parts", 4) == []
    state = torch.load("parts/checkpoints/step_4/state.pt", weights_only=True)
    kept = state["features"]["ReferenceKL"]["reference"]
    assert kept and all(isinstance(x, torch.Tensor) for x in kept)


def test_adapters_of_the_reference_move_too(workplace):
    pytest.importorskip("peft")
    flags = [*REFERENCE, "--use_peft", "--sync_ref_model", "--ref_model_sync_steps", "1", "--ref_model_mixup_alpha", "1"]
    kl = [r["kl"] for r in run("lora", "--steps", "3", *flags, "--learning_rate", "0.01")]
    assert max(kl) < 1e-9
    fixed = [r["kl"] for r in run("fixed", "--steps", "3", *REFERENCE, "--use_peft", "--learning_rate", "0.01")]
    assert fixed[2] > 1e-7


# --------------------------------------------------------------------------------------------------- outlier tokens

def test_a_response_with_one_outlier_is_dropped_whole():
    log_rho = torch.tensor([[0.0, 9.9, 0.1], [0.0, 0.2, 9.9], [-9.9, 0.0, 0.0], [4.6, -9.2, 0.0]])
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True] * 3])
    kept = mismatch_mask(log_rho - 1, torch.full_like(log_rho, -1), mask, "outlier", 1e-4, 100.0)
    for i in range(4):
        inside = all(1e-4 <= math.exp(log_rho[i, t]) <= 100 for t in range(3) if mask[i, t])
        assert kept[i].tolist() == [inside and m for m in mask[i].tolist()]
    assert kept.any(-1).tolist() == [False, True, False, True]


def test_the_bounds_of_an_outlier_are_its_own():
    assert bounds_of(parse(["--mismatch_mask", "outlier"])) == (1e-4, 100.0)
    assert bounds_of(parse(["--mismatch_mask", "token"])) == bounds_of(parse([])) == (0.5, 5.0)


# ------------------------------------------------------------------------- likelihood of right responses

def test_the_likelihood_of_right_responses_is_a_mean_over_their_tokens(workplace, monkeypatch):
    """The gradient with the term minus that without it, at rate 0: a float64 loop over the right responses' tokens."""
    def gradients(*flags):
        found, step = [], train.optimizer_step

        def watched(settings, learner, stats):
            found.append((torch.cat([p.grad.flatten() for p in learner.policy.parameters()]), stats["loss"].item()))
            return step(settings, learner, stats)
        minis, update = [], train.update
        with monkeypatch.context() as patch:
            patch.setattr(train, "optimizer_step", watched)
            patch.setattr(train, "update", lambda settings, learner, mini: (minis.append((learner, mini)), update(settings, learner, mini))[1])
            run("run" + "".join(flags), "--steps", "1", "--steps_per_generation", "1", "--max_grad_norm", "0", *flags)
        return found[0], minis[0]
    (plain, loss), _ = gradients()
    (more, other), (learner, mini) = gradients("--positive_example_nll_weight", "0.5")
    right = mini.parts[:, 0] >= 1
    total = sum(-mini.old_logp[i, t].double().item() for i in range(len(right)) if right[i] for t in range(mini.rollout.mask.shape[1]) if mini.rollout.mask[i, t])
    tokens = int(mini.rollout.mask[right].sum())
    assert tokens and other - loss == pytest.approx(0.5 * total / tokens, rel=1e-4)
    assert not torch.allclose(plain, more)


@pytest.mark.parametrize("flags, words", [
    (["--sync_ref_model"], "needs --beta"), (["--ref_model_mixup_alpha", "0.5", "--beta", "0.1"], "needs --sync_ref_model"),
    (["--beta", "0.1", "--sync_ref_model", "--ref_model_mixup_alpha", "2"], "is not between 0 and 1"),
    (["--mismatch_mask", "outlier", "--mismatch_mask_bounds", "5", "1"], "must be two numbers")], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_what_does_not_fit_together_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        parse(flags)
