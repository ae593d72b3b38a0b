"""Data: a file or a dataset of the Hugging Face hub -> lists of checked Problems.

All rows are checked before training begins; an error is one line that names the row. JSON and CSV
are read by Python itself: datasets reads `007` of a CSV file as 7, `NA` as no answer and a JSON
text such as "2024-01-05 10:00:00" as a date. This file does not depend on tasks, models or losses.
"""

import csv
import json
import math
import zlib
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from plumbing.refusal import Refusal, refuse_os_errors

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution")


@dataclass(frozen=True)
class Problem:
    prompt: str                  # of a conversation, its last message
    answer: str                  # the reference answer, as it stands in the data
    where: str = ""              # file and row, for error messages
    earlier: tuple | None = None  # the messages before it as (role, text); None: no conversation
    row: dict = field(default_factory=dict, compare=False, repr=False)   # its row in the data
    stage: int = 1               # the stage in which training on it begins (features/srpo.py)

    def opened(self, game):
        """The problem with what the reset of its environment has added to the prompt of a game."""
        return replace(self, prompt=self.prompt + game.opening) if game.opening else self

    def messages(self):
        """The prompt as the list of messages that chat templates and TRL's reward functions read,
        [{"role": "user", "content": "…"}]."""
        messages = (*(self.earlier or ()), ("user", self.prompt))
        return [{"role": role, "content": text} for role, text in messages]


def load_problems(name, test_name, columns, rows, environment, answers):
    """(train, test, notes) from a data file or a hub id: two lists of Problem, and messages for the
    user. rows: dicts to use instead of these, or None. columns: the names of the prompt's and the
    answer's column; without any, the first of PROMPT_COLUMNS and of ANSWER_COLUMNS.

    Test split: test_name, or else the hub's own (test or validation); its prompts are removed from
    the train split. Without either, the test split is the tenth of the prompts with the smallest
    CRC-32, at least 1 and at most 512 of them. A single prompt is in both splits.

    environment: the rows are played by an environment. The split is by row then, because all of
    them may have the same prompt. answers: whether rows need one.
    """
    rows, test_rows = read_rows(name) if rows is None else (rows, [])
    if test_name:
        first, second = read_rows(test_name)
        test_rows = second or first
    every = to_problems(rows, name, columns, answers)
    test = []
    if test_rows:
        test = to_problems(test_rows, test_name or f"{name} test", columns, answers)

    def key(problem):
        if environment:
            return json.dumps(problem.row, sort_keys=True, default=str)
        return json.dumps(problem.messages()) if problem.earlier else problem.prompt
    held_out = {*map(key, test)}
    train = [p for p in every if key(p) not in held_out]
    notes = []
    if len(train) < len(every):
        notes.append(f"{len(every) - len(train)} of {len(every)} rows left out: their prompt is in "
                     "the test split")
    if not train:
        raise Refusal(f"{name}: nothing to train on: every prompt is in the test split")
    if not test:
        keys = sorted({*map(key, train)}, key=lambda text: (zlib.crc32(text.encode()), text))
        held_out = {*keys[:min(512, max(1, len(keys) // 10))]}
        test = [p for p in train if key(p) in held_out]
        train = [p for p in train if key(p) not in held_out] or test
    return train, test, notes


# --------------------------------------------------------------------------------- reading of rows

def read_rows(name):
    """(train rows, test rows) of a data file or a hub dataset, each a list of dicts."""
    if Path(name).suffix in DATA_FILES:
        return read_file(Path(name)), []
    import datasets
    try:
        splits = datasets.load_dataset(name, "main" if name == "openai/gsm8k" else None)
    except Exception as error:               # no network, unknown name or configuration, gated …
        raise Refusal(f"--dataset_name {name} ends in none of {', '.join(DATA_FILES)}, and the hub "
                      f"gives {' '.join(str(error).split())}") from error
    train = "train" if "train" in splits else next(iter(splits))
    test = next((s for s in ("test", "validation") if s in splits and s != train), None)
    return [*splits[train]], [*splits[test]] if test else []


@refuse_os_errors()
def read_file(path):
    """The rows of a data file."""
    rows = []
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet
            return pyarrow.parquet.read_table(path).to_pylist()
        csv.field_size_limit(2 ** 31 - 1)                    # of a cell; csv's own is 131,072
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".json":
                return json.load(file)
            reader = (csv.DictReader(file, strict=True) if path.suffix == ".csv" else
                      map(json.loads, filter(str.strip, file)))
            for row in reader:
                rows.append(row)
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path} row {len(rows) + 1}: {error}") from error
    return rows


# -------------------------------------------------------------------------------- checking of rows

def to_problems(rows, source, columns=(), answers=True):
    """The rows as a list of Problem. columns: as in load_problems; answers: whether rows need one.

    A prompt is a text, or a conversation as in TRL's data sets: a list of messages with a role and
    a content, the last of them the user's. Raises Refusal that names the invalid row.
    """
    if not (isinstance(rows, list) and rows):
        raise Refusal(f"{source}: a list of rows is needed")
    found = [next((name for name in names if find_cell(rows[0], name) is not None), names[0])
             for names in (PROMPT_COLUMNS, ANSWER_COLUMNS)]
    prompt_column, answer_column = [*columns, *found[len(columns):]]
    problems = []
    for number, row in enumerate(rows, 1):
        where = f"{source} row {number}"
        if not isinstance(row, dict) or None in row:         # None: more cells than the header
            raise Refusal(f"{where}: not an object with the named columns but {row!r:.80}")
        prompt = find_cell(row, prompt_column)
        earlier = None
        if isinstance(prompt, list):
            *earlier, (_, prompt) = read_messages(prompt, where)
            earlier = tuple(earlier)
        prompt = to_text(row, prompt, prompt_column, where)
        answer = find_cell(row, answer_column)
        if answers or answer is not None:
            answer = to_text(row, answer, answer_column, where)
        problems.append(Problem(prompt, answer or "", where, earlier, row))
    return problems


def find_cell(row, column):
    """The value of a column; `a.b` is the entry b of the object in column a. None: it has none."""
    for name in column.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def read_messages(messages, where):
    """A conversation as (role, text) pairs."""
    try:
        pairs = [(message["role"], message["content"]) for message in messages]
    except (KeyError, TypeError):
        pairs = []
    if not pairs or pairs[-1][0] != "user" or not all(isinstance(x, str) for p in pairs for x in p):
        raise Refusal(f'{where}: messages like {{"role": "user", "content": "text"}} are needed, '
                      f"the last of them the user's, and not {messages!r:.80}")
    return pairs


def to_text(row, value, column, where):
    """A cell, text or a finite number, as text."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)).normalize(), "f")         # 42.0 is 42, 1e16 has no e
    if not isinstance(value, str) or not value.strip() or value != value.encode(
            errors="ignore").decode():                       # half of a surrogate pair
        raise Refusal(f"{where}: {column} is {value!r:.40}, where text or a finite number is "
                      f"needed; the row has {', '.join(row)}: --columns PROMPT ANSWER names two")
    return value
