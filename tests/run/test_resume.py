"""A run that was stopped and resumed is the run that was not: weights, optimizer, random states, metrics, to the last bit."""

import json
import math
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
from tiny_run import TINY, TINY_MODEL, differences, metrics


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
    ["--algorithm", "dapo"], ["--num_iterations", "3"], ["--lr_scheduler_type", "linear"], ["--sampler_dtype", "bfloat16", "--mismatch", "token_truncate", "--mismatch_mask", "token"],
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


def test_a_finished_run_goes_on_for_more_steps(whole, workplace, capsys):
    flags = ["--lr_scheduler_type", "constant_with_warmup"]
    run, argv = whole(*flags), [*TINY, *flags, "--output_dir", "longer"]
    train.main([*argv, "--steps", "2"])
    capsys.readouterr()
    train.main([*argv, "--steps", "4", "--resume"])
    assert differences(run, "longer", 4) == [] and "from batch 3 on" not in capsys.readouterr().out, "the rate does not follow --steps"
    assert "steps was 4, now 3" in refused(capsys, [*argv, "--steps", "3", "--resume"])
    assert "lr_scheduler_type was 'constant_with_warmup', now 'cosine'" in refused(
        capsys, [*argv, "--steps", "5", "--lr_scheduler_type", "cosine", "--resume"])


@pytest.mark.parametrize("kind, share", [("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("linear", lambda x: 1 - x)])
def test_an_extended_schedule_goes_on_as_that_of_a_run_of_all_steps_and_says_so(kind, share, workplace, capsys):
    """Two batches of two updates, then two more: the rates of updates 5 to 8 are those of a run of 8 updates."""
    argv = [*TINY, "--lr_scheduler_type", kind, "--warmup_steps", "0", "--learning_rate", "0.001", "--output_dir", "run"]
    train.main([*argv, "--steps", "2"])
    state = torch.load("run/checkpoints/step_2/state.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0, "the schedule had ended"
    capsys.readouterr()
    rates = []
    with pytest.MonkeyPatch.context() as patch:
        update = train.update
        patch.setattr(train, "update", lambda args, learner, mini: (
            rates.append(learner.optimizer.param_groups[0]["lr"]), update(args, learner, mini))[1])
        train.main(["--output_dir", "run", "--resume", "--steps", "4"])
    want = [0.001 * share(step / 8) for step in range(4, 8)]
    assert rates == pytest.approx(want)
    line, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("--steps 4: from batch 3 on"))
    assert f"of a {kind} schedule over 4 batches: {want[0]:.2e}, after 0.00e+00" in line
    assert json.loads(Path("run/config.json").read_text())["arguments"]["steps"] == 4


# ------------------------------------------------------------------------------------- --resume, and no other flag

FLAGS = ["--steps", "4", "--save_steps", "2", "--temperature", "0.9", "--stop", ",,", "--algorithm", "sapo", "--reduction", "token-mean",
         "--objective_constants", "tau_negative=1.1"]


def test_resume_alone_reads_the_flags_of_the_run(whole, workplace, monkeypatch):
    run, argv = whole(*FLAGS[2:]), [*TINY, *FLAGS, "--output_dir", "resumed"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 3)
        train.main(argv)
    before = json.loads(Path("resumed/config.json").read_text())
    assert before["given"].keys() == {f.removeprefix("--") for f in [*TINY, *FLAGS] if f.startswith("--")}
    train.main(["--output_dir", "resumed", "--resume"])
    assert differences(run, "resumed", 4) == []
    after = json.loads(Path("resumed/config.json").read_text())
    assert after["given"] == before["given"] and after["arguments"] == before["arguments"] | {"resume": True}


@pytest.mark.parametrize("given, words", [
    (["--temperature", "0.8"], "temperature was 0.9, now 0.8"), (["--seed", "1"], "seed was 0, now 1"),
    (["--algorithm", "gspo"], "algorithm was 'sapo', now 'gspo'"), (["--steps", "3"], "steps was 4, now 3"),
    (["--objective_constants", "tau_negative=1.2"], "objective_constants was ['tau_negative=1.1'], now ['tau_negative=1.2']")], ids=str)
def test_a_flag_that_is_given_and_differs_is_refused_by_its_name_alone(given, words, finished, capsys):
    line = refused(capsys, ["--output_dir", "run", "--resume", *given])
    assert f"with other flags: {words}; leave them out" in line


@pytest.fixture
def finished(workplace, request):
    """A folder "run" with a finished run of one batch of FLAGS, made once."""
    made = workplace.parent / "finished-run"
    if not made.exists():
        train.main([*TINY, *FLAGS, "--steps", "1", "--output_dir", str(made)])
        config = json.loads((made / "config.json").read_text())
        for part in ("arguments", "given"):
            config[part]["steps"] = 4
        (made / "config.json").write_text(json.dumps(config))
    shutil.copytree(made, "run")


def test_what_may_change_when_a_run_is_resumed_is_kept_for_the_next_time(finished):
    train.main(["--output_dir", "run", "--resume", "--save_steps", "1", "--stop", ",,", "--temperature", "0.9"])
    config = json.loads(Path("run/config.json").read_text())
    assert config["given"]["save_steps"] == 1 and config["arguments"]["save_steps"] == 1 and len(metrics("run")) == 4


def test_other_defaults_than_the_runs_are_refused(finished, capsys):
    """Another version of train.py, or a machine with a GPU: what the flags do not say would differ."""
    config = json.loads(Path("run/config.json").read_text())
    config["arguments"] |= {"bf16": True, "learning_rate": 0.5}
    Path("run/config.json").write_text(json.dumps(config))
    line = refused(capsys, ["--output_dir", "run", "--resume"])
    assert "holds a run with other settings: learning_rate was 0.5, now 0.0004, bf16 was True, now False; give its values as flags" in line


def test_a_run_of_an_older_version_is_resumed_with_its_flags_typed_again(finished, capsys):
    config = json.loads(Path("run/config.json").read_text())
    del config["given"], config["arguments"]["weight_decay"]
    Path("run/config.json").write_text(json.dumps(config))
    assert "other settings: algorithm was 'sapo', now 'gspo'" in refused(capsys, ["--output_dir", "run", "--resume", "--device", "cpu"])
    train.main([*TINY, *FLAGS, "--output_dir", "run", "--resume"])
    assert len(metrics("run")) == 4


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
    assert "stopped after batch 2 and saved; python train.py --output_dir resumed --resume continues" in out
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
    assert stop.value.code == 130 and "Traceback" not in err
    assert err == "\ntrain.py: stopped immediately; --output_dir run --resume continues from run/checkpoints/step_2\n"
    assert not Path("run/checkpoints/step_3").exists() and Path("run/checkpoints/step_2").is_dir()


@pytest.mark.parametrize("step, kept", [(1, False), (2, True)])
def test_second_ctrl_c_before_a_checkpoint_promises_no_resume(step, kept, workplace, monkeypatch, capfd):
    """In the first batch the folder of the run is removed again; later its metrics stay."""
    ticks = iter(range(0, 1000, 5))
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(checkpoints, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(ticks))}))
        signal_in(patch, step, signal.SIGINT, signal.SIGINT)
        train.main([*TINY, "--steps", "3", "--output_dir", "run"])
    assert stop.value.code == 130 and Path("run").exists() == kept
    assert capfd.readouterr().err == "\ntrain.py: stopped immediately, before there was a checkpoint; nothing can be resumed\n"


