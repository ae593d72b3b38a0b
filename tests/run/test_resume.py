"""A run that was stopped and resumed is the run that was not: weights, optimizer, random states,
metrics, to the last bit. It may be stopped by a kill, a signal, a full disk or an error.
python -m pytest tests/run/test_resume.py"""

import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import eval as evaluation
import session.learner
import train
from moe import TinyMoE
from session import checkpoints, folder, signals
from tiny_run import differences, flags, metrics, read_json, slow, state, write


@pytest.fixture
def as_whole(run, whole):
    """as_whole(more) resumes the run in the folder "run": it ends as one that nothing stopped."""
    def resume(more=""):
        run("--resume")
        assert differences(whole(*more.split()), "run", 4) == []
    return resume


# What has a state. Features: tests/features/test_features.py; moments in 8 bits: test_optim.py.
STATES = ["", "--optim adamw_torch", "--fp16 --sampler_dtype float32"]
MORE_STATES = [
    "--algorithm dapo", "--num_iterations 3", "--lr_scheduler_type linear", "--shard true",
    "--eval_samples 1 --eval_prompts 4 --eval_steps 2",
    "--temperature 0.9 --stop ,, --algorithm sapo --reduction token-mean"]


@pytest.mark.parametrize("more", [
    *STATES, *map(slow, MORE_STATES)])
def test_resumed_run_equals_uninterrupted(more, killed, as_whole):
    """Killed one batch after the checkpoint of batch 2."""
    line = f"--steps 4 --save_steps 2 {more}"
    killed(3, line)
    before = read_json("run/config.json")
    typed = flags(*line.split())
    assert before["settings"].keys() == {word[2:] for word in typed if word.startswith("--")}
    as_whole(more)
    assert sum(record["grad_norm"] for record in metrics("run")) > 0
    assert read_json("run/config.json") == before


