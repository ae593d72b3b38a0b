"""Data files: a file or a hub dataset -> a list of checked Problems.

All rows are checked before training begins. Every error is one line that names the file and the
line or row. Unicode and control characters are kept. This file does not depend on tasks, models or
losses.
"""

import csv
import io
import json
import math
import pickle
import sys
import zlib
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from plumbing.data.reward_functions import describe
from plumbing.refusal import Refusal, refuse_os_errors

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")
UNREAD_COLUMNS = ("tools", "image", "images", "video", "videos", "audio", "audios")
shared_columns = set()           # those that are named on stderr because they cannot be copied


@dataclass(frozen=True)
class Problem:
    prompt: str                  # of a conversation, its last message
    answer: str                  # the reference answer, as it stands in the data
    where: str = ""              # file and line, for error messages
    earlier: tuple | None = None  # the messages before it as (role, text); None: no conversation
    row: dict = field(default_factory=dict, compare=False, repr=False)   # its row in the data
    stage: int = 1               # the stage in which training on it begins (features/srpo.py)
    unread: tuple = field(default=(), compare=False)     # what its row has for a prompt, unused

    def opened(self, game):
        """The problem with what the reset of its environment has added to the prompt of a game."""
        return replace(self, prompt=self.prompt + game.opening) if game.opening else self

    def copy_row(self):
        """A copy of the row for users' code, which may change it. Values that cannot be copied,
        such as locks and clients, are shared; the first of each column is named on stderr."""
        return {**self.row, **pickle.loads(self.pickled_row)}

    @cached_property
    def pickled_row(self):
        """The row, or those of its values that can be copied."""
        try:
            return pickle_and_check(self.row)
        except Exception:                                    # whatever an object's own code raises
            return pickle.dumps({name: value for name, value in self.row.items()
                                 if can_copy(name, value)})


