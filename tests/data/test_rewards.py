"""Rewards: what a reward function of a response or of a batch may return, how components are
weighted, and what is logged. python -m pytest tests/data/test_rewards.py"""

import importlib.util
import inspect
import re
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import advantages
from advantages import gdpo, group_advantages, with_group_mean
from eval import main as eval_main
from plumbing.data import tasks
from plumbing.data.batch_rewards import BatchRewardFunction, make_reward_function
from plumbing.data.reward_functions import RewardFunction, in_parallel
from plumbing.data.running_sum import running_sum
from plumbing.data.task import Task
from plumbing.parallel import processes
from tiny_run import (SMALL, TRAIN, differences, jsonl, load_task, metrics, python, read_json,
                      write)

DATA = ("--model_name_or_path model --dataset_name rows.jsonl --max_completion_length 4 "
        "--verifier mine.py:reward ")


@pytest.fixture
def task(sums):
    """task(source, "f", "g") is a task of the sums, judged by these functions (by "reward" unless
    they are named) of mine.py, whose text is the source."""
    made = []

    def make(source, *names, **options):
        write("mine.py", source)
        kinds = [f"mine.py:{name}" for name in names or ["reward"]]
        made.append(load_task("rows.jsonl", verifier=kinds, **{"verifier_timeout": 20.0} | options))
        return made[-1]
    yield make
    for task in made:
        for verifier in task.reward_functions:
            verifier.close()


@pytest.fixture
def judged(model, sums, run):
    """judged(source, "--steps 2") is the metrics of a run on the sums by the reward of mine.py,
    whose text is the source."""
    def train(source, line="", folder="run"):
        write("mine.py", source)
        return run(DATA + line, folder=folder)
    return train


# ------------------------------------------------------------------------- one answer, many parts


def test_parts_are_weighed_in_the_order_in_which_they_are_named(task, sums):
    """A function that asks for its row gets it."""
    judge = task("def reward(response, answer, problem):\n"
                 "    return {'right': response == answer, 'b': 0.5, 'a': problem['largest']}\n",
                 reward_weights=[1.0, 2.0, -1.0])
    assert judge.component_names == ["right", "b", "a"]
    assert judge.weights(torch.ones(4, 4)) == [1, 2, -1, 1]
    largest = {row["prompt"]: row["largest"] for row in sums}
    for problem in judge.train:
        a = largest[problem.prompt]
        parts = judge.reward_components([problem.answer, "no"], [problem] * 2)
        assert parts.tolist() == [[1, 0.5, a], [0, 0.5, a]]
        assert judge.total(parts, 2)[0] == 2 - a
    judge.reward_weights = [1.0, 2.0]
    with pytest.raises(ValueError, match="holds 2 numbers, but the reward has 3 components: right"):
        judge.weights(torch.ones(4, 3))


@pytest.mark.parametrize("bad, words", [
    ("{'right': 1}", "returned right, but right format before"),
    ("{'right': 1, 'format': float('nan')}", "returned nan for format, not a finite number"),
    ("{'right': '1', 'format': 1}", "returned '1' for right, not a finite number"),
    ("{'right': None, 'format': 1}", "returned None for right"),
    ("{}", "returned an empty dict"),
    ("{'right': 1, 'format': 1, 'more': 1}", "returned right format more, but"),
    ("1.0", "returned reward, but right format before"),
    ("{'right': 10 ** 400, 'format': 1}", "not a finite"),
    ("{}['right']", "raised KeyError: 'right'")])
def test_a_bad_dict_is_one_line_reward_0_and_counted(bad, words, task, capfd):
    judge = task(f"def reward(response, answer):\n    if 'bad' in response:\n        return {bad}\n"
                 "    return {'right': response == answer, 'format': 1}\n")
    problem = judge.train[0]
    found = [judge.reward_components([problem.answer, "bad", "bad 2"], [problem] * 3),
             judge.reward_components(["bad", "fine"], [problem] * 2)]
    assert torch.cat(found).tolist() == [[1, 1], [0, 0], [0, 0], [0, 0], [0, 1]]
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and words in err
    assert "mine.py:reward" in err and "the reward is 0" in err
    assert judge.reward_functions[0].errors == {"crash": 3}


