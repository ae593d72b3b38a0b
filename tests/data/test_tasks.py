"""tasks.py: the built-in task against sums done in plain Python, its tokenizer, loading of data, and the data position.

    python -m pytest tests/data/test_tasks.py
"""
import csv
import json
import random
import re
import runpy
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from plumbing.model import cold_start
import train
from tiny_run import SMALL, TINY
from make_max_data import make_max_data
from plumbing.data.stream import PromptStream
from plumbing.data.datafiles import Problem
from plumbing.data.tasks import join, load_task
from plumbing.data.running_sum import builtin_tokenizer, running_sum
from plumbing.data.task import encode_prompt

ROOT = Path(__file__).resolve().parents[2]
WORD_PROBLEMS = ROOT / "tests/data/gsm8k_style.jsonl"


# ------------------------------------------------------------------------------------------------- a task of one's own

def custom(kind, **more):
    """A task made in Python: its verifier returns a bool, an int or a NumPy number."""
    import numpy
    from plumbing.data.task import Task
    sums = running_sum(1, 2, train_size=40, test_size=8)
    kind = {"numpy": numpy.float32}.get(kind, kind)
    verify = lambda response, problem: kind(response[:1] == problem.answer[:1])
    return Task("sums of mine", sums.train, sums.test, verify, teacher=sums.teacher, sizes=(len(sums.train),), **more)


@pytest.mark.parametrize("kind", [bool, int, "numpy"])
def test_a_verifier_of_ones_own_may_return_a_bool_or_an_int(kind, workplace, monkeypatch):
    monkeypatch.setattr(cold_start, "MUST_PASS", 0.0)
    train.run_script(train.parse([*TINY, "--steps", "1", "--output_dir", "run"]), custom(kind))
    record = json.loads(Path("run/metrics.jsonl").read_text())
    assert record["reward"] == record["pass_rate"] > 0


def test_token_credit_without_first_error_is_refused_before_anything_is_made(workplace):
    args = train.parse([*TINY, "--algorithm", "gspo_token", "--advantage", "token_credit", "--output_dir", "run"])
    with pytest.raises(ValueError, match="token_credit needs .* 'sums of mine' has no first_error"):
        train.run_script(args, custom(int))
    assert not Path("run").exists()


def test_stop_adds_to_the_strings_of_a_task_of_ones_own():
    from plumbing.data.tasks import of_run
    args = train.parse(["--stop", "\\n", "+"])
    assert of_run(args, custom(int, stop=(";", "+"))).stop == (";", "+", "\n")
    assert of_run(train.parse(["--stop", "+"])).stop == ("+",)


def test_the_length_limit_stands_in_the_task_and_the_settings_stay_as_they_were():
    from dataclasses import FrozenInstanceError, asdict

    from plumbing.data.tasks import from_arguments, of_run
    for flags, limits in (([], (5, 256)), (["--overlong_cache", "0.5"], (9, 256)), (["--max_completion_length", "7"], (7, 7))):
        args = train.parse(["--min_terms", "1", "--max_terms", "2", *flags])
        before = asdict(args)
        assert (of_run(args).max_completion_length, of_run(args, custom(int)).max_completion_length) == limits
        assert from_arguments(args).max_completion_length == limits[0] and asdict(args) == before
        assert of_run(args, custom(int, max_completion_length=9)).max_completion_length == (args.max_completion_length or 9)
    with pytest.raises(FrozenInstanceError):
        args.max_completion_length = 8


# ------------------------------------------------------------------------------------------------- the built-in running sum

def last_digits(prompt):
    """The reference: last digits of the sums of the first 1, 2, 3 … terms."""
    terms = [int(term) for term in prompt.strip().rstrip("=").split("+")]
    return terms, [sum(terms[:i + 1]) % 10 for i in range(len(terms))]


