"""Data files: rows of a file, a hub dataset or a problem generator -> checked (prompt, answer, where) triples.

Every refusal is one line that names the file and the line or row: a null in row 7,412 of somebody else's file is found now, or
after a night of training. Unicode and control characters pass unchanged. Knows nothing of tasks, models or losses.
"""

import csv
import difflib
import io
import json
import math
from pathlib import Path

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS, ANSWER_COLUMNS = ("prompt", "question", "problem"), ("answer", "solution")


def file_or_hub_rows(name, config):
    """(train rows, test rows): a data file if it ends like one, is there or looks like a path; else a hub id."""
    if Path(name).suffix.lower() in DATA_FILES or Path(name).exists() or name.startswith((".", "/", "~")):
        return read_rows(name), []
    return hub_rows(name, config)


def read_rows(path):
    """Rows of a data file as (where, row) pairs; `where` names file and line. Raises FileNotFoundError or ValueError."""
    path, kind = Path(path), Path(path).suffix.lower()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: {'is a folder, not a data file' if path.is_dir() else 'there is no such data file'}")
    if kind not in DATA_FILES:
        raise ValueError(f"{path}: a data file ends in {', '.join(DATA_FILES)}")
    if kind == ".parquet":
        import pyarrow.parquet
        try:
            return [(f"{path} row {i}", row) for i, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)]
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text from byte {error.start} on")
    rows, number, hint = [], 1, "" if kind == ".csv" else " (one object per line, or one list of objects)"
    try:
        if kind == ".csv":
            csv.field_size_limit(2 ** 31 - 1)
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            for row in reader:
                if None in row:
                    raise ValueError("more cells than the header has names")
                rows.append((f"{path} line {reader.reader.line_num}", row))
        elif text.lstrip().startswith("["):                          # one JSON list of objects
            rows = [(f"{path} row {i}", row) for i, row in enumerate(json.loads(text), 1)]
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    rows.append((f"{path} line {number}", json.loads(line)))
    except (ValueError, csv.Error, RecursionError) as error:
        if kind == ".csv":
            number = reader.reader.line_num
        elif text.lstrip().startswith("["):
            number = getattr(error, "lineno", 1)
        raise ValueError(f"{path} line {number}: broken {kind[1:].upper()}: {getattr(error, 'msg', error)}{hint}")
    return rows


def hub_rows(name, config):
    """(train rows, test rows) of a dataset on the Hugging Face hub; no test rows if it has no such split. Raises ValueError."""
    import datasets
    try:
        splits = datasets.load_dataset(name, config or ("main" if name == "openai/gsm8k" else None))
    except Exception as error:                                       # no network, unknown name or configuration, gated …
        raise ValueError(f"dataset {name}: there is no such file, and the hub gives {type(error).__name__}: {first_line(error)}")
    train = "train" if "train" in splits else next(iter(splits))
    test = next((split for split in ("test", "validation") if split in splits and split != train), None)
    return tuple([(f"{name} {split} row {i}", row) for i, row in enumerate(splits[split] if split else [], 1)]
                 for split in (train, test))


def gym_rows(name, size, seed):
    """`size` problems of the package reasoning_gym's generator `name`, as read_rows gives them. Raises ValueError."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(f"dataset reasoning_gym:{name}: the package is not installed: pip install reasoning-gym")
    known = list(reasoning_gym.factory.DATASETS)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, cutoff=0)
        raise ValueError(f"dataset reasoning_gym:{name}: there is no generator {name!r}; the nearest are {', '.join(near)}")
    try:
        data = reasoning_gym.create_dataset(name, seed=seed, size=size)
        problems = [data[i] for i in range(size)]
    except Exception as error:
        raise ValueError(f"dataset reasoning_gym:{name}: the generator fails: {first_line(error)}")
    return [(f"reasoning_gym:{name} row {i}", {"prompt": row["question"], "answer": str(row["answer"] or "any that fits")})
            for i, row in enumerate(problems, 1)]


def first_line(error):
    return (str(error).strip() or repr(error)).splitlines()[0]


def checked_rows(rows, source, prompt_column=None, answer_column=None):
    """(where, row) pairs -> (prompt, answer, where) triples of text. Raises ValueError naming the bad row, or the columns."""
    if not rows:
        raise ValueError(f"{source}: is empty: it holds no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object with named columns but {type(row).__name__}")
    there, columns = list(rows[0][1]), []
    for part, wanted, usual in (("prompt", prompt_column, PROMPT_COLUMNS), ("answer", answer_column, ANSWER_COLUMNS)):
        names = [wanted] if wanted else usual
        columns += [name for name in names if name in there][:1]
        if not set(names) & set(there):
            raise ValueError(f"{source}: no column {' or '.join(names)} for the {part}; it has {', '.join(there) or 'none'}")

    def text(where, value, column):
        if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"{where}: {column} holds a {type(value).__name__}: text or a number is needed")
        if value is None or isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {column} is {'null' if value is None else value}: text or a number is needed")
        if not str(value).strip():
            raise ValueError(f"{where}: {column} is empty")
        if any("\ud800" <= c <= "\udfff" for c in str(value)):
            raise ValueError(f"{where}: {column} holds half a surrogate pair, which no tokenizer accepts")
        return str(value)

    triples = []
    for where, row in rows:
        prompt, answer = (text(where, row.get(column), column) for column in columns)
        if "####" in answer:
            answer = text(where, answer.rpartition("####")[2].strip(), f"{columns[1]} after ####")
        triples.append((prompt, answer, where))
    return triples


if __name__ == "__main__":
    import tempfile
    good = '{"question": "Two apples and three pears: how many?", "answer": "2 + 3 = 5\\n#### 5"}\n'
    print("one good line, then one more:\n")
    for line in ('{"question": "6*7?", "answer": 42}', '{"question": "6*7?", "answer": null}', '{"question": "6*7?"', "[6, 7]"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.jsonl")
            path.write_text(good + line)
            try:
                prompt, answer, _ = checked_rows(read_rows(path), path)[-1]
                result = f"prompt {prompt!r}, answer {answer!r}"
            except ValueError as error:
                result = f"refused: {error}".replace(f"{folder}/", "")
        print(f"  {line:40} {result}")
