"""Rewards: what a reward function of a response or of a batch may return, how components are
weighted, and what is logged. python -m pytest tests/data/test_rewards.py"""

import importlib.util
import inspect
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plumbing.data.reward_functions import RewardFunction
from plumbing.data.task import Task
from plumbing.refusal import Refusal
from tiny_run import differences, jsonl, load_task, read_json, write

DATA = ("--model_name_or_path model --dataset_name rows.jsonl --max_completion_length 4 "
        "--verifier mine.py:reward ")
LATE = "7+8="            # the prompt of the only row with another column


@pytest.fixture
def task(sums):
    """task(source, "f", "g") is a task of the sums, judged by these functions (by "reward" unless
    they are named) of mine.py, whose text is the source."""
    def make(source, *names, **options):
        write("mine.py", source)
        kinds = [f"mine.py:{name}" for name in names or ["reward"]]
        return load_task("rows.jsonl", verifier=kinds, **{"verifier_timeout": 20.0} | options)
    return make


@pytest.fixture
def judged(model, sums, run):
    """judged(source, "--steps 2") is the metrics of a run on the sums by the reward of mine.py,
    whose text is the source."""
    jsonl("rows.jsonl", [row | {"late": 7} if row["prompt"] == LATE else row for row in sums])

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
    problem = judge.train[0]
    a = problem.row["largest"]
    parts = judge.reward_components([problem.answer, "no"], [problem] * 2)
    assert parts.tolist() == [[1, 0.5, a], [0, 0.5, a]] and judge.total(parts)[0] == 2 - a


@pytest.mark.parametrize("bad", ["{'right': 1, 'format': float('nan')}",
                                 "{'right': None, 'format': 1}", "{}['right']"])
def test_a_bad_dict_is_reward_0_and_counted(bad, task, capfd):
    judge = task(f"def reward(response, answer):\n    if 'bad' in response:\n        return {bad}\n"
                 "    return {'right': response == answer, 'format': 1}\n")
    problem = judge.train[0]
    parts = judge.reward_components([problem.answer, "bad", "bad 2", "fine"], [problem] * 4)
    assert parts.tolist() == [[1, 1], [0, 0], [0, 0], [0, 1]]
    assert judge.reward_functions[0].errors == 2 and "Error" in capfd.readouterr().err


def test_the_first_answers_name_the_components_and_another_one_is_an_error(task):
    """Two tasks, and a penalty that comes later."""
    judge = task("def reward(response, answer):\n"
                 "    if len(response) > 3:\n        return {'right': 0, 'too_long': -1}\n"
                 "    return {'right' if answer < '4' else 'even': response == answer}\n")
    problems = judge.train[:8]
    parts = judge.reward_components([p.answer for p in problems], problems)         # [8, K]
    assert sorted(judge.component_names) == ["even", "right"]
    assert parts.sum(-1).tolist() == [1] * 8 and 0 < parts[:, 0].sum() < 8
    with pytest.raises(ValueError, match="mine.py:reward returned right, too_long"):
        judge.reward_components(["long"], problems[:1])


@pytest.mark.parametrize("columns", [[0, 1, 2], [1, 2, 0]])
def test_where_all_responses_lack_the_first_function_the_next_one_decides(columns):
    """In either order. No form mark makes a response right, and a single None leaves it wrong."""
    f, g = SimpleNamespace(names=["f"]), SimpleNamespace(names=["right", "form"])
    judge = Task("two", [], [], None, reward_functions=(g, f) if columns[0] else (f, g))
    N = torch.nan
    parts = torch.tensor([[N, 1, 0], [N, 0, 1], [1, N, 1], [N, N, 1], [N, N, 1], [N, N, 1]])
    right = judge.right(parts[:, columns], 2)                                       # [6]
    assert right.tolist() == [True, False, True, False, False, False]


def test_only_a_function_that_asks_for_its_row_gets_it(task, calls):
    asked = calls(RewardFunction, "ask")
    task("def reward(response, answer):\n    return 1\n")
    assert {args[2][2] for args, *_ in asked} == {None}


def test_a_function_that_fails_on_some_reference_answers_is_kept_and_they_are_not_counted(task):
    judge = task("def reward(response, answer):\n"
                 "    return {'right': 1 / (answer != '2'), 'a': 0}\n")
    assert judge.component_names == ["right", "a"] and not judge.reward_functions[0].errors


