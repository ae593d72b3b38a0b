"""Reward functions of a whole batch, as TRL calls them. python -m pytest tests/data/test_reward_functions.py"""

import importlib.util
import inspect
import json
import math
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from advantages import gdpo, group_advantages, with_group_mean
from plumbing.data.reward_functions import RewardFunction, is_whole_batch
from plumbing.data.tasks import load_task
from tiny_run import SMALL, metrics

SUMS = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10), "largest": max(a, b)}) + "\n"
               for a in range(1, 5) for b in range(1, 5))


@pytest.fixture
def checkpoint(workplace, cold_start):
    """Flags for a run of a checkpoint on rows.jsonl, 16 sums, by mine.py:reward."""
    Path("rows.jsonl").write_text(SUMS)
    return [*SMALL, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name", "rows.jsonl",
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
    assert len(calls) == 3 and [ids[-1] for ids in calls[0][2]] == [15] * 8      # the trial: answers and <eos>
    for (prompts, completions, ids, columns), record in zip(calls[1:], metrics("run"), strict=True):
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


def test_an_answer_without_any_reward_does_not_pass(checkpoint):
    """Its group's mean is 1 where all others are right; it is no right answer, in training and in evaluations."""
    Path("mine.py").write_text("def reward(completions, **columns):\n"
                               "    return [None if i % 4 == 1 else 1.0 for i in range(len(completions))]\n")
    train.main([*checkpoint, "--steps", "1", "--verifier", "mine.py:reward", "--eval_samples", "4", "--eval_prompts", "2", "--num_generations", "4"])
    record, summary = metrics("run")[0], json.loads(Path("run/summary.json").read_text())
    assert record["pass_rate"] == 0.75 and record["reward"] == 1 and record["reward_parts"] == {"reward": 1}
    assert record["dead_groups"] == 1 and record["verifier_errors"] >= 4
    assert summary["pass_at_1_after"] == 0.75 and summary["reward_after"] == 1 and summary["greedy_after"] == 1


def test_an_answer_without_any_reward_has_advantage_0_and_is_counted(task, capfd):
    judge = task("def reward(completions):\n    return [None if c == 'lost' else float(c) for c in completions]\n")
    problem, other = judge.train[:2]
    texts = ["0.1", "lost", "0.7", "0.1"] + ["0.3", "lost", "0.3", "0.3"] + ["lost"] * 4
    rewards = judge.total(judge.judge(texts, [problem, other, judge.train[2]]), 4)
    assert rewards.tolist() == pytest.approx([0.1, 0.3, 0.7, 0.1] + [0.3] * 4 + [0] * 4)
    advantages = group_advantages(rewards, 4).view(3, 4)
    assert advantages[0, 1].abs() < 1e-6 and (advantages[0, [0, 2, 3]].abs() > 0.5).all()
    assert (advantages[1:] == 0).all()                         # equal but for the lost one: exactly dead
    assert judge.new_errors() == 6
    judge.judge(["lost"], [problem])
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "mine.py:reward gave no reward for 'lost'" in err and "mean of their group" in err


@pytest.mark.parametrize("world", [1, 2])
def test_a_problem_that_occurs_twice_in_a_batch_has_two_groups(world, task, monkeypatch):
    """Four wrong responses, and further on three right ones and one without a reward: its group is the second."""
    from plumbing.parallel import processes
    judge = task("def reward(completions):\n    return [None if c == 'lost' else float(c) for c in completions]\n")
    problem, other = judge.train[:2]
    problems, texts = [problem, other, problem, problem], ["0"] * 4 + ["0", "1"] * 2 + ["lost", "1", "1", "1"] + ["lost"] * 4
    monkeypatch.setattr(processes, "gather", lambda part: [part])
    found = []
    for rank in range(world):
        monkeypatch.setattr(processes, "share", lambda n: slice(rank * n // world, (rank + 1) * n // world))
        found.append(processes.divided(judge.judge)(texts, problems))
    assert torch.equal(judge.total(torch.cat(found), 4), torch.tensor([0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0.0]))


def test_a_run_of_one_problem_keeps_its_groups_apart(checkpoint):
    """Every group of the batch asks the same problem; group g gets g and a None: every group is dead."""
    Path("one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("mine.py").write_text("def reward(completions):\n    return [None if i % 4 == 1 else i // 4 for i in range(len(completions))]\n")
    train.main([*checkpoint, "--dataset_name", "one.jsonl", "--steps", "1"])
    record = metrics("run")[0]
    assert record["reward"] == 1.5 and record["dead_groups"] == 1 and record["grad_norm"] == 0 and record["verifier_errors"] == 4


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
     "are plain strings, as the prompts of the data are; for prompts that are lists of messages, completions are too")])
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
    assert judge.judge(["x"], judge.train[:1]).tolist() == [[1, 0]] and time.monotonic() - began > 0.6
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
    ("def reward(completions, **kw): pass", True), ("def reward(completion_ids): pass", True),
    ("\ufeffdef reward(completions): pass", True), ("async def reward(prompts, completions): pass", True),
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


# --------------------------------------------------------------------------- every reward function of TRL

FACTORIES = {"get_soft_overlong_punishment": "max_completion_len=6, soft_punish_cache=4",
             "get_repetition_penalty_reward": "ngram_size=1", "get_cosine_scaled_reward": "max_len=6"}
RECORDER = """
from rollout import Sampler

TEXTS = ["so $\\\\boxed{4}$", "<think>\\na\\n</think>\\n$4$", "$\\\\boxed{3}$ or $5$", "no"]
ROLLOUTS = []

class Recorder(Sampler):
    def sample(self, *inputs, **options):
        rollout = super().sample(*inputs, **options)
        rollout.texts = [TEXTS[i % 4] for i in range(len(rollout.texts))]
        ROLLOUTS.append(rollout)
        return rollout
"""


@pytest.fixture
def conversations(workplace, cold_start):
    """A checkpoint "chat" with a chat template, and talk.jsonl, whose prompts are lists of messages, as in TRL's data."""
    from transformers import AutoTokenizer
    shutil.copytree(next(cold_start.iterdir()), "chat")
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    tokenizer.save_pretrained("chat")
    rows = [{"prompt": [{"role": "system", "content": "1,"}, {"role": "user", "content": f"{a}+{b}"}],
             "solution": "4" if a < 4 else ","} for a in range(1, 5) for b in range(1, 5)]
    Path("talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


trl_rewards = importlib.import_module("trl.rewards") if importlib.util.find_spec("trl") else None
NAMES = [n for names in trl_rewards._import_structure.values() for n in names] if trl_rewards else []


@pytest.mark.skipif(not trl_rewards, reason="pip install trl==1.16.0")
@pytest.mark.parametrize("name", NAMES)
def test_every_reward_function_of_trl_works_unchanged(name, conversations, monkeypatch):
    """From the command line, `--verifier FILE.py:FUNCTION`; what it returns is what it returns when called directly with what
    was sampled: its own tokens, messages, and the column."""
    from plumbing.data.task import Task
    make = f"{name}({FACTORIES[name]})" if name.startswith("get_") else name
    Path("mine.py").write_text(f"from trl.rewards import {name}\nreward = {make}\n")
    Path("recorder.py").write_text(RECORDER)
    judged, judge = [], Task.judge
    monkeypatch.setattr(Task, "judge", lambda *inputs: (judged.append((inputs[2], judge(*inputs))), judged[-1][1])[1])
    train.main([*SMALL, "--model_name_or_path", "chat", "--dataset_name", "talk.jsonl", "--verifier", "mine.py:reward", "--sampler",
                "recorder.py:Recorder", "--temperature", "3", "--max_completion_length", "8", "--steps", "1", "--output_dir", "run"])
    (problems, parts), = judged
    rollout, = sys.modules["verifier_recorder"].ROLLOUTS
    function = getattr(trl_rewards, name)
    function = eval(f"function({FACTORIES[name]})") if name.startswith("get_") else function
    asked = [p for p in problems for _ in range(4)]
    ids = [row[own].tolist() for row, own in zip(rollout.response_ids, rollout.mask)]
    assert any(row[-1] == 15 for row in ids)                  # an end-of-sequence token was sampled
    theirs = function(completions=[[{"role": "assistant", "content": text}] for text in rollout.texts], completion_ids=ids,
                      prompts=[[{"role": "system", "content": "1,"}, {"role": "user", "content": p.prompt}] for p in asked],
                      solution=[p.answer for p in asked]) if "completions" in inspect.signature(function).parameters \
        else function(completion_ids=ids)
    given = torch.tensor([math.nan if x is None else x for x in theirs])
    want, record = with_group_mean(given, 4), metrics("run")[0]
    assert torch.equal(parts[:, 0].nan_to_num(nan=-9), given.nan_to_num(nan=-9)) and record["reward"] == pytest.approx(want.mean().item())
    assert record["reward_parts"]["reward"] == pytest.approx(given.nanmean().nan_to_num().item())
    assert name == "reasoning_accuracy_reward" or len(set(want.tolist())) > 1


def test_completion_ids_are_the_sampled_tokens_with_a_tools_output(task):
    from rollout import Rollout
    ids = torch.tensor([[4, 5, 6, 7], [4, 9, 9, 7], [4, 15, 16, 16], [4, 5, 9, 9], [15, 16, 16, 16]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    cut = torch.tensor([True, False, False, True, False])      # the fourth: the tool's output reached the limit
    rollout = Rollout(ids[:, :1], mask[:, :1], ids, mask, ids.float(), cut, [""] * 5, 1)
    assert rollout.token_lists() == [[4, 5, 6, 7], [4, 9, 9, 7], [4, 15], [4, 5, 9, 9], [15]]


def test_the_start_of_a_run_says_what_a_parameter_completions_changes(checkpoint, capsys):
    Path("mine.py").write_text("def reward(completions):\n    return [1.0] * len(completions)\n"
                               "def one(response, answer):\n    return 1.0\n")
    train.main([*checkpoint, "--steps", "1", "--verifier", "mine.py:reward", "mine.py:one"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "takes whole batches" in line]
    assert len(lines) == 1 and lines[0].startswith("verifier mine.py:reward") and "no time limit" in lines[0] and "ends the run" in lines[0]


def test_a_column_that_first_appears_after_row_eight_reaches_a_reward_function(checkpoint):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)]
    rows[-1]["late"] = 7
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text("def reward(completions, late):\n    open('late', 'a').write(f'{late}')\n    return [1.0] * len(completions)\n")
    train.main([*checkpoint, "--steps", "4"])
    assert "7" in Path("late").read_text() and "None" in Path("late").read_text()


@pytest.mark.parametrize("prompt, words", [
    ([], "prompt is a list without messages"), (["2+2="], "holds '2+2=', which is not a message"),
    ([{"role": "user", "content": ["2"]}], "prompt's content holds a list"), ([{"role": "user"}], "prompt's content is null"),
    ([{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}], "ends with a message of assistant")])
def test_a_conversation_that_is_none_is_one_line(prompt, words, checkpoint, capsys):
    Path("rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "4"}) + "\n")
    err = refused(capsys, *checkpoint)
    assert words in err and "rows.jsonl line 1: " in err


def test_an_answer_that_cannot_be_tokenized_is_one_line(checkpoint, capsys):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "two"}\n')
    Path("mine.py").write_text("def reward(completion_ids):\n    return [1.0] * len(completion_ids)\n")
    assert "rows.jsonl line 1: the answer cannot be tokenized" in refused(capsys, *checkpoint)


def test_a_conversation_without_a_chat_template_is_refused(conversations, capsys):
    err = refused(capsys, *SMALL, "--model_name_or_path", "chat", "--dataset_name", "talk.jsonl", "--no_chat_template")
    assert "it is a list of messages, which needs a chat template" in err


def test_a_conversation_is_read_as_the_chat_template_writes_it(conversations):
    from transformers import AutoTokenizer
    task = load_task("talk.jsonl", verifier="exact")
    tokenizer, problem = AutoTokenizer.from_pretrained("chat"), task.train[0]
    encoded, = task.encode(tokenizer, [problem], True, 99)
    assert tokenizer.decode(encoded) == f"1,{problem.prompt}="
    task.prompt_template, task.ids = "0{prompt}0", {}
    assert tokenizer.decode(task.encode(tokenizer, [problem], True, 99)[0]) == f"1,0{problem.prompt}0="
