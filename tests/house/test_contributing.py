"""CONTRIBUTING.md names files, functions and tests that exist. python -m pytest tests/house/test_contributing.py

After a file or function was renamed: edit CONTRIBUTING.md.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = sorted(set(re.findall(r"`([^`\s]+)`", PAGE)))
SOURCE = "".join(file.read_text() for file in [*ROOT.glob("*.py"), *(ROOT / "features").glob("*.py"), *(ROOT / "plumbing").rglob("*.py")])


@pytest.mark.parametrize("name", [name for name in NAMED if "/" in name or name.endswith(".py")])
def test_a_named_file_exists(name):
    assert list(ROOT.glob(name)), name


@pytest.mark.parametrize("name", [name for name in NAMED if re.fullmatch(r"[A-Za-z_.]+", name) and not name.endswith(".py")])
def test_a_named_function_exists(name):
    assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b|^{name.split('.')[-1]} = ", SOURCE, re.MULTILINE), name


def test_named_commands_exist():
    for script in re.findall(r"python (\S+\.py)", PAGE):
        assert (ROOT / script).is_file(), script
    for folder in re.findall(r"python -m pytest (tests/\S+)", PAGE):
        assert (ROOT / folder).is_dir(), folder


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#\s]+)", PAGE):
        assert (ROOT / target).exists(), target


def test_it_is_one_page():
    assert len(PAGE.splitlines()) <= 80
