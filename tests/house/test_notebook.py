"""gspo.ipynb is gspo.py cell by cell, small, and runs; family.ipynb as well.
python -m pytest tests/house/test_notebook.py

After a change of gspo.py or make_gspo.py: python docs/notebooks/make_gspo.py writes the first anew,
with its outputs; python docs/notebooks/make_family.py the second.
"""

import re

import pytest

from documents import PROGRAM
import make_family
import make_gspo
from make_gspo import executed, made, notebook, sources
from tiny_run import read_json

PAGE = PROGRAM["gspo.py"]
BOOK, FAMILY = (read_json(make.NOTEBOOK) for make in (make_gspo, make_family))
STALE = "python docs/notebooks/make_gspo.py and make_family.py write the notebooks anew"


def outputs(book):
    return [output for cell in book["cells"] for output in cell.get("outputs", [])]


def printed(book):
    return "".join("".join(output["text"]) for output in outputs(book) if "text" in output)


@pytest.mark.parametrize("book, make, written", [
    (BOOK, make_gspo, lambda: notebook(PAGE)),
    (FAMILY, make_family, lambda: made(make_family.CELLS))], ids=["gspo", "family"])
def test_a_notebook_is_what_its_generator_writes_with_its_outputs(book, make, written):
    assert sources(book) == sources(written()), STALE
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), STALE
    pictures = [output for output in outputs(book) if "image/png" in output.get("data", {})]
    assert len(pictures) == 5
    assert not [output for output in outputs(book) if output["output_type"] == "error"]
    text = make.NOTEBOOK.read_text(encoding="utf-8")
    assert len(text.encode()) < 400_000 and "site-packages" not in text


def learns(book):
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)   clipped", printed(book))]
    assert len(rewards) == 50 and rewards[0] < 0.7 and sum(rewards[-5:]) / 5 > 0.9, rewards


def tells(book):
    """The shares that the notebook prints, of which CISPO and SAPO remove nothing."""
    found = re.findall(r"(\w+) +removes +([\d.]+)%", printed(book))
    shares = {name: float(share) for name, share in found}
    assert len(shares) == 6, shares
    assert shares["cispo"] == shares["sapo"] == 0 < shares["grpo"] < shares["gspo"], shares
    return shares


def test_the_notebooks_say_that_the_policy_learns_and_what_each_objective_removes():
    learns(BOOK)
    tells(FAMILY)


@pytest.mark.slow
def test_the_notebooks_run_and_say_the_same():
    pytest.importorskip("nbclient")
    learns(executed(notebook(PAGE)))
    assert tells(executed(made(make_family.CELLS))) == tells(FAMILY), STALE
