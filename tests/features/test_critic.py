"""What the critic is trained on, what its values do to the advantages, and its head start.

python -m pytest tests/features/test_critic.py
"""

import math

import pytest
import torch
from safetensors.torch import load_file

import train
from advantages import ADVANTAGES, Advantage, estimate_advantages, gae, whiten
from features import critic
from plumbing.run.arguments import parse
from tiny_run import differences
from tools import export


def by_loops(rewards, values, mask, lam=0.95):
    """(Â_t = Σ_l λ^l δ_{t+l}, the returns Â_t + V_t) of 1506.02438 eq. 16 with γ = 1, in float64;
    the reward is given at the last loss token."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(mask)):
        places = mask[i].nonzero().flatten().tolist()
        V = [values[i, t].item() for t in places] + [0.0]
        r = [0.0] * len(places)
        r[-1:] = [rewards[i].item()] * bool(places)
        errors = [r[k] + V[k + 1] - V[k] for k in range(len(places))]
        for k, t in enumerate(places):
            advantages[i, t] = sum(lam ** j * error for j, error in enumerate(errors[k:]))
            returns[i, t] = advantages[i, t] + V[k]
    return advantages, returns


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_the_row_gae_gives_the_advantages_and_not_the_returns(lam):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 6, generator=generator) + 0.5                                # [B, T]
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 5])[:, None]                        # [B, T]
    rewards = torch.tensor([1.0, 0.0, 1.0, -0.5])
    found = estimate_advantages("gae", rewards, 2, values=values, mask=mask, lam=lam)
    want, returns = by_loops(rewards, values, mask, lam)
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=1e-5)
    assert (returns - want).abs().max() > 0.5


@pytest.fixture
def targets(monkeypatch):
    """[(part, the returns that its critic is trained on)] of every micro-batch from now on."""
    seen = []
    loss = critic.value_loss
    inside = critic.Critic.in_loss

    def watched(self, part, new, mini):
        def kept(values, old_values, returns, *others):
            seen.append((part, returns))
            return loss(values, old_values, returns, *others)
        monkeypatch.setattr(critic, "value_loss", kept)
        return inside(self, part, new, mini)
    monkeypatch.setattr(critic.Critic, "in_loss", watched)
    return seen


@pytest.mark.parametrize("lam", [0.95, 0.5])
def test_the_critics_targets_are_gaes_returns_whatever_the_advantage_makes_of_them(
        lam, targets, monkeypatch, run):
    def whitened(rewards, values, mask):
        return whiten(gae(rewards, values, mask)[0], mask)
    row = Advantage(whitened, "token", ("rewards", "values", "mask"))
    monkeypatch.setitem(ADVANTAGES, "whitened", row)
    records = run("--algorithm ppo --advantage whitened --steps 4 --warmup_steps 0 "
                  f"--learning_rate 0.003 --lam {lam}")
    assert len(targets) == 8 and all(record["value_loss"] > 0 for record in records)
    for part, returns in targets:
        mask = part.rollout.mask
        _, want = by_loops(part.rewards, part.more["values"], mask, lam)
        torch.testing.assert_close(returns[mask].double(), want[mask], atol=1e-5, rtol=1e-5)
    part, returns = targets[-1]
    values = part.more["values"][part.rollout.mask]
    assert values.abs().max() > 1e-3, "the critic has learned something"


def test_distillation_is_added_to_the_advantages_and_not_to_the_targets(
        targets, run, monkeypatch):
    seen = []
    loss = train.policy_loss

    def watched(objective, logp, old_logp, advantages, mask, **options):
        seen.append(advantages)
        return loss(objective, logp, old_logp, advantages, mask, **options)
    monkeypatch.setattr(train, "policy_loss", watched)
    records = run("--algorithm ppo --self_distillation answer --distillation_coef 0.5 --steps 3 "
                  "--warmup_steps 0 --learning_rate 0.003")
    for (part, returns), advantages in zip(targets, seen, strict=True):
        mask, values = part.rollout.mask, part.more["values"]
        plain, want = by_loops(part.rewards, values, mask)
        torch.testing.assert_close(returns[mask].double(), want[mask], atol=1e-5, rtol=1e-5)
        gap = (part.more["teacher_logp"] - part.old_logp)[mask].double()
        torch.testing.assert_close(advantages[mask].double(), plain[mask] + 0.5 * gap, atol=1e-5,
                                   rtol=1e-5)
        assert gap.abs().max() > 1e-3
    assert len(seen) == 6 and records[-1]["value_loss"] > 0


def test_lam_reaches_the_advantages_of_a_run(run, monkeypatch):
    seen = []
    estimate = train.estimate_advantages

    def watched(name, rewards, *args, **inputs):
        seen.append((rewards, inputs["values"], inputs["mask"],
                     estimate(name, rewards, *args, **inputs)))
        return seen[-1][-1]
    monkeypatch.setattr(train, "estimate_advantages", watched)
    run("--algorithm ppo --steps 3 --warmup_steps 0 --learning_rate 0.003 --lam 0.3")
    for rewards, values, mask, found in seen:
        want, _ = by_loops(rewards, values, mask, 0.3)
        torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)
    assert len(seen) == 3 and seen[-1][1].abs().max() > 1e-3


# -------------------------------------------------------------------------------- the head start

HEAD = ("--algorithm ppo --critic_warmup 2 --steps 4 --warmup_steps 3 --weight_decay 0.1 "
        "--save_steps 1 --learning_rate 0.002")


@pytest.fixture
def updates(monkeypatch):
    """[(batch, rate, policy before, policy after, critic before, critic after, AdamW's state of
    the first weight of the policy)] of every update from now on."""
    seen = []
    update = train.update

    def watched(settings, learner, mini):
        def weights():
            return [[p.detach().clone() for p in module.parameters()]
                    for module in (learner.policy, learner.actor.critic)]
        rate = learner.optimizer.param_groups[0]["lr"]
        before = weights()
        stats = update(settings, learner, mini)
        first = next(learner.policy.parameters())
        state = {name: float(x.sum()) for name, x in learner.optimizer.state.get(first, {}).items()}
        seen.append((mini.step, rate, before, weights(), state, stats))
        return stats
    monkeypatch.setattr(train, "update", watched)
    return seen


def equal(before, after):
    return all(map(torch.equal, before, after))


def test_the_head_start_trains_the_critic_alone_at_the_peak_rate_and_the_schedule_waits(
        updates, run):
    records = run(f"{HEAD} --num_iterations 2 --lr_scheduler_type cosine")
    for step, rate, before, after, state, _ in updates:
        head = step <= 2
        assert equal(before[0], after[0]) == head and not equal(before[1], after[1])
        assert bool(state) != head
    share = [min((i + 1) / 3, (1 + math.cos(math.pi * max(0, i - 3) / 5)) / 2) for i in range(8)]
    rates = [rate for _, rate, *_ in updates]
    assert rates == pytest.approx([0.002] * 8 + [0.002 * x for x in share])
    assert updates[8][4]["step"] == 1, "AdamW has seen no gradient of the policy before"
    assert records[0]["value_loss"] > 0 and records[0]["clip_low"] == 0


def test_the_gradients_norm_in_the_head_start_is_the_critics(updates, run):
    run(f"{HEAD} --steps 3")
    run(f"{HEAD.replace('--critic_warmup 2', '')} --steps 3", folder="without")
    norm = [stats["grad_norm"] for *_, stats in updates]
    assert 0 < norm[0] < norm[6], "the policy's gradient is in the second alone"


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_resumed_in_or_after_the_head_start_is_the_whole_run(stop, run, monkeypatch):
    run(HEAD, folder="whole")
    with monkeypatch.context() as patch:
        collect = train.collect

        def killed(settings, learner, task, step):
            if step > stop:
                raise KeyboardInterrupt
            return collect(settings, learner, task, step)
        patch.setattr(train, "collect", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run(HEAD, folder="parts")
    run("--resume", folder="parts")
    assert differences("whole", "parts", 4) == []


def test_skipped_updates_of_the_head_start_are_no_head_start_of_the_policy(
        updates, run, monkeypatch):
    loss = train.policy_loss

    def spoilt(*args, **options):
        value, stats = loss(*args, **options)
        return value * (float("nan") if len(updates) in (0, 2) else 1), stats
    monkeypatch.setattr(train, "policy_loss", spoilt)
    run(HEAD)
    assert [stats["skipped"] for *_, stats in updates][:4] == [True, False, True, False]
    rates = [rate for _, rate, *_ in updates]
    assert rates[:6] == pytest.approx([0.002] * 4 + [0.002 / 3, 0.004 / 3])


def test_without_a_head_start_no_gradient_is_dropped(run):
    policy = lambda folder: load_file(f"{folder}/checkpoints/step_1/model.safetensors")
    run("--algorithm ppo --warmup_steps 0")
    run("--algorithm ppo --warmup_steps 0 --critic_warmup 1 --steps 2 --save_steps 1",
        folder="head")
    moved, still = policy("run"), policy("head")
    assert any(not torch.equal(moved[name], still[name]) for name in moved)


def test_the_exports_name_the_critic_and_verls_keys_for_it():
    settings = parse("--algorithm ppo --critic_warmup 3 --lam 0.9".split())
    assert "no critic" in export.exported(export.trl, settings)
    said = export.exported(export.verl, settings)
    assert "algorithm.lam=0.9 trainer.critic_warmup=4" in said
