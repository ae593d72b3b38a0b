"""GOMP_SPINCOUNT. What stands on a command line: test_bad_arguments.py.
python -m pytest tests/run/test_command_line.py"""

import os
import subprocess
import sys

import pytest

from tiny_run import ROOT

# libgomp reads GOMP_SPINCOUNT when torch is loaded: each entry point must set it before.
SPIN = """
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


@pytest.mark.parametrize("entry", ["train", "eval"])
@pytest.mark.parametrize("given, spins", [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_before_torch_is_imported_the_spinning_is_limited_unless_the_user_has_set_it(
        entry, given, spins):
    own = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    bare = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run([sys.executable, "-c", SPIN.format(entry=entry)], env=bare | given,
                          cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == spins, done.stderr
