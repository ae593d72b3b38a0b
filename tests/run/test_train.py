"""train.py as its user sees it: every algorithm, what a run prints and leaves behind, and where.
python -m pytest tests/run/test_train.py"""

import math
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import models
import train
from losses import OBJECTIVES
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.actor import Actor
from rollout import sample
from session.arguments import ALGORITHMS, Settings
from tiny_run import TINY, differences, metrics, read_json

METRICS = """step reward reward_std pass_rate loss clip_low clip_high ratio_max log_w_var log_s_var
    variance_factor inverse_length perplexity_old perplexity_new delta_h entropy grad_norm lr
    length truncated zero_variance_groups flip_rate flip_rate_per_layer mismatch_kl
    seconds_rollout seconds_logp seconds_update tokens_per_second""".split()


# ------------------------------------------------------------------------------- the script

def test_script_from_prompt_to_summary(workplace, capfd):
    train.main([*TINY, *"--steps 2 --eval_samples 2 --eval_prompts 8".split()])
    said, err = capfd.readouterr()
    out = said.splitlines()
    assert "runs/gspo/metrics.jsonl" in said and "clip range [1 - 0.0003, 1 + 0.0004]" in said
    assert sum(line.startswith("batch ") for line in out) == 2
    assert err == ""                                         # no bar, no warnings

    summary = read_json("runs/gspo/summary.json")
    assert summary["steps"] == 2 and summary["seconds"] > 0
    for when in ("before", "after"):
        line, = [line for line in out if line.startswith(f"{when}:")]
        assert f"pass@1 {summary[f'pass_at_1_{when}']:.3f}" in line
    config = read_json("runs/gspo/config.json")
    assert config.keys() == {f.name for f in fields(Settings)}
    assert config["epsilon"] == 3e-4 and config["reduction"] == "sequence-mean"


# ------------------------------------------------------------------------------- every algorithm

@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_takes_two_steps(algorithm, run, cold_start):
    more = "--stage2_step 1 --cold_start_steps 60" if algorithm == "srpo" else ""
    run(f"--algorithm {algorithm} --steps 2 --warmup_steps 1 {more}")
    records = read_json("run/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert set(METRICS) <= record.keys()
        assert all(math.isfinite(v) for v in record.values() if isinstance(v, float))
        assert record["skipped"] == 0 and record["length"] <= 5
        assert 0 <= record["clip_low"] + record["clip_high"] <= 1
        norms = [mini["grad_norm"] for mini in record["minibatches"]]
        assert record["grad_norm"] == pytest.approx(sum(norms) / len(norms))
        if ALGORITHMS[algorithm].get("old_logp") != "sampler":   # or nothing is recomputed
            assert 0 <= record["flip_rate"] <= 1 and len(record["flip_rate_per_layer"]) == 1
        assert "kl" not in record  # there is no reference without --beta
    assert sum(record["grad_norm"] for record in records) > 0
    before = load_file(cold_start / "model.safetensors")
    after = load_file("run/checkpoints/step_2/model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_tokens_per_second_leaves_out_evaluations(run, first):
    first(train, "held_out", lambda *_: time.sleep(1))
    run("--steps 2 --eval_steps 1 --eval_samples 1 --eval_prompts 2")
    record = read_json("run/metrics.jsonl")[0]
    seconds = sum(record[f"seconds_{lap}"] for lap in ("rollout", "logp", "update"))
    assert "pass_at_1" in record
    tokens = 16 * record["length"]
    assert record["tokens_per_second"] == pytest.approx(tokens / seconds)


@pytest.mark.parametrize("more", [
    "", "--algorithm rspo --routing_replay old", "--plain", "--router_aux_loss_coef 0.1",
    "--algorithm ppo --num_generations 1"])
def test_answers_of_one_token_train(more, run):
    for record in run(f"--steps 2 --max_completion_length 1 {more}"):
        assert record["length"] == 1 and 0 <= record["flip_rate"] <= 1
        assert math.isfinite(record["loss"])


# ----------------------------------------------------------------- ways to compute that are equal

def test_a_group_of_equal_rewards_still_feels_a_pull(run, monkeypatch):
    """The plain way computes every group; with a pull the fast way must, too."""
    monkeypatch.setitem(OBJECTIVES, "dro", replace(OBJECTIVES["dro"], constants={"beta": 5.0}))
    line = ("--warmup_steps 0 --learning_rate 0.002 --steps_per_generation 1 --sampler_dtype int4 "
            "--algorithm dro")
    (fast,), (plain,) = run(line), run(f"{line} --plain", folder="plain")
    assert 0 < fast["zero_variance_groups"] < 1
    assert fast["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


def test_gradient_checkpointing_keeps_dropout_off():
    """That it computes the layers again: test_flags.py; that it changes no run: test_pairs.py."""
    policy = models.make("opt", ffn_dim=48, word_embed_proj_dim=32, dropout=0.5,
                         attention_dropout=0.5)
    part = sample(policy, builtin_tokenizer(), ["1+2=", "3+4+5="], 2, 6)
    grads = [models.gradient(policy, Actor(policy, train.parse(words))(part).logp.sum())
             for words in ([], ["--gradient_checkpointing"])]
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------- what a run leaves

def test_samples_are_real_responses_and_ten_of_them_are_printed(run, capsys):
    run("--steps 20")
    rows = read_json("run/samples.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 21)]
    for sampled in (s for row in rows for s in row["samples"]):
        terms = [int(c) for c in sampled["prompt"] if c.isdigit()]
        right = ",".join(str(sum(terms[:i + 1]) % 10) for i in range(len(terms))) + "."
        assert sampled["reward"] == float(sampled["response"] == right)
    shown = [row["samples"][0] for row in rows[1::2]]
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if ", reward " in line]
    assert said == [f"{one['prompt'].strip()!r} -> {one['response']!r}, reward {one['reward']:g}"
                    for one in shown]


def test_the_critic_does_not_depend_on_whether_the_cold_start_was_cached(run):
    """Its random weights are drawn after the policy is there, however it came to be there."""
    for name in ("made", "cached"):
        run("--algorithm ppo --cold_start_steps 1 --seed 3", folder=name)
    assert differences("made", "cached", 1) == []


def test_default_folders_are_numbered_and_one_that_is_taken_meanwhile_is_left(workplace, first):
    """As by a run that was started together with this one."""
    Path("runs/gspo").mkdir()
    Path("runs/gspo/metrics.jsonl").touch()
    first(train, "Learner", lambda *_: Path("runs/gspo-2").mkdir(exist_ok=True))
    for folder in ("gspo-3", "gspo-4"):
        train.main([*TINY, "--steps", "1"])
        assert Path("runs", folder, "metrics.jsonl").is_file()
    assert not [*Path("runs/gspo-2").iterdir()]


# ------------------------------------------------------------------ objectives without a ratio

def test_without_a_ratio_there_is_one_optimizer_step_per_rollout_batch(workplace):
    at = TINY.index("--steps_per_generation")
    default = [*TINY[:at], *TINY[at + 2:]]
    for argv, algorithm, updates in ((default, "reinforce", 1), (default, "rloo", 1),
                                     (TINY, "rloo", 2), (TINY, "grpo", 2)):
        folder = f"{algorithm}{updates}"
        train.main([*argv, "--steps", "1", "--algorithm", algorithm, "--output_dir", folder])
        assert len(metrics(folder)[0]["minibatches"]) == updates
