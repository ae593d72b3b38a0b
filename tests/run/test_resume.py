"""A run that was stopped and resumed is the run that was not: weights, optimizer, random states, metrics, to the last bit."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plumbing.run import checkpoints
from plumbing.run import folder as checkpoint
import train
from tiny_run import TINY, differences, metrics


class Killed(BaseException):
    """What stands in for SIGKILL inside one process: nothing in train.py catches it. tests/soak_kill.py uses the real one."""


def kill_after(monkeypatch, step):
    """The power fails just after the metrics of `step` are written."""
    append = checkpoints.append

    def fail(path, record):
        append(path, record)
        if path.name == "metrics.jsonl" and record["step"] == step:
            raise Killed
    monkeypatch.setattr(checkpoints, "append", fail)


def interrupted(monkeypatch, argv, step):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, step)
        train.main(argv)
    train.main([*argv, "--resume", "true"])


@pytest.mark.parametrize("flags", [
    [], ["--algorithm", "ppo"], *(pytest.param(flags, marks=pytest.mark.slow) for flags in (
    ["--algorithm", "srpo", "--stage2_step", "2", "--prompts_per_step", "8", "--num_generations", "2"], ["--beta", "0.1"],
    ["--algorithm", "grpo", "--distillation_coef", "0.5", "--self_distillation"],
    ["--algorithm", "dapo"], ["--lr_scheduler_type", "linear"], ["--sampler_dtype", "bfloat16", "--mismatch", "token_truncate", "--mismatch_mask", "token"],
    ["--eval_samples", "1", "--eval_prompts", "4", "--eval_steps", "2"], ["--shard", "true"]))], ids=str)
def test_resumed_run_equals_uninterrupted(flags, whole, workplace, monkeypatch, capsys):
    argv, run = [*TINY, "--steps", "4", "--save_steps", "2", *flags], whole(*flags)
    interrupted(monkeypatch, [*argv, "--output_dir", "resumed"], step=3)                # one batch after the checkpoint of batch 2
    assert differences(run, "resumed", 4) == []
    assert sum(r["grad_norm"] for r in metrics(run)) > 0
    if "srpo" in flags:                                      # the test sees what it is about: stages, and problems that were left out
        state = torch.load("resumed/checkpoints/step_4/state.pt", weights_only=True)["stream"]
        assert state["stage"] == 2 and state["epoch"] > 0 and state["solved"]
    if "ppo" in flags:
        assert torch.load("resumed/checkpoints/step_4/state.pt", weights_only=True)["critic"]


def test_resumes_from_any_batch_and_any_number_of_times(whole, workplace, monkeypatch):
    run, argv = whole(), [*TINY, "--steps", "4", "--save_steps", "1", "--output_dir", "resumed"]
    for step, more in ((1, []), (2, ["--resume", "true"]), (3, ["--resume", "true"])):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_after(patch, step)
            train.main([*argv, *more])
    train.main([*argv, "--resume", "true"])
    assert differences(run, "resumed", 4) == []


def test_a_finished_run_goes_on_for_more_steps_where_the_rate_does_not_follow_them(whole, workplace, capsys):
    flags = ["--lr_scheduler_type", "constant_with_warmup"]
    run, argv = whole(*flags), [*TINY, *flags, "--output_dir", "longer"]
    train.main([*argv, "--steps", "2"])
    train.main([*argv, "--steps", "4", "--resume"])
    assert differences(run, "longer", 4) == []
    for less in (["--steps", "3"], ["--steps", "5", "--lr_scheduler_type", "cosine"]):
        with pytest.raises(SystemExit):
            train.main([*argv, *less, "--resume"])
        assert "steps was 4, now" in capsys.readouterr().err


def test_killed_before_the_first_checkpoint(whole, workplace, monkeypatch):
    run = whole()
    interrupted(monkeypatch, [*TINY, "--steps", "4", "--output_dir", "resumed"], step=1)
    assert differences(run, "resumed", 4) == []


def test_metrics_line_that_was_being_written(whole, workplace, monkeypatch):
    run, argv = whole(), [*TINY, "--steps", "4", "--save_steps", "1"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 2)
        train.main([*argv, "--output_dir", "resumed"])
    with open("resumed/metrics.jsonl", "a") as f:
        f.write('{"step": 3, "rew')
    train.main([*argv, "--output_dir", "resumed", "--resume", "true"])
    assert differences(run, "resumed", 4) == []


def test_python_numpy_and_torch_random_states_are_resumed(workplace, monkeypatch):
    """A user's verifier may draw from any of them."""
    import random

    import numpy
    draws = []
    collect = train.collect

    def drawing(*args):
        draws.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
        return collect(*args)
    monkeypatch.setattr(train, "collect", drawing)
    argv = [*TINY, "--steps", "4", "--save_steps", "2"]
    train.main([*argv, "--output_dir", "whole"])
    whole, draws[:] = list(draws), []
    interrupted(monkeypatch, [*argv, "--output_dir", "resumed"], step=3)
    assert draws[:3] + draws[4:] == whole[:3] + whole[3:] and draws[3] == whole[2]      # batch 3 twice, with the same numbers