# ------------------------------------------------------------------------------- in training

def test_verifier_errors_go_on_over_a_resume(judged, run, killed):
    source = ("def reward(response, answer):\n"
              "    return {'right': response == answer, 'form': 1 / (len(response) % 2)}\n")
    line = "--steps 3 --save_steps 1 "
    counts = [record["verifier_errors"] for record in judged(source, line, folder="whole")]
    killed(2, DATA + line)
    run("--resume --verifier mine.py:reward")
    assert min(counts) > 0 and differences("whole", "run", 3) == []


BATCH = "def reward(completions):\n    return {}\n"


@pytest.mark.parametrize("source, line, error, words", [
    ("def reward(response, answer):\n    return 1.0\n", "--verifier mine.py:reward",
     Refusal, "two components of the reward have the same name"),
    ("def reward(response, answer):\n    return 1.0\n", "--reward_weights 1 2", Refusal,
     "--reward_weights holds 2 numbers, but the reward has 1 components: reward"),
    ("def reward(response, answer):\n    return 1e12 * (response == answer) + 1e12\n",
     "--reward_weights 1e8", Refusal, "must be below 1e[+]15 in size"),
    (BATCH.format("[1.0]"), "", Refusal, "returned 1 rewards for 16 completions"),
    (BATCH.format("[float('inf')] * len(completions)"), "", Refusal, "rewards from inf to inf"),
    (BATCH.format("['a'] * len(completions)"), "", ValueError, "could not convert"),
    (BATCH.format("{}['x']"), "", KeyError, "x"),
    ("def reward(completions, trainer_state):\n    return 0\n", "", TypeError, "trainer_state")])
def test_a_reward_that_cannot_be_counted_is_refused_and_a_bug_keeps_its_traceback(
        source, line, error, words, judged):
    with pytest.raises(error, match=words):
        judged(source, line)


# ----------------------------------------------------------- functions of a whole batch, as TRL's

def test_a_run_hands_over_whole_groups_of_plain_strings_and_all_columns(judged):
    """A row may lack a column; the rewards are those of its return."""
    record, = judged(
        "import json\nasync def reward(prompts, completions, completion_ids=None, **columns):\n"
        "    with open('calls.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([prompts, completions, completion_ids, columns]) + '\\n')\n"
        "    return [float(c[:1] == a) for c, a in zip(completions, columns['answer'])]\n",
        "--verifier exact")
    (prompts, completions, ids, columns), = read_json("calls.jsonl")
    assert len(prompts) == len(completions) == len(ids) == 16
    assert set(columns) == {"answer", "largest", "late"}
    assert [n is None for n in columns["late"]] == [prompt != LATE for prompt in prompts]
    assert columns["largest"] == [int(max(prompt[0], prompt[2])) for prompt in prompts]
    assert all(len(set(prompts[i:i + 4])) == 1 for i in range(0, 16, 4))
    assert all(len(c) <= len(x) <= 4 for c, x in zip(completions, ids))
    right = sum(c[:1] == a for c, a in zip(completions, columns["answer"])) / 16
    assert record["reward_parts"]["reward"] == record["pass_rate"] == right
    assert set(record["reward_parts"]) == {"reward", "exact"}


def test_the_metrics_mean_is_over_the_answers_that_have_the_part(judged):
    record, = judged("def reward(completions, largest):\n"
                     "    return [1.0 if n > 6 else None for n in largest]\n"
                     "def other(completions, largest):\n"
                     "    return [None if n > 6 else 0.25 for n in largest]\n",
                     "--verifier mine.py:other --advantage gdpo")
    assert record["reward_parts"] == {"reward": 1.0, "other": 0.25} and 0.25 < record["reward"] < 1
    assert record["zero_variance_groups"] == 1 and record["grad_norm"] == 0
    assert record["pass_rate"] < 1