@pytest.mark.parametrize("low, high", [(1, 1), (3, 3), (3, 9), (8, 12), (128, 128)])
def test_the_answer_is_the_last_digit_of_every_partial_sum(low, high):
    short, long = (running_sum(low, high, verbose=verbose, train_size=500, test_size=50) for verbose in (False, True))
    for problem, verbose in zip(short.train + short.test, long.train + long.test, strict=True):
        terms, digits = last_digits(problem.prompt)
        assert low <= len(terms) <= high and set(terms) <= set(range(1, 10))
        assert problem.answer == ",".join(map(str, digits)) + "."
        assert len(problem.answer) == 2 * len(terms)
        assert verbose.prompt == problem.prompt
        assert verbose.answer == ",".join(f"{d}+{t}={e}" for d, t, e in zip([0] + digits, terms, digits)) + "."


def test_every_prompt_is_padded_with_spaces_to_one_width():
    for task in (running_sum(8, 12), running_sum(3, 20)):
        widths = {len(p.prompt) for p in task.train + task.test}
        assert len(widths) == 1 and all(p.prompt.rstrip(" ").endswith("=") for p in task.train)


def test_reward_is_1_for_exactly_one_of_all_answers_of_three_steps():
    """Every three digits with every separator: only the right ones are rewarded, whatever their sum comes to."""
    task = running_sum(3, 3, train_size=20, test_size=5)
    for problem in task.test:
        _, digits = last_digits(problem.prompt)
        rewarded = [(abc, separators) for abc in product(range(10), repeat=3) for separators in product(",.+", repeat=3)
                    if task.verify("".join(f"{d}{s}" for d, s in zip(abc, separators)), problem)]
        assert rewarded == [(tuple(digits), (",", ",", "."))]


def test_every_prefix_and_every_longer_answer_gets_nothing():
    for verbose in (False, True):
        task = running_sum(verbose=verbose, train_size=5, test_size=5)
        for problem in task.test:
            answer = problem.answer
            assert task.verify(answer, problem) == 1.0
            for response in [answer[:i] for i in range(len(answer))] + [answer + c for c in "0123456789+=,. "] + [" " + answer]:
                assert task.verify(response, problem) == 0.0
                assert task.first_error(response, problem) is not None


def test_two_cancelling_errors_are_not_rewarded():
    task = running_sum(train_size=5, test_size=5)
    problem = task.test[0]
    wrong = str((int(problem.answer[2]) + 1) % 10)
    response = problem.answer[:2] + wrong + problem.answer[3:]                           # ends with the right last digit
    assert task.verify(response, problem) == 0.0
    assert task.first_error(response, problem) == 2


@pytest.mark.parametrize("verbose", [False, True])
def test_first_error_is_where_the_first_wrong_step_begins(verbose):
    """The reference splits the response into steps and compares them with the right ones one by one."""
    task, rng = running_sum(verbose=verbose, slip=0.1, train_size=400, test_size=5), random.Random(0)
    wrong = 0
    for problem in task.train:
        response = task.teacher(problem, rng)
        right, given = problem.answer[:-1].split(","), response[:-1].split(",")
        first = next((i for i, (a, b) in enumerate(zip(right, given, strict=True)) if a != b), None)
        expected = None if first is None else sum(len(step) + 1 for step in given[:first])
        assert task.first_error(response, problem) == expected
        wrong += expected is not None
    assert 100 < wrong < 400


@pytest.mark.parametrize("response, index", [
    ("3,1,6,5.", None), ("4,1,6,5.", 0), ("3,2,7,6.", 2), ("3,1,6,4.", 6),              # a wrong digit: its step
    ("3,1.", 3), ("3,1,6,5,0.", 7), ("3,1", 3), ("3,1,", 4), ("", 0), ("3,1,6,5.7", 8)])   # it ends too early or late
def test_first_error_of_answers_that_end_at_the_wrong_place(response, index):
    task = running_sum(4, 4, train_size=10, test_size=5)
    assert task.first_error(response, Problem("3+8+5+9=", "3,1,6,5.")) == index


def test_train_and_test_never_share_a_prompt_and_seeds_repeat():
    first, again, other = running_sum(), running_sum(), running_sum(seed=1)
    assert (first.train, first.test) == (again.train, again.test) and first.train != other.train
    train, test = ({p.prompt for s in splits for p in s} for splits in ((first.train, other.train), (first.test, other.test)))
    assert not train & test                                                              # not across seeds either: a hash decides
    assert len({p.prompt for p in first.train}) == len(first.train) == 16384 and len(first.test) == 512
    assert first.sizes == (16384,)


