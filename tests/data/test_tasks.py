"""tasks.py: the built-in task against sums done in plain Python, its tokenizer, loading of data,
and the data position. python -m pytest tests/data/test_tasks.py"""

import json
import random
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import train
from plumbing.data.datafiles import Problem
from plumbing.data.running_sum import running_sum
from plumbing.data.stream import PromptStream
from plumbing.data.task import Task
from plumbing.data.tasks import prepare_task
from plumbing.refusal import Refusal
from session.arguments import parse
from tiny_run import flags, jsonl, load_task, metrics, write

ROOT = Path(__file__).resolve().parents[2]
WORD_PROBLEMS = ROOT / "tests/data/gsm8k_style.jsonl"


# ------------------------------------------------------------------------- a task of one's own

def custom(kind=int, **more):
    """A task made in Python, whose verify returns a number of this kind."""
    sums = running_sum(1, 2, train_size=40, test_size=8)
    return Task("sums of mine", sums.train, sums.test,
                lambda response, problem: kind(response[:1] == problem.answer[:1]),
                teacher=sums.teacher, **more)


def test_verify_of_a_task_made_in_python_may_return_any_kind_of_number(workplace):
    task = custom(bool)
    rewards = task.reward_components([task.train[0].answer, ""], task.train[:1] * 2)
    assert rewards.tolist() == [[1], [0]]
    train.run_script(parse(flags("--steps", "1", "--output_dir", "run")), custom(numpy.float32))
    record, = metrics("run")
    assert record["reward"] == record["pass_rate"] > 0


def test_stop_adds_to_the_strings_of_a_task_of_ones_own():
    task = custom(stop=(";", "+"))
    assert prepare_task(parse(["--stop", "\\n", "+"]), task).stop == (";", "+", "\n")
    assert prepare_task(parse(["--stop", "+"])).stop == ("+",)


def test_components_of_one_name_are_refused_also_in_a_task_that_a_feature_has_joined():
    twice = 2 * (SimpleNamespace(names=["steps"]),)
    with pytest.raises(Refusal, match="the same name: steps, steps"):
        prepare_task(parse([]), Task("joined", [], [], None, reward_functions=twice))


@pytest.mark.parametrize("line, built_in, given, stated", [
    ("", 5, 256, 9), ("--overlong_cache 0.5", 9, 256, 9), ("--max_completion_length 7", 7, 7, 7)])
def test_the_length_limit_stands_in_the_task_and_the_settings_stay_as_they_were(line, built_in,
                                                                                given, stated):
    args = parse(f"--min_terms 1 --max_terms 2 {line}".split())
    before = asdict(args)
    limits = [prepare_task(args), prepare_task(args, custom()),
              prepare_task(args, custom(max_completion_length=9))]
    assert [task.max_completion_length for task in limits] == [built_in, given, stated]
    assert asdict(args) == before


# ---------------------------------------------------------------------- the built-in running sum

def last_digits(prompt):
    """The reference: the terms, and the last digits of the sums of the first 1, 2, 3 … of them."""
    terms = [int(term) for term in prompt.strip().rstrip("=").split("+")]
    return terms, [sum(terms[:i + 1]) % 10 for i in range(len(terms))]


@pytest.mark.parametrize("low, high", [(1, 1), (3, 3), (3, 9), (8, 12), (128, 128)])
def test_the_answer_is_the_last_digit_of_every_partial_sum(low, high):
    short, long = (running_sum(low, high, verbose=verbose, train_size=500, test_size=50)
                   for verbose in (False, True))
    for problem, verbose in zip(short.train + short.test, long.train + long.test, strict=True):
        terms, digits = last_digits(problem.prompt)
        steps = [f"{d}+{t}={e}" for d, t, e in zip([0] + digits, terms, digits)]
        assert low <= len(terms) <= high and set(terms) <= set(range(1, 10))
        assert problem.prompt == ("+".join(map(str, terms)) + "=").ljust(2 * high), "one width"
        assert problem.answer == ",".join(map(str, digits)) + "."
        assert verbose == replace(problem, answer=",".join(steps) + ".")


@pytest.mark.parametrize("verbose", [False, True])
def test_first_error_is_where_the_first_wrong_step_begins(verbose):
    """The reference compares the steps with the right ones one by one."""
    task = running_sum(verbose=verbose, slip=0.1, train_size=400, test_size=5)
    rng, found = random.Random(0), []
    for problem in task.train:
        response = task.teacher(problem, rng)
        steps = response[:-1].split(",")
        wrong = [i for i, right in enumerate(problem.answer[:-1].split(",")) if right != steps[i]]
        found.append(task.first_error(response, problem))
        assert found[-1] == (sum(len(step) + 1 for step in steps[:wrong[0]]) if wrong else None)
    assert 0 < found.count(None) < 300


def test_train_and_test_never_share_a_prompt_and_seeds_repeat():
    first, again, other = (running_sum(train_size=2000, test_size=200, seed=s) for s in (0, 0, 1))
    assert (first.train, first.test) == (again.train, again.test) and first.train != other.train
    trained, tested = ({p.prompt for p in one + another} for one, another in (
        (first.train, other.train), (first.test, other.test)))
    assert not trained & tested and len(trained) > 3000      # across seeds too: a hash decides


