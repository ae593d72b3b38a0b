"""Reward functions of a whole batch, as TRL calls them. python -m pytest tests/data/test_reward_functions.py"""

import json
import time
from pathlib import Path

import pytest
import torch

import train
from advantages import gdpo, group_advantages
from plumbing.data.reward_functions import RewardFunction, is_whole_batch
from plumbing.data.tasks import load_task
from tiny_run import TINY, metrics

SUMS = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10), "largest": max(a, b)}) + "\n"
               for a in range(1, 5) for b in range(1, 5))


@pytest.fixture
def checkpoint(workplace, cold_start):
    """Flags for a run of a checkpoint on rows.jsonl, 16 sums, by mine.py:reward."""
    Path("rows.jsonl").write_text(SUMS)
    return [*TINY, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name", "rows.jsonl",
            "--verifier", "mine.py:reward", "--max_completion_length", "4", "--output_dir", "run"]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """make(source, *functions) -> a task of 16 sums judged by these functions of mine.py, whose text is source."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(SUMS)

    def make(source, *functions, **options):
        Path("mine.py").write_text(source)
        return load_task("rows.jsonl", verifier=[f"mine.py:{name}" for name in functions or ["reward"]], **options)
    return make


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        train.main([*argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: "), err
    return err


# from TRL's documentation, "Using a custom reward function": columns by name, and None for rows of another kind
TRLS = """
import re

def reward(completions, answer, **kwargs):
    matches = [re.search(r"(\\d+)", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, answer)]

def small(prompts, completions, largest, **kwargs):
    return [float(len(completion)) if n < 3 else None for completion, n in zip(completions, largest)]

def odd(prompts, completions, largest, **kwargs):
    return [0.5 if n >= 3 else None for n in largest]
