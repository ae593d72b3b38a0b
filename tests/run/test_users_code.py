"""Code of users that changes the current folder, or takes functions of os away, in the process of
the run. python -m pytest tests/run/test_users_code.py"""

import os
from pathlib import Path

import pytest

from tiny_run import read_json, write

MOVES = """
import os
os.makedirs({there!r}, exist_ok=True)
os.chdir({there!r})
ran = 0
def whole(completions, **columns):
    global ran
    ran += 1
    with open(f"{{ran}}.txt", "w") as file:                  # in this function's own folder
        file.write(os.getcwd())
    os.makedirs("deeper", exist_ok=True)
    os.chdir("deeper")
    return [float(len(text)) for text in completions]
def one(response, answer):
    os.chdir({there!r})
    if response[:1] == "1" != answer:
        os._exit(1)                                          # the next response has a new worker
    return 1.0
class Play:
    template = False
    def __init__(self, row):
        os.chdir({there!r})
    def step(self, text):
        os.makedirs("games", exist_ok=True)
        os.chdir("games")
        return "1", 1.0, True
"""
SAMPLER = MOVES.partition("ran =")[0] + """
from rollout import Sampler
class Moving(Sampler):
    def sample(self, *inputs, **options):
        os.chdir({there!r})
        return super().sample(*inputs, **options)
"""
VERIFIED = "--verifier mine.py:whole mine.py:one --steps 2 --save_steps 1 "


@pytest.fixture
def there(tmp_path_factory):
    """The folder into which the code of mine.py goes."""
    folder = tmp_path_factory.mktemp("there").resolve()
    write("mine.py", MOVES.format(there=str(folder)))
    write("moving.py", SAMPLER.format(there=str(folder)))
    return folder


def test_the_paths_of_a_run_do_not_follow_a_function_that_changes_the_folder(
        own, there, run, capsys, workplace):
    (workplace / "model").symlink_to(own.split()[1])
    line = own.replace(own.split()[1], "model") + VERIFIED
    run(line, folder="out/run")
    said = capsys.readouterr().out
    assert "metrics are written to out/run/metrics.jsonl" in said
    assert "samples and the checkpoint are in out/run/" in said
    records = run("--resume --trust_run_code --steps 3", folder="out/run")
    assert [row["step"] for row in records] == [1, 2, 3]
    assert (workplace / "out/run/checkpoints/step_3/state.pt").exists()
    assert (workplace / "out/run/summary.json").exists() and os.getcwd() == str(workplace)
    moved = [path for path in there.rglob("*") if path.is_file()]
    assert moved and all(path.read_text(encoding="utf-8") == str(path.parent) for path in moved)
    assert not [*workplace.rglob("deeper")]


@pytest.mark.parametrize("flags", ["--environment mine.py:Play", "--sampler moving.py:Moving"])
def test_nor_an_environment_or_a_sampler_that_does(flags, own, there, run, workplace):
    line = f"{own}--verifier exact {flags} --steps 2 --save_steps 1 "
    run(line)
    assert [row["step"] for row in run("--resume --trust_run_code --steps 3")] == [1, 2, 3]
    assert (workplace / "run/summary.json").exists() and os.getcwd() == str(workplace)


GUARD = """
import os, shutil, subprocess
def guard():
    for name in ("kill", "rename", "replace", "remove", "unlink", "mkdir", "chdir", "getcwd"):
        setattr(os, name, None)
    shutil.rmtree = subprocess.Popen = None
    vars(shutil).pop("move", None)
def whole(completions, **columns):
    whole.ran = getattr(whole, "ran", 0) + 1
    if whole.ran > 2:
        guard()
    return [float(len(text)) for text in completions]
def one(response, answer):
    guard()
    return float(response == answer)
"""


def test_functions_of_os_that_a_function_takes_are_given_back(own, run, workplace):
    """As HumanEval's guard around generated programs takes them. In a worker of its own it costs
    the run nothing; in its process it ends it, and the last complete batch is saved."""
    write("mine.py", GUARD)
    run(own + "--verifier mine.py:one --save_steps 1 --steps 2")
    assert read_json("run/metrics.jsonl")[-1]["verifier_errors"] == 0
    said = run.refused(own + "--verifier mine.py:whole --steps 4 --output_dir other", begun=True)
    assert "--verifier mine.py:whole has set os.chdir, os." in said and "to None" in said
    assert callable(os.rename) and (workplace / "other/checkpoints/step_2").is_dir()
    assert Path.cwd() == workplace