def test_few_terms_give_every_query_there_is():
    task = running_sum(3, 3)
    prompts = [p.prompt for p in task.train + task.test]
    assert sorted(prompts) == [f"{a}+{b}+{c}=" for a, b, c in product(range(1, 10), repeat=3)]


def test_the_teacher_has_the_habit_and_the_slips_it_is_said_to_have():
    task, rng = running_sum(habit=0.6, slip=0.02, train_size=4000, test_size=10), random.Random(0)
    found = {True: [], False: []}                            # of a 9; of another term
    for problem in task.train:
        digits = [int(c) for c in task.teacher(problem, rng)[:-1:2]]
        for before, term, after in zip([0] + digits, last_digits(problem.prompt)[0], digits):
            found[term == 9].append(after == (before + min(term, 8)) % 10)
    habits, right = (sum(found[nine]) / len(found[nine]) for nine in (True, False))
    assert habits == pytest.approx(0.6 * 0.98 + 0.02 / 10, abs=0.03)
    assert right == pytest.approx(1 - 0.02 * 0.9, abs=0.004)     # a tenth is right by chance


# ------------------------------------------------------------------------------------- your data


def pairs(task):
    """{prompt: answer} of all problems, each of which is there once."""
    problems = task.train + task.test
    found = {p.prompt: p.answer for p in problems}
    assert len(found) == len(problems)
    return found


def numbered(path, numbers):
    """A file whose prompts are p0, p1, …"""
    return jsonl(path, [{"prompt": f"p{i}", "answer": "1"} for i in numbers])


def as_file(path, rows):
    """A file of rows in the format that its name asks for; its path as str."""
    import datasets
    data = datasets.Dataset.from_list(rows)
    make = {".csv": data.to_csv, ".parquet": data.to_parquet,
            ".json": lambda path: write(path, json.dumps(rows, indent=1)),
            ".jsonl": lambda path: jsonl(path, rows)}
    make[path.suffix](path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("prompt, answer", [("prompt", "answer"), ("question", "solution"),
                                            ("problem", "answer")])
def test_every_format_and_usual_column_gives_the_same_problems(tmp_path, suffix, prompt, answer):
    rows = [{"id": i, prompt: f"What is {i} and “{i}”,\n{i}?", answer: f"{2 * i}"}
            for i in range(30)]
    task = load_task(as_file(tmp_path / f"rows{suffix}", rows), verifier="exact")
    assert pairs(task) == {row[prompt]: row[answer] for row in rows}
    assert (len(task.test), len(task.train)) == (3, 27)


def test_a_prompt_of_the_test_file_leaves_the_train_file(tmp_path):
    """And the split does not depend on the order of the rows."""
    task = load_task(numbered(tmp_path / "train.jsonl", range(10)),
                     numbered(tmp_path / "test.jsonl", (3, 4, 4, 77)))
    assert [p.prompt for p in task.train] == [f"p{i}" for i in (0, 1, 2, 5, 6, 7, 8, 9)]
    assert [p.prompt for p in task.test] == ["p3", "p4", "p4", "p77"]
    one, two = (load_task(numbered(tmp_path / "x.jsonl", numbers))
                for numbers in (range(50), range(49, -1, -1)))
    assert {p.prompt for p in one.test} == {p.prompt for p in two.test} and len(one.test) == 5


@pytest.fixture
def hub(monkeypatch):
    """hub({split: rows}): what the hub has from now on, or the error that it gives. Gives a list,
    to which each question adds its (name, configuration)."""
    import datasets
    asked = []

    def has(found):
        def load_dataset(*words):
            asked.append(words)
            if isinstance(found, Exception):
                raise found
            return found
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked
    return has


def test_a_hub_dataset_brings_its_own_configuration_and_splits(hub):
    asked = hub({split: [{"question": f"{split} {i}", "answer": f"so\n#### {i}"} for i in range(5)]
                 for split in ("train", "test")})
    task = load_task("openai/gsm8k", verifier="exact")
    assert asked == [("openai/gsm8k", "main")]
    assert task.train[1] == Problem("train 1", "so\n#### 1", "openai/gsm8k row 2")
    assert len(task.test) == 5 and not task.notes
    hub({"everything": [{"prompt": f"p{i}", "answer": i} for i in range(20)]})
    task = load_task("some/body", verifier="exact")
    assert len(task.train) == 18 and len(task.test) == 2


def test_a_hub_that_cannot_be_reached_is_one_clear_line(hub):
    hub(ConnectionError("Couldn't reach the Hub\nand more"))
    with pytest.raises(Refusal, match="nobody/nothing ends in none of .jsonl.*Couldn't reach the"):
        load_task("nobody/nothing")


# --------------------------------------------------------------------------------- data position

def test_an_epoch_holds_every_problem_once_in_an_order_of_its_own():
    """Also in batches that cross its end."""
    stream = PromptStream(100, seed=0)
    drawn = [i for _ in range(100) for i in stream.next(3)]
    epochs = [drawn[i:i + 100] for i in (0, 100, 200)]
    assert all(sorted(epoch) == [*range(100)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != [*range(100)]
    assert PromptStream(100, seed=0).next(300) == drawn
    assert PromptStream(100, seed=1).next(100) != epochs[0]


def test_a_stop_string_that_no_token_ends_is_refused(run):
    with pytest.raises(Refusal, match="--stop: "):
        run("--stop X")
