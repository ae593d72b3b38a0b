"""train.py as its user sees it: every algorithm, what a run prints and leaves behind, where it puts it."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from plumbing.model import cold_start
from plumbing.run.arguments import ALGORITHMS, flags
from tiny_run import TINY, TINY_MODEL, TRAIN, differences, metrics

METRICS = ("step reward reward_std pass_rate loss clip_low clip_high ratio_max log_w_var log_s_var variance_factor inverse_length perplexity_old "
           "perplexity_new delta_h equivalence_error kl entropy grad_norm lr length truncated dead_groups flip_rate flip_rate_per_layer "
           "mismatch_kl seconds_rollout seconds_logp seconds_update tokens_per_second").split()


def script(*argv, cwd):
    return subprocess.run([sys.executable, TRAIN, *argv], cwd=cwd, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


# -------------------------------------------------------------------------------------------------------- the real script

@pytest.mark.parametrize("start", ["main", pytest.param("script", marks=pytest.mark.slow)])
def test_script_from_prompt_to_summary(start, workplace, capfd):
    argv = [*TINY, "--steps", "2", "--eval_samples", "2", "--eval_prompts", "8"]
    if start == "script":
        done = script(*argv, cwd=workplace)
        assert done.returncode == 0, done.stderr
        said, err = done.stdout, done.stderr
    else:
        train.main(argv)
        said, err = capfd.readouterr()
    out = said.splitlines()
    assert "runs/gspo/metrics.jsonl" in said and "clip range [1 - 0.0003, 1 + 0.0004]" in said
    assert sum(line.startswith("batch ") for line in out) == 2
    assert re.search(r"^before: held-out pass@1 [\d.]+ \[[\d.]+, [\d.]+\], greedy [\d.]+", said, re.M)
    assert re.search(r"^after:  held-out pass@1 ", said, re.M)
    assert sum(line.startswith("prompt ") for line in out) == 2                      # two transcripts
    assert not any(line.lstrip().startswith("python ") for line in out)             # and no command to try next
    assert err == ""                                                                 # no bar where there is no terminal, no warnings

    run = workplace / "runs" / "gspo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["seconds"] > 0
    assert 0 <= summary["pass_at_1_before"] <= 1 and 0 <= summary["pass_at_1_after"] <= 1
    config = json.loads((run / "config.json").read_text())
    assert config["arguments"].keys() == {f.name for f in flags()}
    assert config["arguments"]["epsilon"] == 3e-4 and config["arguments"]["max_completion_length"] == 5     # as resolved
    assert config["versions"]["torch"] == torch.__version__


def test_help_lists_every_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == "" and [f.name for f in flags() if f"--{f.name} " not in out] == []
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- every algorithm

@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_takes_two_steps(algorithm, workplace, cold_start, monkeypatch):
    monkeypatch.setattr("plumbing.model.cold_start.MUST_PASS", 0.0)
    more = ["--stage2_step", "1", "--cold_start_steps", "60"] if algorithm == "srpo" else []
    train.main([*TINY, "--algorithm", algorithm, "--steps", "2", "--warmup_steps", "1", *more])
    run = workplace / "runs" / algorithm
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2]
    for record in records:
        assert set(METRICS) <= record.keys()
        assert all(math.isfinite(v) for v in record.values() if isinstance(v, float)) and record["skipped"] == 0
        assert 0 <= record["clip_low"] + record["clip_high"] <= 1 and record["equivalence_error"] < 1e-5
        assert record["length"] <= 5
        if ALGORITHMS[algorithm].get("old_logp") != "sampler":  # the sampler's log-probs: nothing is recomputed, or recorded
            assert 0 <= record["flip_rate"] <= 1 and len(record["flip_rate_per_layer"]) == 1
        assert record["kl"] is None                          # there is no reference without --beta
    assert sum(r["grad_norm"] for r in records) > 0
    before = load_file(next(cold_start.iterdir()) / "model.safetensors")
    after = load_file(run / "checkpoints" / "step_2" / "model.safetensors")
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in before)


def test_dynamic_sampling_ends_when_there_is_nothing_left_to_learn(workplace, monkeypatch):
    """Ten rounds without a mixed group: the batch is filled with others, and the run goes on and is saved."""
    monkeypatch.setattr(train.tasks, "running_sum", always_right(train.tasks.running_sum))
    train.main([*TINY, "--algorithm", "dapo", "--steps", "2", "--overlong_cache", "0"])      # no length in the reward
    assert [r["dead_groups"] for r in metrics("runs/dapo")] == [1.0, 1.0] and Path("runs/dapo/checkpoints/step_2").is_dir()


def test_dynamic_sampling_logs_what_was_sampled(workplace, monkeypatch):
    """The pass rate of the groups that were kept alone says nothing about the policy."""
    rounds, keep = [], train.batches.keep_signal

    def noted(found, *rest, **options):
        rounds[:] = found
        return keep(found, *rest, **options)
    monkeypatch.setattr(train.batches, "keep_signal", noted)
    train.main([*TINY, "--algorithm", "dapo", "--steps", "1", "--num_generations", "2", "--overlong_cache", "0.5", "--output_dir", "run"])
    record, = metrics("run")
    rewards = torch.cat([parts[:, 0] for _, _, parts in rounds]).view(-1, 2)                          # [groups, 2]
    lengths = [sum(row) for rollout, _, _ in rounds for row in rollout.mask.tolist()]
    assert len(rounds) > 1 and len(rewards) == 4 * len(rounds)
    assert record["pass_rate"] == pytest.approx(rewards.mean().item())
    assert record["discarded_groups"] == len(rewards) - 4 and record["length"] == pytest.approx(sum(lengths) / len(lengths))
    assert record["reward_parts"]["correct"] == pytest.approx(rewards.mean().item())
    assert record["reward"] == pytest.approx(sum(record["reward_parts"].values()))                    # with the overlong penalty
    limit = json.loads(Path("run/config.json").read_text())["arguments"]["max_completion_length"]
    zone = round(0.5 * limit)                                                                         # DAPO eq. 13
    penalized = [[right - max(0, n - (limit - zone)) / zone for right, n in zip(row, lengths[2 * i:2 * i + 2])]
                 for i, row in enumerate(rewards.tolist())]
    assert record["dead_groups"] == pytest.approx(sum(a == b for a, b in penalized) / len(penalized))


@pytest.mark.slow
def test_tokens_per_second_leaves_out_evaluations(workplace, monkeypatch):
    evaluate = train.held_out
    monkeypatch.setattr(train, "held_out", lambda *args: (time.sleep(1), evaluate(*args))[1])
    train.main([*TINY, "--steps", "2", "--eval_steps", "1", "--eval_samples", "1", "--eval_prompts", "2", "--output_dir", "run"])
    record = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    seconds = sum(record[f"seconds_{lap}"] for lap in ("rollout", "logp", "update"))
    assert "pass_at_1" in record and record["tokens_per_second"] == pytest.approx(16 * record["length"] / seconds)


def always_right(make):
    def easy(*args, **kwargs):
        task = make(*args, **kwargs)
        task.verify = lambda response, problem: 1.0
        return task
    return easy


@pytest.mark.parametrize("flags", [                         # each flag alone: test_flags.py; more of them together: test_pairs.py
    ["--advantage", "token_credit", "--algorithm", "gspo_token"], ["--routing_replay", "old"], ["--routing_replay", "rollout", "--plain", "true"],
    ["--beta", "0.1", "--entropy_coef", "0.01", "--router_aux_loss_coef", "0.01"], ["--eval_steps", "1", "--eval_samples", "1", "--eval_prompts", "4"]])
def test_options_run(flags, workplace):
    train.main([*TINY, "--steps", "2", *flags, "--output_dir", "run"])
    records = metrics("run")
    assert [r["step"] for r in records] == [1, 2] and all(math.isfinite(r["loss"]) for r in records)
    if "--beta" in flags:
        assert records[0]["kl"] == 0 and records[1]["kl"] > 0
    if "--eval_steps" in flags:
        assert 0 <= records[0]["pass_at_1"][0] <= 1
    if "--routing_replay" in flags and "sampler" not in flags:
        assert records[0]["route_bytes_per_token"] > 0


def test_micro_batches_change_no_metric_but_by_rounding(workplace):
    for size in ("8", "2"):
        train.main([*TINY, "--steps", "2", "--warmup_steps", "0", "--micro_batch_size", size, "--output_dir", size])
    for a, b in zip(metrics("8"), metrics("2")):
        for name in ("reward", "loss", "grad_norm", "perplexity_new", "clip_low", "clip_high"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_scoring_equal_responses_once_gives_the_log_probs_and_routes_of_all(cold_start):
    from dataclasses import replace
    from rollout import sample
    from plumbing.data.running_sum import running_sum
    args, task = train.parse(TINY), running_sum()
    policy, tokenizer = train.trained_policy(args, task, torch.device("cpu"), next(cold_start.iterdir()))
    part = sample(policy, tokenizer, [p.prompt for p in task.train[:3]], 4, 24, uniforms=torch.rand(12, 24, generator=torch.Generator().manual_seed(1)))
    for name in ("response_ids", "mask"):                    # a group of equal ones, a group of two kinds
        tensor = getattr(part, name)
        tensor[1:4], tensor[5:7] = tensor[0].clone(), tensor[4].clone()
    found = []
    for plain in (False, True):
        now = replace(args, plain=plain)
        learner = train.make_learner(now, task, policy, tokenizer, torch.device("cpu"))
        got = learner.score(part, entropy=True)
        found.append((got.logp, got.entropy, got.routes))
    (logp, entropy, ours), (want, want_entropy, theirs) = found
    assert torch.allclose(logp, want, atol=1e-5) and torch.allclose(entropy, want_entropy, atol=1e-5)
    assert torch.equal(ours.indices[:, part.mask], theirs.indices[:, part.mask])
    assert torch.allclose(ours.logits[:, part.mask], theirs.logits[:, part.mask], atol=1e-4)


# ------------------------------------------------------------------------------------------------------ what a run leaves

def test_checkpoint_is_an_ordinary_hugging_face_one(workplace):
    from moe import TinyMoE
    train.main([*TINY, "--steps", "1"])
    folder = workplace / "runs" / "gspo" / "checkpoints" / "step_1"
    ours, theirs = TinyMoE.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(["3+8=", "7="], return_tensors="pt", padding=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids.input_ids, ids.attention_mask).logits[:, -1], theirs(**ids).logits[:, -1], rtol=1e-5, atol=1e-5)
        answers = theirs.generate(**ids, max_new_tokens=5, do_sample=False)
    assert all(re.fullmatch(r"[\d,. ]*", text) for text in tokenizer.batch_decode(answers[:, ids.input_ids.shape[1]:], skip_special_tokens=True))
    train.main([*TINY_MODEL, "--steps", "1", "--model_name_or_path", str(folder), "--output_dir", "from_checkpoint"])     # and train.py takes it
    assert metrics("from_checkpoint")[0]["lr"] < 1e-5                              # with a checkpoint's learning rate


def test_samples_are_real_responses(workplace):
    train.main([*TINY, "--steps", "2"])
    rows = [json.loads(line) for line in Path("runs/gspo/samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for sample in (s for row in rows for s in row["samples"]):
        terms = [int(c) for c in sample["prompt"] if c.isdigit()]
        right = ",".join(str(sum(terms[:i + 1]) % 10) for i in range(len(terms))) + "."
        assert sample["reward"] == float(sample["response"] == right)


def test_a_run_repeats_bit_for_bit(whole, workplace):
    run = whole()
    train.main([*TINY, "--steps", "4", "--output_dir", "two"])
    assert differences(run, "two", 4) == []
    train.main([*TINY_MODEL, "--steps", "1", "--output_dir", "other", "--model_name_or_path", "two/checkpoints/step_4", "--seed", "1"])
    assert metrics("other")[0] != metrics(run)[0]


def test_the_critic_does_not_depend_on_whether_the_cold_start_was_cached(workplace, monkeypatch):
    """Its random weights are drawn after the policy is there, however it came to be there."""
    monkeypatch.setattr(cold_start, "MUST_PASS", 0.0)
    cheap = [*TINY, "--algorithm", "ppo", "--steps", "1", "--cold_start_steps", "1", "--seed", "3"]
    for name in ("made", "cached"):
        train.main([*cheap, "--output_dir", name])
    assert differences("made", "cached", 1) == []


# ----------------------------------------------------------------------------------------------------------- where it goes

def test_default_folders_are_numbered(workplace):
    Path("runs/gspo").mkdir()
    Path("runs/gspo/metrics.jsonl").touch()
    for folder in ("gspo-2", "gspo-3"):
        train.main([*TINY, "--steps", "1"])
        assert (workplace / "runs" / folder / "summary.json").is_file()


def test_a_named_folder_with_a_run_is_replaced_only_if_told(workplace, capsys):
    train.main([*TINY, "--steps", "2", "--output_dir", "mine"])
    before = Path("mine/metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--steps", "1", "--output_dir", "mine"])
    assert stop.value.code == 2 and Path("mine/metrics.jsonl").read_bytes() == before
    assert "holds a run with other flags (steps)" in capsys.readouterr().err
    train.main([*TINY, "--steps", "1", "--output_dir", "mine", "--overwrite_output_dir", "true"])
    assert len(metrics("mine")) == 1 and not Path("mine/checkpoints/step_2").exists()


# ------------------------------------------------------------------------------------- memory and speed

def counted_layers(monkeypatch, layer):
    """Counts the forwards of a decoder layer while gradients are on; backward's own included."""
    calls, forward = [0], layer.forward

    def counting(self, *args, **kwargs):
        calls[0] += torch.is_grad_enabled()
        return forward(self, *args, **kwargs)
    monkeypatch.setattr(layer, "forward", counting)
    return calls


