"""epsilon and epsilon_over_std of metrics.jsonl: the clip range beside the standard deviation of log s."""

import itertools
import math

import train
from plumbing.run import metrics as records_of
from tiny_run import TINY, metrics


def test_the_band_is_told_beside_the_spread_of_log_s_where_s_is_clipped(workplace):
    train.main([*TINY, "--steps", "2", "--learning_rate", "2e-3", "--output_dir", "run"])
    for record in metrics("run"):
        assert record["epsilon"] == 3.5e-4
        assert record["epsilon_over_std"] == 3.5e-4 / math.sqrt(record["log_s_var"])
    train.main([*TINY, "--steps", "1", "--algorithm", "grpo", "--output_dir", "grpo"])
    assert "epsilon" not in metrics("grpo")[0]


def test_while_no_group_has_a_signal_rounding_is_not_a_spread(workplace, monkeypatch):
    """Hard tasks begin with equal rewards. Against the sampler's log-probs, an unchanged policy differs by rounding."""
    def equal_at_first(*args, **kwargs):
        task = sums(*args, **kwargs)
        judged = itertools.count()
        verify = task.verify
        first = 2 * 16                                       # two batches of 16 responses
        task.verify = lambda text, problem: 0.0 if next(judged) < first else verify(text, problem)
        return task
    sums = train.tasks.running_sum
    monkeypatch.setattr(train.tasks, "running_sum", equal_at_first)
    train.main([*TINY, "--old_logp", "sampler", "--steps", "3", "--warmup_steps", "0", "--output_dir", "run"])
    records = metrics("run")
    assert [r["dead_groups"] == 1 for r in records] == [True, True, False]
    for record in records[:2]:
        assert 0 < record["log_s_var"] < records_of.ROUNDING and record["epsilon_over_std"] is None
    assert records[2]["epsilon_over_std"] > 0