def test_ctrl_c_before_the_first_batch_says_that_nothing_was_saved(workplace, monkeypatch, capfd):
    def interrupted(*args):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train.tasks, "of_run", interrupted)
        train.main([*TINY, "--output_dir", "run"])
    assert stop.value.code == 130 and capfd.readouterr().err == "\ntrain.py: stopped before the run began; nothing was saved\n"


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
        held = checkpoint.lock(Path("run"))                  # noqa: F841 (released when nothing refers to it)
        os.write(writer, b"locked")
        signal.pause()
    os.read(reader, 6)
    assert "another process is using run" in refused(capsys, argv)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    train.main(argv)
    assert [r["step"] for r in metrics("run")] == [1]


def test_a_run_that_is_refused_later_leaves_no_folder(workplace, capsys):
    refused(capsys, [*TINY_MODEL, "--output_dir", "new", "--model_name_or_path", "./nowhere"])
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


def test_a_run_with_a_flag_that_is_gone_is_refused(finished, capsys):
    config = json.loads(Path("run/config.json").read_text())
    config["given"]["use_cpu"] = True
    Path("run/config.json").write_text(json.dumps(config))
    line = refused(capsys, ["--output_dir", "run", "--resume"])
    assert "--resume: run/config.json names --use_cpu, which is no longer a flag: start a new run" in line