def test_gradient_checkpointing_computes_every_layer_again_in_a_run(workplace, monkeypatch):
    import moe
    calls, found = counted_layers(monkeypatch, moe.Layer), {}
    for name, flags in (("kept", ["--plain"]), ("again", ["--plain", "--gradient_checkpointing"])):
        calls[0] = 0
        train.main([*TINY, "--steps", "2", *flags, "--output_dir", name])
        found[name] = calls[0]
    assert found["kept"] == 4 and found["again"] == 8, "two batches of two updates, one layer"
    for a, b in zip(metrics("kept"), metrics("again")):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_gradient_checkpointing_keeps_dropout_off(monkeypatch):
    from transformers import OPTConfig, OPTForCausalLM
    from transformers.models.opt import modeling_opt
    from plumbing.model.actor import Actor
    from rollout import sample
    from test_rollout import PROMPTS, TOKENIZER
    torch.manual_seed(0)
    policy = OPTForCausalLM(OPTConfig(vocab_size=17, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4,
                                      word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, pad_token_id=16, eos_token_id=15)).eval()
    part = sample(policy, TOKENIZER, PROMPTS, 2, 6)
    calls, grads = counted_layers(monkeypatch, modeling_opt.OPTAttention), []  # what the layer calls
    for flags in ([], ["--gradient_checkpointing"]):
        policy.zero_grad()
        calls[0] = 0
        Actor(policy, train.parse(["--plain", *flags]))(part).logp.sum().backward()
        grads.append((calls[0], torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])))
    assert [count for count, _ in grads] == [2, 4]
    assert torch.allclose(grads[0][1], grads[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flags", [[], ["--algorithm", "rspo", "--routing_replay", "old"], ["--plain"], ["--router_aux_loss_coef", "0.1"]])
def test_answers_of_one_token_on_a_mixture_of_experts(flags, workplace):
    train.main([*TINY, "--steps", "2", "--max_completion_length", "1", *flags, "--output_dir", "run"])
    assert [r["length"] for r in metrics("run")] == [1.0, 1.0] and all(0 <= r["flip_rate"] <= 1 for r in metrics("run"))


@pytest.mark.parametrize("flags", [
    [], pytest.param(["--algorithm", "rspo", "--routing_replay", "old"], marks=pytest.mark.slow), ["--algorithm", "ppo", "--beta", "0.1", "--entropy_coef", "0.01"]])
def test_the_plain_way_is_the_quick_one_in_the_first_batch(flags, workplace):
    for name, more in (("quick", []), ("plain", ["--plain"])):
        train.main([*TINY, "--steps", "1", "--warmup_steps", "0", *flags, *more, "--output_dir", name])
    (a,), (b,) = metrics("quick"), metrics("plain")
    same = ("reward", "length", "loss", "grad_norm", "perplexity_old", "perplexity_new", "entropy", "clip_low", "clip_high", "flip_rate")
    assert [a[k] for k in same] == pytest.approx([b[k] for k in same], rel=1e-5, abs=1e-5)
    weights = [load_file(Path(name, "checkpoints/step_1/model.safetensors")) for name in ("quick", "plain")]
    assert all(torch.allclose(weights[0][k], weights[1][k], atol=1e-5) for k in weights[0])


# ---------------------------------------------------------------------------- objectives without a ratio, or with a pull

def test_without_a_ratio_there_is_one_optimizer_step_per_rollout_batch_and_more_are_noted(workplace, capsys):
    for algorithm in ("reinforce", "rloo"):
        at = TINY.index("--steps_per_generation")
        train.main([*TINY[:at], *TINY[at + 2:], "--steps", "1", "--algorithm", algorithm, "--output_dir", algorithm])
        assert len(metrics(algorithm)[0]["minibatches"]) == 1 and "note:" not in capsys.readouterr().out
    train.main([*TINY, "--steps", "1", "--algorithm", "rloo", "--output_dir", "more"])
    assert "note: rloo has no importance ratio" in capsys.readouterr().out and len(metrics("more")[0]["minibatches"]) == 2
    train.main([*TINY, "--steps", "1", "--algorithm", "grpo", "--output_dir", "grpo"])
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize("algorithm, constant", [("dro", "beta=5"), ("ipo", "tau=1")])
def test_a_group_of_equal_rewards_still_feels_a_pull(algorithm, constant, workplace):
    """The plain way computes every group; with a pull the fast way must, too."""
    command = [*TINY, "--steps", "1", "--warmup_steps", "0", "--learning_rate", "0.002", "--steps_per_generation", "1",
               "--algorithm", algorithm, "--objective_constants", constant, "--sampler_dtype", "int4"]
    for name, more in (("fast", []), ("plain", ["--plain"])):
        train.main([*command, *more, "--output_dir", name])
    (fast,), (plain,) = metrics("fast"), metrics("plain")
    assert 0 < fast["dead_groups"] < 1 and fast["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