def test_finished_run_resumed_only_reports_again(workplace, capsys):
    argv = [*TINY, "--steps", "2", "--output_dir", "run", "--eval_samples", "1", "--eval_prompts", "4"]
    train.main(argv)
    before, first = Path("run/metrics.jsonl").read_bytes(), capsys.readouterr().out
    train.main([*argv, "--resume", "true"])
    second = capsys.readouterr().out
    assert Path("run/metrics.jsonl").read_bytes() == before
    assert re.findall(r"^(?:before:|after: ) .*pass@1.{30}", first, re.M)[-2:] == re.findall(r"^(?:before:|after: ) .*pass@1.{30}", second, re.M)


# ---------------------------------------------------------------------------------------------------------------- signals

def signal_in(monkeypatch, step, *numbers):
    """Signals that come while batch `step` is being sampled."""
    collect = train.collect

    def interrupting(args, learner, task, now):
        if now == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return collect(args, learner, task, now)
    monkeypatch.setattr(train, "collect", interrupting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(number, whole, workplace, monkeypatch, capfd):
    run, argv = whole(), [*TINY, "--steps", "4"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        signal_in(patch, 2, number)
        train.main([*argv, "--output_dir", "resumed"])
    out = capfd.readouterr().out
    assert stop.value.code == 130 and "stopping after this rollout batch" in out
    assert "stopped after batch 2 and saved; the same command with --output_dir resumed --resume continues" in out
    assert Path("resumed/checkpoints/step_2").is_dir()
    train.main([*argv, "--output_dir", "resumed", "--resume"])
    assert differences(run, "resumed", 4) == []


def test_second_ctrl_c_stops_at_once_but_not_one_that_torchrun_repeats(workplace, monkeypatch, capfd):
    argv = [*TINY, "--steps", "3", "--output_dir", "run"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        signal_in(patch, 2, signal.SIGINT, signal.SIGINT)                           # within two seconds: the same one
        train.main(argv)
    assert Path("run/checkpoints/step_2").is_dir()
    ticks = iter(range(0, 1000, 5))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(checkpoints, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(ticks))}))
        signal_in(patch, 3, signal.SIGINT, signal.SIGINT)
        train.main([*argv, "--resume"])
    err = capfd.readouterr().err
    assert stop.value.code == 130 and err.startswith("\ntrain.py: stopped immediately") and "Traceback" not in err
    assert not Path("run/checkpoints/step_3").exists() and Path("run/checkpoints/step_2").is_dir()


# ------------------------------------------------------------------------------------------------------------ checkpoints

def test_half_written_checkpoint_is_ignored_with_a_message(whole, workplace, monkeypatch, capsys):
    run, argv = whole(), [*TINY, "--steps", "4", "--save_steps", "2"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 3)
        train.main([*argv, "--output_dir", "resumed"])
    partial = Path("resumed/checkpoints/.partial-step_4")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "config.json").write_text("{}")
    capsys.readouterr()
    train.main([*argv, "--output_dir", "resumed", "--resume"])
    assert f"ignoring an incomplete checkpoint: {partial}" in capsys.readouterr().out and not partial.exists()
    assert differences(run, "resumed", 4) == []