MOMENTS = {                                                  # the function with which each begins
    "sampling": (train, "collect"), "updating": (train, "update"),
    "writing the model": (TinyMoE, "save_pretrained"), "writing state.pt": (torch, "save"),
    "flushing to disk": (checkpoints, "sync"), "renaming and pruning": (os, "rename")}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_is_really_killed(moment, number, run, first, then, as_whole):
    """At call `number` of a function after the first batch, or up to 10 ms later. A checkpoint that
    was finished is there."""
    note, calls = Path("finished"), itertools.count()
    note.touch()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        then(checkpoints, "save", lambda _, folder, policy, tokenizer, state: write(note,
            str(state["step"])))
        first(*MOMENTS[moment], lambda *_, **options: Path("run/metrics.jsonl").exists()
              and next(calls) == number and os.write(writer, b"!"))
        run("--steps 4 --save_steps 1")
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)                                       # nothing, if the run ends before
    time.sleep(random.Random(number).uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saved = [step for step, _ in checkpoints.list_checkpoints(Path("run"))]
    assert {*map(int, note.read_text(encoding="utf-8").split())} <= {*saved}
    as_whole()


def test_resumes_from_any_batch_and_any_number_of_times(killed, as_whole):
    killed(1, "--steps 4 --save_steps 1")
    killed(2, "--resume")
    with open("run/metrics.jsonl", "a",
              encoding="utf-8") as file:             # a line that was being written
        file.write('{"step": 3, "rew')
    killed(3, "--resume")
    as_whole()


def test_killed_before_the_first_checkpoint(killed, as_whole, capsys):
    """It starts again; also the second time."""
    killed(2, "--steps 4")
    killed(1, "--resume")
    as_whole()
    assert capsys.readouterr().out.count("no checkpoint yet: starts again at batch 1\n") == 2


def test_half_written_checkpoint_is_replaced(killed, as_whole):
    killed(3, "--steps 4 --save_steps 2")
    partial = Path("run/checkpoints/.partial")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    write(partial / "config.json", "{}")
    as_whole()
    assert not partial.exists()


def test_python_numpy_and_torch_random_states_are_resumed(run, killed, first):
    """A user's verifier may draw from any of them."""
    draws = []
    first(train, "collect", lambda *_: draws.append(
        (random.random(), numpy.random.rand(), torch.rand(1).item())))
    run("--steps 4", folder="whole")
    killed(3, "--steps 4 --save_steps 2")
    run("--resume")
    whole, resumed = draws[:4], draws[4:]
    assert resumed == [*whole[:3], *whole[2:]]               # batch 3 twice, with the same numbers


# ------------------------------------------------------------------------------- more steps

def test_a_finished_run_goes_on_for_more_steps(run, whole, capsys):
    more = "--lr_scheduler_type constant_with_warmup"
    run(f"{more} --steps 2")
    run(f"{more} --steps 4 --max_completion_length 5 --resume")      # the task's own
    assert differences(whole(*more.split()), "run", 4) == []
    out = capsys.readouterr().out
    assert "steps 2 -> 4 from batch 3\n" in out


@pytest.mark.parametrize("kind, share", [
    ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("linear", lambda x: 1 - x)])
def test_an_extended_schedule_goes_on_as_that_of_a_run_of_all_steps(kind, share, run, first):
    """Two batches of two updates, then two more: updates 5 to 8 have the rates of a run of 8."""
    run(f"--lr_scheduler_type {kind} --warmup_steps 0 --learning_rate 0.001 --steps 2")
    assert state("run", 2)["optimizer"]["param_groups"][0]["lr"] == 0, "the schedule had ended"
    rates = []
    first(train, "update", lambda args, learner, mini: rates.append(
        learner.optimizer.param_groups[0]["lr"]))
    run("--resume --steps 4")
    want = [0.001 * share(step / 8) for step in range(4, 8)]
    assert rates == pytest.approx(want)


def test_finished_run_resumed_only_reports_again(run, capsys):
    def scores():
        return re.findall(r"^(?:before:|after: ) .*pass@1.{30}", capsys.readouterr().out, re.M)
    before = run("--steps 2 --eval_samples 1 --eval_prompts 4")
    said = scores()
    assert run("--resume") == before
    assert said[-2:] == scores() and len(said) > 2


def test_a_run_that_evaluates_from_its_resumption_on_reports_the_end_alone(run, capsys):
    run()
    run("--resume --steps 2 --eval_samples 1 --eval_prompts 4")
    said = capsys.readouterr().out
    assert "\nafter:  held-out pass@1" in said and "\nbefore:" not in said
    summary = read_json("run/summary.json")
    assert "reward_after" in summary and "reward_before" not in summary


# ------------------------------------------------------------------------------- other flags

CHANGED = {                                                  # flags: what is printed
    "--learning_rate 1e-4": "learning_rate 0.0004 -> 0.0001",
    "--weight_decay 50": "weight_decay 0.0 -> 50.0",
    "--max_grad_norm 0.001": "max_grad_norm 1.0 -> 0.001",
    "--epsilon 0.9": "epsilon 0.0003 -> 0.9",
    "--lr_scheduler_type linear": "lr_scheduler_type cosine -> linear",
    "--num_generations 2": "num_generations 4 -> 2",
    "--algorithm grpo": "algorithm gspo -> grpo",
    "--fp16": "fp16 false -> true",
    "--beta 0.1": "beta 0.0 -> 0.1"}


@pytest.mark.parametrize("line", CHANGED)
def test_a_flag_typed_with_resume_holds_from_then_on(line, killed, run, whole, capsys):
    """It is printed, written to config.json, and acts on the next batch, not on those before."""
    killed(3, "--steps 4 --save_steps 2 --warmup_steps 0")
    after = run(f"--resume {line}")
    before = metrics(whole("--warmup_steps", "0"))
    assert after[:2] == before[:2] and after[2:] != before[2:]
    assert f"{CHANGED[line]} from batch 3\n" in capsys.readouterr().out
    config = read_json("run/config.json")
    name, *value = line.removeprefix("--").split()
    change, = config["changes"]
    assert change["from_batch"] == 3 and change[name][1] == config["resolved"][name]
    assert config["settings"][name] == config["resolved"][name]
    if name == "learning_rate":
        assert [r["lr"] for r in after] == pytest.approx(
            [r["lr"] / (1 if r["step"] < 3 else 4) for r in before])
    assert run("--resume") == after and read_json("run/config.json") == config


def test_an_edit_of_the_settings_holds(killed, run, capsys):
    killed(3, "--steps 4 --save_steps 2")
    config = read_json("run/config.json")
    config["settings"]["learning_rate"] = "1e-4"             # text is read, too
    write("run/config.json", json.dumps(config))
    run("--resume")
    assert "learning_rate 0.0004 -> 0.0001 from batch 3\n" in capsys.readouterr().out
    group, = state("run", 4)["optimizer"]["param_groups"]
    assert group["initial_lr"] == 1e-4 and state("run", 4)["schedule"]["base_lrs"] == [1e-4]


def test_what_the_saved_state_depends_on_is_refused(run):
    """By parse, by the training prompts, or by the critic; nothing changes."""
    run("--steps 2")
    for line, words in {
            "--seed 1": "seed was 0 in run, now 1: the saved state depends on it",
            "--hidden_size 64": "hidden_size was 32 in run, now 64",
            "--prompts_per_step 8": "prompts_per_step was 4", "--optim adamw_torch": "optim was",
            "--steps_per_generation 1": "steps_per_generation", "--use_peft": "use_peft was false",
            "--num_iterations 2": "num_iterations", "--model_name_or_path x": "model_name_or_path",
            "--min_terms 2": "the training prompts are not those of run/checkpoints/step_2",
            "--algorithm ppo": "the state of run/checkpoints/step_2 does not fit these flags (",
            "--steps 1": "--steps 1: run/checkpoints/step_2 has more: give at least 2"}.items():
        assert words in run.refused(f"--output_dir run --resume {line}")


# ------------------------------------------------------------------------------- signals

@pytest.fixture
def signalled(run, first, monkeypatch):
    """signalled(line, 2, number, …) is a run in which signals come while batch 2 is sampled, all
    at once or seconds=5 apart: its exit code."""
    due = {}
    first(train, "collect", lambda *args: [os.kill(os.getpid(), number)
                                           for number in due.pop(args[-1], ())])

    def start(line, step, *numbers, seconds=0):
        due[step] = numbers
        ticks = iter(range(0, 1000 * seconds, seconds or 1))
        clock = SimpleNamespace(monotonic=lambda: next(ticks))
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(signals, "time", clock if seconds else time)
            run(line)
        return stop.value.code
    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM,
                                    getattr(signal, "SIGHUP", signal.SIGTERM)])
