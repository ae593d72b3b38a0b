"""Damage to the files of a checkpoint is noticed: plumbing/model/checksums.py. python -m pytest tests/run/test_damage.py

Two hundred random single-byte changes: --resume, --model_name_or_path and eval.py passk refuse each and name the file.
"""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from plumbing.model import checksums
from plumbing.model.policy import load_policy
from plumbing.run.arguments import parse
from tiny_run import TINY, TINY_MODEL, differences

RUN = [*TINY, "--steps", "3", "--save_steps", "1", "--output_dir", "run"]
NEWEST = Path("run/checkpoints/step_3")


def refused(capsys, call):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    return err


def changes(folder, count, seed=0):
    """(file, place, other byte) of random changes; every file is as likely as any other."""
    rng, files = random.Random(seed), sorted(file for file in folder.rglob("*") if file.is_file())
    for _ in range(count):
        file = rng.choice(files)
        yield file, rng.randrange(file.stat().st_size), rng.randrange(1, 256)


def flip(file, place, bits):
    with open(file, "r+b") as data:
        data.seek(place)
        old = data.read(1)[0]
        data.seek(place)
        data.write(bytes([old ^ bits]))


def noticed(capsys, folder, count, resume):
    """How many of `count` changes both --resume and loading refuse, with the name of the file; each is undone."""
    flags, found = parse([*TINY_MODEL, "--model_name_or_path", str(folder)]), 0
    for change in changes(folder, count):
        flip(*change)
        name = change[0].name
        err = refused(capsys, lambda: train.main(resume))
        with pytest.raises(ValueError) as error:
            load_policy(flags, None, torch.device("cpu"))
        found += all(str(folder) in words and (name in words or name == checksums.NAME) and f"{folder.parent}/step_2 is sound" in words
                     for words in (err, str(error.value)))
        flip(*change)
    return found


@pytest.mark.parametrize("more, count", [
    ([], 20), pytest.param([], 200, marks=pytest.mark.slow), pytest.param(["--use_peft", "--lora_r", "2"], 200, marks=pytest.mark.slow)], ids=str)
def test_every_changed_byte_is_noticed(more, count, workplace, capsys):
    if more:
        pytest.importorskip("peft")
    train.main([*RUN, *more])
    found = noticed(capsys, NEWEST, count, [*RUN, *more, "--resume"])
    print(f"{found} of {count} changed bytes noticed")
    assert found == count and checksums.damaged(NEWEST) == []


def test_what_the_error_advises_goes_on_as_if_nothing_had_been(whole, workplace, capsys):
    train.main([*TINY, "--steps", "4", "--save_steps", "1", "--output_dir", "run"])
    resume = [*TINY, "--steps", "4", "--save_steps", "1", "--output_dir", "run", "--resume"]
    flip(Path("run/checkpoints/step_4/state.pt"), 5000, 1)
    before = Path("run/metrics.jsonl").read_bytes()
    err = refused(capsys, lambda: train.main(resume))
    assert "state.pt is damaged" in err and "step_3 is sound" in err and Path("run/metrics.jsonl").read_bytes() == before
    shutil.rmtree("run/checkpoints/step_4")
    train.main(resume)
    assert differences(whole(), "run", 4) == []
    for step in (3, 4):
        flip(Path(f"run/checkpoints/step_{step}/model.safetensors"), 5000, 1)
    assert "no other checkpoint in run/checkpoints is sound" in refused(capsys, lambda: train.main(resume))


@pytest.mark.parametrize("name", ["generation_config.json", "state.pt"])
def test_passk_and_a_new_run_name_the_file(name, workplace, capsys):
    train.main(RUN)
    flip(NEWEST / name, 40, 1)
    passk = ["passk", "--model_name_or_path", str(NEWEST), "--n", "1", "--problems", "2", "--device", "cpu", "--min_terms", "1", "--max_terms", "2"]
    new = [*TINY_MODEL, "--steps", "1", "--model_name_or_path", str(NEWEST), "--output_dir", "second"]
    for call in (lambda: evaluation.main(passk), lambda: train.main(new)):
        err = refused(capsys, call)
        assert f"{NEWEST}: {name} is damaged" in err and "step_2 is sound" in err
    assert not Path("second").exists()
    flip(NEWEST / name, 40, 1)
    (NEWEST / name).unlink()
    if name == "state.pt":                                   # a model folder that was copied without it
        train.main(new)
    else:
        assert name in refused(capsys, lambda: train.main(new))


@pytest.mark.parametrize("more", [[], pytest.param(["--use_peft", "--lora_r", "2"], marks=pytest.mark.slow)], ids=str)
def test_the_sums_are_those_of_sha256sum_and_the_files_have_one_mode(more, workplace):
    train.main([*RUN, *more])
    mask = os.umask(0)
    os.umask(mask)
    for folder in (NEWEST, next(Path("runs/cold_start").iterdir())):
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~mask}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", checksums.NAME], cwd=NEWEST, check=True)
    listed = {line.split("  ")[1] for line in (NEWEST / checksums.NAME).read_text().splitlines()}
    assert listed == {file.name for file in NEWEST.iterdir()} - {checksums.NAME}


def test_a_checkpoint_of_another_program_is_not_checked(workplace):
    train.main(RUN)
    shutil.copytree(NEWEST, "other", ignore=shutil.ignore_patterns(checksums.NAME, checksums.STATE))
    assert checksums.damaged("other") == []
    train.main([*TINY_MODEL, "--steps", "1", "--model_name_or_path", "other", "--output_dir", "second"])