"""


def test_a_trl_function_works_unchanged(task):
    both = task(TRLS, "reward", "small", "odd", reward_weights=[1, 0.1, 0.2])
    problems = [p for p in both.train for _ in range(2)]
    texts = [text for p in both.train for text in (p.answer + ".", "no")]
    rows = [json.loads(line) for line in SUMS.splitlines()]
    largest = [next(r["largest"] for r in rows if r["prompt"] == p.prompt) for p in problems]
    names, parts = both.part_names, both.judge(texts, problems)
    assert names == ["reward", "small", "odd"] and parts[:, 0].tolist() == [1, 0] * len(both.train)
    module = {}
    exec(TRLS, module)                                         # as GRPOTrainer calls them
    columns = dict(prompts=[p.prompt for p in problems], completions=texts, largest=largest,
                   answer=[p.answer for p in problems], completion_ids=None, trainer_state=None)
    theirs = torch.tensor([[float("nan") if x is None else x for x in module[name](**columns)] for name in names]).T
    assert torch.equal(parts.nan_to_num(nan=-9), theirs.nan_to_num(nan=-9)) and parts.isnan().any(0).tolist() == [False, True, True]
    nansum = (theirs * torch.tensor([1, 0.1, 0.2])).nansum(1)  # TRL's sum
    torch.testing.assert_close(both.total(parts), nansum)


def test_a_run_hands_over_whole_groups_of_plain_strings_and_logs_the_parts(checkpoint):
    Path("mine.py").write_text("import json\ndef reward(prompts, completions, completion_ids=None, **columns):\n"
                               "    open('calls', 'a').write(json.dumps([prompts, completions, completion_ids, columns]) + '\\n')\n"
                               "    return [float(c[:1] == a) for c, a in zip(completions, columns['answer'])]\n")
    train.main([*checkpoint, "--steps", "2", "--verifier", "mine.py:reward", "exact"])
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    assert len(calls) == 2                                     # the trial had no tokens to give
    for (prompts, completions, ids, columns), record in zip(calls, metrics("run")):
        assert len(prompts) == len(completions) == len(ids) == 16 and set(columns) == {"answer", "largest"}
        assert all(len(set(prompts[i:i + 4])) == 1 for i in range(0, 16, 4))
        assert all(len(c) <= len(x) <= 4 for c, x in zip(completions, ids))
        right = sum(c[:1] == a for c, a in zip(completions, columns["answer"])) / 16
        assert record["reward_parts"]["reward"] == record["pass_rate"] == right and record["verifier_errors"] == 0
        assert set(record["reward_parts"]) == {"reward", "exact"}


def test_the_metrics_mean_is_over_the_answers_that_have_the_part(checkpoint):
    Path("mine.py").write_text("def reward(completions, largest):\n"
                               "    return [1.0 if n > 2 else None for n in largest]\n"
                               "def other(completions, largest):\n    return [None if n > 2 else 0.25 for n in largest]\n")
    train.main([*checkpoint, "--steps", "1", "--verifier", "mine.py:reward", "mine.py:other", "--advantage", "gdpo"])
    record = metrics("run")[0]
    assert record["reward_parts"] == {"reward": 1.0, "other": 0.25} and 0.25 < record["reward"] < 1
    assert record["dead_groups"] == 1 and record["grad_norm"] == 0 and record["pass_rate"] < 1


def test_an_answer_without_any_reward_has_advantage_0_and_is_counted(task, capfd):
    judge = task("def reward(completions):\n    return [None if c == 'lost' else float(c) for c in completions]\n")
    problem, other = judge.train[:2]
    texts = ["0.1", "lost", "0.7", "0.1"] + ["0.3", "lost", "0.3", "0.3"] + ["lost"] * 4
    problems = [problem] * 4 + [other] * 4 + [judge.train[2]] * 4
    rewards = judge.total(judge.judge(texts, problems))
    assert rewards.tolist() == pytest.approx([0.1, 0.3, 0.7, 0.1] + [0.3] * 4 + [0] * 4)
    advantages = group_advantages(rewards, 4).view(3, 4)
    assert advantages[0, 1].abs() < 1e-6 and (advantages[0, [0, 2, 3]].abs() > 0.5).all()
    assert (advantages[1:] == 0).all()                         # equal but for the lost one: exactly dead
    assert judge.new_errors() == 6
    judge.judge(["lost"], [problem])
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "mine.py:reward gave no reward for 'lost'" in err and "mean of their group" in err


def test_gdpo_ignores_a_part_that_an_answer_does_not_have():
    parts = torch.tensor([[1.0, 0.1], [0, float("nan")], [0, 0.1], [1, 0.1], [1, float("nan")], [0, float("nan")], [1, 1], [0, 0]])
    got = gdpo(parts, [1.0, 1.0], 4)
    first = group_advantages(parts[:, 0], 4)
    second = group_advantages(torch.tensor([0.1] * 4 + [0.5, 0.5, 1, 0]), 4)
    total = first + second
    torch.testing.assert_close(got, total / (total.square().mean().sqrt() + 1e-6))
    assert (second[:4] == 0).all()


# ---------------------------------------------------------------------------------------- what goes wrong

@pytest.mark.parametrize("body, words", [
    ("{}['x']", "raised KeyError: 'x'"), ("[1.0]", "returned 1 rewards for 16 completions"), ("3", "returned 3, not a list"),
    ("['1'] * len(completions)", "returned '1' for a completion: a finite number or None"),
    ("[float('inf')] * len(completions)", "returned inf for a completion"),
    ("[c[0]['content'] for c in completions]", "raised TypeError: string indices must be integers, not 'str' (completions "
     "are plain strings here")])
def test_a_function_that_fails_in_a_run_ends_it_in_one_line(body, words, checkpoint, capsys):
    Path("mine.py").write_text("def reward(completions):\n    if len(completions) == 8:\n        return [1] * 8\n"
                               f"    return {body}\n")
    err = refused(capsys, *checkpoint)
    assert words in err and "mine.py:reward" in err


@pytest.mark.parametrize("source, words", [
    ("def reward(completions):\n    return 1 / 0\n", "mine.py:reward raised ZeroDivisionError: division by zero: it fails on each of "
     "the first 8 reference answers"),
    ("def reward(completions, trainer_state, label):\n    return 0\n", "asks for label, trainer_state; a reward function gets "
     "prompts, completions, completion_ids, answer, largest"),
    ("import nowhere_at_all\ndef reward(completions):\n    return 0\n", "does not load: raised ModuleNotFoundError"),
    ("def reward(completions):\n    import time\n    time.sleep(9)\n", "mine.py:reward took longer than --verifier_timeout 0.2 s")])
def test_a_function_that_cannot_work_is_refused_before_the_run(source, words, checkpoint, capsys):
    Path("mine.py").write_text(source)
    assert words in refused(capsys, *checkpoint, *(["--verifier_timeout", "0.2"] if "time" in source else []))
    assert not Path("run").exists()


def test_a_slow_judge_has_no_limit_and_an_answers_verifier_has_the_flags(task, monkeypatch):
    from plumbing.data import tasks
    monkeypatch.setattr(tasks, "ANSWER_LIMIT", 0.3)
    source = ("import time\ndef reward(completions):\n    time.sleep(0.6)\n    return [1] * len(completions)\n"
              "def one(response, answer):\n    time.sleep(0.6 * (response != answer))\n    return 1.0\n")
    began, judge = time.monotonic(), task(source, "reward", "one")
    assert judge.judge(["x"], judge.train[:1]).tolist() == [[1, 0]] and time.monotonic() - began > 1
    assert judge.verifier_errors == {"timeout": 1}
    patient = task(source, "one", time_limit=5.0)
    assert patient.judge(["x"], patient.train[:1]).tolist() == [[1]]
    for verifier in (*judge.verifiers, *patient.verifiers):
        verifier.close()


def test_reference_answers_that_all_time_out_are_refused(checkpoint, capsys):
    Path("mine.py").write_text("def reward(response, answer):\n    import time\n    time.sleep(5)\n    return 1.0\n")
    err = refused(capsys, *checkpoint, "--verifier_timeout", "0.05")
    assert "took longer than 0.05 s" in err and "each of the first 8 reference answers" in err and "--verifier_timeout" in err


# ------------------------------------------------------------------------------------------- which kind it is

@pytest.mark.parametrize("source, whole", [
    ("def reward(completions, **kw): pass", True), ("async def reward(prompts, completions): pass", True),
    ("def reward(response, answer): pass", False), ("def reward(response, answer, problem): pass", False),
    ("def reward(*, completions): pass", True), ("reward = lambda completions: []", True), ("reward = len", False),
    ("from other import reward", True), ("def reward(", False), ("raise SystemExit", False), ("", False)])
def test_completions_in_the_signature_make_it_a_function_of_the_batch(source, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text("def reward(completions):\n    return []\n")
    Path("mine.py").write_text(source + "\n")
    assert is_whole_batch("mine.py:reward") == whole
    assert not is_whole_batch("math") and not is_whole_batch("nowhere.py:reward")


def test_a_plain_functions_file_is_not_run_here(tmp_path, monkeypatch):
    """A verifier of one answer loads in its worker alone: its file may take long, or end the process."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("open('ran', 'w')\ndef check(response, answer):\n    return 1\n")
    assert not is_whole_batch("mine.py:check") and not Path("ran").exists()


