"""Metrics that compare two policies, at a learning rate of 1e-12: what equal policies give.
python -m pytest tests/run/test_equal_policies.py
"""

import pytest

from tiny_run import slow

STILL = "--learning_rate 1e-12 --warmup_steps 0 --steps 2 --beta 0.1"
EQUAL = {"log_w_mean": 0, "log_w_var": 0, "log_s_mean": 0, "log_s_var": 0, "ratio_max": 1,
         "delta_h": 0, "clip_low": 0, "clip_high": 0, "clip_signal": 0, "kl": 0, "flip_rate": 0,
         "mismatch_kl": 0, "mismatch_ess": 1, "mismatch_chi2": 0}


def check(record, *apart):
    """All of EQUAL that a record has, but for some names; null where nothing was compared."""
    for name in EQUAL.keys() & record.keys() - {*apart}:
        assert record[name] in (None, pytest.approx(EQUAL[name], rel=1e-5, abs=2e-6)), name
    assert record["perplexity_new"] == pytest.approx(record["perplexity_old"], rel=1e-5)


@pytest.mark.parametrize("line", [
    "--old_logp sampler", "--dynamic_sampling", "--micro_batch_size 2", "--plain",
    "--num_generations 8", "--algorithm grpo --mismatch token_truncate",
    *map(slow, ["--algorithm ppo", "--algorithm dppo", "--num_hidden_layers 2", "--use_peft",
                "--num_iterations 2", "--entropy_quantile 0.8 --algorithm grpo"])])
def test_a_policy_that_stays_differs_from_itself_by_rounding(line, run):
    for record in run(f"{STILL} {line}"):
        check(record)


@pytest.mark.parametrize("line", [
    "--plain --algorithm grpo", "--micro_batch_size 2", "--algorithm rspo",
    *map(slow, ["--dynamic_sampling", "--gradient_checkpointing"])])
def test_routing_replay_with_a_rounded_sampler(line, run):
    """The sampler chooses other experts than the policy, in every response."""
    for record in run(f"{STILL} --routing_replay rollout --sampler_dtype int3 {line}"):
        check(record, "mismatch_kl")
        assert record["mismatch_kl"] > 1e-3 and record["flip_rate"] == 0