def test_few_terms_give_every_query_there_is_and_a_note():
    task = running_sum(3, 3)
    assert {p.prompt for p in task.train + task.test} == {f"{a}+{b}+{c}=" for a, b, c in product(range(1, 10), repeat=3)}
    assert len(task.train) + len(task.test) == 729 and "only" in task.notes[0]


def test_ten_thousands_of_problems_are_made_in_a_moment():
    start = time.process_time()
    running_sum(train_size=20_000)
    assert time.process_time() - start < 2.0                                             # 0.2 s is usual


def test_the_teacher_has_the_habit_and_the_slips_it_is_said_to_have():
    task, rng = running_sum(habit=0.6, slip=0.02, train_size=4000, test_size=10), random.Random(0)
    nines, habits, others, slips = 0, 0, 0, 0
    for problem in task.train:
        terms, digits = last_digits(problem.prompt)[0], [int(c) for c in task.teacher(problem, rng)[:-1:2]]
        for before, term, after in zip([0] + digits, terms, digits):
            if term == 9:
                nines, habits = nines + 1, habits + (after == (before + 8) % 10)
            else:
                others, slips = others + 1, slips + (after != (before + term) % 10)
    assert habits / nines == pytest.approx(0.6 * 0.98 + 0.02 / 10, abs=0.03)
    assert slips / others == pytest.approx(0.02 * 0.9, abs=0.004)                        # a tenth of the random digits is right


def test_a_teacher_without_habit_and_slips_is_right():
    task = running_sum(habit=0, slip=0, train_size=200, test_size=5)
    assert all(task.verify(task.teacher(p, random.Random(0)), p) for p in task.train)


@pytest.mark.parametrize("arguments, named", [
    (dict(min_terms=0), "min_terms 0"), (dict(min_terms=9, max_terms=8), "max_terms 8"), (dict(habit=1.5), "habit 1.5"),
    (dict(slip=-0.1), "slip -0.1"), (dict(train_size=0), "train_size 0"), (dict(test_size=0), "test_size 0")])
def test_impossible_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        running_sum(**arguments)


# --------------------------------------------------------------------------------------------------------------- tokenizer

def test_a_character_is_a_token_both_ways_and_after_saving(tmp_path):
    tokenizer = builtin_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789+=,. ", k=rng.randint(0, 60))) for _ in range(500)]
    texts += [" ", "   ", " 1 , 2 . ", *(p.prompt for p in running_sum(train_size=50, test_size=5).train)]
    assert len(tokenizer) == 17
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
        assert loaded(text)["input_ids"] == ids and loaded.decode(ids) == text
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert (loaded.eos_token_id, loaded.pad_token_id) == (eos, pad) and eos != pad and {eos, pad} == {15, 16}
    assert loaded.batch_decode([tokenizer("3,1.")["input_ids"] + [eos, pad]], skip_special_tokens=True) == ["3,1."]


def test_the_space_that_pads_prompts_is_not_the_pad_token():
    assert builtin_tokenizer()(" ")["input_ids"] not in ([15], [16])


# --------------------------------------------------------------------------------------------------------------- your data

def write(path, rows):
    """Rows in the format that the name of the file asks for."""
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import datasets
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("prompt, answer", [("prompt", "answer"), ("question", "solution"), ("problem", "answer")])
def test_every_format_and_usual_column_gives_the_same_problems(tmp_path, suffix, prompt, answer):
    rows = [{"id": i, prompt: f"What is {i} and “{i}”,\n{i}?", answer: f"{2 * i}"} for i in range(30)]
    task = load_task(write(tmp_path / f"rows{suffix}", rows), verifier="exact")
    assert {(p.prompt, p.answer) for p in task.train + task.test} == {(row[prompt], row[answer]) for row in rows}
    assert len(task.test) == 3 and not {p.prompt for p in task.train} & {p.prompt for p in task.test}
    assert "held out 3 problem(s)" in task.notes[0] and task.sizes == (27,) and task.chat


