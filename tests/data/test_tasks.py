"""tasks.py: the built-in task against sums done in plain Python, its tokenizer, loading of data,
and the data position. python -m pytest tests/data/test_tasks.py"""

import json
import random
from dataclasses import FrozenInstanceError, asdict, replace
from itertools import product
from pathlib import Path

import numpy
import pytest
from transformers import AutoTokenizer

import train
from plumbing.data.datafiles import Problem
from plumbing.data.running_sum import builtin_tokenizer, running_sum
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
    for kind in (bool, int):
        task = custom(kind)
        rewards = task.reward_components([task.train[0].answer, ""], task.train[:1] * 2)
        assert rewards.tolist() == [[1], [0]]
    train.run_script(parse(flags("--steps", "1", "--output_dir", "run")), custom(numpy.float32))
    record, = metrics("run")
    assert record["reward"] == record["pass_rate"] > 0


def test_stop_adds_to_the_strings_of_a_task_of_ones_own():
    task = custom(stop=(";", "+"))
    assert prepare_task(parse(["--stop", "\\n", "+"]), task).stop == (";", "+", "\n")
    assert prepare_task(parse(["--stop", "+"])).stop == ("+",)


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
    with pytest.raises(FrozenInstanceError):
        args.max_completion_length = 8


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


def test_reward_is_1_for_exactly_one_of_all_answers_of_three_steps():
    """Every three digits with every separator, whatever their sum comes to."""
    task = running_sum(3, 3, train_size=20, test_size=5)
    answers = ["".join(parts) for parts in product(*["0123456789", ",.+"] * 3)]
    for problem in task.test:
        a, b, c = last_digits(problem.prompt)[1]
        assert [text for text in answers if task.verify(text, problem)] == [f"{a},{b},{c}."]


@pytest.mark.parametrize("verbose", [False, True])
def test_first_error_is_where_the_first_wrong_step_begins(verbose):
    """The reference compares the steps with the right ones one by one."""
    task = running_sum(verbose=verbose, slip=0.1, train_size=400, test_size=5)
    rng, found = random.Random(0), []
    for problem in task.train:
        response = task.teacher(problem, rng)
        expected, place = None, 0
        steps = zip(problem.answer[:-1].split(","), response[:-1].split(","), strict=True)
        for right, given in steps:
            if right != given and expected is None:
                expected = place
            place += len(given) + 1
        found.append(task.first_error(response, problem))
        assert found[-1] == expected
    assert 0 < found.count(None) < 300


def test_train_and_test_never_share_a_prompt_and_seeds_repeat():
    default = running_sum()
    assert len(default.train) == 16384 and len(default.test) == 512
    first, again, other = (running_sum(train_size=2000, test_size=200, seed=s) for s in (0, 0, 1))
    assert (first.train, first.test) == (again.train, again.test) and first.train != other.train
    trained, tested = ({p.prompt for p in one + another} for one, another in (
        (first.train, other.train), (first.test, other.test)))
    assert not trained & tested                              # across seeds too: a hash decides
    assert len({p.prompt for p in first.train}) == 2000


def test_few_terms_give_every_query_there_is():
    task = running_sum(3, 3)
    prompts = [p.prompt for p in task.train + task.test]
    assert sorted(prompts) == [f"{a}+{b}+{c}=" for a, b, c in product(range(1, 10), repeat=3)]


def test_the_teacher_has_the_habit_and_the_slips_it_is_said_to_have():
    task, rng = running_sum(habit=0.6, slip=0.02, train_size=4000, test_size=10), random.Random(0)
    habits, slips = [], []
    for problem in task.train:
        digits = [int(c) for c in task.teacher(problem, rng)[:-1:2]]
        for before, term, after in zip([0] + digits, last_digits(problem.prompt)[0], digits):
            if term == 9:
                habits.append(after == (before + 8) % 10)
            else:
                slips.append(after != (before + term) % 10)
    mean = lambda found: sum(found) / len(found)
    assert mean(habits) == pytest.approx(0.6 * 0.98 + 0.02 / 10, abs=0.03)
    assert mean(slips) == pytest.approx(0.02 * 0.9, abs=0.004)       # a tenth is right by chance
    task = running_sum(habit=0, slip=0, train_size=200, test_size=5)
    assert all(task.verify(task.teacher(p, rng), p) for p in task.train)


