"""The strangers' paths that need nothing but this environment.
python -m pytest -m "slow or checkpoint" tests/run/test_strangers.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from make_smollm2 import FOLDER, make_smollm2

SCRIPT = Path(__file__).parents[1] / "strangers.sh"


def walked(*paths):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([SCRIPT, *paths], env=os.environ | {"PATH": path}, timeout=900,
                          capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== path ") == 2 * len(paths)


@pytest.mark.slow
def test_a_changed_recipe_own_columns_and_a_killed_run():
    walked("2", "3", "4")


@pytest.mark.checkpoint
def test_an_adapter_is_loaded_merged_and_served():
    for package in ("peft", "fastapi"):
        pytest.importorskip(package)
    make_smollm2(str(SCRIPT.parents[1] / FOLDER))
    walked("5")