def test_ctrl_c_saves_and_says_how_to_go_on(number, signalled, as_whole, capfd):
    assert signalled("--steps 4", 2, number) == 130
    out = capfd.readouterr().out
    assert "stopping after this rollout batch" in out
    assert ("stopped after batch 2 and saved; python train.py --output_dir run --resume continues"
            in out)
    assert Path("run/checkpoints/step_2").is_dir()
    as_whole()


TWICE = (signal.SIGINT, signal.SIGINT)
STOPPED = ("\ntrain.py: stopped immediately; --resume continues a run from its last checkpoint, if "
           "there is one\n")


def test_second_ctrl_c_stops_at_once_but_not_one_that_torchrun_repeats(signalled, capfd):
    signalled("--steps 3", 2, *TWICE)                        # within two seconds: the same one
    assert os.listdir("run/checkpoints") == ["step_2"]
    assert signalled("--resume", 3, *TWICE, seconds=5) == 130
    assert capfd.readouterr().err == STOPPED
    assert os.listdir("run/checkpoints") == ["step_2"]


@pytest.mark.parametrize("step, kept", [(1, False), (2, True)])
def test_second_ctrl_c_before_a_checkpoint(step, kept, signalled, capfd):
    """In the first batch the folder of the run is removed again; later its metrics stay."""
    assert signalled("--steps 3", step, *TWICE, seconds=5) == 130
    assert Path("run").exists() == kept
    assert capfd.readouterr().err == STOPPED


