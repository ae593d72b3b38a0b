"""gspo.ipynb is gspo.py cell by cell, small, and runs; family.ipynb as well. python -m pytest tests/house/test_notebook.py

After a change of gspo.py or notebooks/make_gspo.py: python notebooks/make_gspo.py writes the first anew, with its outputs;
python notebooks/make_family.py the second.
"""

import ast
import json
import re

import pytest

import gspo
from losses import OBJECTIVES
from notebooks import make_family as family
from notebooks.make_gspo import NOTEBOOK, PICTURE, PICTURED, ROOT, executed, made, notebook, page_cells, picture, sources

PAGE = (ROOT / "gspo.py").read_text()
BOOK = json.loads(NOTEBOOK.read_text())
STALE = "python notebooks/make_gspo.py writes the notebook anew"


def printed(book):
    return "".join("".join(output["text"]) for cell in book["cells"] for output in cell.get("outputs", []) if "text" in output)


def test_the_notebooks_code_is_the_pages():
    cells = ["".join(cell["source"]) for cell in BOOK["cells"] if "gspo.py" in cell["metadata"].get("tags", [])]
    docstring, *sections = page_cells(PAGE)
    assert "".join([docstring, *sections]) == PAGE[:PAGE.index("if __name__ ==")], "a part of the page is in no cell"
    assert cells == [section.strip("\n") for section in sections] and len(cells) == 8, STALE


def test_the_notebook_is_what_its_generator_writes():
    assert sources(BOOK) == sources(notebook(PAGE)), STALE


def test_the_notebook_is_committed_with_its_outputs():
    code = [cell for cell in BOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), STALE
    pictures = [output for cell in code for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 5 and not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    assert NOTEBOOK.stat().st_size < 400_000 and "site-packages" not in NOTEBOOK.read_text()
    learns(BOOK)


def test_the_picture_of_the_reading_page_is_the_notebooks():
    assert PICTURE.read_bytes() == picture(BOOK, PICTURED), STALE
    assert f"](figures/{PICTURE.name})" in (ROOT / "docs/reading.md").read_text()


def learns(book):
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)   clipped", printed(book))]
    assert len(rewards) == 50 and rewards[0] < 0.7 and sum(rewards[-5:]) / 5 > 0.9, rewards


@pytest.mark.slow
def test_the_notebook_runs_and_its_policy_learns():
    pytest.importorskip("nbclient")
    learns(executed(notebook(PAGE)))


# ------------------------------------------------------------------------------------------------------- family.ipynb

FAMILY = json.loads(family.NOTEBOOK.read_text())
AGAIN = "python notebooks/make_family.py writes the notebook anew"


def test_the_familys_notebook_is_what_its_generator_writes_with_its_outputs():
    assert sources(FAMILY) == sources(made(family.CELLS)), AGAIN
    code = [cell for cell in FAMILY["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), AGAIN
    pictures = [output for cell in code for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 5 and family.NOTEBOOK.stat().st_size < 400_000 and "site-packages" not in family.NOTEBOOK.read_text()


def test_the_familys_notebook_needs_three_concept_files():
    code = "\n".join(text for kind, text in sources(FAMILY) if kind == "code")
    modules = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    assert modules == {"ratios", "advantages", "losses"}


def test_the_recorded_batch_is_one_of_the_page():
    batch = json.loads(family.BATCH.read_text())
    G = batch["group_size"]
    for row, (text, reward) in enumerate(zip(batch["responses"], batch["rewards"])):
        terms = [int(c) for c in batch["prompts"][row // G] if c.isdigit()]
        answer = ",".join(str(sum(terms[:i + 1]) % 10) for i in range(len(terms))) + "."
        assert reward == gspo.reward(text, answer) and len(batch["logp"][row]) == len(batch["old_logp"][row])
        assert len(batch["logp"][row]) - len(text) in (0, 1)            # its end token
    assert len(batch["rewards"]) == family.PROMPTS * G and 0.1 < sum(batch["rewards"]) / len(batch["rewards"]) < 0.9


def tells(book):
    """The shares that the notebook prints: seven rows, of which CISPO and SAPO remove nothing."""
    shares = {name: float(share) for name, share in re.findall(r"(\w+) +removes +([\d.]+)%", printed(book))}
    assert len(shares) == 7 and shares.keys() <= OBJECTIVES.keys(), shares
    assert shares["cispo"] == shares["sapo"] == 0 < shares["grpo"] < shares["gspo"], shares
    return shares


def test_the_familys_notebook_says_what_each_objective_removes():
    tells(FAMILY)


@pytest.mark.slow
def test_the_familys_notebook_runs():
    pytest.importorskip("nbclient")
    assert tells(executed(made(family.CELLS))) == tells(FAMILY), AGAIN
