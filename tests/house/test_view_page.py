"""docs/view.html, the page of two recorded default runs, is what tools/viewer makes today.

    python train.py && python train.py --algorithm grpo
    python eval.py view runs/gspo runs/grpo --output docs/view.html --kilobytes 390

Its runs are folded below the toy, which the next command sees to. After a change of the viewer or
of losses.OBJECTIVES, from the runs inside the page:

    PYTHONPATH=. python tests/house/test_view_page.py
"""

import json
import re
from pathlib import Path

from tools import view

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/view.html").read_text(encoding="utf-8")
RUNS = json.loads(max(re.findall(r"\{.*\}", PAGE), key=len))["runs"]       # those inside the page


def remade():
    """The page as the viewer makes it of the same runs today, these folded below the toy."""
    return view.make_page(RUNS, largest=10 ** 9, folded=True)


def test_the_page_is_what_the_viewer_makes_of_its_runs_today():
    """To the last character: a browser runs no script whose digest the page does not name."""
    assert remade() == PAGE


def test_its_runs_are_the_default_run_and_grpos():
    assert [run["objective"] for run in RUNS] == ["gspo", "grpo"]
    assert all(len(run["curves"]) == 50 and len(run["groups"]) > 3 for run in RUNS)
    assert all(run["curves"][-1]["pass_rate"] > 0.85 for run in RUNS)


def test_it_is_small_and_linked_from_the_readme():
    assert len(PAGE.encode()) <= 480_000
    assert "docs/view.html" in (ROOT / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    (ROOT / "docs/view.html").write_text(remade(), encoding="utf-8")
