"""On-policy distillation: the advantage against a loop and an expectation, its loss against TRL;
teachers and hints from the command line.
python -m pytest -m "" tests/features/test_distillation.py"""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import features
import models
from advantages import distillation, estimate_advantages, group_advantages
from features.distillation import Distillation
from models import own_logp as one_by_one
from tiny_run import jsonl, read_json

STUDENT = "--algorithm grpo --warmup_steps 0 "
ALONE = "--advantage distillation "


def random_batch(B=8, T=6, seed=0):
    """teacher_logp, old_logp, mask [B, T], absurd outside the mask, and rewards [B]."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) > 0.3
    hide = lambda x: torch.where(mask, x, float("nan"))
    return hide(draw()), hide(draw()), mask, torch.tensor([1.0, 0, 0, 1] * 2).double()


# ----------------------------------------------------------------------------------- the advantage

@pytest.mark.parametrize("coef", [0.3, 1.0])
def test_the_advantage_is_a_loops_alone_and_added(coef):
    teacher, old, mask, rewards = random_batch()
    alone = estimate_advantages("distillation", rewards, 4, teacher_logp=teacher, old_logp=old,
                                mask=mask)
    feature = Distillation.__new__(Distillation)
    feature.settings = SimpleNamespace(distillation_coef=coef)

    def added(advantages):
        batch = SimpleNamespace(advantages=advantages, old_logp=old,
                                rollout=SimpleNamespace(mask=mask),
                                extras={"teacher_logp": teacher})
        feature.advantages(batch)
        return batch.advantages                                                     # [B, T]
    group = group_advantages(rewards, 4)                                            # [B]
    both = added(group)                                                             # [B, T]
    for i in range(8):
        for t in range(6):
            gap = teacher[i, t].item() - old[i, t].item() if mask[i, t] else 0.0
            want = group[i].item() + coef * gap if mask[i, t] else 0.0
            assert alone[i, t].item() == pytest.approx(gap, abs=1e-12)
            assert both[i, t].item() == pytest.approx(want, abs=1e-9)
    per_token = group[:, None] * mask                                               # [B, T]
    assert added(per_token).equal(both)
    assert not distillation(teacher.requires_grad_(), old.requires_grad_(), mask).requires_grad


# ------------------------------------------------------------------------- from the command line

@pytest.fixture
def teacher(run):
    """The checkpoint of a finished run of the built-in task."""
    run("--steps 4 --warmup_steps 0 --learning_rate 0.002", folder="teacher")
    return "--teacher_model_name_or_path teacher/checkpoints/step_4 "


@pytest.mark.parametrize("line", [
    "--algorithm sdpo", "--algorithm grpo --advantage distillation --self_distillation answer",
    "--algorithm grpo --distillation_coef 1 --teacher_model_name_or_path {start}"])
def test_the_teachers_routers_choose_by_themselves_where_the_policy_replays_routes(
        line, run, judge, then, calls, cold_start):
    """It is another policy, mostly with another prompt, and no ratio is formed with it. Reference:
    one response at a time. In the first group two are right, in the second none, then all."""
    judge(lambda n, right, problem: n % 16 in (1, 3, *range(8, 16)))
    teachers = []

    def note(result, self, learner, batch, old):
        teacher = self.teacher.policy if self.teacher else learner.policy
        teachers.append(copy.deepcopy(teacher))
    then(Distillation, "after_scoring", note)
    found, hints = calls(Distillation, "after_scoring"), calls(features.distillation, "hinted")
    run(f"{line.format(start=cold_start)} --routing_replay old --steps 3 --warmup_steps 0 "
        "--learning_rate 0.003")
    for (_, _, tokenizer, batch), _, rollout in hints:
        told = [tokenizer.decode(ids[mask].tolist())
                for ids, mask in zip(rollout.prompt_ids[::4], rollout.prompt_mask[::4])]
        problems = batch.problems[::4]
        shown = [problem.answer for problem in problems]
        if "sdpo" in line:
            shown = [batch.rollout.texts[1], "", *batch.rollout.texts[8::4]]
            assert batch.extras["taught"].nonzero().flatten().tolist() == [0, 2]
        assert told == [f"{hint} {problem.prompt}" for hint, problem in zip(shown, problems)]
        assert rollout.response_ids.equal(batch.rollout.response_ids)
        assert rollout.mask.equal(batch.rollout.mask)
    rollouts = [rollout for *_, rollout in hints] or [args[2].rollout for args, *_ in found]
    apart = []
    for teacher, rollout, (args, *_) in zip(teachers, rollouts, found, strict=True):
        logp = args[2].extras["teacher_logp"]                                         # [B, T]
        taught = args[2].extras["taught"][:, None]                                    # [B, 1]
        assert logp.where(~taught, args[2].old_logp).equal(args[2].old_logp)
        kept = rollout.mask & taught                                                # [B, T]
        with torch.no_grad():
            want = one_by_one(teacher, rollout)                                     # [B, T]
        torch.testing.assert_close(logp[kept], want[kept], atol=1e-4, rtol=1e-4)
        apart.append((args[2].old_logp - logp)[kept].abs().max().item())
    assert max(apart) > 1e-3, "the teacher is not the old policy"


def test_another_tokenizer_is_refused_in_one_line(teacher, run):
    shutil.copytree("teacher/checkpoints/step_4", "other")
    file = Path("other/tokenizer.json")
    tokenizer = read_json(file)
    tokenizer["model"]["vocab"] |= {"1": 2, "2": 1}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "has another tokenizer than the policy: 2 tokens differ" in run.refused(
        STUDENT + ALONE + "--teacher_model_name_or_path other")


@pytest.mark.parametrize("flags, message", [
    (ALONE, "log π_T of a teacher: --teacher_model_name_or_path or"),
    ("--self_distillation answer", "--self_distillation answer needs --advantage distillation"),
    ("--teacher_model_name_or_path x",
     "--teacher_model_name_or_path x needs --advantage distillation"),
    (ALONE + "--self_distillation answer --distillation_coef 1",
     "adds distillation to another --advantage"),
    (ALONE + "--self_distillation answer --teacher_model_name_or_path x",
     "a run has only one teacher"),
    (ALONE + "--self_distillation answer --algorithm gspo", "use --algorithm gspo_token"),
    ("--self_distillation answer --distillation_coef 1 --algorithm gspo", "takes one per response"),
    (ALONE + "--self_distillation answer --hint_template {answer}", "must contain {answer} and"),
    ("--hint_template {answer}{prompt}", "needs --self_distillation"),
    ("--teacher_update_rate 0.5", "needs --self_distillation"),
    ("--algorithm sdpo --beta 0.1", "one moving average"),
    ("--algorithm sdpo --num_generations 1", "at least 2"),
    (ALONE + "--teacher_model_name_or_path nowhere",
     "--teacher_model_name_or_path nowhere cannot be loaded")])
def test_what_does_not_go_together_is_refused_in_one_line(flags, message, run):
    assert message in run.refused(STUDENT + flags)


# ------------------------------------------------------------------------ hints that are too long

PLACES = 50                      # positions of the policy; a token is a byte, 答 has three
ROPE = dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
POLICIES = {"gpt2": ("gpt2", {}), "dynamic": ("llama", ROPE), "llama": ("llama", {})}
SIBLING = "--self_distillation sibling --max_completion_length "


@pytest.mark.parametrize("policy, answer, more, said", [
    *((policy, *hint) for policy in ("gpt2", "dynamic") for hint in (
        ("7" * 38, "", "can have 43 tokens, and with --max_completion_length 8 it needs 51 pos"),
        ("答" * 13, "", "can have 44 tokens, and with --max_completion_length 8 it needs 52 pos"),
        ("7", SIBLING + "24", "can have 29 tokens, and with --max_completion_length 24 it"))),
    ("gpt2", "7" * 37, "", None), ("dynamic", "答" * 12, "", None),
    ("gpt2", "7", SIBLING + "22", None), ("llama", "7" * 90, "", None)])    # it has no limit
def test_a_hint_that_the_policy_cannot_read_is_refused_before_the_start(policy, answer, more, said,
                                                                        run):
    family, sizes = POLICIES[policy]
    models.saved("model", family, models.byte_tokenizer([]), num_hidden_layers=1,
                 max_position_embeddings=PLACES, **sizes)
    jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": answer} for i in range(9)])
    line = ("--model_name_or_path model --dataset_name rows.jsonl --verifier exact "
            f"{STUDENT}{ALONE}--self_distillation answer "
            f"--max_prompt_length 16 --max_completion_length 8 {more}")
    if said is None:
        assert len(run(line)) == 1
        return
    error = run.refused(f"{line} --output_dir run")
    assert said in error and f"the policy has {PLACES}" in error and "--hint_template" in error
