"""--report_to. python -m pytest tests/features/test_trackers.py"""

import sys
from types import ModuleType

from features.trackers import flat


def test_a_tracker_gets_every_record_and_the_run_in_flat_numbers(run, monkeypatch):
    package = ModuleType("trackio")
    started = []
    sent = []
    package.init = lambda **options: started.append(options)
    package.log = lambda numbers, step: sent.append((step, numbers))
    package.finish = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("atexit.register", lambda call: None)
    records = run("--report_to trackio --steps 3 --eval_samples 1 --eval_prompts 2")
    (options,), by_step = started, dict(sent)
    assert options["name"] == "run" and options["config"]["steps"] == 3
    for record in records:
        assert flat(record).items() <= by_step[record["step"]].items()


def test_one_that_is_not_installed_is_refused_before_the_first_batch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--report_to wandb" in run.refused("--report_to wandb")


def test_nested_numbers_have_names_and_the_rest_is_left_out():
    record = {"a": 1, "b": [2, None], "c": {"x": 3.0, "y": "no"}, "minibatches": [{"d": 4}]}
    assert flat(record) == {"a": 1, "b/0": 2, "c/x": 3.0}
