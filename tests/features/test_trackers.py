"""--report_to. python -m pytest tests/features/test_trackers.py"""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from tiny_run import metrics, read_json


def test_tensorboard_gets_the_metrics_and_the_parts_of_the_reward_once(killed, run):
    """Also those of a batch that is made again after a kill."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed(2, "--steps 2 --save_steps 1 --report_to tensorboard")
    records = run("--resume")
    events = accumulator.EventAccumulator("run/tensorboard").Reload()
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("minibatches")]
    for name in ("reward", "loss", "reward_parts/correct", "flip_rate_per_layer/0", "lr"):
        outer, _, inner = name.partition("/")
        values = [record[outer] for record in records]
        if inner:
            values = [value[int(inner) if inner.isdigit() else inner] for value in values]
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        assert logged == [(step, pytest.approx(value, rel=1e-6))
                          for step, value in enumerate(values, 1)], name


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_them_too(name, run, monkeypatch):
    """A module that stands in for the package and notes what it is given."""
    calls, package = [], ModuleType(name)
    package.__spec__ = object()
    package.init = lambda **options: calls.append(options)
    package.log = lambda numbers, step: calls.append((step, numbers))
    package.finish = object()
    monkeypatch.setitem(sys.modules, name, package)
    at_the_end = []
    monkeypatch.setattr("atexit.register", at_the_end.append)
    run("--steps 2 --eval_steps 1 --eval_samples 1 --eval_prompts 3 --report_to", name)
    start, *logged = calls
    assert start["name"] == "run" and start["config"]["steps"] == 2
    assert start["project"] == "gspo" and package.finish in at_the_end
    assert [step for step, _ in logged] == [0, 1, 2, 2]      # before, two batches, after
    first, second = logged[1][1], logged[2][1]
    held_out = [first[f"pass_at_1/{i}"] for i in range(3)]   # the mean and its interval
    assert held_out == metrics("run")[0]["pass_at_1"]
    assert second["reward"] == metrics("run")[1]["reward"] and second["reward_parts/correct"] >= 0
    summary = read_json("run/summary.json")
    for (_, numbers), when in ((logged[0], "before"), (logged[-1], "after")):
        assert numbers["pass_at_1/0"] == summary[f"pass_at_1_{when}"]


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
