"""--dry_run: the first batch of the run itself, its time and memory; no folder is made.
python -m pytest tests/run/test_dry_run.py"""

from pathlib import Path

import pytest
import torch

import train
from plumbing.model.actor import Actor
from session.arguments import Settings
from tiny_run import flags, read_json, slow


def tree():
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}


def test_a_dry_run_says_what_it_does_and_shows_the_first_batch_of_the_run(run, capsys, first):
    """It leaves every file as it was, and makes none."""
    run("--steps 3 --eval_samples 2 --eval_prompts 3")
    before = tree()
    capsys.readouterr()
    said = []                                                # before each phase
    for name in ("train_batch", "update", "longest_update"):
        first(train, name, lambda *_: said.append(capsys.readouterr().out))
    train.main(flags("--steps", "3", "--eval_samples", "2", "--dry_run"))
    assert tree() == before
    phases = [text for text in said if "dry run" in text]
    assert [text.count("dry run") for text in phases] == [1, 1]
    sample, _ = read_json("run/samples.jsonl")[0]["samples"]
    said = capsys.readouterr().out
    assert f"{sample['prompt'].strip()!r} -> {sample['response']!r}, reward" in said
    assert " s, all of them 0 min" in said


@pytest.mark.parametrize("line, rows", [
    ("", 8), ("--micro_batch_size 2", 2), ("--micro_batch_size 64", 8),
    slow("--algorithm ppo --bf16 true", 8), slow("--algorithm rspo --entropy_coef 0.01", 8)])
def test_the_longest_responses_are_tried_at_the_end(line, rows, workplace, calls):
    passes = calls(Actor, "forward")
    train.main(flags("--steps", "3", "--dry_run", *line.split()))
    (_, rollout), _, _ = passes[-1]
    assert rollout.response_ids.shape == (rows, 5) and rollout.mask.all()


def test_a_full_gpu_names_flags_that_exist(run, first):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")
    first(Actor, "forward", full)
    said = run.refused("--steps 1", begun=True)
    names = [word.strip(",;") for word in said.split() if word.startswith("--")]
    assert said.startswith("out of GPU memory") and "--micro_batch_size" in names
    assert all(hasattr(Settings(), name[2:]) for name in names)
