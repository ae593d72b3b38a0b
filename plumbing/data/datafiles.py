"""Data files: a file, a hub dataset or a problem generator -> checked (prompt, answer, where).

All rows are checked before training begins. Every error is one line that names the file and the
line or row. Unicode and control characters are kept. This file does not depend on tasks, models or
losses.
"""

import csv
import dataclasses
import difflib
import io
import itertools
import json
import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")


class Problem(NamedTuple):
    prompt: str                  # of a conversation, its last message
    answer: str
    where: str = ""              # file and line, for error messages
    earlier: tuple | None = None  # the messages before it as (role, text); None: no conversation


def load_problems(name, test_name, prompt_column, answer_column, made=None):
    """(train, test, {problem: its row}, notes) from a data file or a hub id; made: rows in place of
    these, as read_rows gives them.

    Columns: prompt, question or problem; answer or solution; or the columns named by the arguments.
    Numbers become text. If an answer contains `####`, only the text after it is used (gsm8k). If a
    prompt occurs in several rows, only the first row is kept.

    Test split: test_name, or else the hub's own (test or validation); its prompts are removed from
    the train split. Without either, the test split is the tenth of the prompts with the smallest
    CRC-32, at least 1 and at most 512 of them. A single problem is in both splits. Raises
    ValueError or FileNotFoundError that names the file and the line.
    """
    rows, own_test = file_or_hub_rows(name) if made is None else (made, [])
    if test_name:
        train_rows, test_rows = file_or_hub_rows(test_name)
        own_test = test_rows or train_rows
    train = problems_of(rows, name, prompt_column, answer_column)
    test = {}
    if own_test or test_name:
        test = problems_of(own_test, test_name or name, prompt_column, answer_column)
    notes = []
    total = len(rows) + len(own_test)
    train = {prompt: pair for prompt, pair in train.items() if prompt not in test}
    if len(train) + len(test) < total:
        left_out = total - len(train) - len(test)
        notes.append(f"{left_out} of {total} rows left out: their prompt came before or is in the "
                     "test split")
    if not train:
        raise ValueError(f"{name}: nothing to train on: every prompt is in the test split too")
    if not test and len(train) == 1:
        test = train
        notes.append("there is only one problem, so it is the test split too: the score says "
                     "nothing about other problems")
    elif not test:
        by_hash = sorted(train, key=lambda prompt: (zlib.crc32(prompt.encode()), prompt))
        held_out = set(by_hash[:min(512, max(1, len(train) // 10))])
        test = {prompt: pair for prompt, pair in train.items() if prompt in held_out}
        train = {prompt: pair for prompt, pair in train.items() if prompt not in held_out}
        notes.append(f"no test split: held out {len(test)} problem(s), those whose prompts have "
                     "the smallest CRC-32")
    pairs = [*train.values(), *test.values()]
    return [p for p, _ in train.values()], [p for p, _ in test.values()], dict(pairs), notes


def problems_of(rows, source, prompt_column, answer_column):
    """{prompt: (Problem, row)}, with the first row of each prompt. A conversation is all of its
    messages as JSON."""
    problems = {}
    for problem, (_, row) in zip(checked_rows(rows, source, prompt_column, answer_column), rows):
        key = problem.prompt if problem.earlier is None else json.dumps(messages_of(problem))
        problems.setdefault(key, (problem, row))
    return problems


def messages_of(problem):
    """A conversation as the list of messages that chat templates and TRL's reward functions read,
    [{"role": "user", "content": "…"}]."""
    turns = (*problem.earlier, ("user", problem.prompt))
    return [{"role": role, "content": text} for role, text in turns]


def file_or_hub_rows(name):
    """(train rows, test rows) of a data file or a hub dataset. The name is taken as a file if it
    has the extension of a data file, exists or looks like a path; otherwise as a hub id."""
    known = Path(name).suffix.lower() in DATA_FILES or Path(name).exists()
    if known or name.startswith((".", "/", "~")):
        return read_rows(name), []
    return hub_rows(name)


def read_rows(path):
    """The rows of a data file as (where, row) pairs; `where` names the file and the line.

    Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if not path.is_file():
        what = "is a folder, not a data file" if path.is_dir() else "there is no such data file"
        raise FileNotFoundError(f"{path}: {what}")
    if kind not in DATA_FILES:
        raise ValueError(f"{path}: a data file ends in {', '.join(DATA_FILES)}")
    if kind == ".parquet":
        return parquet_rows(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text from byte {error.start} on")
    if kind == ".csv":
        return csv_rows(path, text)
    number = 1
    is_list = text.lstrip().startswith("[")
    rows = []
    try:
        if is_list:                                          # one JSON list of objects
            return [(f"{path} row {i}", row) for i, row in enumerate(json.loads(text), 1)]
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                rows.append((f"{path} line {number}", json.loads(line)))
    except (ValueError, RecursionError) as error:
        number = getattr(error, "lineno", 1) if is_list else number
        reason = f"{getattr(error, 'msg', error)} (one object per line, or one list of objects)"
        raise ValueError(f"{path} line {number}: broken {kind[1:].upper()}: {reason}")
    return rows


def csv_rows(path, text):
    csv.field_size_limit(2 ** 31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            if None in row:
                raise ValueError("more cells than the header has names")
            rows.append((f"{path} line {reader.reader.line_num}", row))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} line {reader.reader.line_num}: broken CSV: {error}")
    return rows


def parquet_rows(path):
    import pyarrow.parquet
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {first_line(error)}")
    return [(f"{path} row {i}", row) for i, row in enumerate(rows, 1)]


def hub_rows(name):
    """(train rows, test rows) of a dataset on the Hugging Face hub; without a test split there are
    no test rows. Raises ValueError if the dataset cannot be loaded."""
    import datasets
    try:
        splits = datasets.load_dataset(name, "main" if name == "openai/gsm8k" else None)
    except Exception as error:               # no network, unknown name or configuration, gated …
        raise ValueError(f"dataset {name}: there is no such file, and the hub gives "
                         f"{type(error).__name__}: {first_line(error)}")
    train = "train" if "train" in splits else next(iter(splits))
    test = next((s for s in ("test", "validation") if s in splits and s != train), None)
    return tuple([(f"{name} {split} row {i}", row)
                  for i, row in enumerate(splits[split] if split else [], 1)]
                 for split in (train, test))


def gym_generators(text, size, seed):
    """reasoning_gym:NAME?option=value&option=value,NAME… -> a list of (name, options), one pair for
    each generator. `size` and `seed` are added to the options. A value is JSON (2, true, [1, 2]) or
    a word.

    Raises ValueError for an unknown generator or option and suggests the nearest names.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(f"dataset {text}: the package is not installed: pip install reasoning-gym")
    known = reasoning_gym.factory.DATASETS
    datasets = []
    for one in re.split(r",(?![^\[]*\])", text.partition(":")[2]):      # no comma inside [ ]
        name, _, given = one.strip().removeprefix("reasoning_gym:").partition("?")
        if name not in known:
            raise ValueError(f"dataset {text}: there is no generator {name!r}; the nearest are "
                             f"{', '.join(difflib.get_close_matches(name, known, 3, cutoff=0))}")
        takes = [f.name for f in dataclasses.fields(known[name][1]) if f.name != "seed"]
        options = {"seed": seed, "size": size}
        for pair in filter(None, given.split("&")):
            option, equals, value = pair.partition("=")
            if option not in takes or not equals:
                why = "the seed is --seed" if option == "seed" else f"it has {', '.join(takes)}"
                raise ValueError(f"dataset {text}: {name} has no option {pair!r}; {why}")
            try:
                options[option] = json.loads(value)
            except ValueError:
                options[option] = value
        datasets.append((name, options))
    return datasets


def gym_rows(generators):
    """The problems of reasoning_gym's generators in the form of read_rows, alternating between the
    generators. The verifier finds a problem by its `generator` and `row` numbers. Raises ValueError
    if a generator fails."""
    import reasoning_gym
    sources = []
    for number, (name, options) in enumerate(generators):
        try:
            data = reasoning_gym.create_dataset(name, **options)
            problems = [data[i] for i in range(len(data))]
        except Exception as error:
            said = f"the generator fails: {first_line(error)}"
            raise ValueError(f"dataset reasoning_gym:{name}: {said}")
        sources.append([
            (f"reasoning_gym:{name} row {i + 1}",
             {"prompt": row["question"], "answer": str(row["answer"] or "any that fits"), "row": i,
              "generator": number}) for i, row in enumerate(problems)])
    rounds = itertools.zip_longest(*sources)
    return [row for one_of_each in rounds for row in one_of_each if row is not None]


def first_line(error):
    return (str(error).strip() or repr(error)).splitlines()[0]


def checked_rows(rows, source, prompt_column=None, answer_column=None):
    """(where, row) pairs -> a Problem for each, in this order.

    A prompt is a text, or a conversation as in TRL's data sets: a list of messages with a role and
    a content, the last of them the user's. If an answer contains `####`, only the text after it is
    used. Raises ValueError that names the invalid row or the missing columns.
    """
    if not rows:
        raise ValueError(f"{source}: is empty: it holds no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object with named columns but {type(row).__name__}")
    there = list(rows[0][1])
    columns = []
    for part, wanted, usual in (("prompt", prompt_column, PROMPT_COLUMNS),
                                ("answer", answer_column, ANSWER_COLUMNS)):
        names = [wanted] if wanted else usual
        columns += [name for name in names if name in there][:1]
        if not set(names) & set(there):
            raise ValueError(f"{source}: no column {' or '.join(names)} for the {part}; it has "
                             f"{', '.join(there) or 'none'}: --columns PROMPT ANSWER names two")
    problems = []
    asks, answers = columns
    for where, row in rows:
        prompt = row.get(asks)
        earlier = None
        if isinstance(prompt, list):
            *earlier, (role, prompt) = checked_messages(where, prompt, asks)
            if role != "user":
                raise ValueError(f"{where}: {asks} ends with a message of {role}; the last message "
                                 "must be the user's, because a response follows it")
            earlier = tuple(earlier)
        prompt = checked_text(where, prompt, asks)
        answer = checked_text(where, row.get(answers), answers)
        if "####" in answer:
            final = answer.rpartition("####")[2].strip()
            answer = checked_text(where, final, f"{answers} after ####")
        problems.append(Problem(prompt, answer, where, earlier))
    return problems


def checked_messages(where, messages, column):
    """A conversation as (role, text) pairs. Raises ValueError for anything else."""
    if not messages:
        raise ValueError(f"{where}: {column} is a list without messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: {column} holds {message!r:.40}, which is not a message "
                             'like {"role": "user", "content": "text"}')
    return [(message["role"], checked_text(where, message.get("content"), f"{column}'s content"))
            for message in messages]


def checked_text(where, value, column):
    """A cell as text. Raises ValueError if it is empty or neither text nor a finite number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
        what = f"holds a {type(value).__name__}"
        raise ValueError(f"{where}: {column} {what}: text or a number is needed")
    if value is None or isinstance(value, float) and not math.isfinite(value):
        what = "null" if value is None else value
        raise ValueError(f"{where}: {column} is {what}: text or a number is needed")
    if not str(value).strip():
        raise ValueError(f"{where}: {column} is empty")
    if any("\ud800" <= c <= "\udfff" for c in str(value)):
        raise ValueError(f"{where}: {column} holds half a surrogate pair: no tokenizer accepts it")
    return str(value)
