"""A run folder that was damaged, edited, or would be deleted: a missing file is named, --resume
refuses in one line, no checkpoint that a run starts from is deleted, and no code is run that nobody
typed.
python -m pytest tests/run/test_run_folder.py"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import eval as evaluation
import train
from session.arguments import flags
from session.checkpoints import RECORDS, STATE
from tiny_run import differences, jsonl, metrics, read_json, slow, write

RESUME = "--output_dir run --resume"
NEWEST = Path("run/checkpoints/step_3")
PASSK = "passk --n 1 --problems 2 --device cpu --min_terms 1 --max_terms 2 --model_name_or_path "


@pytest.fixture
def finished(run, workplace):
    """A folder "run" with a run of three batches and the checkpoints step_2 and step_3."""
    made = workplace.parent / "run-of-three"
    if not made.exists():
        run("--steps 3 --save_steps 1", folder=str(made))
    shutil.copytree(made, "run")
    return Path("run")


def edit(**changes):
    """Change settings in config.json, the file that --resume reads."""
    file = Path("run/config.json")
    config = read_json(file)
    config["settings"] |= changes
    write(file, json.dumps(config))


# ------------------------------------------------------------------------------- checkpoints

MISSING = ("state.pt", "config.json", "model.safetensors", "tokenizer_config.json")


@pytest.mark.parametrize("name", MISSING)
def test_a_checkpoint_that_lacks_a_file_is_incomplete_and_the_older_one_is_named(name, finished,
                                                                                 run, whole):
    (NEWEST / name).unlink()
    words = f"{NEWEST} is incomplete: it lacks {name.replace('model', '*')}, or a part of it; "
    assert words + "delete it to continue from run/checkpoints/step_2" in run.refused(RESUME)
    if name in ("state.pt", "model.safetensors"):            # cut off
        (NEWEST / name).write_bytes(Path("run/checkpoints/step_2", name).read_bytes()[:5000])
        assert words + "delete it to continue from run/checkpoints/step_2" in run.refused(RESUME)
    shutil.rmtree("run/checkpoints/step_2")
    assert words + "put that back, or start a new run" in run.refused(RESUME)


def test_an_edited_checkpoint_and_what_the_error_advises(whole, run):
    """A file that was added or edited is no damage."""
    run("--steps 4 --save_steps 1")
    last = Path("run/checkpoints/step_4")
    write(last / "notes.txt", "mine")
    assert len(run("--resume")) == 4
    shutil.rmtree(last)
    run("--resume")
    assert differences(whole(), "run", 4) == []


def test_a_checkpoint_without_its_state_begins_another_run(finished, run):
    (NEWEST / STATE).unlink()
    run(f"--model_name_or_path {NEWEST}", folder="second")


@pytest.mark.parametrize("more", ["", slow("--use_peft --lora_r 2")])
def test_the_files_of_a_checkpoint_have_one_mode(more, run):
    run(f"--steps 3 --save_steps 1 {more}")
    mask = os.umask(0)
    os.umask(mask)
    for folder in (NEWEST, next(Path("runs/cold_start").iterdir())):
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~mask}


def test_a_finished_run_without_its_checkpoints_does_not_start_again(finished, run):
    shutil.rmtree("run/checkpoints")
    assert "its checkpoint in run/checkpoints is gone" in run.refused(RESUME)


def test_a_folder_beside_the_checkpoints_is_none(finished, run):
    for name in ("step_2_backup", "step_07"):
        shutil.copytree("run/checkpoints/step_2", f"run/checkpoints/{name}")
    err = run.refused(f"{PASSK} run", main=evaluation.main)
    assert "its checkpoints: " in err and "run/checkpoints/step_3" in err
    assert [record["step"] for record in run("--resume --steps 4")] == [1, 2, 3, 4]


def test_a_run_saves_every_ten_batches(killed, run):
    killed(11, "--steps 12")
    assert Path("run/checkpoints/step_10").is_dir()
    run("--resume --save_steps 0")
    assert [record["step"] for record in metrics("run")] == [*range(1, 13)]


# ------------------------------------------------------------------------------- config.json

@pytest.mark.parametrize("flag, value", [
    ("sampler", "evil.py:F"), ("verifier", ["exact", "evil.py:F"]),
    ("environment", "./a/evil.py:F")])
def test_code_that_a_folder_names_is_not_run(flag, value, finished, run):
    write("evil.py", "open('ran', 'w').close()\n")
    edit(**{flag: value})
    err = run.refused(RESUME)
    assert f"names code that would be run: --{flag} " in err and "evil.py:F" in err
    assert "--trust_run_code" in err


def test_code_that_is_typed_again_or_trusted_is_run(own, run, first, capsys):
    write("mine.py", "def reward(response, answer):\n    return response == answer\n")
    first(train, "collect", lambda *args: args[-1] == 1 and signal.raise_signal(signal.SIGINT))
    verifier = "--verifier mine.py:reward exact"
    with pytest.raises(SystemExit):
        run(f"{own} --save_steps 1 --steps 2 {verifier}")
    typed = f"{RESUME} {verifier}"
    assert f"python train.py {typed} continues" in capsys.readouterr().out
    assert verifier in run.refused(RESUME)
    run("--resume --trust_run_code")
    assert "trust_run_code" not in read_json("run/config.json")["settings"]
    assert [record["step"] for record in run(f"{typed} --steps 3")] == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"resolved": 3}',
                                  '{"resolved": {"steps": 1}, "settings": []}', None], ids=repr)
def test_a_damaged_config_sends_nobody_in_a_circle(text, finished, run):
    config = Path("run/config.json")
    config.unlink() if text is None else write(config, text)
    assert "put it back, or start from one of its checkpoints" in run.refused(RESUME)
    assert "--resume" not in run.refused("--output_dir run")


# ------------------------------------------------------------------------------- records, data

@pytest.mark.parametrize("bad", ["", "null", '{"a": 1}', '{"step": 2, "rew', "3", "\xff"])
def test_records_are_cut_at_the_batch_of_the_checkpoint(bad, finished, run):
    """With a line that a kill has cut off, in each record."""
    before = {file: file.read_bytes() for file in map(finished.joinpath, RECORDS)
              if file.exists()}                               # minibatches.jsonl: if asked for
    assert len(before) >= 3
    for file, data in before.items():
        later = data.splitlines()[-1].replace(b'"step": 3', b'"step": 4')
        file.write_bytes(data + later + b"\n" + bad.encode("latin-1"))
    run("--resume")
    assert {file: file.read_bytes() for file in before} == before


def test_other_training_prompts_than_before_the_stop_are_refused(own, run):
    line = f"{own} --save_steps 1 --verifier exact"
    run(f"{line} --steps 2")
    rows = Path("rows.jsonl").read_text(encoding="utf-8")
    write("rows.jsonl", rows.replace("1+4=", "4+9="))
    err = run.refused(f"{RESUME} --steps 3")
    assert "the training prompts are not those of run/checkpoints/step_2: put them back" in err


def test_other_answers_and_other_test_rows_are_said(own, run, capsys):
    """Scores on other test rows are not compared."""
    shutil.copy("rows.jsonl", "test.jsonl")
    jsonl("rows.jsonl", read_json("rows.jsonl")[20:])
    jsonl("test.jsonl", read_json("test.jsonl")[:20])
    line = f"{own} --test_dataset_name test.jsonl --verifier exact --eval_samples 1"
    run(f"{line} --steps 2")
    corrected = {name: Path(name).read_text(encoding="utf-8").replace(old, new) for name, old, new
                 in [("rows.jsonl", '"answer": "8"', '"answer": "9"'),
                     ("test.jsonl", '"answer": "3"', '"answer": "7"')]}
    for name, said, other in [
            ("none", "", "note: "),
            ("rows.jsonl", "note: answers, or other columns, of the training rows are not those of "
             "run/checkpoints/step_2: rewards follow the new ones\n", "test rows"),
            ("test.jsonl", "note: the test rows are not those of run/checkpoints/step_3: earlier "
             "scores are left out of the summary\n", "training rows")]:
        if name in corrected:
            write(name, corrected[name])
        capsys.readouterr()
        run(f"--resume --steps {2 + (name in corrected) + (name == 'test.jsonl')}")
        out = capsys.readouterr().out
        assert said in out and other not in out
        summary = read_json("run/summary.json")
        assert ("reward_before" in summary) == (name != "test.jsonl") and "reward_after" in summary


# ------------------------------------------------------------------------------- what is read

OVER = "--output_dir run --overwrite_output_dir"
STARTS = {"model_name_or_path": "",
          "teacher_model_name_or_path": "--model_name_or_path model --algorithm grpo "
                                        "--advantage distillation"}


def test_a_checkpoint_that_the_new_run_starts_from_is_not_deleted(finished, workplace, run):
    shutil.copytree(NEWEST, "model")
    jsonl("rows.jsonl", [{"prompt": f"{i}+{j}=", "answer": "4"} for i in range(9)
                         for j in range(9)])
    assert {f.name for f in flags() if "checkpoint" in f.metadata} == STARTS.keys()
    for flag, more in STARTS.items():
        for path in (NEWEST, f"../{workplace.name}/{NEWEST}"):       # however spelled
            err = run.refused(f"{more} --dataset_name rows.jsonl --verifier exact --{flag} {path} "
                              f"{OVER}")
            assert f"--overwrite_output_dir would delete {path}, which --{flag} needs" in err


def test_data_with_the_name_of_a_runs_records_are_not_deleted(finished, run):
    shutil.copytree(NEWEST, "model")
    for n, file in enumerate(("rows.jsonl", "run/samples.jsonl")):
        jsonl(file, [{"prompt": f"{i}+{n}=", "answer": str(i + n)} for i in range(99)])
    for flag in ("dataset_name", "test_dataset_name"):
        data = {"dataset_name": "rows.jsonl", flag: "run/../run/samples.jsonl"}
        line = " ".join(f"--{name} {file}" for name, file in data.items())
        err = run.refused(f"--model_name_or_path model {line} --verifier exact {OVER}")
        assert f"would delete run/../run/samples.jsonl, which --{flag} needs" in err
    assert Path("run/samples.jsonl").exists() and NEWEST.exists()


def test_what_no_run_has_written_is_not_deleted(finished, run):
    write("run/mine.yaml", "learning_rate: 1e-3\n")
    write("run/checkpoints/notes.txt", "mine")
    assert [one["step"] for one in run("--config run/mine.yaml --overwrite_output_dir")] == [1]
    assert Path("run/mine.yaml").exists() and not NEWEST.exists()
    assert Path("run/checkpoints/notes.txt").exists()


@pytest.mark.parametrize("flag", ["--verifier exact {}:reward", "--prompt_template @{}"])
def test_code_and_texts_that_the_new_run_reads_are_not_deleted(flag, own, finished, run):
    write(NEWEST / "mine.py", "def reward(response, answer):\n    return 1.0    # {prompt}\n")
    err = run.refused(f"{own} {OVER} {flag.format(NEWEST / 'mine.py')}")
    assert "would delete" in err and f"which {flag.split()[0]} needs" in err


def test_the_base_model_of_an_adapter_is_protected(finished, run):
    pytest.importorskip("peft")
    run(f"--model_name_or_path {NEWEST} --use_peft", folder="lora")
    err = run.refused(f"--model_name_or_path lora/checkpoints/step_1 --use_peft {OVER}")
    assert f"would delete {NEWEST}, which --model_name_or_path needs" in err


@pytest.mark.parametrize("asked, words", [
    ("run/checkpoints/step_50", ""), ("./rum/checkpoints/step_9", ""), ("nothing/at/all", ""),
    ("checkpoints/SmolLM2-135M-Instruct", "python tests/make_smollm2.py makes it"),
    ("runs/gspo", "")])
def test_a_checkpoint_that_does_not_exist_is_refused(asked, words, workplace, refused):
    shutil.copytree(next(Path("runs/cold_start").iterdir()), "run/checkpoints/step_9")
    teacher = ("--model_name_or_path run/checkpoints/step_9 --algorithm grpo "
               "--advantage distillation --teacher_model_name_or_path")
    for flag in ("--model_name_or_path", teacher):
        err = refused(f"--output_dir new {flag} {asked}")
        assert f"{flag.split()[-1]} {asked}: there is no such folder" in err and words in err
