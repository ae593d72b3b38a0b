"""docs/view.html, the page of two recorded default runs, is what tools/viewer makes today.

    python train.py && python train.py --algorithm grpo
    python eval.py view runs/gspo runs/grpo --output docs/view.html

Its runs are folded below the toy, which the next command sees to. After a change of the viewer or
of losses.OBJECTIVES, from the runs inside the page:

    PYTHONPATH=. python tests/house/test_view_page.py
"""

import json
import re
from pathlib import Path

from tools import view

FILE = Path(__file__).parents[2] / "docs/view.html"
PAGE = FILE.read_text(encoding="utf-8")


def remade():
    """The page as the viewer makes it of the same runs today, these folded below the toy."""
    data, = re.findall(r'(?s)id="data">(.*?)</script>', PAGE)
    records = map(json.loads, data.splitlines())
    return view.make_page([run for run in records if "groups" in run], folded=True)


def test_the_page_is_what_the_viewer_makes_of_its_runs_today():
    assert remade() == PAGE


if __name__ == "__main__":
    FILE.write_text(remade(), encoding="utf-8")
