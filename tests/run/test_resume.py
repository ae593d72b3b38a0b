"""A run that was stopped and resumed is the run that was not: weights, optimizer, random states,
metrics, to the last bit. It may be stopped by a kill or a signal.
python -m pytest tests/run/test_resume.py"""

import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
import train
from features.minibatches import Minibatches
from plumbing.refusal import Refusal
from session import checkpoints
from tiny_run import TINY, TRAIN, differences, metrics, read_json, slow, state, write


@pytest.fixture
def as_whole(run, whole):
    """as_whole(more) resumes the run in the folder "run": it ends as one that nothing stopped."""
    def resume(more=""):
        run("--resume")
        assert differences(whole(*more.split()), "run", 4) == []
    return resume


# What has a state. Features: tests/features/test_features.py; moments in 8 bits: test_optim.py.
STATES = ["", "--fp16 --sampler_dtype float32"]
MORE_STATES = [
    "--algorithm dapo", "--num_iterations 3", "--lr_scheduler_type linear", "--shard true",
    "--eval_samples 1 --eval_prompts 4 --eval_steps 2",
    "--temperature 0.9 --stop ,, --algorithm sapo --reduction token-mean"]


@pytest.mark.parametrize("more", [
    *STATES, *map(slow, MORE_STATES)])
def test_resumed_run_equals_uninterrupted(more, killed, as_whole):
    """Killed one batch after the checkpoint of batch 2."""
    killed(3, f"--steps 4 --save_steps 2 {more}")
    before = read_json("run/config.json")
    as_whole(more)
    assert sum(record["grad_norm"] for record in metrics("run")) > 0
    assert read_json("run/config.json") == before | {"resume": True}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_process_that_is_really_killed_at_any_moment(number, whole, as_whole, workplace):
    """SIGKILL at a random moment from the first metrics to the end, of a run that saves after every
    batch: a checkpoint that was named is whole."""
    child = subprocess.Popen([sys.executable, TRAIN, *TINY, *"--steps 4 --save_steps 1".split(),
                              "--output_dir", "run"], stdout=subprocess.DEVNULL)
    rng = random.Random(number)
    while not Path("run/metrics.jsonl").exists() and child.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 1))
    child.kill()
    child.wait()
    as_whole()


