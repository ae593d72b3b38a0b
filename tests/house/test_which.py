"""docs/which.md carries no figure that no run carries: python -m pytest tests/house/test_which.py"""

import json
import re
from pathlib import Path

import pytest

from experiments.shared import which

ROOT = Path(__file__).parents[2]
PAGE, README = (ROOT / "docs/which.md").read_text(), (ROOT / "README.md").read_text()
SECTIONS = [part.split("\n## ")[0] for part in re.split(r"\n### ", PAGE)[1:]]
ROWS = [row for rows in which.rows().values() for row in rows]
FIGURE = r"[+-]?\d+(?:\.\d+|e-\d+)(?:e-\d+)?%?|[+-]\d+%?|\d+ ?%"     # a decimal, a power of ten, a sign or a share


def figures(text):
    """The figures of a text, flags in `backquotes` left out: they are chosen, not measured."""
    return re.findall(FIGURE, re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))


def carried(rows):
    """All figures of the named numbers that these rows list."""
    numbers = [which.numbers()[name] | {"shown": which.n(name)} for row in rows for name in row.behind]
    ends = [f"{number[end]:+.{number['digits']}f}" for number in numbers if "low" in number for end in ("low", "high")]
    return [*ends, *(number["shown"] for number in numbers), *figures(" ".join(number["of"] for number in numbers))]


@pytest.mark.parametrize("section, row", list(zip(SECTIONS, ROWS)), ids=[row.question for row in ROWS])
def test_every_figure_of_a_section_is_a_named_number_that_it_lists(section, row):
    assert section.startswith(row.question) and "It would change with: " in section
    for number in figures(section):
        assert number in carried([row]), f"{number} is none of this section's numbers"
    for line in re.findall(r"^\* .*", section, re.M):
        result = re.search(r"results/(\w+)\.json", line)[1]
        assert (ROOT / f"results/{result}.json").is_file(), line


def test_a_figure_that_no_run_carries_is_noticed():
    section, row = next((s, r) for s, r in zip(SECTIONS, ROWS) if "trusted" in s)
    assert "+0.18" in figures(section) and "+0.18" in carried([row]) and "+0.19" not in carried([row])
    assert figures("-0.048 [-0.064, 3e-4] 15 % `0.2` 8 and 6.5 [x](a-0.5.md)") == ["-0.048", "-0.064", "3e-4", "15 %", "6.5"]
    with pytest.raises(ValueError, match="has no number 'a number of no run'"):
        which.n("a number of no run")


def test_the_numbers_are_those_of_the_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import importlib
    made = importlib.import_module("experiments.which")
    assert json.loads((ROOT / "results/which.json").read_text()) == made.numbers(), "run python experiments/which.py"


def test_the_page_has_every_regime_and_what_was_not_tested():
    assert [regime for regime, _ in which.rows()] == re.findall(r"^## (.*)", PAGE, re.M)[:len(which.rows())]
    assert len(SECTIONS) == len(ROWS) and all(row.answer.count(". ") == 0 for row in ROWS), "an answer is one sentence"
    assert all(figures(row.figure) and "[" not in re.sub("`[^`]*`", "", row.figure) for row in ROWS), "one figure, no interval"
    assert PAGE.count("\n* ") >= len(which.NOT_TESTED) + len(which.OTHERS) and "## Not tested" in PAGE


def test_the_readme_has_five_lines_without_brackets_that_lead_to_the_page():
    part = README.split("## Which should I use, and how wide a band?")[1].split("\n## ")[0]
    lines = re.findall(r"^\* \*\*.*", part, re.M)
    assert which.short() in part and len(lines) == 5 and "docs/which.md" in part
    assert not any("[" in re.sub("`[^`]*`", "", line) for line in lines)
    for line in lines:
        assert "tiny model" in line or "48 layers" in line or "SmolLM2" in line, f"without its model: {line}"
        assert all(number in carried(ROWS) for number in figures(line)), line
