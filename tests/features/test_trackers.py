"""--report_to. python -m pytest tests/features/test_trackers.py"""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest



@pytest.fixture
def failing(monkeypatch):
    """failing(init, log): a package trackio that raises there, where it is given True."""
    def make(init, log):
        package = ModuleType("trackio")
        package.__spec__ = object()
        package.finish = object()
        package.init = lambda **options: {}["key"] if init else None
        package.log = lambda numbers, step: {}["net"] if log else None
        monkeypatch.setitem(sys.modules, "trackio", package)
        monkeypatch.setattr("atexit.register", lambda call: None)
    return make


def test_a_tracker_that_does_not_start_is_one_line_and_one_that_fails_later_a_warning(
        failing, run, capsys):
    line = "--report_to trackio --steps 3 --eval_samples 1 --eval_prompts 2 "
    failing(init=True, log=False)
    said = run.refused(f"{line} --output_dir none")
    assert "--report_to trackio does not start: KeyError: 'key'" in said
    failing(init=False, log=True)
    assert len(run(line)) == 3 and Path("run/checkpoints/step_3").is_dir()
    err = capsys.readouterr().err
    assert err.count("--report_to trackio raised KeyError: 'net'") == err.count("warning") == 1


def test_a_tracker_that_is_not_installed_is_one_line_before_the_run(refused, monkeypatch):
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec",
                        lambda name, *rest: None if name == "trackio" else find(name, *rest))
    assert refused("--report_to trackio") == (
        "train.py: --report_to trackio needs a package that is not installed: "
        "pip install trackio\n")
