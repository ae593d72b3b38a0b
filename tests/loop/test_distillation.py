"""On-policy distillation: the advantage against loops and enumerated expectations, teachers from the command line.
python -m pytest -m "slow or not slow" tests/loop/test_distillation.py"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from advantages import distillation, estimate_advantages, group_advantages
from losses import policy_loss
from moe import TinyMoE
from plumbing.data.running_sum import builtin_tokenizer, running_sum
from plumbing.loop.distillation import hinted, teacher_logp
from plumbing.model.cold_start import tiny_config
from plumbing.model.policy import own_logp
from plumbing.run.arguments import parse
from rollout import response_logp, sample
from tiny_run import TINY, metrics

STUDENT = [*TINY, "--algorithm", "grpo", "--warmup_steps", "0"]


def random_batch(B=8, T=6, seed=0):
    """teacher_logp, old_logp, mask [B, T], absurd outside the mask, and rewards [B]."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) > 0.3
    hide = lambda x: torch.where(mask, x, float("nan"))
    return hide(draw()), hide(draw()), mask, torch.tensor([1.0, 0, 0, 1] * 2).double()


# ------------------------------------------------------------------------------------------------ the advantage

@pytest.mark.parametrize("coef", [0.3, 1.0])
def test_the_advantage_is_a_loops_alone_and_added(coef):
    teacher, old, mask, rewards = random_batch()
    alone = estimate_advantages("distillation", rewards, 4, teacher_logp=teacher, old_logp=old, mask=mask)
    added = estimate_advantages("group", rewards, 4, teacher_logp=teacher, old_logp=old, mask=mask, distillation_coef=coef)
    group = group_advantages(rewards, 4)
    for i in range(8):
        for t in range(6):
            gap = teacher[i, t].item() - old[i, t].item() if mask[i, t] else 0.0
            assert alone[i, t].item() == pytest.approx(gap, abs=1e-12)
            assert added[i, t].item() == pytest.approx(group[i].item() + coef * gap if mask[i, t] else 0.0, abs=1e-9)
    assert estimate_advantages("group", rewards, 4, teacher_logp=teacher, old_logp=old, mask=mask).equal(group)


def test_the_advantage_carries_no_gradient():
    teacher, old, mask, _ = random_batch()
    assert not distillation(teacher.requires_grad_(), old.requires_grad_(), mask).requires_grad


def test_its_gradient_is_that_of_the_kl_to_the_teacher():
    """Enumerated over 5 tokens: E_{y ~ π}[gradient of the loss with Â = log π_T - log π] = ∇ KL(π || π_T)."""
    g = torch.Generator().manual_seed(3)
    logits, other = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_pi, log_teacher = logits.log_softmax(-1), other.log_softmax(-1)
    true, = torch.autograd.grad((log_pi.exp() * (log_pi - log_teacher)).sum(), logits)
    expected, mask = torch.zeros(5, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    for y in range(5):
        logp = logits.log_softmax(-1)[y].view(1, 1)
        A = distillation(log_teacher[y].view(1, 1), logp, mask)
        loss, _ = policy_loss("grpo", logp, logp.detach(), A, mask)
        expected += log_pi[y].exp().item() * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(expected, true, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------- the policy shown the right answer

def test_a_hinted_rollout_is_scored_as_if_the_answer_stood_before_the_prompt():
    task, tokenizer = running_sum(1, 2), builtin_tokenizer()
    torch.manual_seed(0)
    policy = TinyMoE(tiny_config(parse(["--hidden_size", "16", "--num_hidden_layers", "1"]), tokenizer)).eval()
    problems, args = task.train[:3], parse(["--algorithm", "grpo", "--advantage", "distillation", "--self_distillation", "answer", "--hint_template", "{answer} {prompt}"])
    rollout = sample(policy, tokenizer, [p.prompt for p in problems], 2, 4)
    batch = SimpleNamespace(rollout=rollout, problems=problems)
    told = hinted(args, task, tokenizer, batch, [problem.answer for problem in problems])
    for i, problem in enumerate(problems):
        assert tokenizer.decode(told.prompt_ids[i][told.prompt_mask[i]].tolist()) == f"{problem.answer} {problem.prompt}"
    assert told.response_ids.equal(rollout.response_ids) and told.mask.equal(rollout.mask)
    score = lambda rollout, scorer=None: response_logp(policy, rollout, entropy=False)
    found = teacher_logp(args, SimpleNamespace(tokenizer=tokenizer, policy=policy, score=score), task, batch, None)
    torch.testing.assert_close(found, own_logp(policy, told), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, own_logp(policy, rollout), atol=1e-3)


# ---------------------------------------------------------------------------------------------- from the command line

@pytest.fixture
def teacher(workplace):
    """The checkpoint of a finished run of the built-in task."""
    train.main([*TINY, "--steps", "4", "--warmup_steps", "0", "--learning_rate", "0.002", "--output_dir", "teacher"])
    return "teacher/checkpoints/step_4"


def test_a_finished_runs_checkpoint_trains_a_cold_start_towards_itself(teacher):
    train.main([*STUDENT, "--steps", "12", "--learning_rate", "0.002", "--advantage", "distillation",
                "--teacher_model_name_or_path", teacher, "--output_dir", "student"])
    gaps = [record["teacher_kl"] for record in metrics("student")]
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3]) and gaps[0] > 0


