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


if __name__ == "__main__":
    (ROOT / "docs/view.html").write_text(remade(), encoding="utf-8")
