"""docs/lesson.md is true, its exercises are solved.
python -m pytest tests/house/test_lesson.py

What fails here is corrected by hand, in the page or in the patch in docs/exercises/:
`git apply --reject` shows where a patch no longer fits.
"""

import re
import runpy
import shutil
import subprocess
import sys
from statistics import mean, stdev

import pytest
import torch

from documents import DOCUMENTS, ROOT, blocks
from tiny_run import flags, metrics, python, read_json


def test_the_recorded_figures_are_what_experiments_lesson_makes_of_its_record():
    """fill.py writes them into the page: tests/house/test_evidence.py."""
    sys.path.insert(0, str(ROOT / "experiments"))
    import lesson
    record = read_json(ROOT / "experiments/results/lesson.json")
    assert record["texts"] == lesson.describe(record), "run python experiments/lesson.py"


# ---------------------------------------------------------------------------------- the exercises

def solved(folder, number):
    """A copy of the code with the solution of one exercise applied."""
    patch, = (ROOT / "docs/exercises").glob(f"{number}-*.patch")
    code = folder / "code"
    for name in ("features", "plumbing", "session", "tools"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, code)
    subprocess.run(["git", "apply", patch], cwd=code, check=True)
    subprocess.run(["git", "apply", "-R", "--check", patch], cwd=code, check=True)
    return code


@pytest.mark.parametrize("number, passed", [(1, 1), (2, 5)])
def test_the_solution_passes_the_check_of_its_exercise(number, passed, tmp_path):
    code = solved(tmp_path, number)
    shutil.copytree(ROOT / "docs/exercises", code / "docs/exercises")
    said = python("-m", "pytest", "-p", "no:cacheprovider", "docs/exercises", cwd=code).stdout
    assert f"{passed} passed, {6 - passed} skipped" in said


def test_exercise_3_a_task(tmp_path, monkeypatch):
    """The first digit alone earns 1 of the reward, a third of the repaired one."""
    code = solved(tmp_path, 3)
    names = runpy.run_path(str(code / "repeat.py"))
    given = {"314": (1, 1), "3": (1, 1 / 3), "": (0, 0), "34": (.5, 1 / 3), "3141": (.75, .75)}
    assert {text: (names["reward"](text, "314"), names["repaired"](text, "314"))
            for text in given} == given
    monkeypatch.chdir(code)
    runpy.run_path("repeat.py", run_name="__main__")
    rows = read_json(code / "repeat.jsonl")
    assert len(rows) == 1000 and all(row["prompt"] == row["answer"] + "=" for row in rows)


# ------------------------------------------------------------------------------------- the page

SECTIONS = re.split(r"\n(?=## )", DOCUMENTS["docs/lesson.md"])
NUMBER = re.compile(r"(?<![\w.])[+−]?(?:\d+(?:[.,]\d+)*|\.\d+)%?")


def test_the_lesson_is_short():
    assert len(DOCUMENTS["docs/lesson.md"].split()) <= 3000


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.split("\n")[0])
def test_a_section_has_twenty_numbers_at_most(section):
    """Outside code, links, headings, ε, and the numbers of papers."""
    text = re.sub(r"(?s)```.*?```|^    .*?$|`[^`]*`|\]\([^)]*\)|^#.*?$", " ", section, flags=re.M)
    text = re.sub(r"ε(?:_high)? = [\d.e-]+|arXiv\s+\d{4}\.\d+|eq\. \d+", " ", text)
    assert len(NUMBER.findall(text)) <= 20, NUMBER.findall(text)


def test_the_ten_lines_are_those_of_gspo():
    lesson, = re.findall(r"(?s)```python\n(.*?)```", DOCUMENTS["docs/lesson.md"])
    code = (ROOT / "gspo.py").read_text(encoding="utf-8").splitlines()
    assert all(line in code for line in lesson.splitlines())


# --------------------------------------------------------------------------------------- six lines

def test_the_six_lines_for_other_pipelines_print_what_a_loop_finds(capsys):
    """The block of docs/speed.md on four responses, one with Â = 0, against plain Python."""
    _, lines = next(block for block in blocks("docs/speed.md") if "lw, m, A = " in block[1][0])
    assert len(lines) == 6
    rows, A = [[.01, .03], [-.02], [.004, -.002, .001], [.5, .5]], [1.0, 1.0, -1.0, 0.0]
    mask = torch.arange(3) < torch.tensor([[len(row)] for row in rows])                  # [4, 3]
    old = torch.full((4, 3), -1.0, dtype=torch.float64)
    logp = old + torch.tensor([row + [9.0] * (3 - len(row)) for row in rows]).double()   # padding
    given = dict(logp=logp, old=old, mask=mask, A=torch.tensor(A).double(), eps=5e-3)
    exec("\n".join(lines), given)
    tokens, log_s = sum(rows[:3], []), [mean(row) for row in rows[:3]]
    printed = capsys.readouterr().out.replace("A ≠ 0", "")
    figures = [float(x) for x in re.findall(r"-?\d[\d.]*(?:e-?\d+)?", printed)]
    assert figures == pytest.approx([
        mean(tokens), stdev(tokens), mean(log_s), stdev(log_s), 5e-3 / stdev(log_s), 2 / 3, 1 / 3,
        stdev(tokens)**2 / mean(log_s)**2], rel=.05)


# ------------------------------------------------------------------- the solved exercises train

@pytest.mark.slow
@pytest.mark.parametrize("number, words", [
    (2, "--algorithm gspo_root"),
    (3, "--dataset_name repeat.jsonl --verifier exact repeat.py:reward --reward_weights 0 1 "
        "--max_completion_length 6")])
def test_the_solved_exercises_train(number, words, cold_start, tmp_path):
    code = solved(tmp_path, number)
    if number == 3:
        python("repeat.py", cwd=code)
        words = f"{words} --model_name_or_path {cold_start}"
    (code / "runs").mkdir()
    (code / "runs/cold_start").symlink_to(cold_start.parent)
    python("train.py", *flags(*words.split()), "--steps", "1", "--output_dir", "run", cwd=code)
    record, = metrics(code / "run")
    assert record["verifier_errors"] == record["skipped"] == 0 <= record["reward"] <= 1
