"""gspo.ipynb is gspo.py cell by cell, small, and runs. python -m pytest tests/house/test_notebook.py

After a change of gspo.py or tools/notebook.py: python tools/notebook.py writes it anew, with its outputs.
"""

import json
import re

import pytest

from tools.notebook import NOTEBOOK, ROOT, executed, notebook, page_cells, sources

PAGE = (ROOT / "gspo.py").read_text()
BOOK = json.loads(NOTEBOOK.read_text())
STALE = "python tools/notebook.py writes the notebook anew"


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


def learns(book):
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)   clipped", printed(book))]
    assert len(rewards) == 50 and rewards[0] < 0.7 and sum(rewards[-5:]) / 5 > 0.9, rewards


@pytest.mark.slow
def test_the_notebook_runs_and_its_policy_learns():
    pytest.importorskip("nbclient")
    learns(executed(notebook(PAGE)))