@pytest.mark.parametrize("owner, name", [(train, "update"), (evaluation, "evaluate")])
def test_a_signal_leaves_out_an_evaluation_between_batches(owner, name, run, first, calls,
                                                               capfd):
    """One that comes before it, or in it; the batch is complete and saved."""
    begun = Path("run/metrics.jsonl")
    stop = lambda *_, **__: begun.exists() and os.kill(os.getpid(), signal.SIGTERM)
    sampled = calls(evaluation, "evaluate")
    first(owner, name, stop)
    line = "--steps 4 --eval_samples 1 --eval_prompts 4 --eval_steps 2 --steps_per_generation 1 "
    with pytest.raises(SystemExit) as ended:
        run(line)
    assert ended.value.code == 130 and "stopped after batch 2 and saved" in capfd.readouterr().out
    assert len(sampled) == 2                                 # before training, sampled and greedy
    records = metrics("run")
    assert [record["step"] for record in records] == [1, 2] and "pass_at_1" not in records[1]
    assert Path("run/checkpoints/step_2").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM,
                                    getattr(signal, "SIGHUP", signal.SIGTERM)])
@pytest.mark.parametrize("phase", ["before", "last batch", "after"])
def test_a_signal_acts_in_an_evaluation_and_in_the_last_batch(phase, number, run, first, capfd):
    """Before training nothing is left; after it the evaluation is what --resume goes on with."""
    begun = Path("run/metrics.jsonl")
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    if phase == "last batch":
        first(train, "update", lambda *_: os.kill(os.getpid(), number))
    else:
        first(evaluation, "evaluate", lambda *_, **__: begun.exists() == (phase == "after")
              and os.kill(os.getpid(), number))
    line = "--eval_samples 1 --eval_prompts 4"
    with pytest.raises(SystemExit) as stop:
        run(line)
    assert stop.value.code == 130 and Path("run").exists() == (phase != "before")
    said = capfd.readouterr()
    assert ("stopped after batch 1 and saved" in said.out if phase == "last batch"
            else said.err == STOPPED)
    assert not Path("run/summary.json").exists()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    if phase != "before":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "kill", lambda *_: None)
            run("--resume")
        assert Path("run/summary.json").exists()


def test_ctrl_c_before_the_first_batch(run, first, capfd):
    first(train, "prepare_task", raising(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 130
    assert capfd.readouterr().err == STOPPED


# ------------------------------------------------------------------- no space, no permission

def raising(fault):
    def act(*args, **kwargs):
        raise fault
    return act


FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN_ZIP = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
NO_PERMISSION = PermissionError(errno.EACCES, "Permission denied", "run")


def half_of_the_weights(resource):
    """A real failing write, in the middle of model.safetensors."""
    size = Path("run/checkpoints/step_2/model.safetensors").stat().st_size
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))


LAST = "run/checkpoints/step_3 could not be written"


@pytest.mark.parametrize("where, fault, words", [
    ((torch, "save"), BROKEN_ZIP, [LAST, "inline_container"]),
    ((os, "rename"), NO_PERMISSION, [LAST, "Permission denied"]),
    ((os, "fsync"), FULL, ["run/checkpoints/step_3", "No space left"]),
    ((checkpoints, "open"), FULL, ["run/metrics.jsonl could not be written", "No space"]),
    (None, None, [LAST, "too large"])])