def test_a_function_that_fails_on_some_reference_answers_is_kept_and_they_are_not_counted(task):
    judge = task("def reward(response, answer):\n"
                 "    return {'right': 1 / (answer != '2'), 'a': 0}\n")
    assert judge.component_names == ["right", "a"] and not judge.reward_functions[0].errors


# two processes: functions that fail on some texts, change the order of parts, leave one out; seeds
# that fail on the reference answers, each, too
ROUGH = """
import zlib
def reward(response, answer):
    r = zlib.crc32(f"{{response}} {{answer}} {seed}".encode())
    parts = {{"right": float(response[:1] == answer[:1]), "short": 0.1 * (len(response) < 3)}}
    parts["odd"] = r % 2 / 10
    if response == answer and {all_fail}:
        raise ValueError("a reference answer")
    if r % 7 == 3:
        raise ValueError("no")
    if r % 7 == 4:
        del parts["odd"]
    return dict(reversed(parts.items())) if r % 7 < 3 else parts
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, all_fail", [(1, False), (2, True)])
def test_two_processes_name_and_count_the_parts_as_one_does(seed, all_fail, model, sums):
    write("mine.py", ROUGH.format(seed=seed, all_fail=all_fail))
    words = [TRAIN, *SMALL, *DATA.split(), *"--steps 2 --reward_weights 1 0.5 -0.25".split()]
    found = []
    for n in (1, 2):
        folder = Path(f"run{n}")
        done = python(*words, "--output_dir", folder, processes=n, code=None)
        said = {line for line in done.stderr.splitlines()
                if line.startswith("train.py: ") and "warning" not in line}
        rows = metrics(folder) if folder.exists() else []
        rewards = [[row[key] for key in ("reward", "reward_parts", "pass_rate", "verifier_errors")]
                   for row in rows]
        found.append((done.returncode == 0, said, rewards))
    assert found[0] == found[1]
    assert found[0][0] != all_fail and len(found[0][2]) == (0 if all_fail else 2)


def test_equal_sums_are_equal_rewards(task):
    """So a group whose answers are equally good has no signal."""
    judge = task("def reward(response, answer):\n    return {'a': 0, 'b': 0, 'c': 0}\n")
    usual = [0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 1.0, 100.1, -0.1]
    rows = [*product(usual, repeat=3)]
    totals = {}
    for row, total in zip(rows, judge.total(torch.tensor(rows)).tolist()):
        totals.setdefault(sum(Fraction(str(x)) for x in row), set()).add(total)
    for exact, (total, *others) in totals.items():
        assert not others and float(exact) == pytest.approx(total, rel=1e-6, abs=1e-12)


def test_a_single_part_is_the_reward_to_the_last_bit():
    sums, part = running_sum(1, 2, train_size=20, test_size=4), torch.rand(64, 1)
    penalty = -torch.rand(64, 1)
    assert torch.equal(sums.total(part), part[:, 0])
    assert torch.allclose(sums.total(torch.cat([part, penalty], 1)), (part + penalty)[:, 0])


def test_parallel_calls_give_the_same_rewards_in_the_same_order(sums, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    write("mine.py",
        "import os, time\ndef reward(response, answer):\n    n = int(response)\n"
        "    time.sleep(n % 3 / 500)\n    if n % 7 == 3: raise ValueError\n"
        "    if n % 31 == 8: os._exit(1)\n    return n / 1000\n")
    check, texts = RewardFunction("mine.py:reward", 20.0), [str(n) for n in range(1, 100)]
    expected = [0.0 if n % 7 == 3 or n % 31 == 8 else n / 1000 for n in range(1, 100)]
    assert in_parallel(check, texts, [""] * 99) == expected
    assert check.errors == {"crash": expected.count(0.0)} and len(check.idle) == 4
    check.close()


# ------------------------------------------------------------------------------- in training

def test_gdpo_gets_the_parts_apart_and_their_weights(judged, monkeypatch):
    seen = []

    def noted(parts, part_weights, group_size):
        seen.append((parts, part_weights, group_size))
        return gdpo(parts, part_weights, group_size)
    row = replace(advantages.ADVANTAGES["gdpo"], function=noted)
    monkeypatch.setitem(advantages.ADVANTAGES, "gdpo", row)
    source = ("def reward(response, answer):\n"
              "    return {'right': response == answer, 'length': len(response)}\n")
    judged(source, "--verifier mine.py:reward exact --reward_weights 1 0.1 0 --advantage gdpo")
    parts, part_weights, group_size = seen[-1]               # the others are the start's trials
    assert parts.shape == (16, 3) and part_weights == [1.0, 0.1, 0.0] and group_size == 4
    assert torch.equal(parts[:, 0], parts[:, 2]) and parts[:, 1].max() > 1


def test_verifier_errors_go_on_over_a_resume_and_count_bad_dicts(judged, run, killed, capfd):
    source = ("def reward(response, answer):\n    right = {'right': response == answer}\n"
              "    return right | {'form': 1} if len(response) % 2 else right\n")
    line = "--steps 3 --save_steps 1 "
    counts = [record["verifier_errors"] for record in judged(source, line, folder="whole")]
    killed(2, DATA + line)
    run(DATA + line + "--resume")
    assert 0 < counts[0] < counts[1] < counts[2] and differences("whole", "run", 3) == []
    err = capfd.readouterr().err
    assert err.count("warning: --verifier") == 3
    assert len(re.findall("warning: --verifier.*returned right, but right form before", err)) == 3


def test_ctrl_c_while_a_function_of_a_batch_loads_is_ctrl_c(workplace):
    write("mine.py", "def reward(completions):\n    return 0\n")
    BatchRewardFunction("mine.py:reward", ["answer"])
    write("mine.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        BatchRewardFunction("mine.py:reward", ["answer"])


BATCH = "def reward(completions):\n    return {}\n"
SLEEPS = "import time\ndef reward(response, answer):\n    time.sleep(5)\n    return 1.0\n"
BEFORE = [                                                   # what mine.py holds, flags, the line
    ("def reward(response, answer):\n    return response.split('<answer>')[1] == answer\n", "",
     "mine.py:reward: raised IndexError.*each of the first 8 reference answers; return 0 for an "
     "answer that it cannot read\n"),
    ("def reward(response, answer):\n    return 1.0\n", "--verifier mine.py:reward mine.py:reward",
     "two components of the reward have the same name"),
    ("", "--verifier exact --reward_weights 1 2",
     "^train.py: --reward_weights holds 2 numbers, but the reward has 1 components: exact\n$"),
    ("def reward(completions, trainer_state, label):\n    return 0\n", "",
     "missing a required argument: 'trainer_state'; a reward function gets prompts, completions, "
     "completion_ids, answer, largest"),
    ("import nowhere_at_all\ndef reward(completions):\n    return 0\n", "",
     "does not load: ModuleNotFoundError"),
    ("def reward(completions):\n    return 0\n", "--verifier_timeout 5",
     "--verifier_timeout 5 has no effect: it is for math and for functions of one response"),
    ("", "--verifier exact --verifier_timeout 5", "--verifier_timeout 5 has no effect"),
    (SLEEPS, "--verifier_timeout 0.05",
     "took longer than 0.05 s.*each of the first 8 reference answers.*--verifier_timeout"),
]
BEGUN = [
    ("def reward(response, answer):\n    return 1e12 * (response == answer) + 1e12\n",
     "--reward_weights 1e8", r"a reward is 1e\+20: .* below 1e\+15 .* --reward_weights"),
    ("def reward(response, answer):\n    return 1.0 if response == answer else -0.5\n",
     "--algorithm maxrl", r"a reward is -0.5: --scale_rewards mean \(MaxRL\)"),
    *((BATCH.format(returned), "", f"mine.py:reward {words}") for returned, words in {
        "{}['x']": "raised KeyError: 'x'",
        "exit(3)": "raised SystemExit: 3",
        "[1.0]": r"returned \[1.0\]: a list of 16 numbers",
        "3": "returned 3: a list of 16 numbers",
        "dict.fromkeys(range(16), 1.0)": "returned {0: 1.0, 1: 1.0.*a list of 16 numbers",
        "['1'] * len(completions)": "returned '1' for a completion: a finite number or None",
        "[float('inf')] * len(completions)": "returned inf for a completion",
        "[1e39] * len(completions)": r"returned 1e\+39 for a completion",
        "[1e20] * len(completions)": r"returned 1e\+20 for a completion: .* below 1e\+15",
        "[c[0]['content'] for c in completions]":
            "raised TypeError: string indices must be integers, not 'str'"}.items()),
]


@pytest.mark.parametrize("row", BEFORE + BEGUN, ids=lambda row: row[2][:30])
def test_a_reward_that_cannot_work_is_refused_and_one_that_fails_ends_the_run(row, model, sums,
                                                                              refused):
    source, line, words = row
    write("mine.py", source)
    assert re.search(words, refused(DATA + line, begun=row in BEGUN))


# ----------------------------------------------------------- functions of a whole batch, as TRL's

def test_a_run_hands_over_whole_groups_of_plain_strings_and_logs_the_parts(judged):
    records = judged(
        "import json\ndef reward(prompts, completions, completion_ids=None, **columns):\n"
        "    with open('calls.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([prompts, completions, completion_ids, columns]) + '\\n')\n"
        "    return [float(c[:1] == a) for c, a in zip(completions, columns['answer'])]\n",
        "--steps 2 --verifier mine.py:reward exact")
    calls = read_json("calls.jsonl")
    for (prompts, completions, ids, columns), record in zip(calls, records, strict=True):
        assert len(prompts) == len(completions) == len(ids) == 16
        assert set(columns) == {"answer", "largest"}
        assert columns["largest"] == [int(max(prompt[0], prompt[2])) for prompt in prompts]
        assert all(len(set(prompts[i:i + 4])) == 1 for i in range(0, 16, 4))
        assert all(len(c) <= len(x) <= 4 for c, x in zip(completions, ids))
        right = sum(c[:1] == a for c, a in zip(completions, columns["answer"])) / 16
        assert record["reward_parts"]["reward"] == record["pass_rate"] == right
        assert record["verifier_errors"] == 0
        assert set(record["reward_parts"]) == {"reward", "exact"}


def test_the_metrics_mean_is_over_the_answers_that_have_the_part(judged):
    record, = judged("def reward(completions, largest):\n"
                     "    return [1.0 if n > 6 else None for n in largest]\n"
                     "def other(completions, largest):\n"
                     "    return [None if n > 6 else 0.25 for n in largest]\n",
                     "--verifier mine.py:reward mine.py:other --advantage gdpo")
    assert record["reward_parts"] == {"reward": 1.0, "other": 0.25} and 0.25 < record["reward"] < 1
    assert record["zero_variance_groups"] == 1 and record["grad_norm"] == 0
    assert record["pass_rate"] < 1


def test_an_answer_without_any_reward_does_not_pass(judged):
    """Its group's mean is 1 where all others are right; it is no right answer, in training and in
    evaluations."""
    record, = judged("def reward(completions, **columns):\n"
                     "    return [None if i % 4 == 1 else 1.0 for i in range(len(completions))]\n",
                     "--eval_samples 4 --eval_prompts 1")
    summary = read_json("run/summary.json")
    assert record["pass_rate"] == 0.75 and record["reward"] == 1
    assert record["reward_parts"] == {"reward": 1}
    assert record["zero_variance_groups"] == 1 and record["verifier_errors"] >= 4
    assert summary["pass_at_1_after"] == 0.75
    assert summary["reward_after"] == 1 and summary["greedy_after"] == 1


LOST = ("def reward(completions):\n"
        "    return [None if c == 'lost' else float(c) for c in completions]\n")


def test_an_answer_without_any_reward_has_advantage_0_and_is_counted(task, capfd):
    judge = task(LOST)
    texts = ["0.1", "lost", "0.7", "0.1", "0.3", "lost", "0.3", "0.3"] + ["lost"] * 4
    problems = [problem for problem in judge.train[:3] for _ in range(4)]
    rewards = judge.total(judge.reward_components(texts, problems), 4)
    assert rewards.tolist() == pytest.approx([0.1, 0.3, 0.7, 0.1] + [0.3] * 4 + [0] * 4)
    mixed, equal, none = group_advantages(rewards, 4).view(3, 4)
    assert mixed[1].abs() < 1e-6 and (mixed[[0, 2, 3]].abs() > 0.5).all()
    assert (equal == 0).all() and (none == 0).all()          # equal but for the lost one: exactly
    assert judge.reward_functions[0].errors.total() == 6
    judge.reward_components(["lost"], judge.train[:1])
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "mine.py:reward gave no reward for 'lost'" in err
    assert "mean of the group" in err


@pytest.mark.parametrize("world", [1, 2])
def test_a_problem_that_occurs_twice_in_a_batch_has_two_groups(world, task, monkeypatch):
    """Four wrong responses, and further on three right ones and one without a reward: its group is
    the second."""
    judge = task(LOST)
    problem, other = judge.train[:2]
    problems = [p for p in (problem, other, problem, problem) for _ in range(4)]
    texts = ["0"] * 4 + ["0", "1"] * 2 + ["lost", "1", "1", "1"] + ["lost"] * 4
    monkeypatch.setattr(processes, "gather", lambda part: [part])
    found = []
    for rank in range(world):
        share = lambda n: slice(rank * n // world, (rank + 1) * n // world)
        monkeypatch.setattr(processes, "share", share)
        shared = processes.share_reward_components(judge.reward_components)
        found.append(shared(texts, problems, [[0]] * len(texts), []))
    rewards = judge.total(torch.cat(found), 4)
    assert rewards.tolist() == [0] * 4 + [0, 1] * 2 + [1] * 4 + [0] * 4


def test_a_function_of_a_batch_has_no_time_limit_and_one_of_a_response_has(task, monkeypatch):
    monkeypatch.setattr(tasks, "ANSWER_LIMIT", 0.3)
    judge = task("import time\ndef reward(completions):\n    time.sleep(0.6)\n"
                 "    return [1] * len(completions)\n"
                 "def one(response, answer):\n    time.sleep(0.6 * (response != answer))\n"
                 "    return 1.0\n", "reward", "one", verifier_timeout=None)
    assert judge.reward_components(["x"], judge.train[:1]).tolist() == [[1, 0]]
    assert [f.errors for f in judge.reward_functions] == [{}, {"timeout": 1}]


@pytest.mark.parametrize("source, batched", [
    ("def reward(completions, **kw): pass", True),
    ("def reward(completion_ids): pass", True),
    ("\ufeffdef reward(completions): pass", True),
    ("async def reward(prompts, completions): pass", True),
    ("def reward(response, answer): pass", False),
    ("def reward(response, answer, problem): pass", False),
    ("def reward(*, completions): pass", True),
    ("reward = lambda completions: []", True),
    ("def reward(response, answer): pass\nreward = lambda completions: []", True),
    ("def reward(completions): pass\nreward = lambda response, answer: 1", False),
    ("reward = divmod", False),
    ("from other import reward", True)])
def test_completions_in_the_signature_make_it_a_function_of_the_batch(source, batched, tmp_path,
                                                                      monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("other.py", "def reward(completions):\n    return []\n")
    write("mine.py", source + "\n")
    function = make_reward_function("mine.py:reward", 20.0, ["answer"])
    function.close()
    assert function.batched == batched


def test_an_async_function_and_one_with_a_state_are_called(task):
    judge = task("import asyncio\nclass Judge:\n    def __call__(self, completions, **columns):\n"
                 "        return [len(c) for c in completions]\nstate = Judge()\n"
                 "async def reward(completions):\n    await asyncio.sleep(0)\n"
                 "    return [True] * len(completions)\n", "reward", "state")
    assert judge.reward_components(["a", "bb"], judge.train[:2]).tolist() == [[1, 1], [1, 2]]
    assert judge.reward_functions[1].batched


def test_a_file_with_dataclasses_and_a_neighbour_called_like_a_package(task):
    """Its own imports find the neighbour; later imports of the process do not."""
    write("colorsys.py", "mine = 7\n")             # there is a module of this name
    sys.modules.pop("colorsys", None)
    judge = task("from __future__ import annotations\nfrom dataclasses import dataclass\n"
                 "import colorsys\n@dataclass\nclass Mark:\n    value: float\n"
                 "def reward(completions):\n"
                 "    return [Mark(colorsys.mine).value for _ in completions]\n"
                 "def one(response, answer):\n    return Mark(colorsys.mine).value\n",
                 "reward", "one")
    assert judge.reward_components(["x"], judge.train[:1]).tolist() == [[7, 7]]
    assert sys.path[0] != str(Path.cwd()) and sys.path[-1] == str(Path.cwd())
    sys.modules.pop("colorsys", None)
    import colorsys
    assert not hasattr(colorsys, "mine")


def test_a_column_that_first_appears_after_row_eight_reaches_a_reward_function(task, sums):
    jsonl("rows.jsonl", [*sums[:-1], sums[-1] | {"late": 7}])
    judge = task("def reward(completions, late):\n    return [n or 0.5 for n in late]\n")
    problems = judge.train + judge.test
    rewards = judge.reward_components([""] * len(sums), problems).flatten().tolist()
    assert sorted(rewards) == [0.5] * (len(sums) - 1) + [7]


# ------------------------------------------------------------- every reward function of TRL

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
TALK = "--model_name_or_path chat --dataset_name talk.jsonl "


@pytest.fixture
def conversations(chat_model):
    """talk.jsonl, whose prompts are lists of messages, as in TRL's data, and plain.jsonl, where
    they are texts, for the checkpoint "chat". Its tokenizer."""
    solutions = {f"{a}+{b}": "4" if a < 4 else "," for a in range(1, 5) for b in range(1, 5)}
    jsonl("talk.jsonl", [{"prompt": [{"role": "system", "content": "1,"},
                                     {"role": "user", "content": prompt}], "solution": solution}
                         for prompt, solution in solutions.items()])
    jsonl("plain.jsonl", [{"question": prompt, "solution": solution}
                          for prompt, solution in solutions.items()])
    return chat_model


def test_rows_as_verl_has_them(conversations, run, capsys, calls):
    """compute_score with defaults, which would take (response, answer) for its first two; nested
    columns; two rows with one prompt; a row's own system message; the template's variables, in
    prompts, evaluations and questions."""
    from plumbing.data import task as module
    conversations.chat_template += ("{% if strict %}+{{ strict }}{% endif %}"
                                    "{{ strftime_now('%d')[:1] }}")
    conversations.save_pretrained("chat")
    jsonl("talk.jsonl", [
        {"prompt": [{"role": "system", "content": "1,"}, {"role": "user", "content": f"{a}+1"}],
         "data_source": "sums", "extra_info": {"index": i},
         "reward_model": {"style": "rule", "ground_truth": f"worked\n#### {i}"}}
        for a in (1, 2) for i in range(4)])
    write("mine.py",
        "import json\n"
        "def compute_score(data_source=None, solution_str='', ground_truth='', extra_info=None,\n"
        "                  bonus=0.5):\n"
        "    with open('calls.jsonl', 'a') as file:\n"
        "        index = (extra_info or {}).get('index', 0)\n"
        "        words = [data_source, solution_str, ground_truth, index]\n"
        "        file.write(json.dumps(words) + '\\n')\n"
        "    return {'score': bonus, 'pred': solution_str}\n")
    write("whole.py",
        "def whole(completions, reward_model):\n"
        "    return [1 if x is None else x['ground_truth'].count('worked')\n"
        "            for x in reward_model]\n")
    prompts = calls(module, "encode_prompt")
    record, = run(TALK + "--columns prompt reward_model.ground_truth --verifier "
                  "mine.py:compute_score whole.py:whole --max_completion_length 4 "
                  "--system_prompt 2= --save_steps 1 --eval_samples 1 --eval_prompts 2 "
                  "--chat_template_kwargs", '{"strict": 7, "stirct": 0}')
    out = capsys.readouterr().out
    assert record["reward_parts"] == {"compute_score": 0.5, "whole": 1.0}
    for note in ("8 of 8 prompts have a system message of their own, which is used instead of",
                 "--chat_template_kwargs stirct has no effect: the chat template has no such",
                 "the chat template prints today's date"):
        assert note in out
    for source, response, answer, index in read_json("calls.jsonl"):
        assert source == "sums" and answer == str(index) and response is not None
    assert {words[3] for words in read_json("calls.jsonl")} == {0, 1, 2, 3}
    eval_main(["ask", "run/checkpoints/step_1", "1+2", "--n", "1", "--answer", "3",
               "--trust_run_code"])
    texts = {conversations.decode(ids) for _, _, ids in prompts}
    assert any("1,2+1=+7" in text for text in texts) and any("2=1+2=+7" in text for text in texts)
    for value in ("[1]", "no"):
        assert "is not a JSON object like" in run.refused(TALK + "--chat_template_kwargs", value)


trl_rewards = importlib.import_module("trl.rewards") if importlib.util.find_spec("trl") else None
NAMES = [*chain(*trl_rewards._import_structure.values())] if trl_rewards else []
FACTORIES = {"get_soft_overlong_punishment": "(max_completion_len=6, soft_punish_cache=4)",
             "get_repetition_penalty_reward": "(ngram_size=1)",
             "get_cosine_scaled_reward": "(max_len=6)"}


@pytest.mark.skipif(not trl_rewards, reason="pip install trl==1.16.0")
@pytest.mark.parametrize("form", ["talk", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_every_reward_function_of_trl_works_unchanged(name, form, conversations, run, calls):
    """From the command line, `--verifier FILE.py:FUNCTION`; what it returns is what it returns when
    called directly with what was sampled: its own tokens, messages, and the column. So it does
    where rows are texts that the chat template renders."""
    assert name in FACTORIES or not name.startswith("get_")
    made = name + FACTORIES.get(name, "")
    write("mine.py", f"from trl.rewards import {name}\nreward = {made}\n")
    write("recorder.py", RECORDER)
    seen = calls(Task, "reward_components")
    record, = run(f"--model_name_or_path chat --dataset_name {form}.jsonl "
                  "--verifier mine.py:reward --sampler recorder.py:Recorder "
                  "--temperature 3 --max_completion_length 8")
    ((_, _, problems, *_), _, parts), = seen
    rollout, = sys.modules["verifier_recorder"].ROLLOUTS
    function = eval(f"trl_rewards.{made}")
    ids = [row[own].tolist() for row, own in zip(rollout.response_ids, rollout.mask)]
    assert any(row[-1] == 15 for row in ids)                 # an end-of-sequence token was sampled
    columns = {"completion_ids": ids}
    if "completions" in inspect.signature(function).parameters:
        system = [{"role": "system", "content": "1,"}] if form == "talk" else []
        columns |= dict(
            completions=[[{"role": "assistant", "content": text}] for text in rollout.texts],
            prompts=[[*system, {"role": "user", "content": p.prompt}] for p in problems],
            solution=[p.answer for p in problems])
    given = torch.tensor([torch.nan if x is None else x for x in function(**columns)])
    want = with_group_mean(given, 4)
    torch.testing.assert_close(parts[:, 0], given, rtol=0, atol=0, equal_nan=True)
    assert record["reward"] == pytest.approx(want.mean().item())
    mean = given.nanmean().nan_to_num().item()
    assert record["reward_parts"]["reward"] == pytest.approx(mean)
    assert name == "reasoning_accuracy_reward" or len(set(want.tolist())) > 1


SIGNATURES = """
CALLS = []
def documented(completions, **kwargs):
    CALLS.append(dict(kwargs, completions=completions))
    return [float(len(completion[0]["content"])) for completion in completions]
