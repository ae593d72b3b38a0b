"""The screen: the reward beside pass@1, a run that collapsed, progress through a pipe. python -m pytest tests/run/test_screen.py"""

import json

import pytest

import train
from plumbing.model import cold_start as warm_up
from plumbing.run import trackers
from plumbing.run.arguments import parse
from tiny_run import SMALL, TINY


def test_the_reward_and_its_parts_stand_beside_pass_at_1(workplace, monkeypatch, capsys):
    (workplace / "mine.py").write_text("def reward(response, answer):\n    return {'some': .5 * (response < '6'), 'any': .25}\n")
    (workplace / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(1, 8) for b in range(1, 5)))
    model = str(next((workplace / "runs/cold_start").resolve().iterdir()))
    train.main([*SMALL, "--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward", "--max_completion_length", "5",
                "--steps", "2", "--eval_samples", "2", "--eval_prompts", "2", "--eval_steps", "1", "--reward_weights", "1", "2", "--output_dir", "run"])
    summary = json.loads((workplace / "run/summary.json").read_text())
    for when in ("before", "after"):
        parts = summary[f"reward_parts_{when}"]
        assert parts.keys() == {"some", "any"} and parts["any"] == .25 and 0 < parts["some"] <= .5
        assert summary[f"reward_{when}"] == pytest.approx(parts["some"] + 2 * parts["any"])
        low, high = summary[f"reward_interval_{when}"]
        assert low <= summary[f"reward_{when}"] <= high
        assert summary[f"pass_at_1_{when}"] == 0 and summary[f"interval_{when}"] == [0, pytest.approx(1 - .025 ** .5)]
    screen = capsys.readouterr().out
    assert "pass@1 0.000 [0.000, 0.842], greedy 0.000, mean reward " in screen and "any 0.250)" in screen
    first = json.loads((workplace / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["pass_at_1"][0] == 0 and first["held_out_reward"][0] > 0 and first["held_out_parts"]["any"] == .25


# ------------------------------------------------------------------------------------------------------ a run that collapsed

@pytest.mark.parametrize("kept, said", [(1, True), (5, False)])
def test_a_sentence_at_the_end_says_that_a_run_collapsed(kept, said, workplace, monkeypatch, capsys):
    """kept: how many of five batches have only right responses; the others have only wrong ones."""
    sums = train.tasks.running_sum
    judged = []

    def judging(*args, **kwargs):
        task = sums(*args, **kwargs)

        def verify(response, problem):
            judged.append(response)
            return float(len(judged) <= kept * 16)
        task.verify = verify
        return task
    monkeypatch.setattr(train.tasks, "running_sum", judging)
    train.main([*TINY, "--steps", "5", "--learning_rate", "0.002", "--output_dir", "run"])
    printed = capsys.readouterr().out
    assert "worth trying" not in printed
    sentence = "the run collapsed (pass rate below half its best): try a lower --learning_rate than 0.002"
    assert printed.rstrip().endswith(sentence) == said and ("collapsed" in printed) == said


@pytest.mark.parametrize("rule, reward, words", [
    ("0.0", 0, "all rewards were equal, so"), ("len(problem.prompt) / 100", None, "all rewards were equal within every group, so")])
def test_three_batches_of_equal_rewards_are_reported_at_once(rule, reward, words, workplace, monkeypatch, capsys):
    sums = train.tasks.running_sum

    def judged(*args, **kwargs):
        task = sums(*args, **kwargs)
        task.verify = lambda response, problem: eval(rule.replace("problem.prompt", "problem.prompt.strip()"))
        return task
    monkeypatch.setattr(train.tasks, "running_sum", judged)
    train.main([*TINY, "--steps", "5", "--output_dir", "run"])
    printed = capsys.readouterr().out.splitlines()
    note, = [i for i, text in enumerate(printed) if text.startswith("note: in the last 3 batches")]
    first = json.loads((workplace / "run/samples.jsonl").read_text().splitlines()[2])["samples"][0]
    assert printed[note - 1].startswith("batch 3/5") and words in printed[note]
    assert f"with reward {first['reward']:g}: {first['prompt'].strip()!r} -> {first['response']!r}" in printed[note]
    assert "dead 1.00" in printed[note - 1] and reward in (None, first["reward"])
    train.main([*TINY, "--steps", "3", "--output_dir", "other", "--advantage", "gae", "--algorithm", "ppo"])
    assert ("note: in the last" in capsys.readouterr().out) == (reward == 0), "a critic learns from rewards that differ between prompts"


def test_trackers_get_both_ends_of_the_held_out_scores(workplace, monkeypatch):
    """Without --eval_steps: before the first batch and after the last."""
    sent = []
    monkeypatch.setattr(trackers, "check", lambda name: None)
    monkeypatch.setattr(trackers, "start", lambda *args: lambda numbers, step: sent.append((step, numbers)))
    train.main([*TINY, "--steps", "2", "--eval_samples", "1", "--eval_prompts", "4", "--report_to", "tensorboard", "--output_dir", "run"])
    summary = json.loads((workplace / "run/summary.json").read_text())
    ends = [(step, numbers) for step, numbers in sent if "held_out_reward/0" in numbers]
    assert [step for step, _ in ends] == [0, 2] and len(sent) == 4
    for (_, numbers), when in zip(ends, ("before", "after")):
        assert numbers["held_out_reward/0"] == summary[f"reward_{when}"] and numbers["pass_at_1/0"] == summary[f"pass_at_1_{when}"]
        assert numbers["held_out_parts/correct"] == summary[f"reward_parts_{when}"]["correct"]


# ---------------------------------------------------------------------------------------------------------------- progress

def test_the_cold_start_tells_its_progress_through_a_pipe(monkeypatch, capsys):
    clock = iter(range(0, 1000, 2))                          # a step takes two seconds
    monkeypatch.setattr(warm_up.time, "perf_counter", lambda: next(clock))
    assert list(warm_up.with_progress(10)) == list(range(1, 11))
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [f"cold start: {step} of 10 supervised steps, {left} s left" for step, left in ((3, 14), (6, 8), (9, 2))]
    assert printed.err == ""


def test_a_run_that_ends_before_its_second_stage_says_so():
    from plumbing.data import tasks
    from plumbing.run import screen
    late, early = (parse([*TINY, "--max_terms", "4", "--steps", "3", "--stage2_step", n]) for n in ("3", "2"))
    for args, said in ((late, True), (early, False)):
        words = screen.plan(args, "runs/x", tasks.from_arguments(args), "cpu")
        assert ("the second stage begins after batch 3, and this run ends with batch 3" in words) == said