def test_write_that_fails_leaves_the_last_checkpoint(where, fault, words, run, as_whole,
                                                     monkeypatch):
    """From the metrics of batch 3 on, for real in the middle of the weights if `where` is None."""
    resource = pytest.importorskip("resource")               # POSIX
    append = checkpoints.append
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        def breaking(path, record):
            if where and record["step"] == 3:
                patch.setattr(*where, raising(fault), raising=False)
            append(path, record)
            if not where and record["step"] == 3:
                half_of_the_weights(resource)
        patch.setattr(checkpoints, "append", breaking)
        err = run.refused("--steps 4 --save_steps 1 --output_dir run", begun=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(word in err for word in [*words, "MB are free there)"]), err
    assert sorted(os.listdir("run/checkpoints")) == ["step_1", "step_2"]
    as_whole()


# ------------------------------------------------------------------------ an error saves first

@pytest.fixture
def failing(first):
    """failing(3, fault, owner, "name"): owner.name raises the fault, once, in batch 3."""
    now, due = [], {}
    first(train, "collect", lambda *args: now.append(args[-1]))

    def start(step, fault, owner, name):
        def act(*args, **options):
            if now and now[-1] in due:
                raise due.pop(now[-1])
        due[step] = fault
        first(owner, name, act)
    return start


@pytest.mark.parametrize("owner, name, fault", [
    (session.learner.Learner, "score", ValueError("bad")), (train, "reward", OSError("gone")),
    (train, "estimate_advantages", RuntimeError("bug")),
    (train, "update", torch.OutOfMemoryError("no memory"))])
def test_an_error_after_the_first_batch_saves_it_first(owner, name, fault, run, as_whole, failing,
                                                       monkeypatch, capsys):
    """No --save_steps: without that the batches before the error would be lost."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8 * 10 ** 9))
    failing(3, fault, owner, name)
    with pytest.raises((Exception, SystemExit)):
        run("--steps 4")
    assert ("error in batch 3; run/checkpoints/step_2 was saved; --resume continues from it"
            in capsys.readouterr().out)
    assert os.listdir("run/checkpoints") == ["step_2"]
    as_whole()


def test_an_error_between_two_updates_says_what_the_checkpoint_holds(run, first, capsys):
    calls = itertools.count(1)
    bad = raising(ValueError("bad"))
    first(train, "update", lambda *args: next(calls) == 4 and bad())
    with pytest.raises(ValueError, match="bad"):
        run("--steps 3")
    out = capsys.readouterr().out
    assert os.listdir("run/checkpoints") == ["step_1"]
    assert "was saved, with the updates that this batch had made; --resume continues" in out
    assert [record["step"] for record in run("--resume")] == [1, 2, 3]


def test_a_signal_while_an_error_ends_the_run_costs_neither_checkpoint_nor_message(
        run, failing, first, then):
    """torchrun sends one to the processes beside one that has died."""
    failing(3, ValueError("bad"), train, "reward")
    stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    first(checkpoints, "save", stop)
    then(train.StopSignals, "__exit__", stop)
    with pytest.raises(ValueError, match="bad"):
        run("--steps 4")
    assert os.listdir("run/checkpoints") == ["step_2"]


def test_an_error_with_ruined_weights_saves_nothing(run, first):
    def ruin(learner, *rest, **options):
        if Path("ruined/metrics.jsonl").exists():
            next(learner.policy.parameters()).data.fill_(float("nan"))
            raise ValueError("bad")
    first(session.learner.Learner, "score", ruin)
    with pytest.raises(ValueError, match="bad"):
        run("--steps 2", folder="ruined")
    assert not Path("ruined/checkpoints").exists()


@pytest.mark.parametrize("error", [
    ValueError("wrong"), RuntimeError("a bug"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__)
def test_a_failed_start_leaves_no_folder_and_the_next_run_gets_its_name(error, run, failing):
    for step, argv in ((1, flags()), (2, ["--resume", "--output_dir", "runs/gspo"])):
        failing(step, error, session.learner.Learner, "score")
        with pytest.raises((SystemExit, type(error))):
            train.main([*argv, "--steps", "2"])
        if step == 1:
            assert not Path("runs/gspo").exists()
            train.main(flags("--steps", "1"))
    assert len(metrics("runs/gspo")) == 1 and os.listdir("runs/gspo/checkpoints") == ["step_1"]
    assert not Path("runs/gspo-2").exists()


def test_a_full_disk_at_the_start_leaves_no_folder(run, monkeypatch):
    def full(path, text, **options):
        path.touch()
        raise FULL
    monkeypatch.setattr(Path, "write_text", full)
    said = run.refused("--output_dir run")
    assert "file could not be written: [Errno 28] No space" in said and "MB are free" in said
    assert not Path("run").exists()


# ------------------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("keep, left", [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_old_checkpoints_are_pruned(keep, left, run, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEEP", keep)
    run("--steps 4 --save_steps 1")
    assert sorted(os.listdir("run/checkpoints")) == [f"step_{step}" for step in left]
    assert [step for step, _ in checkpoints.list_checkpoints(Path("run"))] == left


def test_a_checkpoint_is_on_the_disk_before_it_is_named(run, first):
    """The order of system calls that makes a power cut harmless: every file is synced, the
    rename, the folder is synced."""
    calls = []
    first(os, "rename", lambda a, b: calls.append(f"rename {Path(b).name}"))
    first(os, "fsync", lambda number: calls.append(
        os.path.basename(os.readlink(f"/proc/self/fd/{number}"))))
    run()
    begun, named = calls.index("metrics.jsonl"), calls.index("rename step_1")
    assert {"metrics.jsonl", "samples.jsonl", "config.json", "model.safetensors",
            "tokenizer.json", "state.pt"} <= set(calls[begun:named])
    assert calls[named - 1:] == [".partial", "rename step_1", "checkpoints"]


# ------------------------------------------------------------------- one folder, one process

@pytest.mark.parametrize("more", ["--resume", "--overwrite_output_dir", ""])
def test_a_second_run_in_the_folder_of_one_at_work_is_refused(more, run, whole, first):
    said = []
    first(train, "collect", lambda *args: args[-1] == 2 and said.append(
        run.refused(f"--steps 4 --output_dir run {more}")))
    run("--steps 4")
    assert "run" in said[0] and ("another process is using" in said[0] or not more)
    assert differences(whole(), "run", 4) == []


def test_the_lock_goes_with_the_process_however_it_ends(run):
    Path("run").mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = folder.lock(Path("run"))                      # noqa: F841 (released with its name)
        os.write(writer, b"locked")
        signal.pause()
    os.read(reader, 6)
    assert "another process is using run" in run.refused("--output_dir run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [record["step"] for record in run()] == [1]


@pytest.mark.parametrize("spoil, words", [
    (lambda run: (run / "metrics.jsonl").unlink(), "run/metrics.jsonl is gone: put it back"),
    (lambda run: write(run / "config.json", json.dumps(read_json(run / "config.json")
                                                       | {"changes": {}})),
     "no readable config.json")])
def test_a_file_of_the_run_that_is_gone_or_edited_is_one_line(spoil, words, run):
    run("--steps 2 --save_steps 1")
    spoil(Path("run"))
    assert words in run.refused("--output_dir run --resume --steps 3", begun=True)


LACKING = [OSError(number, os.strerror(number))
           for number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)]


@pytest.mark.parametrize("fault", LACKING, ids=str)
def test_a_file_system_without_fsync_modes_and_locks_keeps_the_checkpoint(fault, run, monkeypatch,
                                                                          capsys):
    fcntl = pytest.importorskip("fcntl")                     # POSIX
    for owner, name in ((os, "fsync"), (shutil, "copymode"), (fcntl, "flock")):
        monkeypatch.setattr(owner, name, raising(fault))
    run("--save_steps 1")
    assert os.listdir("run/checkpoints") == ["step_1"]
    said = "note: run cannot be locked"
    assert (said in capsys.readouterr().out) == (fault.errno != errno.ENOSYS)    # filelock's own


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("name", ["rename", "replace"])
def test_a_file_system_without_rename_is_refused_before_the_warm_up(name, existed, run, first,
                                                                    monkeypatch):
    if existed:
        Path("run").mkdir()
    first(train, "load_trained_policy", raising(AssertionError("too late")))
    monkeypatch.setattr(os, name, raising(LACKING[-1]))
    said = run.refused("--output_dir run")
    assert "--output_dir run: " in said and LACKING[-1].strerror in said
    assert "; give another folder" in said
    assert Path("run").exists() == existed


def test_a_file_of_the_users_in_the_run_folder_stops_no_checkpoint(run, first):
    first(train, "update", lambda *_: [os.symlink("nowhere", "run/mine.jsonl")]
          if not os.path.lexists("run/mine.jsonl") else None)
    run()
    assert os.listdir("run/checkpoints") == ["step_1"]


def test_a_folder_in_a_checkpoint_can_be_entered_and_its_files_are_on_the_disk(run, first,
                                                                               cold_start):
    """Chat templates besides the first are written to a folder."""
    from transformers import AutoTokenizer
    synced = []
    tokenizer = AutoTokenizer.from_pretrained(cold_start)
    shutil.copytree(cold_start, "model")
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "more": "{{ messages }}"}
    tokenizer.save_pretrained("model")
    first(checkpoints, "sync", lambda path: synced.append(path.name))
    run("--model_name_or_path model")
    more = Path("run/checkpoints/step_1/additional_chat_templates")
    assert more.stat().st_mode & 0o111 and "more.jinja" in synced
