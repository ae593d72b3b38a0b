"""--epsilon auto: the clip range follows the standard deviation of log s, and nothing else of a run changes."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

import train
from losses import OBJECTIVES
from plumbing.run import band
from plumbing.run.arguments import parse
from tools import export, view
from test_resume import interrupted
from tiny_run import TINY, differences, metrics

AUTO = ["--epsilon", "auto"]
STEPS = ["--steps", "6", "--learning_rate", "2e-3"]


def median_band(records, scale):
    """What the docstring of plumbing/run/band.py says, from metrics.jsonl alone: [(low, high)] of every batch."""
    paper, bands = OBJECTIVES["gspo"], []
    for i in range(len(records)):
        before = [math.sqrt(r["log_s_var"]) for r in records[max(0, i - 4):i]]
        bands.append((min(scale * statistics.median(before), .2),) * 2 if before else (paper.epsilon, paper.epsilon_high))
    return bands


@pytest.mark.parametrize("value, scale", [("auto", 2), ("auto:0.5", .5)])
def test_the_edges_of_every_update_are_the_measured_ones(value, scale, workplace, monkeypatch, capsys):
    used, loss = [], train.policy_loss

    def noted(*args, **options):
        used.append((options["epsilon"], options["epsilon_high"]))
        return loss(*args, **options)
    monkeypatch.setattr(train, "policy_loss", noted)
    train.main([*TINY, *STEPS, "--epsilon", value, "--output_dir", "run"])
    records, printed = metrics("run"), capsys.readouterr().out
    bands = median_band(records, scale)
    assert used[::2] == used[1::2]                                          # two mini-batches per rollout batch, both alike
    assert [x for edges in used[::2] for x in edges] == pytest.approx([x for edges in bands for x in edges])
    assert len(set(bands)) > 3
    for record, (low, high) in zip(records, bands):
        assert record["epsilon"] == pytest.approx((low + high) / 2)
        assert record["epsilon_over_std"] == pytest.approx((low + high) / 2 / math.sqrt(record["log_s_var"]))
    assert f"clip range 1 ± {scale:g} standard deviations" in printed and printed.count("std)") == 6
    assert json.loads(Path("run/config.json").read_text())["arguments"]["epsilon"] == f"auto:{scale:g}"


def test_a_resumed_run_has_the_same_bands(workplace, monkeypatch):
    argv = [*TINY, *STEPS, *AUTO, "--save_steps", "2"]
    train.main([*argv, "--output_dir", "whole"])
    interrupted(monkeypatch, [*argv, "--output_dir", "resumed"], step=5)      # saved after batch 4, goes on with a window of four
    assert differences("whole", "resumed", 6) == []
    state = torch.load("whole/checkpoints/step_6/state.pt", weights_only=True)
    assert len(state["progress"]["log_s_std"]) == 4


def test_a_fixed_band_is_told_and_keeps_no_state(workplace):
    train.main([*TINY, "--steps", "2", "--output_dir", "run"])
    assert [r["epsilon"] for r in metrics("run")] == [3.5e-4] * 2
    state = torch.load("run/checkpoints/step_2/state.pt", weights_only=True)
    assert "log_s_std" not in state["progress"]
    train.main([*TINY, "--steps", "1", "--algorithm", "grpo", "--output_dir", "grpo"])
    assert "epsilon" not in metrics("grpo")[0]


def test_one_collapse_does_not_widen_the_band_and_nothing_widens_it_beyond_its_limit():
    args, progress = parse(AUTO), {}
    bands = band.AutoBand(args, progress)
    assert bands.edges() == (3e-4, 4e-4)
    for var in (1e-4, 1e-4, 1e-4, 4.0, float("nan"), 0.0, float("inf")):      # what is no measurement is not counted
        bands.update(1e-3, var)
    bands.update(0.9 * band.ROUNDING, 1e-12)                                  # nor is rounding,
    bands.update(1e-3, 1e-6, 2e-3)                                            # of 16 bits neither
    assert bands.edges() == (pytest.approx(.02),) * 2
    assert len(progress["log_s_std"]) == 4
    for _ in range(4):
        bands.update(1e-3, 4.0)
    assert bands.edges() == (.2, .2)
    for _ in range(4):
        bands.update(1.1 * band.ROUNDING, 1e-16)
    assert bands.edges() == (band.NARROWEST,) * 2 == (1e-5,) * 2
    assert band.make_band(parse([]), {}) is None


@pytest.mark.parametrize("flags, told", [
    ("--epsilon auto --algorithm grpo", "clips the sequence ratio s"),
    ("--epsilon auto --algorithm sequence_is", "clips the sequence ratio s"),
    ("--epsilon auto --algorithm sapo", "clips the sequence ratio s"),
    ("--epsilon auto --epsilon_high 0.01", "sets both ends of the clip range"),
    ("--epsilon auto:0", "auto:C"), ("--epsilon auto:", "auto:C"), ("--epsilon auto:-1", "auto:C"),
    ("--epsilon automatic", "auto:C"), ("--epsilon auto:inf", "auto:C"), ("--epsilon nan", "finite")])
def test_refusals(flags, told, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and told in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("algorithm", ["gspo", "gspo_token", "luspo"])
def test_objectives_that_clip_s(algorithm):
    assert parse([*AUTO, "--algorithm", algorithm]).epsilon_high == "auto:2"


def test_trl_has_no_such_band(capsys):
    export.main(["trl", *AUTO])
    assert "clip range that follows log s" in capsys.readouterr().out


def test_the_view_opens_with_the_median_band(workplace):
    train.main([*TINY, *STEPS, *AUTO, "--output_dir", "run"])
    shown = view.read_run(Path("run"))
    assert shown["epsilon"] == shown["epsilon_high"] == statistics.median(r["epsilon"] for r in metrics("run"))
    assert [c["epsilon_over_std"] for c in shown["curves"]] == [r["epsilon_over_std"] for r in metrics("run")]


def test_while_no_group_has_a_signal_rounding_does_not_become_a_clip_range(workplace, monkeypatch):
    """Hard tasks begin with equal rewards. Against the sampler's log-probs, an unchanged policy differs by rounding."""
    def equal_at_first(*args, **kwargs):
        task, judged = sums(*args, **kwargs), itertools.count()
        verify, first = task.verify, 2 * 16                                   # two batches of 16 responses
        task.verify = lambda text, problem: 0.0 if next(judged) < first else verify(text, problem)
        return task
    sums = train.tasks.running_sum
    monkeypatch.setattr(train.tasks, "running_sum", equal_at_first)
    train.main([*TINY, *AUTO, "--old_logp", "sampler", "--steps", "4", "--warmup_steps", "0", "--output_dir", "run"])
    records = metrics("run")
    assert [r["dead_groups"] == 1 for r in records] == [True, True, False, False]
    assert all(0 < r["log_s_var"] < band.ROUNDING and r["epsilon_over_std"] is None for r in records[:2])
    assert [r["epsilon"] for r in records[:3]] == [3.5e-4] * 3
    first = records[2]["minibatches"][0]
    assert first["clip_low"] == first["clip_high"] == 0, "every ratio is 1"
    assert records[3]["epsilon"] == pytest.approx(2 * math.sqrt(records[2]["log_s_var"]))