def load_problems(name, test_name, columns, rows, environment):
    """(train, test, notes) from a data file or a hub id: two lists of Problem, and messages for the
    user. rows: rows to use instead of these, as read_rows returns them, or None.

    columns: the names of the prompt's and the answer's, where `a.b` is the entry b of the object in
    column a; if there are none: prompt, question or problem; answer or solution. Numbers become
    text. Every row is a problem of its own.

    Test split: test_name, or else the hub's own (test or validation); its prompts are removed from
    the train split. Without either, the test split is the tenth of the prompts with the smallest
    CRC-32, at least 1 and at most 512 of them. A single prompt is in both splits.

    environment: the rows are played by an environment. They need no answer, and the split is by
    row, because all of them may have the same prompt.

    Raises Refusal that names the file and the line.
    """
    rows, test_rows = read_file_or_hub(name) if rows is None else (rows, [])
    if test_name:
        first, second = read_file_or_hub(test_name)
        test_rows = second or first
    options = columns, not environment
    train = to_problems(rows, name, *options)
    test = to_problems(test_rows, test_name or name, *options) if test_rows or test_name else []
    key = row_key if environment else prompt_key
    notes = [] if environment else describe_answers(train + test)
    held_out = set(map(key, test))
    total = len(train)
    train = [p for p in train if key(p) not in held_out]
    if not train:
        raise Refusal(f"{name}: nothing to train on: every prompt is in the test split too")
    if len(train) < total:
        notes.append(f"{total - len(train)} of {total} rows left out: their prompt is in the test "
                     "split")
    keys = sorted(set(map(key, train)), key=lambda text: (zlib.crc32(text.encode()), text))
    if not test and len(keys) == 1:
        test = train
        notes.append("there is only one prompt, so it is in the test split too: the score says "
                     "nothing about other prompts")
    elif not test:
        held_out = set(keys[:min(512, max(1, len(keys) // 10))])
        test = [p for p in train if key(p) in held_out]
        train = [p for p in train if key(p) not in held_out]
        notes.append(f"no test split: held out {len(test)} problem(s)")
    return train, test, notes


def describe_answers(problems):
    """[a note] about prompts that have several answers, if there are any."""
    firsts = {}                                              # {prompt: {answer: its first row}}
    for p in problems:
        firsts.setdefault(prompt_key(p), {}).setdefault(p.answer, p.where)
    several = [[*places.values()] for places in firsts.values() if len(places) > 1]
    return [f"note: {len(several)} prompt(s) have different answers, such as {first} and {second}"
            for first, second, *_ in several[:1]]


def pickle_and_check(value):
    """A value as bytes. Raises whatever an object raises that cannot be pickled and read again."""
    data = pickle.dumps(value)
    pickle.loads(data)
    return data


def can_copy(column, value):
    """Whether a value of a row can be copied; the first of a column that cannot is named."""
    try:
        pickle_and_check(value)
    except Exception as error:
        if column not in shared_columns:
            shared_columns.add(column)
            sys.stderr.write(f"train.py: note: {column!r} of a row cannot be copied, so all "
                             f"responses share it: {describe(error)}\n")
        return False
    return True


def prompt_key(problem):
    """A text that is the same for problems with the same prompt."""
    return problem.prompt if problem.earlier is None else json.dumps(as_messages(problem))


def row_key(problem):
    """A text that is the same for equal rows."""
    return json.dumps(problem.row, sort_keys=True, default=str)


def as_messages(problem):
    """A conversation as the list of messages that chat templates and TRL's reward functions read,
    [{"role": "user", "content": "…"}]."""
    messages = (*(problem.earlier or ()), ("user", problem.prompt))
    return [{"role": role, "content": text} for role, text in messages]


# --------------------------------------------------------------------------------- reading of rows

def read_file_or_hub(name):
    """(train rows, test rows) of a data file or a hub dataset. The name is taken as a file if it
    has the extension of a data file, exists or looks like a path; otherwise as a hub id."""
    known = Path(name).suffix.lower() in DATA_FILES or Path(name).exists()
    if known or name.startswith((".", "/", "~")):
        return read_rows(name), []
    return read_hub(name)


@refuse_os_errors()
def read_rows(path):
    """The rows of a data file as (where, row) pairs; `where` names the file and the line.

    Raises Refusal.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in DATA_FILES:
        raise Refusal(f"{path}: a data file ends in {', '.join(DATA_FILES)}")
    if not path.is_file():
        raise Refusal(f"{path}: there is no such data file")
    if suffix == ".parquet":
        return read_parquet(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path}: not UTF-8 text from byte {error.start} on")
    if suffix == ".csv":
        return parse_csv(path, text)
    number = 1
    rows = []
    try:
        if text.lstrip().startswith("["):                    # one JSON list of objects
            return [(f"{path} row {i}", row) for i, row in enumerate(read_json(text), 1)]
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                rows.append((f"{path} line {number}", read_json(line)))
    except (ValueError, RecursionError) as error:
        number = getattr(error, "lineno", 1) if number == 1 else number
        reason = f"{getattr(error, 'msg', error)} (one object per line, or one list of objects)"
        raise Refusal(f"{path} line {number}: broken {suffix[1:].upper()}: {reason}")
    return rows


def read_json(text):
    """What a JSON text holds. Raises ValueError for a key that an object has twice."""
    def unique(pairs):
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{max(names, key=names.count)} stands twice")
        return row
    return json.loads(text, object_pairs_hook=unique)


def parse_csv(path, text):
    csv.field_size_limit(2 ** 31 - 1)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        names = reader.fieldnames or []
        if len({*names}) < len(names):
            raise Refusal(f"a name occurs twice: {', '.join(names)}")
        for row in reader:
            if None in row:
                raise Refusal("more cells than the header has names")
            rows.append((f"{path} line {reader.line_num}", row))
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path} line {reader.reader.line_num}: broken CSV: {error}")
    return rows


def read_parquet(path):
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a Parquet file: {describe(error)}")
    shorten({field.name: str(field.type) for field in table.schema}, rows)
    return [(f"{path} row {i}", row) for i, row in enumerate(rows, 1)]


def shorten(types, rows):
    """Write numbers of the columns with 16 or 32 bits as such a number is written: 0.1, which as a
    Python float has become 0.10000000149011612. types: {column: type}."""
    import numpy as np
    for name, of in types.items():
        if of in ("float", "float32", "halffloat", "float16"):       # Arrow's and datasets' words
            kind = np.float16 if of in ("halffloat", "float16") else np.float32
            for row in rows:
                row[name] = row[name] if row[name] is None else float(str(kind(row[name])))


def read_hub(name):
    """(train rows, test rows) of a dataset on the Hugging Face hub; without a test split there are
    no test rows. Raises Refusal if the dataset cannot be loaded."""
    import datasets
    try:
        splits = datasets.load_dataset(name, "main" if name == "openai/gsm8k" else None)
    except Exception as error:               # no network, unknown name or configuration, gated …
        raise Refusal(f"dataset {name}: there is no such file, and the hub gives "
                      f"{describe(error)}")
    train = "train" if "train" in splits else next(iter(splits))
    test = next((s for s in ("test", "validation") if s in splits and s != train), None)
    found = []
    for split in (train, test):
        rows = [*splits[split]] if split else []
        types = getattr(splits[split], "features", None) if rows else None
        shorten({column: getattr(of, "dtype", "") for column, of in (types or {}).items()}, rows)
        found.append([(f"{name} {split} row {i}", row) for i, row in enumerate(rows, 1)])
    return tuple(found)


# -------------------------------------------------------------------------------- checking of rows

def to_problems(rows, source, columns=(), answers=True):
    """(where, row) pairs -> a Problem for each, in this order. columns: as in load_problems;
    answers: whether rows need an answer; without one it is "".

    A prompt is a text, or a conversation as in TRL's data sets: a list of messages with a role and
    a content, the last of them the user's. Raises Refusal that names the invalid row or the
    missing columns.
    """
    if not rows:
        raise Refusal(f"{source}: is empty: it holds no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise Refusal(f"{where}: not an object with named columns but {type(row).__name__}")
    names = column_names(rows[0][1])
    candidates = [[name] for name in columns] or [PROMPT_COLUMNS, ANSWER_COLUMNS]
    chosen = []
    for use, usual in zip(("prompt", "answer"), candidates):
        chosen.append(next((name for name in usual if name in names), None))
        if chosen[-1] is None and (columns or answers or use == "prompt"):
            raise Refusal(f"{source}: no column {' or '.join(usual)} for the {use}; it has "
                          f"{', '.join(names) or 'none'}: --columns PROMPT ANSWER names two")
    prompt_column, answer_column = chosen
    cells = [find_cell(row, answer_column) if answer_column else None for _, row in rows]
    # pandas writes integers as 3.0 where an entry of the column is missing
    whole = all(cell is None or isinstance(cell, float) and cell.is_integer() for cell in cells)
    problems = []
    for (where, row), cell in zip(rows, cells):
        prompt = find_cell(row, prompt_column)
        earlier = None
        unread = {name for name in UNREAD_COLUMNS if row.get(name)}
        if isinstance(prompt, list):
            messages = prompt
            *earlier, (role, prompt) = check_messages(where, messages, prompt_column)
            if role != "user":
                raise Refusal(f"{where}: {prompt_column} ends with a message of {role}; the "
                              "last message must be the user's, because a response follows it")
            earlier = tuple(earlier)
            unread |= {key for message in messages for key, value in message.items()
                       if value and key not in ("role", "content")}
        prompt = to_text(where, prompt, prompt_column)
        answer = int(cell) if whole and cell is not None else cell
        missing = not answers and (answer is None or answer == "")
        answer = "" if missing else to_text(where, answer, answer_column)
        problems.append(Problem(prompt, answer, where, earlier, row, unread=tuple(sorted(unread))))
    return problems


def column_names(row):
    """The names of a row's columns; entries of an object in a column follow it as `column.name`."""
    names = []
    for name, value in row.items():
        inner = column_names(value) if isinstance(value, dict) else []
        names += [name, *(f"{name}.{key}" for key in inner)]
    return names


def find_cell(row, column):
    """The value of a column; `a.b` is the entry b of the object in column a. None: it has none."""
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    value = row.get(outer)
    return find_cell(value, inner) if inner and isinstance(value, dict) else None


def check_messages(where, messages, column):
    """A conversation as (role, text) pairs. Raises Refusal for anything else."""
    for message in messages or [None]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(f"{where}: {column} holds {message!r:.40}, which is not a message "
                          'like {"role": "user", "content": "text"}')
    return [(message["role"], to_text(where, message.get("content"), f"{column}'s content"))
            for message in messages]


def to_text(where, value, column):
    """A cell as text; a number is written as a decimal, 0.00001 and not 1e-05. Raises Refusal if
    the cell is empty or neither text nor a finite number."""
    number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    if number and (isinstance(value, int) or math.isfinite(value)):      # int: of any length
        return format(Decimal(str(value)), "f")
    surrogates = isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value)
    if not isinstance(value, str) or not value.strip() or surrogates:    # half a pair: no character
        raise Refusal(f"{where}: {column} is {value!r:.40}: text or a finite number is needed")
    return value
