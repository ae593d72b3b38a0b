"""The budget: how much there is of what. What is added is paid for in the same change, by something
that goes. python -m pytest -s tests/house/test_budget.py prints the table; README's weight of the
program is its first line."""

import io
import sys
import tokenize
from collections import Counter

import pytest

from documents import DOCUMENTS, README, ROOT, texts
from session.arguments import Settings

CEILINGS = {                             # code tokens, unless the name says what
    "program": 60_400, "core": 47_500, "tests": 100_000, "evidence": 26_000, "flags": 93,
    "files in session/": 6, "files in features/": 17, "words of pages": 14_800}


def count(code):
    """The tokens of a Python file without comments, docstrings and line breaks."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(token.string.strip() != "" and token.string[0] != "#"
               and not token.line.lstrip().startswith('"""') for token in tokens)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it cuts f-strings into more tokens")
def test_nothing_is_above_its_ceiling():
    weight, files = Counter(), Counter()                     # of the folders, and files at the root
    for name, code in (texts(ROOT.glob("*.py")) | texts(ROOT.glob("[!.]*/**/*.py"))).items():
        folder = name.split("/")[0]
        weight[folder] += count(code)
        files[folder] += 1
    tests, evidence = weight["tests"], weight["experiments"] + weight["benchmarks"]
    program = weight.total() - tests - evidence - weight["recipes"] - weight["docs"]
    words = sum(len(text.split()) for name, text in DOCUMENTS.items() if name[0] != ".")
    today = (program, program - weight["features"] - weight["tools"], tests, evidence,
             len(vars(Settings())), files["session"], files["features"] - 1, words)
    for (name, ceiling), n in zip(CEILINGS.items(), today):
        print(f"\n{name:20}{n:8,} of {ceiling:8,}", end="")
    assert f"{program:,} code tokens" in README
    assert all(n <= ceiling for n, ceiling in zip(today, CEILINGS.values()))