def test_an_answer_without_any_reward_does_not_pass(judged):
    """Where all others are right it is no right answer, in training and in evaluations."""
    record, = judged("def reward(completions, **columns):\n"
                     "    return [None if i % 4 == 1 else 1.0 for i in range(len(completions))]\n",
                     "--eval_samples 4 --eval_prompts 1")
    summary = read_json("run/summary.json")
    assert record["pass_rate"] == 0.75 and record["reward"] == 1
    assert record["reward_parts"] == {"reward": 1} and record["zero_variance_groups"] == 1
    assert summary["pass_at_1_after"] == 0.75
    assert summary["reward_after"] == 1 and summary["greedy_after"] == 1


@pytest.mark.parametrize("source, batched", [
    ("def reward(completions, **kw): pass", True), ("def reward(environments): pass", True),
    ("\ufeffdef reward(*, completion_ids): pass", True), ("from other import reward", True),
    ("class Judge:\n    def __call__(self, completions): pass\nreward = Judge()", True),
    ("def reward(response, answer, problem): pass", False)])
def test_completions_in_the_signature_make_it_a_function_of_the_batch(source, batched, tmp_path,
                                                                      monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("other.py", "def reward(completions):\n    return []\n")
    write("mine.py", source + "\n")
    assert RewardFunction("mine.py:reward").batched == batched
    sys.modules.pop("other", None)


def test_a_file_with_dataclasses_and_a_neighbour_called_like_a_package(task):
    """Python's own modules are found before the neighbours of the user's file."""
    write("colorsys.py", "mine = 7\n")             # there is a module of this name
    write("mates.py", "mine = 7\n")
    judge = task("from __future__ import annotations\nfrom dataclasses import dataclass\n"
                 "import colorsys, mates\n@dataclass\nclass Mark:\n    value: float\n"
                 "def reward(completions):\n"
                 "    return [Mark(mates.mine + colorsys.ONE_THIRD).value for _ in completions]\n"
                 "def one(response, answer):\n    return Mark(mates.mine).value\n",
                 "reward", "one")
    parts = judge.reward_components(["x"], judge.train[:1])
    assert parts.flatten().tolist() == pytest.approx([22 / 3, 7])


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


def test_rows_as_verl_has_them(conversations, run, calls):
    """Nested columns; two rows with one prompt; a row's own system message; the template's
    variables."""
    from plumbing.data import task as module
    conversations.chat_template += "{% if strict %}+{{ strict }}{% endif %}"
    conversations.save_pretrained("chat")
    jsonl("talk.jsonl", [
        {"prompt": [{"role": "system", "content": "1,"}, {"role": "user", "content": f"{a}+1"}],
         "reward_model": {"style": "rule", "ground_truth": f"worked\n#### {i}"}, "index": i}
        for a in (1, 2) for i in range(4)])
    write("mine.py", "def score(response, answer, problem):\n"
                     "    return 0.5 * (answer == str(problem['index']))\n")
    prompts = calls(module, "encode_prompt")
    record, = run(TALK + "--columns prompt reward_model.ground_truth --verifier mine.py:score "
                  "--max_completion_length 4 --system_prompt 2= --chat_template_kwargs",
                  '{"strict": 7}')
    assert record["reward_parts"] == {"score": 0.5}
    assert {conversations.decode(ids)[-8:] for _, _, ids in prompts} == {"1,1+1=+7", "1,2+1=+7"}


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
    rollout, = sys.modules[str(Path.cwd() / "recorder.py").replace(".", "_")].ROLLOUTS
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
    given = [torch.nan if x is None else x for x in function(**columns)]
    given = torch.tensor(given, dtype=torch.float64)
    torch.testing.assert_close(parts[:, 0], given, rtol=0, atol=0, equal_nan=True)
    mean = given.nanmean().nan_to_num().item()
    assert record["reward_parts"]["reward"] == pytest.approx(mean)
    assert name == "reasoning_accuracy_reward" or len(set(given.tolist())) > 1


def test_a_conversation_needs_a_chat_template_and_is_read_as_it_writes_it(conversations, run):
    task = load_task("talk.jsonl")
    problem = task.train[0]
    read = lambda: conversations.decode(task.encode(conversations, [problem])[0])
    assert read() == f"1,{problem.prompt}="
    task.prompt_template, task.ids = "0{prompt}0", {}
    assert read() == f"1,0{problem.prompt}0="
    with pytest.raises(Refusal, match="it is a list of messages, which needs a chat template"):
        run(TALK + "--chat_template false --verifier exact")
