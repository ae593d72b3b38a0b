"""docs/which.md carries no figure that no result carries: python -m pytest tests/house/test_which.py"""

import json
import re
from pathlib import Path

import pytest

from experiments.shared import which

ROOT = Path(__file__).parents[2]
PAGE, README = (ROOT / "docs/which.md").read_text(), (ROOT / "README.md").read_text()
SECTIONS = re.split(r"\n## ", PAGE)[1:]
FIGURE = r"[+-]?\d+(?:\.\d+|e-\d+)(?:e-\d+)?%?|[+-]\d+%?|\d+ ?%"     # a decimal, a power of ten, a sign or a share


def figures(text):
    """The figures of a text, flags in `backquotes` left out: they are chosen, not measured."""
    return re.findall(FIGURE, re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))


def carried(text):
    """All that the results say to which a section links."""
    results = [json.loads((ROOT / f"results/{name}.json").read_text()) for name in re.findall(r"results/(\w+)\.json", text)]
    return " ".join(str(r.get(key, "")) for r in results for key in ("number", "measured", "takeaway", "regime"))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_every_figure_of_a_section_is_in_a_result_that_it_links_to(section):
    said = figures(carried(section))
    for number in figures(section):
        assert number in said, f"{number} is in none of the results of this section"


def test_a_figure_that_no_result_carries_is_noticed():
    section = next(s for s in SECTIONS if "trusted" in s)
    assert figures(section.replace("+0.18", "+0.19")) != figures(section)
    assert "+0.19" not in figures(carried(section)) and "+0.18" in figures(carried(section))
    assert figures("-0.048 [-0.064, 3e-4] 15 % `0.2` 8 and 6.5 [x](a-0.5.md)") == ["-0.048", "-0.064", "3e-4", "15 %", "6.5"]
    with pytest.raises(ValueError, match="does not say"):
        which.said("stability_map", "a sentence of no result")


def test_every_question_has_its_regime_what_would_change_it_and_what_was_not_tested():
    questions = [row[0] for row in which.ROWS]
    assert [s.splitlines()[0] for s in SECTIONS] == [*questions, "Not tested"] and len(questions) == 9
    for section in SECTIONS[:-1]:
        assert "Measured with: " in section and "It would change with: " in section and "layers" in section
    assert len(re.findall(r"^\* ", SECTIONS[-1], re.M)) == len(which.NOT_TESTED) >= 5


def test_the_readme_has_the_eight_lines_and_leads_to_the_page():
    part = README.split("## Which should I use, and how wide a band?")[1].split("\n## ")[0]
    assert which.short() in part and len(re.findall(r"^\* \*\*", part, re.M)) == 8 and "docs/which.md" in part
