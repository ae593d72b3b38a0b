"""The code runs on Linux, macOS and Windows: files are read as UTF-8 and scripts print on
any console. python -m pytest tests/house/test_portable.py

tests/run/test_windows.py runs the scripts as Windows would.
"""

import ast

from documents import ROOT, texts

FILES = texts(file for pattern in ("*.py", "[a-z]*/**/*.py") for file in ROOT.glob(pattern)
              if file.relative_to(ROOT).parts[0] not in ("checkpoints", "runs"))
# their open() decodes no text
BINARY = {"os", "tarfile", "zipfile", "webbrowser", "Image", "page"}


def without_encoding(source):
    """The line numbers of calls that read or write text in the encoding of the machine, which is
    cp1252 on many Windows machines."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        attribute = isinstance(node.func, ast.Attribute)
        name = node.func.attr if attribute else getattr(node.func, "id", None)
        owner = getattr(node.func.value, "id", None) if attribute else None
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        place = 0 if attribute else 1        # of the mode: file.open(mode), open(file, mode)
        mode = given.get("mode") or next(iter(node.args[place:]), None)
        binary = owner in BINARY or "b" in str(getattr(mode, "value", ""))
        opens = name == "open" and not binary
        reads = attribute and name == "read_text" and not node.args
        writes = attribute and name == "write_text" and len(node.args) == 1
        decodes = getattr(given.get("text"), "value", None) is True and owner == "subprocess"
        if (opens or reads or writes or decodes) and not {"encoding", None} & given.keys():
            yield node.lineno


def test_text_is_utf_8_on_every_machine():
    lines = [f"{file}:{line}" for file, text in FILES.items() for line in without_encoding(text)]
    assert not lines, lines


WORKER = "plumbing/data/reward_functions.py"             # which prints nothing


def test_a_script_prints_on_any_console():
    """π or × in a console's cp1252 would end it with a UnicodeEncodeError."""
    for file, text in FILES.items():
        blocks = [node for node in ast.parse(text).body
                  if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
        if blocks and not file.startswith("tests/") and file != WORKER:
            first = ast.unparse(blocks[0].body[0])
            assert first == "sys.stdout.reconfigure(errors='replace')", file