def test_resumes_from_any_batch_and_any_number_of_times(killed, as_whole):
    killed(1, "--steps 4 --save_steps 1")
    killed(2, "--resume")
    with open("run/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')                       # a line that was being written
    killed(3, "--resume")
    as_whole()


def test_killed_before_the_first_checkpoint(killed, as_whole):
    """It starts again; also the second time."""
    killed(2, "--steps 4")
    killed(1, "--resume")
    as_whole()


def test_half_written_checkpoint_is_replaced(killed, as_whole):
    killed(3, "--steps 4 --save_steps 2")
    partial = Path("run/checkpoints/.partial")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    write(partial / "config.json", "{}")
    as_whole()
    assert not partial.exists()


def test_pythons_and_torchs_random_states_are_resumed(run, killed, first):
    """A user's verifier may draw from either."""
    draws = []
    first(train, "collect", lambda *_: draws.append((random.random(), torch.rand(1).item())))
    run("--steps 4", folder="whole")
    killed(3, "--steps 4 --save_steps 2")
    run("--resume")
    whole, resumed = draws[:4], draws[4:]
    assert resumed == [*whole[:3], *whole[2:]]               # batch 3 twice, with the same numbers


def test_the_state_of_a_feature_is_resumed(run, monkeypatch):
    loaded = []
    monkeypatch.setattr(Minibatches, "state_dict", lambda feature, folder: {"count": 3})
    monkeypatch.setattr(Minibatches, "load_state_dict",
                        lambda feature, state, folder: loaded.append(state))
    run("--save_minibatches")
    run("--resume --steps 2")
    assert loaded == [{"count": 3}]


# ------------------------------------------------------------------------------- more steps

@pytest.mark.parametrize("kind, share", [
    ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("linear", lambda x: 1 - x)])
def test_an_extended_schedule_goes_on_as_that_of_a_run_of_all_steps(kind, share, run, first):
    """Two batches of two updates, then two more: updates 5 to 8 have the rates of a run of 8."""
    run(f"--lr_scheduler_type {kind} --warmup_steps 0 --learning_rate 0.001 --steps 2")
    assert state("run", 2)["optimizer"]["param_groups"][0]["lr"] == 0, "the schedule had ended"
    rates = []
    first(train, "update", lambda learner, mini: rates.append(
        learner.optimizer.param_groups[0]["lr"]))
    run("--resume --steps 4")
    want = [0.001 * share(step / 8) for step in range(4, 8)]
    assert rates == pytest.approx(want)


def test_a_finished_run_resumed_only_reports_again_and_goes_on_for_more_steps(run, whole, capsys):
    def scores():
        return re.findall(r"^(?:before:|after: ) .*pass@1.{30}", capsys.readouterr().out, re.M)
    more = "--lr_scheduler_type constant_with_warmup"
    before = run(f"{more} --steps 2 --eval_samples 1 --eval_prompts 4")
    said = scores()
    assert run("--resume") == before
    assert said[-1:] == scores() and len(said) == 2
    run("--steps 4 --resume")
    assert differences(whole(*more.split()), "run", 4) == []


# ------------------------------------------------------------------------------- signals

@pytest.fixture
def signalled(run, first, monkeypatch):
    """signalled(line, 2, number, …) is a run in which signals come while batch 2 is sampled, all
    at once or seconds=5 apart: the exception that ended it."""
    due = {}
    first(train, "collect", lambda *args: [os.kill(os.getpid(), number)
                                           for number in due.pop(args[-1], ())])

    def start(line, step, *numbers, seconds=0):
        due[step] = numbers
        ticks = iter(range(0, 1000 * seconds, seconds or 1))
        clock = SimpleNamespace(monotonic=lambda: next(ticks))
        with monkeypatch.context() as patch, pytest.raises(BaseException) as stop:
            patch.setattr(checkpoints, "time", clock if seconds else time)
            run(line)
        return stop.value
    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(number, signalled, as_whole, capfd):
    assert signalled("--steps 4", 2, number).code == 130
    out = capfd.readouterr().out
    assert "stopping after this rollout batch" in out
    assert ("stopped after batch 2 and saved; python train.py --output_dir run --resume continues"
            in out)
    assert os.listdir("run/checkpoints") == ["step_2"]
    as_whole()
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


TWICE = (signal.SIGINT, signal.SIGINT)


def test_second_ctrl_c_stops_at_once_but_not_one_that_torchrun_repeats(signalled):
    signalled("--steps 3", 2, *TWICE)                        # within two seconds: the same one
    assert os.listdir("run/checkpoints") == ["step_2"]
    stop = signalled("--resume", 3, *TWICE, seconds=5)
    assert isinstance(stop, KeyboardInterrupt)
    assert os.listdir("run/checkpoints") == ["step_2"]


@pytest.mark.parametrize("owner, name", [(train, "update"), (evaluation, "evaluate")])
def test_a_signal_in_a_batch_with_an_evaluation_loses_neither(owner, name, run, first, capfd):
    """One that comes before the evaluation, or in it. The resumed run is as the whole one."""
    line = "--steps 4 --eval_samples 1 --eval_prompts 4 --eval_steps 2 --steps_per_generation 1 "
    whole = run(line, folder="whole")
    sent = itertools.count()
    stop = lambda *_, **__: (Path("run/metrics.jsonl").exists() and next(sent) == 0
                             and os.kill(os.getpid(), signal.SIGTERM))
    first(owner, name, stop)
    with pytest.raises(SystemExit) as ended:
        run(line)
    assert ended.value.code == 130 and "stopped after batch 2 and saved" in capfd.readouterr().out
    records = metrics("run")
    assert [record["step"] for record in records] == [1, 2] and "pass_at_1" in records[1]
    assert run("--resume") == whole


@pytest.mark.parametrize("name", ["step_2_best", "step_best", "step_1_2", "step_9"])
def test_other_folders_beside_the_checkpoints_are_left_alone(name, killed, as_whole):
    """A copy, and the checkpoint of something else, which has no state of ours."""
    killed(3, "--steps 4 --save_steps 1")
    left_out = shutil.ignore_patterns("state.pt" if name == "step_9" else "")
    shutil.copytree("run/checkpoints/step_2", f"run/checkpoints/{name}", ignore=left_out)
    as_whole()
    assert {*os.listdir("run/checkpoints")} == {"step_3", "step_4", name}


def test_the_two_up_to_the_one_just_written_are_kept(tmp_path):
    """Of others as many as there are."""
    for n in (2, 3, 9, 10):
        (tmp_path / f"checkpoints/step_{n}").mkdir(parents=True)
        write(tmp_path / f"checkpoints/step_{n}/state.pt", "")
    saved = SimpleNamespace(save_pretrained=lambda folder: folder.mkdir(exist_ok=True))
    learner = SimpleNamespace(tokenizer=saved, features=[])
    checkpoints.write(tmp_path, saved, learner, {"step": 4})
    assert {*os.listdir(tmp_path / "checkpoints")} == {f"step_{n}" for n in (3, 4, 9, 10)}


def test_a_full_disk_at_a_save_is_a_line_and_the_checkpoint_before_it_stays(run, monkeypatch,
                                                                            as_whole):
    save = torch.save
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="step_3 is not saved"):
        patch.setattr(torch, "save",
                      lambda state, path: 1 / (3 - state["step"]) and save(state, path))
        run("--steps 4 --save_steps 1")
    as_whole()
