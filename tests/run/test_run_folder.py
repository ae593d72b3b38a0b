"""A run folder that was damaged, edited, or would be deleted: every changed byte of a checkpoint is
noticed, --resume refuses in one line or says what it leaves out, nothing that a run reads is
overwritten, and no code is run that nobody typed. python -m pytest tests/run/test_run_folder.py"""

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import get_args, get_origin

import pytest

import eval as evaluation
import train
from plumbing.model import checksums
from session import checkpoints
from session.arguments import flags
from tiny_run import differences, jsonl, metrics, read_json, slow

RESUME = "--output_dir run --resume"
NEWEST = Path("run/checkpoints/step_3")
PASSK = "passk --n 1 --problems 2 --device cpu --min_terms 1 --max_terms 2 --model_name_or_path "
NEW = "--output_dir second --model_name_or_path "


@pytest.fixture
def finished(run, workplace):
    """A folder "run" with a run of three batches and the checkpoints step_2 and step_3."""
    made = workplace.parent / "run-of-three"
    if not made.exists():
        run("--steps 3 --save_steps 1", folder=str(made))
    shutil.copytree(made, "run")
    return Path("run")


def files():
    return {path: path.read_bytes() for path in Path("run").rglob("*")
            if path.is_file() and path.name != ".lock"}


def edit(parts=("arguments", "given"), **changes):
    """Change flags in config.json, where they are recorded and where they are given."""
    file = Path("run/config.json")
    config = read_json(file)
    for part in parts:
        config[part] |= changes
    file.write_text(json.dumps(config), encoding="utf-8")


def flip(file, place, bits=1):
    data = bytearray(Path(file).read_bytes())
    data[place] ^= bits
    Path(file).write_bytes(data)


def damage(file, how):
    data = file.read_bytes() if file.exists() else b""
    lines, middle = data.splitlines(keepends=True), len(data) // 2
    if how == "removed":
        file.unlink()
    elif how == "edited":
        flip(file, middle)
    else:
        file.write_bytes({"emptied": b"", "cut": data[:middle], "replaced": b"\xff\x00\n",
                          "added": b"{}", "of one line": b"".join(lines[:1]),
                          "of all lines but one": b"".join(lines[:-1])}[how])


# ------------------------------------------------------------------------------- a changed byte

ADAPTER = "--use_peft --lora_r 2"


@pytest.mark.parametrize("more", ["", slow(ADAPTER)])
def test_every_changed_byte_is_noticed(more, run):
    """Random changes, undone after each; every file is as likely as any other."""
    run(f"--steps 3 --save_steps 1 {more}")
    rng = random.Random(0)
    for _ in range(40):
        file = rng.choice(sorted(NEWEST.iterdir()))
        change = rng.randrange(file.stat().st_size), rng.randrange(1, 256)
        flip(file, *change)
        damage = checksums.damaged(NEWEST)
        assert any(file.name in line for line in damage) or damage and file.name == checksums.NAME
        flip(file, *change)
    assert checksums.damaged(NEWEST) == []


def test_what_the_error_advises_goes_on_as_if_nothing_had_been(whole, run):
    run("--steps 4 --save_steps 1")
    flip("run/checkpoints/step_4/state.pt", 5000)
    err = run.refused(RESUME)
    assert "state.pt is damaged" in err and "step_3 is sound" in err
    shutil.rmtree("run/checkpoints/step_4")
    run("--resume")
    assert differences(whole(), "run", 4) == []
    for step in (3, 4):
        flip(f"run/checkpoints/step_{step}/model.safetensors", 5000)
    assert "no other checkpoint in run/checkpoints is sound" in run.refused(RESUME)


READERS = {RESUME: None, f"{PASSK} {NEWEST}": evaluation.main, f"{NEW} {NEWEST}": None}


@pytest.mark.parametrize("name, how, words", [
    ("generation_config.json", "edited", "generation_config.json is damaged"),
    ("generation_config.json", "removed", "generation_config.json is missing"),
    ("state.pt", "edited", "state.pt is damaged"),
    (checksums.NAME, "emptied", "SHA256SUMS is damaged"),
    (checksums.NAME, "of one line", "generation_config.json is not listed in SHA256SUMS"),
    (checksums.NAME, "of all lines but one", "tokenizer_config.json is not listed in SHA256SUMS"),
    ("added_tokens.json", "added", "added_tokens.json is not listed in SHA256SUMS")])
def test_whoever_reads_a_checkpoint_names_its_damage(name, how, words, finished, run):
    (NEWEST / ".DS_Store").write_text("", encoding="utf-8")                    # no damage
    damage(NEWEST / name, how)
    for line, main in READERS.items():
        err = run.refused(line, main=main)
        assert f"{NEWEST}: {words}" in err and "run/checkpoints/step_2 is sound" in err