def test_an_async_function_and_one_with_a_state_are_called(task):
    judge = task("import asyncio\nclass Judge:\n    def __call__(self, completions, **columns):\n"
                 "        return [len(c) for c in completions]\nstate = Judge()\n"
                 "async def reward(completions):\n    await asyncio.sleep(0)\n    return [True] * len(completions)\n",
                 "reward", "state")
    assert judge.judge(["a", "bb"], judge.train[:2]).tolist() == [[1, 1], [1, 2]]
    assert isinstance(judge.verifiers[1], RewardFunction)


def test_a_file_with_dataclasses_and_a_neighbour_called_like_a_package(task):
    """Its own imports find the neighbour; later imports of the process do not."""
    import sys
    Path("colorsys.py").write_text("mine = 7\n")                # there is a module of this name
    source = ("from __future__ import annotations\nfrom dataclasses import dataclass\nimport colorsys\n"
              "@dataclass\nclass Mark:\n    value: float\n"
              "def reward(completions):\n    return [Mark(colorsys.mine).value for _ in completions]\n"
              "def one(response, answer):\n    return Mark(0.5).value\n")
    sys.modules.pop("colorsys", None)
    judge = task(source, "reward", "one")
    assert judge.judge(["x"], judge.train[:1]).tolist() == [[7, 0.5]]
    assert sys.path[0] != str(Path.cwd()) and sys.path[-1] == str(Path.cwd())
    sys.modules.pop("colorsys", None)
    import colorsys
    assert not hasattr(colorsys, "mine")
    judge.verifiers[1].close()


def test_two_sources_judge_their_own_answers(task):
    from plumbing.data.tasks import join
    first = task("def reward(completions):\n    return [1] * len(completions)\n")
    Path("other.jsonl").write_text("".join(json.dumps({"prompt": f"{i}=", "answer": "0"}) + "\n" for i in range(20)))
    Path("other.py").write_text("def reward(completions, prompts):\n    return [len(p) for p in prompts]\n")
    both = join(first, load_task("other.jsonl", verifier="other.py:reward"))
    problems = [both.train[0], both.train[-1], both.train[1]]
    assert both.judge(["", "", ""], problems).tolist() == [[1], [len(problems[1].prompt)], [1]]
