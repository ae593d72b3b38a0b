"""What CONTRIBUTING.md has a reader write for a feature: its file and two lines, and nothing else.

python -m pytest -m slow tests/features/test_own_feature.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from tiny_run import TINY, metrics

ROOT = Path(train.__file__).parent


def documented():
    """(name of the file, its text, the two lines, the words of the command)."""
    section = (ROOT / ".github/CONTRIBUTING.md").read_text().split("## A feature, for example\n")[1]
    section = section.split("\n## ")[0]
    name, = re.findall(r"One file, `(\S+)`", section)
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", section, re.M)
    blocks = ["\n".join(line[4:] for line in block.strip("\n").splitlines())
              for block in blocks if block.strip()]
    text, lines, command = blocks
    return name, text + "\n", lines.splitlines(), command.split()[1:]


@pytest.fixture
def program(cold_start, tmp_path):
    """program(*words) runs Python in a copy of the program with the feature, in program.home."""
    home = tmp_path / "program"
    for folder in ("features", "plumbing", "tools"):
        shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, home)
    (home / "runs").mkdir()
    (home / "runs" / "cold_start").symlink_to(cold_start)
    name, text, lines, _ = documented()
    assert len(lines) == 2 and len(text.splitlines()) <= 36
    (home / name).write_text(text)
    with open(home / "features/__init__.py", "a") as listed:
        listed.write("\n".join(["", *lines, ""]))

    def call(*words):
        return subprocess.run([sys.executable, *words], cwd=home, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    call.home = home
    return call


@pytest.mark.slow
def test_a_documented_feature_trains_by_its_file_and_two_lines(program):
    *_, command = documented()
    flag, value = command[1:3]
    done = program(*command, *TINY, "--warmup_steps", "0")
    assert done.returncode == 0, done.stderr
    folder = command[-1]
    limits = [record["advantage_limit"] for record in metrics(program.home / folder)]
    assert len(limits) == 3 and all(0 < limit < 3 for limit in limits)
    assert program("train.py", *TINY, "--warmup_steps", "0", "--steps", "3", "--output_dir",
                   "plain").returncode == 0
    limited, plain = (metrics(program.home / one) for one in (folder, "plain"))
    assert "advantage_limit" not in plain[0] and limited[0]["reward"] == plain[0]["reward"]
    assert limited[0]["grad_norm"] < plain[0]["grad_norm"], "the largest advantages are smaller"
    help = " ".join(program("train.py", "--help").stdout.split())
    assert f"{flag} float limit advantages" in help and "the size of advantages:" in help
    said = program("train.py", flag, "2")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and f"{flag} 2.0" in said.stderr
    said = program("tools/export.py", "trl", "--algorithm", "grpo", flag, value).stdout
    assert f"{flag} {value}" in said.split("trl.GRPOConfig(")[0]
