"""Every metric at a learning rate of 1e-12 is what equal policies give, under every flag.

The flags are those of test_flags.py, which has an entry for every field of Settings; the flags
that change routes, sampler or batch run by default, the others with -m slow. A metric that is in
neither of the tables below fails: say what equal policies give.
python -m pytest tests/run/test_equal_policies.py
"""

import math
from pathlib import Path

import pytest

import train
from features.mismatch import read_mask_bounds
from features.sampler_format import find_sampler_format
from session.arguments import parse
from test_flags import EFFECTS, home, observed, run, tiny_for  # noqa: F401
from tiny_run import TINY, metrics, slow

STILL = "--learning_rate 1e-12 --warmup_steps 0 --steps 2"
ROUNDING = 2e-6                                              # of log-probs in float32

# What equal policies give: a number, None, or a function of (record, arguments).
EQUAL = {
    "log_w_mean": 0, "log_w_var": 0, "log_s_mean": 0, "log_s_var": 0, "ratio_max": 1,
    "variance_factor": None,
    "delta_h": lambda record, args: None if record["perplexity_old"] is None else 0,
    "perplexity_new": lambda record, args: record["perplexity_old"],
    "clip_low": 0, "clip_high": 0, "clip_signal": 0, "kl": 0,
    "flip_rate": 0, "flip_rate_per_layer": lambda record, args: [0.0] * args.num_hidden_layers,
    "mismatch_kl": lambda record, args: (None if args.old_logp == "sampler" else 0 if exact(args)
                                         else record["mismatch_kl"]),
    "mismatch_ess": lambda record, args: 1 if exact(args) else record["mismatch_ess"],
    "mismatch_chi2": lambda record, args: 0 if exact(args) else record["mismatch_chi2"],
}

NO_TOKENS = {"kl": None, "mismatch_kl": None, "ratio_max": 0}    # where every response was cut off

# What does not compare two policies.
ONE_POLICY = set("""step reward reward_std reward_parts pass_rate length inverse_length truncated
    zero_variance_groups discarded_groups loss value_loss kl_loss
    entropy_loss balance_loss grad_norm skipped minibatches
    perplexity_old entropy lr
    verifier_errors seconds_rollout seconds_logp seconds_update tokens_per_second
    rollout_tokens_per_second pass_at_1
    held_out_reward held_out_parts turns out_of_turns turn_reward_1 turn_reward_2 turn_reward_3
    turn_reward_4""".split())


def exact(args):
    """Whether the sampler computes in the trainer's float32, and the limits of its weights leave
    the weight 1 as it is."""
    low, high = read_mask_bounds(args)
    kept = low <= 1 <= min(high, args.mismatch_high)
    return kept and find_sampler_format(args) == "float32" and not args.autocast_dtype


def apart(record, args):
    """The metrics that are not what equal policies give."""
    found = []
    masked = args.mask_truncated_completions and record["truncated"] == 1
    for name in record.keys() - ONE_POLICY:
        want = (EQUAL | NO_TOKENS if masked else EQUAL)[name]
        want = want(record, args) if callable(want) else want
        value = record[name]
        if name.startswith("flip") and value is None:        # a dense policy, or not recorded
            continue
        pairs = list(zip(value, want)) if isinstance(want, list) else [(value, want)]
        for x, y in pairs:
            if (x is None) != (y is None) or x is not None and not math.isclose(
                    x, y, rel_tol=1e-5, abs_tol=ROUNDING):
                found.append(f"batch {record['step']}, {name}: {x}, not {y}")
    return found


def check(records, args):
    unknown = {name for record in records for name in record} - EQUAL.keys() - ONE_POLICY
    assert not unknown, f"say in EQUAL or ONE_POLICY what equal policies give for {unknown}"
    assert len(records) == 2 and [line for record in records for line in apart(record, args)] == []


FIRST = """old_logp sampler dynamic_sampling beta micro_batch_size plain bf16
    num_generations""".split()
# A run that goes on needs one with the same flags; a dry run writes no metrics.
NOTHING = ("resume", "dry_run")


@pytest.mark.parametrize("flag", [
    flag if flag in FIRST else slow(flag)
    for flag in EFFECTS if flag not in {*NOTHING, "config"}])     # a file of other flags
def test_a_flag_alone(flag, run, home, monkeypatch):  # noqa: F811
    both, *values, _ = EFFECTS[flag]
    monkeypatch.chdir(home)                                  # where files of the flags are
    if "vllm" in both:                                       # as in test_flags.py
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "features/fake"))
    runs = [f"{both} {'' if value is None else f'--{flag} {value}'}" for value in values]
    runs = [f"{flags} --beta 0.1" for flags in runs]
    done = [(flags, run(f"{flags} {STILL}")) for flags in runs[FIRST.count(flag):]]
    assert any(seen.code == 0 for _, seen in done), [seen.out[-300:] for _, seen in done]
    for line, seen in done:
        if seen.code == 0:                                   # some values end a run, as they should
            args = parse([*tiny_for(line), *line.split(), *STILL.split()])
            check(seen.metrics, args)


ROUTED = "--routing_replay rollout --sampler_dtype int3 --beta 0.1"


@pytest.mark.parametrize("more", [
    "--plain --algorithm grpo", "--micro_batch_size 2", "--algorithm rspo",
    *map(slow, ["--dynamic_sampling", "--gradient_checkpointing"])])
def test_routing_replay_with_a_rounded_sampler(more, workplace):
    """The sampler chooses other experts than the policy, in every response."""
    flags = [*TINY, *f"{ROUTED} {more} {STILL}".split()]
    train.main([*flags, "--output_dir", "run"])
    records = metrics("run")
    check(records, parse(flags))
    assert all(record["mismatch_kl"] > 1e-3 and record["flip_rate"] == 0 for record in records)
