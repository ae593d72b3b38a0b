"""--save_minibatches: the log-probs that the clip acted on, in every mini-batch of a batch.
python -m pytest tests/features/test_minibatches.py"""

import math
from statistics import mean

import pytest

from tiny_run import read_json


def log_s(one):
    return mean(map(float.__sub__, one["logp"], one["old_logp"]))


def test_a_line_has_every_mini_batch_as_it_was_before_its_step(run):
    """Plain, so that zero-variance groups are scored, too: 4 groups of 4 in 2 mini-batches."""
    record, = run("--plain --save_minibatches --steps 1 --learning_rate 1e-2")
    line, = read_json("run/minibatches.jsonl")
    assert line["step"] == 1 and [len(mini) for mini in line["minibatches"]] == [8, 8]
    first, second = line["minibatches"]
    assert all(abs(log_s(one)) < 1e-6 for one in first), "before the first step s is 1"
    assert any(abs(log_s(one)) > 1e-4 for one in second)
    clipped, tokens = [], []
    for mini in (first, second):
        gone = [log_s(one) > math.log(1 + 4e-4) if one["advantage"] > 0 else
                one["advantage"] < 0 and log_s(one) < math.log(1 - 3e-4) for one in mini]
        clipped.append(sum(len(one["logp"]) for one, each in zip(mini, gone) if each))
        tokens.append(sum(len(one["logp"]) for one in mini))
    share = mean(c / n for c, n in zip(clipped, tokens))
    assert share == pytest.approx(record["clip_low"] + record["clip_high"], abs=1e-6)
    assert mean(one["reward"] for mini in (first, second) for one in mini) == pytest.approx(
        record["reward"])


def test_advantages_per_token_are_recorded_per_token_and_a_resumed_run_has_each_batch_once(run):
    run("--save_minibatches --plain --algorithm ppo --steps 2 "
        "--save_steps 1")
    run("--resume --steps 3")
    lines = read_json("run/minibatches.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    one = lines[0]["minibatches"][0][0]
    assert len(one["advantage"]) == len(one["logp"]) == len(one["old_logp"])