def test_a_folder_that_was_copied_without_its_state_begins_another_run(finished, run):
    (NEWEST / checksums.STATE).unlink()
    run(f"--model_name_or_path {NEWEST}", folder="second")


@pytest.mark.parametrize("more", ["", slow(ADAPTER)])
def test_the_sums_are_those_of_sha256sum_and_the_files_have_one_mode(more, run):
    run(f"--steps 3 --save_steps 1 {more}")
    mask = os.umask(0)
    os.umask(mask)
    for folder in (NEWEST, next(Path("runs/cold_start").iterdir())):
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~mask}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", checksums.NAME], cwd=NEWEST,
                   check=True)
    lines = (NEWEST / checksums.NAME).read_text(encoding="utf-8").splitlines()
    listed = {line.split("  ")[1] for line in lines}
    assert listed == {file.name for file in NEWEST.iterdir()} - {checksums.NAME}


def test_a_checkpoint_of_another_program_is_not_checked(finished, run):
    shutil.copytree(NEWEST, "other",
                    ignore=shutil.ignore_patterns(checksums.NAME, checksums.STATE))
    assert checksums.damaged("other") == []
    run("--model_name_or_path other", folder="second")


# ------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["state.pt", "config.json", checksums.NAME])
def test_a_file_that_every_checkpoint_lacks_is_missed(name, finished, run):
    for folder in finished.glob("checkpoints/*"):
        (folder / name).unlink()
    err = run.refused(RESUME)
    assert f"{NEWEST}: {name} is missing" in err and "no other checkpoint" in err


def test_a_finished_run_without_its_checkpoints_does_not_start_again(finished, run):
    shutil.rmtree("run/checkpoints")
    assert "its checkpoint in run/checkpoints is gone" in run.refused(RESUME)


def test_a_folder_beside_the_checkpoints_is_none(finished, run):
    for name in ("step_2_backup", "step_07"):
        shutil.copytree("run/checkpoints/step_2", f"run/checkpoints/{name}")
    err = run.refused(f"{PASSK} run", main=evaluation.main)
    assert "its checkpoint is run/checkpoints/step_3" in err
    assert [record["step"] for record in run("--resume --steps 4")] == [1, 2, 3, 4]
    Path("run/checkpoints/step_4/state.pt").write_bytes(b"")
    err = run.refused(RESUME)
    assert "state.pt is damaged" in err and f"{NEWEST} is sound" in err


def test_a_run_saves_every_ten_batches_and_says_so(killed, run, capsys):
    killed(11, "--steps 12")
    size = sum(file.stat().st_size for file in Path("run/checkpoints/step_10").iterdir())
    line, = [line for line in capsys.readouterr().out.splitlines() if "checkpoints of" in line]
    assert line.endswith("MB: every 10 rollout batches, the first after batch 10")
    assert float(line.split()[3]) == pytest.approx(size / 1e6, abs=0.1)
    run("--resume --save_steps 0")
    line, = [line for line in capsys.readouterr().out.splitlines() if "checkpoints of" in line]
    assert line.endswith("MB: the first after batch 12")
    assert [record["step"] for record in metrics("run")] == [*range(1, 13)]


def test_a_checkpoint_of_ones_own_is_saved_every_25_batches(own, killed, capsys):
    killed(1, f"{own} --steps 26 --verifier exact")
    assert "MB: every 25 rollout batches, the first after batch 25" in capsys.readouterr().out


# ------------------------------------------------------------------------------- config.json

@pytest.mark.parametrize("flag, value", [
    ("sampler", "evil.py:F"), ("verifier", ["exact", "evil.py:F"]),
    ("environment", "./a/evil.py:F")])