@pytest.mark.parametrize("keep, left", [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_old_checkpoints_are_pruned(keep, left, workplace, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEEP", keep)
    train.main([*TINY, "--steps", "4", "--save_steps", "1", "--output_dir", "run"])
    assert sorted(os.listdir("run/checkpoints")) == [f"step_{step}" for step in left]
    assert [step for step, _ in checkpoints.whole(Path("run"))] == left


def test_folder_that_lost_its_state_is_neither_resumed_from_nor_in_the_way(workplace):
    argv = [*TINY, "--steps", "2", "--save_steps", "1", "--output_dir", "run"]
    train.main(argv)
    Path("run/checkpoints/step_2/state.pt").unlink()
    train.main([*argv, "--resume"])
    assert [step for step, _ in checkpoints.whole(Path("run"))] == [1, 2] and [r["step"] for r in metrics("run")] == [1, 2]


def test_a_checkpoint_is_on_the_disk_before_it_is_named(workplace, monkeypatch):
    """The order of system calls that makes a power cut harmless: every file synced, the rename, the folder synced."""
    calls, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(f"rename {Path(b).name}"), rename(a, b)))
    train.main([*TINY, "--steps", "1", "--output_dir", "run"])
    calls = calls[calls.index("metrics.jsonl"):]
    before, after = calls[:calls.index("rename step_1")], calls[calls.index("rename step_1") + 1:]
    assert {"metrics.jsonl", "samples.jsonl", "config.json", "model.safetensors", "tokenizer.json", "state.pt"} <= set(before)
    assert before[-1] == ".partial-step_1" and after == ["checkpoints"]


# ------------------------------------------------------------------- one folder, one process

def refused(capsys, argv):
    """The one line on stderr of a run that ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("more", [["--resume"], ["--overwrite_output_dir"], []], ids=str)
def test_a_second_run_in_the_folder_of_one_at_work_is_refused(more, whole, workplace, monkeypatch, capsys):
    argv, collect, lines, alone = [*TINY, "--steps", "4", "--output_dir", "run"], train.collect, [], whole()

    def while_sampling(*args):
        if not lines:
            lines.append(None)
            lines[0] = refused(capsys, [*argv, *more])
        return collect(*args)
    monkeypatch.setattr(train, "collect", while_sampling)
    train.main(argv)
    assert "run" in lines[0] and ("another process is using" in lines[0] or not more)
    assert differences(alone, "run", 4) == []


def test_the_lock_goes_with_the_process_however_it_ends(workplace, capsys):
    argv = [*TINY, "--steps", "1", "--output_dir", "run"]
    Path("run").mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        checkpoint.lock(Path("run"))
        os.write(writer, b"locked")
        signal.pause()
    os.read(reader, 6)
    assert "another process is using run" in refused(capsys, argv)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    train.main(argv)
    assert [r["step"] for r in metrics("run")] == [1]


def test_a_run_that_is_refused_later_leaves_no_folder(workplace, capsys):
    refused(capsys, [*TINY, "--output_dir", "new", "--model_name_or_path", "./nowhere"])
    assert not Path("new").exists()


def test_overwriting_replaces_all_of_the_old_run(workplace):
    argv = [*TINY, "--output_dir", "run"]
    train.main([*argv, "--steps", "2", "--save_steps", "1"])
    train.main([*argv, "--steps", "1", "--overwrite_output_dir"])
    assert os.listdir("run/checkpoints") == ["step_1"] and [r["step"] for r in metrics("run")] == [1]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """The short version of `python tests/soak_kill.py --kills 20`."""
    done = subprocess.run([sys.executable, str(Path(__file__).parents[1] / "soak_kill.py"), "--kills", "2"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=900)
    assert done.returncode == 0 and "2 of 2" in done.stdout, done.stdout + done.stderr
