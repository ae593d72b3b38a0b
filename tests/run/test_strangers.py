"""The strangers' paths that need nothing but this environment. python -m pytest -m slow
tests/run/test_strangers.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "strangers.sh"


@pytest.mark.slow
def test_a_changed_recipe_own_columns_and_a_killed_run():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([SCRIPT, "2", "3", "4"], env=os.environ | {"PATH": path}, timeout=600,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== path ") == 6
