"""Dynamic sampling. python -m pytest tests/features/test_dynamic_sampling.py"""

from pathlib import Path

import pytest
import torch

from features.dynamic_sampling import DynamicSampling


def test_dynamic_sampling_ends_when_there_is_nothing_left_to_learn(run, judge):
    """Ten rounds without a mixed group: the batch is filled with others, the run goes on."""
    judge(lambda n, right, problem: 1)
    records = run("--algorithm dapo --steps 2 --overlong_cache 0")       # no length in the reward
    assert [record["zero_variance_groups"] for record in records] == [1.0, 1.0]
    assert Path("run/checkpoints/step_2").is_dir()


def test_dynamic_sampling_logs_what_was_sampled(run, first):
    """The pass rate of the groups that were kept alone says nothing about the policy."""
    rounds = []
    first(DynamicSampling, "_find_signal", lambda self, *found: rounds.append(found))
    record, = run("--algorithm dapo --num_generations 2 --overlong_cache 0")
    rewards = torch.cat([parts[:, 0] for _, _, parts in rounds]).view(-1, 2)          # [groups, 2]
    lengths = [sum(row) for rollout, _, _ in rounds for row in rollout.mask.tolist()]
    assert len(rounds) > 1 and len(rewards) == 4 * len(rounds)
    assert record["pass_rate"] == pytest.approx(rewards.mean().item())
    assert record["discarded_groups"] == len(rewards) - 4
    assert record["length"] == pytest.approx(sum(lengths) / len(lengths))
    assert record["reward"] == pytest.approx(rewards.mean().item())
    equal = (rewards[:, 0] == rewards[:, 1]).float().mean().item()
    assert record["zero_variance_groups"] == pytest.approx(equal)
