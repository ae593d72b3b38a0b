"""--config FILE: flags of train.py from a YAML file, by their own names.

    model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
    learning_rate: 1e-6
    stop: ["\\n", "###"]

A recipe of recipes/ is such a file, and so is the config.json of a run: then the flags that the run
was given count. What stands on the command line wins.
"""

import json
from pathlib import Path

import yaml


def read_config(path):
    """{flag: value} of a file, in its order; of a run's config.json the flags that it was given.

    Raises ValueError, which names the file and the line: one that cannot be read, that is no
    mapping, or that has a key twice.
    """
    try:
        mapping = yaml.load(Path(path).read_text(encoding="utf-8"), Once)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--config {path}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        said = getattr(error, "problem", None) or str(error)
        raise ValueError(f"--config {path}: {where}{said}") from None
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping):
        raise ValueError(f"--config {path}: not a mapping; write one 'flag: value' per line, with "
                         "the names of train.py --help")
    if {"arguments", "given"} <= mapping.keys():                        # config.json of a run
        return mapping["given"]
    return mapping


class Once(yaml.SafeLoader):
    """A loader of plain data that refuses a key which stands twice in a mapping."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice",
                                           problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def words_of(name, value):
    """A flag and its value as words of a command line. Raises ValueError for a value that no
    command line could give."""
    if isinstance(value, list) and len(value) > 1:
        return [f"--{name}", *(text_of(name, one) for one in value)]
    return [f"--{name}={text_of(name, value[0] if isinstance(value, list) and value else value)}"]


def text_of(name, value):
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise ValueError(f"{name} is {json.dumps(value, default=str)}: give one value or a list of "
                     "them, or leave it out")
