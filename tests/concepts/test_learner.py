"""What a learner changes in losses.py is noticed by the rest: a new objective, clip and statistic, tried on a copy of the code
from the command line. python -m pytest -m "slow or not slow" tests/concepts/test_learner.py"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_run import TINY, metrics

ROOT = Path(__file__).parent
ROOT = next(folder for folder in ROOT.parents if (folder / "losses.py").exists())
LEFT_OUT = shutil.ignore_patterns(".git", "runs", "checkpoints", "__pycache__", ".pytest_cache", "*.png")

ROW = '''OBJECTIVES = {
    "mine": Objective("token", "hard", 0.001, 0.001, "sequence-mean", constants=dict(slope=1.0)),
'''
CASE = '''    none = torch.zeros_like(mask)                               # [B, T]
    if clip == "hard":
        below, above = ratio < low, ratio > high
        return (constants["slope"] * ratio * A).masked_fill(below | above, 0.0), below, above
'''
STATISTIC = '''    stats["far"] = (mask & ((ratio - 1).abs() > 0.001)).sum() / mask.sum().clamp(min=1)
    return loss, stats | ratio_stats(logp, old_logp, mask)
'''
ENTRY = '''STATISTICS = {
    "far": "tokens",
'''


def in_place_of(text, *replacements):
    """Each replacement's line in place of the text's line with the same beginning."""
    for new in replacements:
        first = new.splitlines()[-1 if new == STATISTIC else 0]
        old, = (line for line in text.splitlines() if line.startswith(first))
        text = text.replace(f"{old}\n", new, 1)
    return text


def copied(folder, cold_start, *replacements):
    """A copy of the code in which losses.py has these lines."""
    code = folder / "code"
    shutil.copytree(ROOT, code, ignore=LEFT_OUT)
    (code / "runs").mkdir()
    (code / "runs/cold_start").symlink_to(cold_start)
    losses = code / "losses.py"
    losses.write_text(in_place_of(losses.read_text(), *replacements))
    return code


def call(code, *words):
    return subprocess.run([sys.executable, *words], cwd=code, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


def trained(code, *flags):
    command = [*TINY, "--steps", "1", "--warmup_steps", "0", "--learning_rate", "0.01", "--micro_batch_size", "4",
               "--algorithm", "mine", "--output_dir", "run", *flags]
    return call(code, "train.py", *command)


@pytest.mark.slow
def test_a_new_hard_clip_reports_what_it_removed_and_a_new_statistic_is_recorded(tmp_path, cold_start):
    code = copied(tmp_path, cold_start, ROW, CASE, STATISTIC, ENTRY)
    done = trained(code)
    assert done.returncode == 0, done.stderr[-2000:]
    record, = metrics(code / "run")
    removed = record["clip_low"] + record["clip_high"]
    assert record["clip_low"] > 0 and record["clip_high"] > 0 and record["clip_signal"] > 0
    assert 0 < removed <= 1 and 0 < record["far"] <= 1
    assert "slope=1.0" in (code / "run/config.json").read_text()


@pytest.mark.slow
def test_a_statistic_that_says_not_what_it_is_averaged_over_is_refused_in_one_line(tmp_path, cold_start):
    done = trained(copied(tmp_path, cold_start, ROW, CASE, STATISTIC))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "statistic far" in done.stderr and "losses.STATISTICS" in done.stderr


@pytest.mark.slow
def test_a_new_row_alone_is_an_algorithm_and_enters_the_documents(tmp_path, cold_start):
    row = ROW.replace('"hard"', '"min"').replace(", constants=dict(slope=1.0)", ', "2600.00001"')
    code = copied(tmp_path, cold_start, row)
    done = trained(code)
    assert done.returncode == 0 and metrics(code / "run")[0]["clip_low"] > 0, done.stderr[-2000:]
    assert call(code, "experiments/readme.py").returncode == 0
    page = (code / "docs/family.md").read_text()
    assert "| `mine` | token | min | 0.001, 0.001 | – | sequence-mean | 2600.00001 |" in page
    assert "| `mine` | `mine` | – | – |" in page


@pytest.mark.slow
def test_the_tests_of_the_losses_take_what_is_new_as_it_comes(tmp_path, cold_start):
    code = copied(tmp_path, cold_start, ROW, CASE, STATISTIC, ENTRY)
    file, = (f.relative_to(ROOT) for f in (ROOT / "tests").rglob("test_losses.py"))
    done = call(code, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "[mine" in call(code, "-m", "pytest", "--collect-only", "-q", str(file)).stdout
