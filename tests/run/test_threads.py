"""Threads of torch that wait do not spin for long, unless the user says so.
python -m pytest tests/run/test_threads.py

libgomp reads GOMP_SPINCOUNT when torch is loaded, so each entry point must set it before.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import importlib.abc, os, sys

class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Look())
import {entry}
"""


@pytest.mark.parametrize("entry", ["gspo", "train", "eval"])
@pytest.mark.parametrize("given, spins", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_before_torch_is_imported_the_spinning_is_limited_unless_the_user_has_set_it(
        entry, given, spins):
    own = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    bare = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run([sys.executable, "-c", LOOK.format(entry=entry)], env=bare | given,
                          cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == spins, done.stderr