def test_code_that_a_folder_names_is_not_run(flag, value, finished, run):
    Path("evil.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    edit(**{flag: value})
    err = run.refused(RESUME)
    assert f"names code that would be run: --{flag} " in err and "evil.py:F" in err
    assert "--trust_run_code" in err


def test_code_that_is_typed_again_or_trusted_is_run(own, run, first, capsys):
    Path("mine.py").write_text("def reward(response, answer):\n    return response == answer\n",
                               encoding="utf-8")
    first(train, "collect", lambda *args: args[-1] == 1 and signal.raise_signal(signal.SIGINT))
    verifier = "--verifier mine.py:reward exact"
    with pytest.raises(SystemExit):
        run(f"{own} --save_steps 1 --steps 2 {verifier}")
    typed = f"{RESUME} {verifier}"
    assert f"python train.py {typed} continues" in capsys.readouterr().out
    assert verifier in run.refused(RESUME)
    run("--resume --trust_run_code")
    assert "trust_run_code" not in read_json("run/config.json")["given"]
    assert [record["step"] for record in run(f"{typed} --steps 3")] == [1, 2, 3]


@pytest.mark.parametrize("parts", [("arguments", "given"), ("arguments",)], ids="+".join)
@pytest.mark.parametrize("flag, was, now", [
    ("learning_rate", 0.0004, 0.1), ("temperature", 1.0, 0.5), ("steps", 3, 2),
    ("num_generations", 4, 2)])
def test_settings_that_the_checkpoint_was_not_made_with_are_refused(flag, was, now, parts, finished,
                                                                    run):
    edit(parts, **{flag: now})
    err = run.refused(RESUME)
    assert f"{NEWEST} was made with other settings than those of now: " in err
    assert f" now: {flag} was {was}, now {now}; " in err


def test_a_run_with_a_flag_that_is_gone_is_refused(finished, run):
    edit(["given"], use_cpu=True)
    said = "--resume: run/config.json: --use_cpu is gone: write --device cpu"
    assert said in run.refused(RESUME)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"arguments": 3}',
                                  '{"arguments": {}, "given": []}', None], ids=repr)
def test_a_damaged_config_sends_nobody_in_a_circle(text, finished, run):
    config = Path("run/config.json")
    config.unlink() if text is None else config.write_text(text, encoding="utf-8")
    assert f"put it back, start from {NEWEST} (--model_name_or_path)" in run.refused(RESUME)
    assert "--resume" not in run.refused("--output_dir run")


# ------------------------------------------------------------------------------- records, data

@pytest.mark.parametrize("bad", ["", "null", '{"a": 1}', '{"step": 2}', '{"step": 2, "rew', "3",
                                 '{"step": [], "pass_rate": 1, "samples": 1, "tokens": 1}', "\xff"])
def test_a_bad_line_costs_no_other(bad, finished, run, capsys):
    """In each record."""
    whole = {file: file.read_bytes() for file in map(finished.joinpath, checkpoints.RECORDS)}
    for file, data in whole.items():
        first, rest = data.split(b"\n", 1)
        file.write_bytes(b"\n".join([first, bad.encode("latin-1"), rest]))
    capsys.readouterr()
    run("--resume")
    said = capsys.readouterr().out
    for file, data in whole.items():
        assert f"{file}: left out what is no whole record: line 2\n" in said
        assert file.read_bytes() == data


OTHER = [                                                    # file, what it held, holds, the line
    ("rows.jsonl", '"answer": "5"', '"answer": "6"', "training data"),
    ("rows.jsonl", "1+4=", "4+9=", "training data"),
    ("rows.jsonl", '"largest": 3', '"largest": 7', "training data"),
    ("test.jsonl", '"8"', '"7"', "held-out data"),
    ("template", "{prompt}", "0{prompt}", "prompt template")]


def test_other_data_than_before_the_stop_are_refused(own, run):
    jsonl("test.jsonl", [{"prompt": "9+9=", "answer": "8", "largest": 9}])
    Path("template").write_text("{prompt}", encoding="utf-8")
    line = (f"{own} --save_steps 1 --verifier exact --test_dataset_name test.jsonl "
            "--prompt_template @template")
    run(f"{line} --steps 2")
    for file, old, new, words in OTHER:
        text = Path(file).read_text(encoding="utf-8")
        assert old in text
        Path(file).write_text(text.replace(old, new), encoding="utf-8")
        err = run.refused(f"{line} --steps 3 {RESUME}")
        words = f"the {words} are not those that run/checkpoints/step_2 was made with"
        assert words in err, (file, new)
        Path(file).write_text(text, encoding="utf-8")
    assert len(run(f"{line} --steps 3 --resume")) == 3


# ------------------------------------------------------------------------------- every file

