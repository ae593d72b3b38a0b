"""docs/view.html, the page of two recorded default runs, is what tools/viewer makes today.

    python train.py && python train.py --algorithm grpo
    python eval.py view runs/gspo runs/grpo --output docs/view.html --kilobytes 390
"""

import json
import re
from pathlib import Path

from tools import view

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/view.html").read_text()


def test_the_pages_code_is_that_of_the_viewer():
    html, style, *scripts = ((ROOT / "tools/viewer" / file).read_text() for file in view.FILES)
    assert style in PAGE and "\n".join(scripts) in PAGE
    for text in re.split(r"@\w+@", html):
        assert text in PAGE


def test_its_runs_are_the_default_run_and_grpos():
    data = max(re.findall(r"\{.*\}", PAGE), key=len)
    runs = json.loads(data)["runs"]
    assert [run["objective"] for run in runs] == ["gspo", "grpo"]
    assert all(len(run["curves"]) == 50 and len(run["groups"]) > 3 for run in runs)
    assert all(run["curves"][-1]["pass_rate"] > 0.85 for run in runs)


def test_it_is_small_and_linked_from_the_readme():
    assert len(PAGE.encode()) <= 400_000 and "](docs/view.html)" in (ROOT / "README.md").read_text()
