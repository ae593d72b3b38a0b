"""--config FILE: flags of train.py from a YAML file, by their names.

    model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
    learning_rate: 1e-6
    stop: ["\\n", "no"]

A value is text, which arguments.convert reads as on the command line: `no` is the text "no" for a
flag that takes a text, and false for a switch. A recipe of recipes/ is such a file, and so is the
config.json of a run, of which the settings count. Flags on the command line override the file's.
"""

import json
from contextlib import suppress
from pathlib import Path

import yaml

from plumbing.refusal import Refusal


def read_config(path):
    """{flag: text, or a list of texts} of a file, in its order; a mapping inside has JSON's types.

    Raises Refusal, which names the file and the line: one that cannot be read, that is no
    mapping, or that has a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            values = json.loads(text)
            values = find_settings(values) if isinstance(values, dict) else values
        else:
            values = read_node(yaml.compose(text, Loader=yaml.BaseLoader))
    except OSError as error:
        raise Refusal(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise Refusal(f"--config {path}: not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        raise Refusal(f"--config {path}: line {error.problem_mark.line + 1}: "
                      f"{error.problem}") from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise Refusal(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise Refusal(f"--config {path}: not a mapping; write one 'flag: value' per line, with "
                      "the names of train.py --help")
    return values


def find_settings(config):
    """{flag: value} of the config.json of a run, of which the settings count, or of another JSON
    file of flags. A run that was made when --epsilon alone set one end keeps its range."""
    values = config.get("settings", config)
    resolved = config.get("resolved")
    if isinstance(values, dict) and isinstance(resolved, dict) and "epsilon" in values:
        epsilon = values["epsilon"]
        high = resolved.get("epsilon_high", epsilon)
        if resolved.get("epsilon") == epsilon != high:       # else it was edited since
            values = {"epsilon_high": high} | values
    return values


def read_node(node, depth=0):
    """The text, list or mapping of a node. depth: 1 for the value of a flag, which is text; 2
    inside a flag's mapping, where a value has JSON's type (false, 3) and any other word is text."""
    if isinstance(node, yaml.SequenceNode):
        return [read_node(item, depth) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        mapping = {}
        for key, value in node.value:
            if key.value in mapping:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice",
                                           problem_mark=key.start_mark)
            mapping[key.value] = read_node(value, depth + 1)
        return mapping
    if depth > 1 and node.style is None:
        with suppress(ValueError):
            return json.loads(node.value)
    if depth == 1 and node.style is None and node.value in ("", "~", "null"):
        raise yaml.MarkedYAMLError(problem="no value; leave the flag out, or quote the text",
                                   problem_mark=node.start_mark)
    return node and node.value                               # None for an empty file