def test_named_columns_win_over_the_usual_ones(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b", "ask": f"c{i}", "say": i} for i in range(3)])
    task = load_task(path, prompt_column="ask", answer_column="say", verifier="exact")
    assert {(p.prompt, p.answer) for p in task.train + task.test} == {("c0", "0"), ("c1", "1"), ("c2", "2")}


def test_of_a_worked_answer_only_what_follows_the_hashes_counts():
    task = load_task(str(WORD_PROBLEMS))
    try:
        problems = {p.where.rpartition(" ")[2]: p for p in task.train + task.test}
        assert len(problems) == 24 and len(task.test) == 2
        for number, line in enumerate(WORD_PROBLEMS.read_text().splitlines(), 1):
            row = json.loads(line)
            problem, final = problems[str(number)], row["answer"].split("#### ")[1]
            assert (problem.prompt, problem.answer) == (row["question"], final)
            if number % 4:
                continue                                                                 # math-verify takes 30 ms for an answer
            assert task.verify(row["answer"], problem) == 1.0                            # the worked answer, last number and all
            assert task.verify(rf"\boxed{{{final}}}", problem) == 1.0
            assert task.verify("The answer is 77777.", problem) == 0.0
    finally:
        task.verifiers[0].close()


def test_the_split_does_not_depend_on_the_order_of_the_rows(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(50)]
    one = load_task(write(tmp_path / "one.jsonl", rows), verifier="exact")
    two = load_task(write(tmp_path / "two.jsonl", rows[::-1]), verifier="exact")
    assert {p.prompt for p in one.test} == {p.prompt for p in two.test} and len(one.test) == 5


def test_a_prompt_of_the_test_file_leaves_the_train_file(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in range(10)])
    test = write(tmp_path / "test.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in (3, 4, 4, 77)])
    task = load_task(train, test, verifier="exact")
    assert [p.prompt for p in task.train] == [f"p{i}" for i in (0, 1, 2, 5, 6, 7, 8, 9)]
    assert [p.prompt for p in task.test] == ["p3", "p4", "p77"]
    assert task.notes == ["3 of 14 rows left out: their prompt came before or is in the test split"]


def test_a_hub_dataset_brings_its_own_configuration_and_test_split(monkeypatch):
    import datasets
    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        train, test = ([{"question": f"{split} {i}", "answer": f"so\n#### {i}"} for i in range(5)] for split in ("train", "test"))
        return {"train": train, "test": test}
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("openai/gsm8k", verifier="exact")
    assert asked == [("openai/gsm8k", "main")]
    assert task.train[1] == ("train 1", "1", "openai/gsm8k train row 2", None) and len(task.test) == 5 and not task.notes


def test_a_hub_that_cannot_be_reached_is_one_clear_line(monkeypatch):
    import datasets

    def load_dataset(name, config):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand more")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="^dataset nobody/nothing: there is no such file, and the hub gives Conn") as refusal:
        load_task("nobody/nothing")
    assert "\n" not in str(refusal.value)


def test_a_dataset_with_a_single_unnamed_split_is_split_by_hash(monkeypatch):
    import datasets
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(20)]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {"everything": rows})
    task = load_task("some/body", verifier="exact")
    assert len(task.train) == 18 and len(task.test) == 2


@pytest.mark.slow
def test_reasoning_gym_judges_its_own_problems():
    gym = pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:basic_arithmetic", size=40, seed=3)
    try:
        theirs = {item["question"]: item["answer"] for item in gym.create_dataset("basic_arithmetic", seed=3, size=40)}
        assert {p.prompt: p.answer for p in task.train + task.test} == theirs and len(task.test) == len(theirs) // 10
        for problem in task.train[:10]:
            assert task.verify(problem.answer, problem) == 1.0
            assert task.verify(f"I think <answer>{problem.answer}</answer>", problem) == 1.0
            assert task.verify("no idea", problem) < 0.1
    finally:
        task.verifiers[0].close()
    with pytest.raises(ValueError, match="no generator 'basic_aritmetic'; the nearest are basic_arithmetic"):
        load_task("reasoning_gym:basic_aritmetic")