# ------------------------------------------------------------------------------------- tokenizer

def test_a_character_is_a_token_both_ways_and_after_saving(tmp_path):
    tokenizer = builtin_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789+=,. ", k=rng.randint(0, 60))) for _ in range(500)]
    assert len(tokenizer) == 17
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for text in [*texts, " ", "   ", " 1 , 2 . "]:
            ids = one(text)["input_ids"]
            assert len(ids) == len(text) and one.decode(ids) == text
            assert ids == tokenizer(text)["input_ids"] and not {15, 16} & {*ids}
        assert (one.eos_token_id, one.pad_token_id) == (15, 16)
        ids = [*tokenizer("3,1.")["input_ids"], 15, 16]
        assert one.batch_decode([ids], skip_special_tokens=True) == ["3,1."]


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
    assert "held out 3 problem(s)" in task.notes[0]


def test_math_reads_what_follows_the_hashes_of_a_worked_answer():
    task = load_task(str(WORD_PROBLEMS), verifier="math")
    problems = {p.where.rpartition(" ")[2]: p for p in task.train + task.test}
    assert len(problems) == 24 and len(task.test) == 2
    for number, line in enumerate(WORD_PROBLEMS.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        problem, final = problems[str(number)], row["answer"].split("#### ")[1]
        assert (problem.prompt, problem.answer) == (row["question"], row["answer"])
        if number % 4 == 0:                                  # math-verify takes 30 ms each
            answers = [row["answer"], rf"\boxed{{{final}}}", "The answer is 77777."]
            assert task.reward_components(answers, [problem] * 3).tolist() == [[1], [1], [0]]
    task.reward_functions[0].close()


def test_the_split_does_not_depend_on_the_order_of_the_rows(tmp_path):
    one = load_task(numbered(tmp_path / "one.jsonl", range(50)), verifier="exact")
    two = load_task(numbered(tmp_path / "two.jsonl", range(49, -1, -1)), verifier="exact")
    assert {p.prompt for p in one.test} == {p.prompt for p in two.test} and len(one.test) == 5


def test_a_prompt_of_the_test_file_leaves_the_train_file(tmp_path):
    task = load_task(numbered(tmp_path / "train.jsonl", range(10)),
                     numbered(tmp_path / "test.jsonl", (3, 4, 4, 77)), verifier="exact")
    assert [p.prompt for p in task.train] == [f"p{i}" for i in (0, 1, 2, 5, 6, 7, 8, 9)]
    assert [p.prompt for p in task.test] == ["p3", "p4", "p4", "p77"]
    assert task.notes == ["2 of 10 rows left out: their prompt is in the test split"]


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
    stream = PromptStream(100, seed=0)
    drawn = [i for _ in range(60) for i in stream.next(5)]
    epochs = [drawn[i:i + 100] for i in (0, 100, 200)]
    in_order = [*range(100)]
    assert all(sorted(epoch) == in_order for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != in_order
    assert PromptStream(100, seed=0).next(100) == epochs[0]
    assert PromptStream(100, seed=1).next(100) != epochs[0]


def test_batches_larger_than_an_epoch_or_across_its_end_lose_nothing():
    by_3, by_25 = PromptStream(10, seed=2), PromptStream(10, seed=2)
    assert [i for _ in range(25) for i in by_3.next(3)] == [
        i for _ in range(3) for i in by_25.next(25)]


def test_a_run_of_the_built_in_checkpoint_stops_at_a_string(model, sums, run):
    """Its tokenizer has no letters, which transformers' test for stop strings needs."""
    jsonl("rows.jsonl", [{"prompt": f"{i}+{j}=", "answer": str(i)}
                         for i in range(1, 6) for j in range(1, 6)])
    record, = run("--model_name_or_path model --dataset_name rows.jsonl --verifier exact --stop , "
                  "--max_completion_length 6")
    assert record["length"] < 4 and record["pass_rate"] > 0  # "3," of "3,5."


def test_a_stop_string_that_no_token_ends_is_refused(run):
    with pytest.raises(Refusal, match="--stop: "):
        run("--stop X")
