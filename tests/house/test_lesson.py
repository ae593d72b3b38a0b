"""docs/lesson.md is true, its exercises are solved.
python -m pytest tests/house/test_lesson.py

What fails here is corrected by hand, in the page or in the patch in docs/exercises/:
`git apply --reject` shows where a patch no longer fits.
"""

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from statistics import mean, stdev

import pytest
import torch

from documents import ROOT, blocks
from tiny_run import flags, metrics, python, read_json, write


def test_the_recorded_figures_are_what_experiments_lesson_makes_of_its_record():
    """fill.py writes them into the page: tests/house/test_evidence.py."""
    sys.path.insert(0, str(ROOT / "experiments"))
    import lesson
    record = read_json(ROOT / "experiments/results/lesson.json")
    assert record["texts"] == lesson.describe(record), "run python experiments/lesson.py"


def test_a_recorded_minibatch_is_measured_as_a_loop_over_its_tokens():
    """Two responses with Â ≠ 0, outside the paper's range, the first on its own side."""
    sys.path.insert(0, str(ROOT / "experiments"))
    import lesson
    one = lambda log_w, A: {"logp": [-1 + x for x in log_w], "old_logp": [-1.0] * len(log_w),
                            "advantage": A}
    found = lesson.measure_mini([one([.1, .3], 1.0), one([.0, .2], -1.0), one([.5], 0.0)])
    assert found == pytest.approx({
        "zero": 1 / 3, "v": .0125, "mean": .15, "sigma": .05, "median_w": .15, "median_s": .15,
        "outside": 1, "clipped": .5}, rel=1e-3)


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


def test_exercise_2_an_objective(tmp_path):
    """Responses of 4 and 16 tokens: 0.04/√|y| is 0.02 and 0.01 for s - 1."""
    losses = runpy.run_path(str(solved(tmp_path, 2) / "losses.py"))
    mask = torch.arange(16) < torch.tensor([[4], [16]])
    old = torch.full((2, 16), -1.0, dtype=torch.float64)
    for s, kept in ((1.0, [1, 1]), (1.009, [1, 1]), (1.015, [1, 0]), (1.025, [0, 0]),
                    (0.975, [1, 1])):
        logp = (old + math.log(s)).requires_grad_()
        loss, stats = losses["policy_loss"]("gspo_root", logp, old, torch.ones(2).double(), mask)
        pushed = -2 * mask.sum(-1) * torch.autograd.grad(loss, logp)[0][:, 0]      # N · |y|
        assert pushed.tolist() == pytest.approx([s * each for each in kept])
        assert stats["clip_low"] == 0
        assert stats["clip_high"].item() == pytest.approx(
            (mask.sum(-1) * (1 - torch.tensor(kept))).sum().item() / 20)


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


def test_exercise_1_lengths(tmp_path):
    """Three responses of each length whose s is 1.02, and their number that 0.04/√|y| clips."""
    code = solved(tmp_path, 1)
    one = lambda n, A: {"logp": [-1 + math.log(1.02)] * n, "old_logp": [-1.0] * n, "advantage": A}
    mini = [one(n, A) for n in (3, 9, 27) for A in (1.0, -1.0, 1.0)]
    (code / "run").mkdir()
    write(code / "run/minibatches.jsonl", json.dumps(
        {"step": 1, "minibatches": [[one(5, 1.0)], mini, [one(7, 0.0)]]}) + "\n")
    lines = python("lengths.py", "run", cwd=code).stdout.splitlines()
    pattern = r"\|y\| +([\d.]+) .*paper ([\d.]+)   0.01 ([\d.]+)   0.04/√\|y\| ([\d.]+)"
    found = [[float(x) for x in re.match(pattern, line).groups()] for line in lines]
    assert found == [[3, .667, .667, 0], [9, .667, .667, .667], [27, .667, .667, .667]]


# ------------------------------------------------------------------------------------- five lines

def test_the_five_lines_for_other_pipelines_print_what_a_loop_finds(capsys):
    """The block of docs/speed.md on four responses, one with Â = 0, against plain Python."""
    _, lines = next(block for block in blocks("docs/speed.md") if "lw, m, A = " in block[1][0])
    assert len(lines) == 5
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