def test_a_generators_options_hold_and_several_generators_are_one_task(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "mine.py").write_text("def short(response, answer):\n    return float(len(response) < 4)\n")
    name = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=60,letter_counting?max_words=5&size=30"
    task = load_task(name, verifier=f"{tmp_path}/mine.py:short", reward_weights=[1, 0.5])
    try:
        sums = [p for p in task.train + task.test if "+" in p.prompt or " - " in p.prompt]
        letters = [p for p in task.train + task.test if "letter" in p.prompt]
        assert len(letters) == 30 and len(sums) + len(letters) == len(task.train) + len(task.test) > 60
        assert all(len([c for c in p.prompt if c.isdigit()]) == 2 for p in sums)
        assert {"+" in p.prompt for p in task.train[:6]} == {True, False}      # one of each in turn
        assert task.part_names == ["reasoning_gym", "short"]                   # both rewards count
        for problem in (sums[0], letters[0]):
            assert task.judge([problem.answer, "long, and wrong"], [problem] * 2)[:, 1].tolist() == [1, 0]
            assert task.verify(problem.answer, problem) == 1.5 and task.verify("nonsense", problem) < 0.1
    finally:
        for verifier in task.verifiers:
            verifier.close()


@pytest.mark.parametrize("name, words", [
    ("chain_sum?max_term=2", "chain_sum has no option 'max_term=2'; it has min_terms, max_terms"),
    ("chain_sum?max_terms", "no option 'max_terms'"), ("chain_sum?seed=3", "the seed is --seed"),
    ("chain_sum,chian_sum", "no generator 'chian_sum'; the nearest are chain_sum"),
    ("chain_sum?min_terms=5&max_terms=2", "the generator fails"), ("chain_sum?max_terms=many", "the generator fails")])
def test_an_option_that_there_is_not_is_named(name, words):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=re.escape(words)):
        load_task(f"reasoning_gym:{name}")


def test_a_list_in_an_options_value_keeps_its_commas():
    from plumbing.data.datafiles import gym_generators
    pytest.importorskip("reasoning_gym")
    found = gym_generators('reasoning_gym:basic_arithmetic?operators=["+","-"]&size=5,reasoning_gym:chain_sum', 9, 1)
    assert found == [("basic_arithmetic", {"seed": 1, "size": 5, "operators": ["+", "-"]}), ("chain_sum", {"seed": 1, "size": 9})]


def test_reasoning_gym_that_is_not_installed_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        load_task("reasoning_gym:countdown")


def test_two_joined_tasks_keep_their_sources_and_their_verifiers(tmp_path):
    rows = [[{"prompt": f"{name}{i}", "answer": "a"} for i in range(10)] for name in "xy"]
    (tmp_path / "mine.py").write_text("def always(response, answer):\n    return 0.5\n")
    first = load_task(write(tmp_path / "x.jsonl", rows[0]), verifier="exact", stop=("\n",))
    second = load_task(write(tmp_path / "y.jsonl", rows[1]), verifier=f"{tmp_path}/mine.py:always", stop=("\n", "y"))
    task = join(first, second)
    assert task.sizes == (9, 9) and [p.prompt[0] for p in task.train] == ["x"] * 9 + ["y"] * 9 and len(task.test) == 2
    assert [task.verify("a", p) for p in task.train] == [1.0] * 9 + [0.5] * 9 and task.stop == ("\n", "y")
    first.verifiers[0].errors["timeout"] += 1
    second.verifiers[0].errors["timeout"] += 2
    assert task.verifier_errors == {"timeout": 3}
    second.verifiers[0].close()


def test_the_max_of_two_files_hold_no_test_pair_in_train(tmp_path):
    train, test = make_max_data(tmp_path)
    task = load_task(str(train), str(test), verifier="exact", stop=("\n",), chat=False)
    assert len(task.train) == 2000 and len(task.test) == 256 and not task.notes

    def pairs(problem, lines=slice(None)):
        return [frozenset(int(n) for n in line[4:].split(")")[0].split(",")) for line in problem.prompt.split("\n")[lines]]
    asked = {pair for p in task.test for pair in pairs(p, slice(4, 5))}
    shown = {pair for p in task.train for pair in pairs(p)} | {pair for p in task.test for pair in pairs(p, slice(0, 4))}
    assert len(asked) == 256 and not asked & shown
    assert all(task.verify(f"{max(pairs(p)[4])} ", p) == 1.0 for p in task.test)
    assert {n for pair in shown | asked for n in pair} == set(range(91))