@pytest.mark.parametrize("how", ["removed", "emptied", "cut", "replaced", "edited"])
def test_every_file_of_a_run_folder_is_missed(how, finished, run, capsys):
    """The newest checkpoint and config.json: refused, and nothing changes. Records: said, and the
    run goes on, as it does without its summary."""
    names = sorted(str(path.relative_to(finished)) for path in files())
    assert len(names) == 7 + 7 + 5
    for name in names:
        if "step_2/" in name and how != "removed":           # not read: one way is enough
            continue
        if name == "config.json" and how == "edited":        # the tests above change its settings
            continue
        damage(finished / name, how)
        if name == "config.json" or name.startswith("checkpoints/step_3"):
            err, word = run.refused(RESUME), f"{Path(name).name} is "
            word = "no readable config.json" if name == "config.json" else word
            assert word in err or checksums.NAME in err and name.endswith(checksums.NAME), err
            assert "run/checkpoints/step_" in err
        else:
            before = files()
            capsys.readouterr()
            run("--resume")
            after = files()
            if how != "edited":                              # which may change a number only
                said = f"run/{name}: " in capsys.readouterr().out
                broken = how in ("cut", "replaced")          # --save_tokens may be off
                assert said == (name in checkpoints.RECORDS and (broken or name != "tokens.jsonl"))
            rewritten = {name, "config.json", "summary.json"}
            assert all(after[path] == data for path, data in before.items()
                       if str(path.relative_to(finished)) not in rewritten)
        shutil.rmtree("run")
        shutil.copytree(Path.cwd().parent / "run-of-three", "run")


# ------------------------------------------------------------------------------- what is read

MODEL = "--model_name_or_path model --dataset_name rows.jsonl"
# Every flag with a text, which may name a file: (the other flags of the run, a path inside run/)
INSIDE = {
    "model_name_or_path": ("--dataset_name rows.jsonl --verifier exact", "run/checkpoints/step_3"),
    "teacher_model_name_or_path": (f"{MODEL} --verifier exact --algorithm grpo "
                                   "--advantage distillation", "run/checkpoints/step_3"),
    "dataset_name": ("--model_name_or_path model --verifier exact", "run/rows.jsonl"),
    "test_dataset_name": (f"{MODEL} --verifier exact", "run/rows.jsonl"),
    "stage2_dataset_name": (f"{MODEL} --verifier exact --stage2_step 1", "run/more.jsonl"),
    "verifier": (MODEL, "run/mine.py:reward"),
    "environment": (MODEL, "run/mine.py:Play"),
    "sampler": (f"{MODEL} --verifier exact", "run/own.py:Own"),
    "config": ("--prompts_per_step 4", "run/config.yaml"),
    "system_prompt": (f"{MODEL} --verifier exact", "@run/text"),
    "prompt_template": (f"{MODEL} --verifier exact", "@run/text"),
}


def has_a_text(f):
    """Whether a field of Settings is a str, or a list of them, with any content."""
    kinds = get_args(f.type) if get_origin(f.type) is not None else [f.type]
    kinds = [kind for given in kinds for kind in (get_args(given) or [given])]
    return str in kinds and "choices" not in f.metadata and "kind" not in f.metadata


@pytest.fixture
def place(finished, workplace):
    """The folder `run` with all kinds of files, and a model and data outside of it."""
    shutil.copytree(NEWEST, "model")
    for name in ("rows.jsonl", "run/rows.jsonl", "run/more.jsonl"):
        jsonl(name, [{"prompt": f"{i}+{j}+{len(name)}=", "answer": "4"}
                     for i in range(9) for j in range(9)])
    Path("run/own.py").write_text("from rollout import Sampler\n\n\nclass Own(Sampler):\n"
                                  "    pass\n", encoding="utf-8")
    Path("run/mine.py").write_text("class Play:\n    def __init__(self, row):\n        pass\n"
                                   "    def step(self, text):\n        pass\n\n\n"
                                   "def reward(response, answer):\n    return 1.0\n",
                                   encoding="utf-8")
    Path("run/text").write_text("{prompt}", encoding="utf-8")
    Path("run/config.yaml").write_text("learning_rate: 1e-3\n", encoding="utf-8")
    return workplace


OVER = "--output_dir run --overwrite_output_dir"


def test_every_flag_with_a_text_is_protected_from_overwriting(place, run):
    texts = {f.name for f in flags() if has_a_text(f) and "text" not in f.metadata}
    assert texts == INSIDE.keys(), "a new flag: an entry above, or the word text=True"
    for flag, (more, value) in INSIDE.items():
        for path in (value, value.replace("run/", f"../{place.name}/run/")):     # however spelled
            err = run.refused(f"{more} --{flag} {path} {OVER}")
            assert "--overwrite_output_dir would delete" in err and f"--{flag} {path}" in err


def test_the_base_model_of_an_adapter_and_the_cold_start_are_protected(place, run):
    pytest.importorskip("peft")
    run(f"--model_name_or_path {NEWEST} --use_peft", folder="lora")
    err = run.refused(f"--model_name_or_path lora/checkpoints/step_1 --use_peft {OVER}")
    assert f"would delete {NEWEST} in run" in err
    shutil.copy("run/config.json", "runs/config.json")       # a run's folder with the cold starts
    err = run.refused("--output_dir runs --overwrite_output_dir")
    assert "would delete runs/cold_start" in err


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