def test_a_teacher_that_is_the_policy_gives_exactly_nothing(workplace, cold_start):
    same = str(next(cold_start.iterdir()))
    train.main([*STUDENT, "--steps", "1", "--steps_per_generation", "1", "--advantage", "distillation",
                "--teacher_model_name_or_path", same, "--output_dir", "run"])
    record, = metrics("run")
    assert record["teacher_kl"] == 0 and record["grad_norm"] == 0


@pytest.mark.parametrize("flags", [["--advantage", "distillation", "--teacher_model_name_or_path", "TEACHER"],
                                   ["--distillation_coef", "0.5", "--self_distillation", "answer"]], ids=["teacher", "self"])
def test_micro_batches_and_the_plain_way_change_nothing(flags, teacher):
    flags = [teacher if word == "TEACHER" else word for word in flags]
    for name, more in (("whole", []), ("pieces", ["--micro_batch_size", "2"]), ("plain", ["--plain"])):
        train.main([*STUDENT, "--steps", "2", *flags, *more, "--output_dir", name])
    whole, *others = (metrics(name) for name in ("whole", "pieces", "plain"))
    assert all(record["teacher_kl"] for record in whole)
    for other in others:
        for a, b in zip(whole, other, strict=True):
            for key in ("teacher_kl", "grad_norm", "clip_low", "loss"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def test_another_tokenizer_is_refused_in_one_line(teacher, capsys):
    shutil.copytree(teacher, "other")
    file = Path("other/tokenizer.json")
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {"1": 2, "2": 1}
    file.write_text(json.dumps(tokenizer))
    for name in ("SHA256SUMS", "state.pt"):                  # it would be refused as damaged
        Path("other", name).unlink()
    with pytest.raises(SystemExit) as stop:
        train.main([*STUDENT, "--steps", "1", "--advantage", "distillation", "--teacher_model_name_or_path", "other"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "has another tokenizer than the policy: 2 tokens differ" in said


@pytest.mark.parametrize("flags, message", [
    (["--advantage", "distillation"], "needs a teacher"), (["--distillation_coef", "1"], "needs --teacher_model_name_or_path or --self_distillation"),
    (["--self_distillation", "answer"], "--self_distillation answer needs --advantage distillation"),
    (["--teacher_model_name_or_path", "x"], "--teacher_model_name_or_path x needs --advantage distillation"),
    (["--advantage", "distillation", "--self_distillation", "answer", "--distillation_coef", "1"], "adds distillation to another --advantage"),
    (["--advantage", "distillation", "--self_distillation", "answer", "--teacher_model_name_or_path", "x"], "a run has only one teacher"),
    (["--advantage", "distillation", "--self_distillation", "answer", "--algorithm", "gspo"], "use --algorithm gspo_token"),
    (["--distillation_coef", "1", "--self_distillation", "answer", "--advantage", "gae"], "cannot be combined with --advantage gae"),
    (["--advantage", "distillation", "--self_distillation", "answer", "--hint_template", "{answer}"], "must contain {prompt}"),
    (["--hint_template", "{answer}{prompt}"], "needs --self_distillation"),
    (["--advantage", "distillation", "--teacher_model_name_or_path", "nowhere"], "--teacher_model_name_or_path nowhere cannot be loaded")])
def test_what_does_not_go_together_is_refused_in_one_line(flags, message, workplace, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([*STUDENT, "--steps", "1", *flags])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and said.count("\n") == 1