# ----------------------------------------------------------------------------------------------------------------- prompts

def test_the_chat_template_is_used_if_wanted_and_there():
    tokenizer, problem = builtin_tokenizer(), Problem("3+8=", "3,1.")
    plain = tokenizer("3+8=")["input_ids"]
    assert encode_prompt(tokenizer, problem, chat=True, max_prompt_length=10) == plain                 # it has none
    tokenizer.chat_template = "0{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}.{% endif %}"
    assert encode_prompt(tokenizer, problem, chat=True, max_prompt_length=10) == tokenizer("03+8=.")["input_ids"]
    assert encode_prompt(tokenizer, problem, chat=False, max_prompt_length=10) == plain


# ----------------------------------------------------------------------------------------------------------- data position

def test_an_epoch_holds_every_problem_once_in_an_order_of_its_own():
    stream = PromptStream([100], seed=0)
    drawn = [i for _ in range(60) for i in stream.next(5)]
    epochs = [drawn[i:i + 100] for i in (0, 100, 200)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    assert PromptStream([100], seed=0).next(100) == epochs[0] and PromptStream([100], seed=1).next(100) != epochs[0]


def test_batches_larger_than_an_epoch_or_across_its_end_lose_nothing():
    by_3, by_25 = PromptStream([10], seed=2), PromptStream([10], seed=2)
    assert [i for _ in range(25) for i in by_3.next(3)] == [i for _ in range(3) for i in by_25.next(25)]


@pytest.mark.parametrize("resample, stage2_step", [(False, None), (True, None), (True, 5), (False, 5)])
def test_a_restored_stream_goes_on_exactly(resample, stage2_step):
    """At each of 40 places: save as JSON, restore into a new stream, compare the next draws."""
    def draw(stream, first, last, rng):
        drawn = []
        for step in range(first + 1, last + 1):
            drawn.append(stream.next(7, step))
            stream.record(drawn[-1], [rng.random() < 0.2 for _ in drawn[-1]])
        return drawn
    make = lambda: PromptStream([30, 11], 5, stage2_step, resample, say=lambda line: None)
    for steps in range(40):
        stream = make()
        draw(stream, 0, steps, random.Random(steps))
        state = json.loads(json.dumps(stream.state_dict()))
        restored = make()
        restored.load_state_dict(state)
        assert draw(stream, steps, steps + 12, random.Random(7)) == draw(restored, steps, steps + 12, random.Random(7))


def test_a_position_in_other_data_is_refused():
    stream = PromptStream([30], 5)
    for other in (PromptStream([31], 5), PromptStream([30], 6)):
        with pytest.raises(ValueError, match="saved data position"):
            other.load_state_dict(stream.state_dict())


def test_history_resampling_drops_solved_prompts_and_keeps_the_others():
    stream = PromptStream([12], resample=True)
    epoch = stream.next(12)
    stream.record(epoch, [i in (1, 4, 7) for i in epoch])
    epoch = stream.next(9)
    assert sorted(epoch) == [0, 2, 3, 5, 6, 8, 9, 10, 11]                                # mixed and all-wrong ones stay
    stream.record(epoch, [i == 0 for i in epoch])
    assert sorted(stream.next(8)) == [2, 3, 5, 6, 8, 9, 10, 11]                          # what has left stays away


def test_without_history_resampling_solved_prompts_stay():
    stream = PromptStream([5])
    stream.record(stream.next(5), [True] * 5)
    assert sorted(stream.next(5)) == [0, 1, 2, 3, 4]


def test_a_prompt_solved_once_and_failed_later_stays():
    stream = PromptStream([4], resample=True)
    stream.record([2], [True])
    stream.record(stream.next(4), [False] * 4)
    assert sorted(stream.next(4)) == [0, 1, 2, 3]


def test_when_everything_is_solved_resampling_starts_again_and_says_so():
    said = []
    stream = PromptStream([4], resample=True, say=said.append)
    stream.record(stream.next(4), [True] * 4)
    assert sorted(stream.next(4)) == [0, 1, 2, 3] and len(said) == 1 and "starts again with all" in said[0]


def test_the_second_source_joins_after_so_many_batches():
    said = []
    stream = PromptStream([20, 10], stage2_step=3, say=said.append)
    first = [i for step in (1, 1, 2, 3) for i in stream.next(6, step)]                   # DAPO may draw twice for a batch
    assert max(first) < 20 and set(first) == set(range(20)) and not said
    assert sorted(stream.next(30, 4)) == list(range(30)) and "after 3 batches" in said[0]
    assert sorted(PromptStream([20, 10]).next(30)) == list(range(30))                    # without stages: all from the start


@pytest.mark.parametrize("arguments", [([],), ([0],), ([5, 0],), ([5], 0, 10)])
def test_impossible_sources_are_refused(arguments):
    with pytest.raises(ValueError, match="sizes"):
        PromptStream(*arguments)


def test_a_cold_start_on_other_problems_or_in_another_order_is_another(workplace, monkeypatch):
    """SRPO sorts the problems by length: from the cold start that the cache holds for GSPO it would not start where it does without it."""
    monkeypatch.setattr(cold_start, "MUST_PASS", 0.0)
    Path("runs/cold_start").unlink()
    for name, flags in (("gspo", []), ("srpo", ["--algorithm", "srpo", "--stage2_step", "1"])):
        train.main([*TINY, *flags, "--cold_start_steps", "3", "--steps", "1", "--output_dir", name])
        assert len(list(Path("runs/cold_start").iterdir())) == (1 if name == "gspo" else 2)


@pytest.mark.parametrize("algorithm", ["srpo", "dapo"])
def test_stage2_step_counts_batches_also_under_dynamic_sampling(algorithm, workplace, monkeypatch, capsys):
    """With draws counted, DAPO's second round of the first batch would bring in the longer sums already."""
    drawn, draw, batch, collect = [], PromptStream.next, [0], train.collect
    monkeypatch.setattr(PromptStream, "next", lambda self, *args: (drawn.append((batch[0], draw(self, *args))), drawn[-1][1])[1])
    monkeypatch.setattr(train, "collect", lambda *args: (batch.__setitem__(0, args[-1]), collect(*args))[1])
    if algorithm == "dapo":                                  # five rounds each
        from plumbing.loop import batches
        keep = batches.keep_signal
        monkeypatch.setattr(batches, "keep_signal", lambda found, *rest, last: (
            keep(found, *rest, last=True) if len(found) == 5 else None))
    monkeypatch.setattr(cold_start, "MUST_PASS", 0.0)
    Path("runs/cold_start").unlink()                           # another cold start than that of all tests
    train.main([*TINY, "--algorithm", algorithm, "--stage2_step", "2", "--steps", "4", "--cold_start_steps", "3", "--output_dir", "run"])
    size = torch.load("run/checkpoints/step_4/state.pt", weights_only=True)["stream"]["sizes"][0]
    for step, numbers in drawn:
        assert step > 2 or max(numbers) < size
    assert max(max(numbers) for step, numbers in drawn if step > 2) >= size
    assert "problems of the second source join after 2 batches" in capsys.readouterr().out
    assert len(drawn) == (20 if algorithm == "dapo" else 4)


# -------------------------------------------------------------------------------------------------------------------- demos

@pytest.mark.parametrize("module, words", [
    ("plumbing.data.running_sum", ["first error", "reward 1"]), ("plumbing.data.stream", ["epoch 1"])])
def test_the_demo_shows_its_concept(module, words, capsys):
    runpy.run_path(str(ROOT / module.replace(".", "/")) + ".py", run_name="__main__")
    out, err = capsys.readouterr()
    assert not err and all(word in out for word in words), out + err


def test_a_run_of_the_built_in_checkpoint_stops_at_a_string(workplace, cold_start):
    """Its tokenizer has no letters, which transformers' test for stop strings needs."""
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{j}=", "answer": str(i)}) + "\n"
                                          for i in range(1, 6) for j in range(1, 6)))
    train.main([*SMALL, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name", "rows.jsonl", "--verifier", "exact",
                "--stop", ",", "--steps", "1", "--max_completion_length", "6", "--output_dir", "run"])
    record = json.loads(Path("run/metrics.jsonl").read_text())
    assert record["length"] < 4 and record["pass_rate"] > 0              # "3," of "3,5."
