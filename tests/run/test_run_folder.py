"""The folder of a run: one process at a time, one run, and what a resumed run must share with it.
python -m pytest tests/run/test_run_folder.py"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from session import checkpoints
from tiny_run import SUMS, TINY, TRAIN, differences, jsonl, metrics, read_json, write

RESUME = "--output_dir run --resume"


# ------------------------------------------------------------------- one folder, one process

@pytest.fixture
def busy(workplace):
    """busy(folder): another process holds its lock, until the test ends."""
    children = []

    def lock(folder):
        Path(folder).mkdir(exist_ok=True)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            checkpoints.LOCKS.clear()
            checkpoints.lock(Path(folder))
            os.write(writer, b"!")
            signal.pause()
        children.append(child)
        os.read(reader, 1)
        return child
    yield lock
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_second_run_in_the_folder_of_one_at_work_is_refused(run, busy):
    """A new one when it would make the folder, and --resume at once."""
    busy("run")
    assert "another process is using run" in run.refused("--steps 1 --output_dir run")
    assert os.listdir("run") == [".lock"]
    jsonl("run/config.json", [{}])
    assert "another process is using run" in run.refused(RESUME)


def test_the_lock_goes_with_the_process_however_it_ends(run, busy):
    child = busy("run")
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert [record["step"] for record in run()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("given, folders", [
    ([], ["gspo", "gspo-2"]), (["--output_dir", "runs/one"], ["one"])])
def test_of_two_runs_that_start_together_none_is_mixed_with_the_other(given, folders, workplace):
    """Without --output_dir both train; with the same one, the second to make it is refused."""
    runs = [subprocess.Popen([sys.executable, TRAIN, *TINY, "--steps", "3", "--seed", str(seed),
                              *given], stderr=subprocess.PIPE) for seed in (1, 1)]
    said = [one.communicate()[1].decode() for one in runs]
    assert sorted(one.returncode for one in runs) == [0, 2 * (len(folders) == 1)]
    for folder in folders:
        assert [record["step"] for record in metrics(f"runs/{folder}")] == [1, 2, 3]
    assert len(folders) == 2 or "runs/one" in "".join(said)


# ------------------------------------------------------------------- one folder, others' files

STRANGERS = {"data.jsonl": '{"step": 9}\n{"step": 1}', "log.jsonl": "[1]\n", "tokens.jsonl": "x"}


def test_files_of_others_are_left_alone(run, killed):
    """Also by a resumed run, and one with the name of a record that the run does not write."""
    Path("run").mkdir()
    for name, text in STRANGERS.items():
        write(f"run/{name}", text)
    killed(2, "--steps 3 --save_steps 1 --save_tokens false")
    run("--resume")
    assert {name: Path("run", name).read_text(encoding="utf-8") for name in STRANGERS} == STRANGERS


@pytest.mark.parametrize("name", [
    "metrics.jsonl", "summary.json", "minibatches.jsonl", "checkpoints/step_100", "checkpoints/x"])
def test_a_folder_where_a_run_would_replace_a_file_is_refused(name, run):
    Path("run/checkpoints").mkdir(parents=True)
    write(f"run/{name}", '{"step": 9}\n')
    assert f"run/{name} exists" in run.refused("--save_minibatches --steps 1 --output_dir run")


# ------------------------------------------------------------------------------- config.json

@pytest.fixture
def finished(run, whole):
    """A folder "run" with a run of four batches."""
    shutil.copytree(whole(), "run")


def test_a_resumed_run_keeps_its_flags(finished, run):
    for line, name, value in (
            ("--seed 1", "seed", 0), ("--beta 0.1", "beta", 0.0), ("--algorithm grpo", "algorithm",
            "gspo"), ("--prompts_per_step 8", "prompts_per_step", 4), ("--fp16", "fp16", False),
            ("--max_grad_norm 0.001", "max_grad_norm", 1.0), ("--epsilon 0.9", "epsilon", 3e-4)):
        assert f"--{name} {line.split()[-1] if ' ' in line else True}: this run has {value}" in (
            run.refused(f"{RESUME} {line}"))
    assert len(run("--resume --steps 5 --seed 0 --eval_samples 1 --eval_prompts 2 --save_steps 1 "
                   "--learning_rate 1e-4 --report_to none")) == 5
    config = read_json("run/config.json")
    assert (config["steps"], config["learning_rate"], config["eval_samples"]) == (5, 1e-4, 1)


def test_a_learning_rate_typed_with_resume_holds_from_then_on(killed, run, whole):
    killed(3, "--steps 4 --save_steps 2 --warmup_steps 0")
    after, before = run("--resume --learning_rate 1e-4"), metrics(whole("--warmup_steps", "0"))
    assert after[:2] == before[:2]
    assert [r["lr"] for r in after] == pytest.approx(
        [r["lr"] / (1 if r["step"] < 3 else 4) for r in before])


@pytest.mark.parametrize("old, new", [
    ('"answer": "8"', '"answer": "9"'), ('"largest": 7', '"largest": 6'), ("6+4=", "4+9=")])
def test_changed_training_rows_are_refused(old, new, own, run):
    """Prompts, answers and the other columns, which a reward function may read. Changed test rows
    are not."""
    jsonl("test.jsonl", SUMS[:20])
    jsonl("rows.jsonl", SUMS[20:])
    run(f"{own} --test_dataset_name test.jsonl --verifier exact")
    for name, kept in (("test.jsonl", True), ("rows.jsonl", False)):
        text = Path(name).read_text(encoding="utf-8")
        write(name, text.replace(old, new))
        if kept:
            run("--resume --steps 2")
    said = run.refused(f"{RESUME} --steps 3", begun=True)
    assert "the training rows are not those of run/checkpoints/step_2" in said


# ------------------------------------------------------------------------------- checkpoints

def test_a_run_goes_on_from_the_older_checkpoint_if_the_newest_is_deleted(run, whole):
    run("--steps 4 --save_steps 1")
    assert sorted(os.listdir("run/checkpoints")) == ["step_3", "step_4"]
    shutil.rmtree("run/checkpoints/step_4")
    run("--resume")
    assert differences(whole(), "run", 4) == []


def test_a_run_saves_every_ten_batches(killed, run):
    killed(11, "--steps 12")
    assert os.listdir("run/checkpoints") == ["step_10"]
    run("--resume --save_steps 0")
    assert [record["step"] for record in metrics("run")] == [*range(1, 13)]


def test_a_checkpoint_is_on_the_disk_before_it_is_named(run, first):
    """The order of system calls that makes a power cut harmless: every file is synced, the
    rename, the folder is synced."""
    calls = []
    first(Path, "rename", lambda a, b: calls.append(f"rename {Path(b).name}"))
    first(os, "fsync", lambda number: calls.append(
        os.path.basename(os.readlink(f"/proc/self/fd/{number}"))))
    run()
    named = calls.index("rename step_1")
    assert {"config.json", "model.safetensors", "tokenizer.json", "state.pt"} <= {*calls[:named]}
    assert calls[named - 1:] == [".partial", "rename step_1", "checkpoints"]


def test_the_records_of_mini_batches_are_those_before_each_step(run):
    """--save_minibatches: all responses of every update; a first one has ratio 1."""
    first, _ = run("--steps 2 --save_minibatches --plain --warmup_steps 0")
    one, two = read_json("run/minibatches.jsonl")
    assert [one["step"], two["step"]] == [1, 2] and len(one["minibatches"]) == 2
    rows = [row for mini in one["minibatches"] for row in mini]
    assert len(rows) == 16
    assert sum(row["reward"] for row in rows) / 16 == pytest.approx(first["reward"])
    near = [max(abs(a - b) for a, b in zip(row["logp"], row["old_logp"])) for row in rows]
    assert max(near[:8]) < 1e-5 < max(near[8:])
    assert any(row["advantage"] for row in rows)