def with_columns(prompts, completions, answer, **kwargs):
    CALLS.append(dict(kwargs, prompts=prompts, completions=completions, answer=answer))
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
"""


@pytest.mark.skipif(not trl_rewards, reason="pip install trl==1.16.0")
@pytest.mark.parametrize("form", ["talk", "plain"])
def test_a_function_gets_what_a_trainer_of_trl_gives_it(form, chat_model, run, calls, capsys):
    """What it gives for rows of messages, also where rows are texts; but answers are cut, as for
    functions of one response."""
    from trl import GRPOTrainer
    write("mine.py", SIGNATURES)
    rows = {f"{a}+{b}": {"answer": f"{a} and {b}\n#### {a + b}", "n": a}
            for a in range(1, 4) for b in range(1, 4)}
    message = lambda text, role="user": [{"role": role, "content": text}]
    jsonl("rows.jsonl", [{"prompt": message(prompt) if form == "talk" else prompt} | row
                         for prompt, row in rows.items()])
    seen = calls(Task, "reward_components")
    run("--model_name_or_path chat --dataset_name rows.jsonl --max_completion_length 4 "
        "--verifier mine.py:documented mine.py:with_columns")
    ((task, texts, problems, ids, _), _, _), = seen
    functions = [f.function for f in task.reward_functions]
    note = "note: --verifier mine.py:documented gets messages, because"
    assert (note in capsys.readouterr().out) == (form == "plain")
    inputs = [{"prompt": message(p.prompt), "n": rows[p.prompt]["n"],
               "answer": str(sum(map(int, p.prompt.split("+"))))} for p in problems]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=functions,
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(report_to=[]),
        reward_func_names=["a", "b"], reward_processing_classes=[None] * 2, environments=None,
        _log_completion_extra=None, _log_metric=None)
    inspect.unwrap(GRPOTrainer._calculate_rewards)(
        trainer, inputs, [row["prompt"] for row in inputs],
        [message(text, "assistant") for text in texts], ids)
    for function in functions:
        ours, theirs = function.__globals__["CALLS"]
        of_trainer = {"trainer_state", "log_extra", "log_metric"}
        assert ours == {name: x for name, x in theirs.items() if name not in of_trainer}


def test_a_conversation_without_a_chat_template_is_refused(conversations, refused):
    words = "it is a list of messages, which needs a chat template"
    assert words in refused(TALK + "--no_chat_template")


def test_a_conversation_is_read_as_the_chat_template_writes_it(conversations):
    task = load_task("talk.jsonl", verifier="exact")
    problem = task.train[0]
    read = lambda: conversations.decode(task.encode(conversations, [problem])[0])
    assert read() == f"1,{problem.prompt}="
    task.prompt_template, task.ids = "0{prompt}0", {}
    assert read() == f"1,0{problem.prompt}0="
