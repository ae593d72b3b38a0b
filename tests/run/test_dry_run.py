"""--dry_run: the first batch of the run itself, its memory and its time; no folder is left.
python -m pytest tests/run/test_dry_run.py"""

import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from plumbing.model.actor import Actor
from session import dry_run, errors
from session.arguments import Settings
from tiny_run import SUMS, flags, jsonl, read_json, slow, write

ROOT = Path(__file__).parents[2]


def tree():
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def dry(capsys, *words):
    """What a dry run says; it leaves every file as it was, and makes none."""
    before = tree()
    capsys.readouterr()
    train.main([*words, "--dry_run"])
    assert tree() == before
    return capsys.readouterr().out


def test_a_dry_run_shows_the_first_batch_of_the_run(run, capsys):
    words = flags("--steps", "3", "--eval_samples", "2", "--eval_prompts", "3", "--eval_steps", "1")
    said = dry(capsys, *words)
    assert not Path("runs/gspo").exists() and "metrics are written to runs/gspo/" in said
    first, *_ = run("--steps 3 --eval_samples 2 --eval_prompts 3 --eval_steps 1")
    sample, _ = read_json("run/samples.jsonl")[0]["samples"]
    assert f"prompt: {sample['prompt']!r}\n" in said
    assert f" tokens: {sample['response']!r}\n" in said
    assert f"its reward: {sample['reward']:g}; the reference answer: " in said
    assert (f"first batch: pass rate {first['pass_rate']:.3f}, zero-variance groups "
            f"{first['zero_variance_groups']:.0%}, mean length {first['length']:.1f}, ") in said
    summary = read_json("run/summary.json")
    assert f"3 held-out prompts before training: held-out pass@1 {summary['pass_at_1_before']:.3f}"\
        in said
    memory = re.search(r"8 responses of 5 tokens in a pass: ([\d.]+) GiB resident", said)
    assert 0.1 < float(memory[1]) < 8
    assert re.search(r"about [\d.]+ min: [\d.]+ s to start, 3 batches of [\d.]+ s, 4 evaluations ",
                     said)


@pytest.mark.parametrize("line, rows", [
    ("", 8), ("--micro_batch_size 2", 2), ("--micro_batch_size 64", 8),
    slow("--algorithm ppo --bf16 true", 8), slow("--algorithm rspo --entropy_coef 0.01", 8)])
def test_the_longest_responses_are_tried_at_the_end(line, rows, run, capsys, calls):
    run()                                                    # the supervised warm-up is cached
    passes = calls(Actor, "forward")
    dry(capsys, *flags("--steps", "3", *line.split()))
    (_, rollout), _, _ = passes[-1]
    assert rollout.response_ids.shape == (rows, 5) and rollout.mask.all()


def test_what_does_not_fit_names_the_flags_to_change_and_leaves_no_folder(run, monkeypatch):
    pytest.importorskip("peft")

    def full(learner, rollout, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(Actor, "forward", full)
    assert run.refused("--steps 1 --use_peft --output_dir run") == (
        f"train.py: {errors.OUT_OF_MEMORY}\n")
    for name in re.findall(r"--(\w+)", errors.OUT_OF_MEMORY):
        assert hasattr(Settings(), name), f"--{name} is no flag"


def test_a_config_gives_the_prompt_with_its_template_and_the_parts_of_a_reward(
        workplace, cold_start, capsys):
    write("mine.py", "def reward(response, answer):\n"
                     "    return {'right': response == answer, 'any': .25}\n")
    write("a.yaml",
        f"model_name_or_path: {cold_start}\n"
        f"dataset_name: {jsonl('rows.jsonl', SUMS)}\n"
        "prompt_template: '0+{prompt}'\nmax_completion_length: 3\nprompts_per_step: 2\n"
        "num_generations: 2\ndevice: cpu\neval_samples: 0\nsteps: 1000\n")
    said = dry(capsys, "--config", "a.yaml", "--verifier", "mine.py:reward")
    assert re.search(r"\nfirst prompt, 6 tokens: '0\+\d\+\d='\n", said)
    assert re.search(r"\nprompt: '\d\+\d='\nresponse, \d tokens", said)
    assert re.search(r"its reward: 0.25 \(right 0, any 0.25\); the reference", said)
    assert "pass rate 0.000" in said and "note: No response is right; what helps:" in said
    assert "0 evaluations of" in said and "held-out prompts before training" not in said


def test_an_evaluation_of_fewer_held_out_prompts_than_the_limit_is_counted_as_it_is(
        workplace, cold_start, capsys, monkeypatch):
    seconds = count()                                        # every measured step takes one
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    jsonl("test.jsonl", SUMS[:20])
    rows = jsonl("rows.jsonl", SUMS[20:])
    said = dry(capsys, *flags("--model_name_or_path", str(cold_start), "--dataset_name", str(rows),
                              "--test_dataset_name", "test.jsonl", "--max_completion_length", "3",
                              "--eval_samples", "1", "--steps", "1"))
    assert "\n20 held-out prompts before training: " in said
    assert " 1 batches of 1.0 s, 2 evaluations of 1.0 s" in said


def test_an_empty_folder_that_is_there_stays(run, capsys):
    Path("elsewhere").mkdir()
    Path("run").symlink_to("elsewhere")
    dry(capsys, *flags("--steps", "3", "--output_dir", "run"))
    assert list(Path("run").iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would(refused, run):
    said = refused("--dry_run --model_name_or_path nowhere/at/all")
    assert "--model_name_or_path nowhere/at/all: " in said
    assert "cannot be combined with --resume" in refused("--dry_run --resume --output_dir run")
    run()
    assert "--output_dir run holds a run" in refused("--dry_run --output_dir run")
