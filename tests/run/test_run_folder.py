"""A run folder that was damaged or edited: --resume refuses it in one line, or says what it leaves
out; nothing is lost, and no code is run that nobody typed."""

import json
import shutil
import signal
from pathlib import Path

import pytest

import eval as evaluation
import train
from plumbing.model import checksums
from plumbing.run import checkpoints
from tiny_run import SMALL, TINY, TINY_MODEL, differences, metrics

RESUME = ["--output_dir", "run", "--resume"]
SUMS = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10), "note": a}) + "\n"
               for a in range(1, 5) for b in range(1, 5))


@pytest.fixture
def finished(workplace):
    """A folder "run" with a run of three batches and the checkpoints step_2 and step_3."""
    made = workplace.parent / "run-of-three"
    if not made.exists():
        train.main([*TINY, "--steps", "3", "--save_steps", "1", "--output_dir", str(made)])
    shutil.copytree(made, "run")
    return Path("run")


@pytest.fixture
def data(workplace, cold_start):
    """Flags for a run of a checkpoint on rows.jsonl."""
    Path("rows.jsonl").write_text(SUMS)
    return [*SMALL, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name",
            "rows.jsonl", "--max_completion_length", "4", "--save_steps", "1", "--steps", "2",
            "--output_dir", "run"]


class Killed(BaseException):
    """What stands in for SIGKILL inside one process."""


def killed_after(step, argv):
    """A run that the power leaves just after the metrics of `step` are written."""
    append = checkpoints.append

    def fail(path, record):
        append(path, record)
        if path.name == "metrics.jsonl" and record["step"] == step:
            raise Killed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "append", fail)
        train.main(argv)


def refused(capsys, call, argv):
    """The one line on stderr of a command that ends with exit code 2 and leaves the files of the
    folder "run" as they are."""
    before = files()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    assert files() == before
    return err


def files():
    return {path: path.read_bytes() for path in Path("run").rglob("*")
            if path.is_file() and path.name != ".lock"}


def edit(**changes):
    """Change flags in config.json, where they are recorded and where they are given."""
    file = Path("run/config.json")
    config = json.loads(file.read_text())
    for part in ("arguments", "given"):
        config[part] |= changes
    file.write_text(json.dumps(config))


# ------------------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("name", ["state.pt", "config.json", checksums.NAME])
@pytest.mark.parametrize("both", [False, True], ids=["newest", "all"])
def test_a_checkpoint_that_lacks_a_file_is_damaged(name, both, finished, capsys):
    for step in (2, 3) if both else (3,):
        (finished / f"checkpoints/step_{step}" / name).unlink()
    err = refused(capsys, train.main, RESUME)
    assert f"run/checkpoints/step_3: {name} is missing" in err
    assert ("no other checkpoint" if both else "run/checkpoints/step_2 is sound") in err


def test_a_finished_run_without_its_checkpoints_does_not_start_again(finished, capsys):
    shutil.rmtree("run/checkpoints")
    assert "its checkpoint in run/checkpoints is gone" in refused(capsys, train.main, RESUME)


@pytest.mark.parametrize("left", [0, 1, -1], ids=["empty", "one line", "all but one"])
def test_a_shortened_list_of_checksums_is_damage(left, finished, capsys):
    file = finished / "checkpoints/step_3" / checksums.NAME
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:left]))
    checkpoint = ["--model_name_or_path", "run/checkpoints/step_3"]
    passk = ["passk", *checkpoint, "--n", "1", "--problems", "2", "--device", "cpu",
             "--min_terms", "1", "--max_terms", "2", "--output", "passk.json"]
    new = [*TINY_MODEL, "--steps", "1", *checkpoint, "--output_dir", "second"]
    for call, argv in ((train.main, RESUME), (evaluation.main, passk), (train.main, new)):
        err = refused(capsys, call, argv)
        assert "run/checkpoints/step_3: " in err and checksums.NAME in err
    assert not Path("second").exists()


def test_a_file_that_is_not_listed_is_damage(finished, capsys):
    Path("run/checkpoints/step_3/added_tokens.json").write_text("{}")
    Path("run/checkpoints/step_3/.DS_Store").write_text("")
    err = refused(capsys, train.main, RESUME)
    assert "step_3: added_tokens.json is not listed in SHA256SUMS; " in err


def test_a_folder_beside_the_checkpoints_is_none(finished, capsys):
    shutil.copytree("run/checkpoints/step_2", "run/checkpoints/step_2_backup")
    shutil.copytree("run/checkpoints/step_2", "run/checkpoints/step_07")
    passk = ["passk", "--model_name_or_path", "run", "--device", "cpu"]
    assert "its checkpoint is run/checkpoints/step_3" in refused(capsys, evaluation.main, passk)
    train.main([*RESUME, "--steps", "4"])
    assert [record["step"] for record in metrics("run")] == [1, 2, 3, 4]
    Path("run/checkpoints/step_4/state.pt").write_bytes(b"")
    err = refused(capsys, train.main, RESUME)
    assert "state.pt is damaged" in err and "run/checkpoints/step_3 is sound" in err


# ---------------------------------------------------------------------- before the first checkpoint

def test_a_run_saves_every_ten_batches_and_says_so(workplace, capsys):
    killed_after(11, [*TINY, "--steps", "12", "--output_dir", "run"])
    size = sum(file.stat().st_size for file in Path("run/checkpoints/step_10").iterdir())
    line, = [line for line in capsys.readouterr().out.splitlines() if "checkpoints of" in line]
    assert line.endswith("MB: every 10 rollout batches, the first after batch 10")
    assert float(line.split()[3]) == pytest.approx(size / 1e6, abs=0.1)
    train.main([*RESUME, "--save_steps", "0"])
    line, = [line for line in capsys.readouterr().out.splitlines() if "checkpoints of" in line]
    assert line.endswith("MB: the first after batch 12")
    assert [record["step"] for record in metrics("run")] == [*range(1, 13)]


def test_a_checkpoint_of_ones_own_is_saved_every_25_batches(data, capsys):
    at = data.index("--save_steps")
    killed_after(1, [*data[:at], *data[at + 2:], "--steps", "26", "--verifier", "exact"])
    assert "MB: every 25 rollout batches, the first after batch 25" in capsys.readouterr().out


def test_the_record_of_a_run_without_a_checkpoint_is_kept(whole, workplace, capsys):
    argv = [*TINY, "--steps", "4", "--output_dir", "run"]
    killed_after(2, argv)
    before = {name: Path("run", name).read_bytes() for name in checkpoints.RECORDS}
    capsys.readouterr()
    train.main(RESUME)
    out = capsys.readouterr().out
    assert ("no checkpoint yet: starts again at batch 1; the record so far is kept in "
            "run/stopped-1\n") in out
    assert {name: Path("run/stopped-1", name).read_bytes() for name in before} == before
    assert differences(whole(), "run", 4) == []


# ------------------------------------------------------------------------------- config.json

@pytest.mark.parametrize("flag, value", [
    ("sampler", "evil.py:F"), ("verifier", ["exact", "evil.py:F"]), ("tool", "./a/evil.py:F")])
def test_code_that_a_folder_names_is_not_run(flag, value, finished, capsys):
    Path("evil.py").write_text("open('ran', 'w').close()\n")
    edit(**{flag: value})
    err = refused(capsys, train.main, RESUME)
    assert f"names code that would be run: --{flag} " in err and "evil.py:F" in err
    assert "--trust_run_code" in err and not Path("ran").exists()


def test_code_that_is_typed_again_or_trusted_is_run(data, monkeypatch, capsys):
    Path("mine.py").write_text("def reward(response, answer):\n    return response == answer\n")
    argv = [*data, "--verifier", "mine.py:reward", "exact"]
    collect = train.collect

    def interrupting(args, learner, task, now):
        if now == 1:
            signal.raise_signal(signal.SIGINT)
        return collect(args, learner, task, now)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "collect", interrupting)
        train.main(argv)
    typed = "--output_dir run --resume --verifier mine.py:reward exact"
    assert f"python train.py {typed} continues" in capsys.readouterr().out
    assert "--verifier mine.py:reward exact" in refused(capsys, train.main, RESUME)
    train.main([*RESUME, "--trust_run_code"])
    assert json.loads(Path("run/config.json").read_text())["given"].get("trust_run_code") is None
    train.main([*typed.split(), "--steps", "3"])
    assert [record["step"] for record in metrics("run")] == [1, 2, 3]


@pytest.mark.parametrize("flag, value", [
    ("learning_rate", 0.1), ("temperature", 0.5), ("steps", 2), ("num_generations", 2)])
def test_settings_that_the_checkpoint_was_not_made_with_are_refused(flag, value, finished, capsys):
    was = json.loads(Path("run/config.json").read_text())["arguments"][flag]
    edit(**{flag: value})
    err = refused(capsys, train.main, RESUME)
    assert "run/checkpoints/step_3 was made with other settings than run/config.json says: " in err
    assert f" says: {flag} was {was!r}, now {value!r}; " in err


@pytest.mark.parametrize("change", [
    {"learning_rate": "fast"}, {"steps": "9"}, {"steps": None}, {"stop": "x"}, {"lora_q": 3},
    {"verifier": [3]}, {"seed": 1.5}], ids=str)
def test_a_value_that_no_flag_has_is_refused(change, finished, capsys):
    edit(**change)
    err = refused(capsys, train.main, RESUME)
    assert "run/config.json is damaged" in err or "run/config.json names --lora_q" in err


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"arguments": 3}',
                                  '{"arguments": {}, "given": []}', None], ids=repr)
def test_a_damaged_config_sends_nobody_in_a_circle(text, finished, capsys):
    config = Path("run/config.json")
    config.unlink() if text is None else config.write_text(text)
    err = refused(capsys, train.main, RESUME)
    assert "start from run/checkpoints/step_3 (--model_name_or_path)" in err
    again = refused(capsys, train.main, [*TINY, "--output_dir", "run"])
    assert "leave out --resume" not in err and "--resume" not in again


# ------------------------------------------------------------------------------- records, data

@pytest.mark.parametrize("bad", ["", "null", '{"a": 1}', '{"step": 2}', '{"step": 2, "rew', "3",
                                 '{"step": [], "pass_rate": 1, "samples": 1, "tokens": 1}', "\xff"])
@pytest.mark.parametrize("name", checkpoints.RECORDS)
def test_a_bad_line_costs_no_other(name, bad, finished, capsys):
    file = finished / name
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([whole[0], bad.encode("latin-1") + b"\n", *whole[1:]]))
    capsys.readouterr()
    train.main(RESUME)
    assert f"{file}: left out what is no whole record: line 2\n" in capsys.readouterr().out
    assert file.read_bytes() == b"".join(whole)


@pytest.mark.parametrize("changed, words", [
    ("answer", "training data"), ("prompt", "training data"), ("note", "training data"),
    ("test", "held-out data"), ("template", "prompt template")])
def test_other_data_than_before_the_stop_are_refused(changed, words, data, capsys):
    Path("test.jsonl").write_text(json.dumps({"prompt": "9+9=", "answer": "8", "note": 9}) + "\n")
    Path("template").write_text("{prompt}")
    argv = [*data, "--verifier", "exact", "--test_dataset_name", "test.jsonl",
            "--prompt_template", "@template"]
    train.main(argv)
    sound = Path("rows.jsonl").read_text()
    old, new = {"answer": ('"answer": "5"', '"answer": "6"'), "prompt": ("1+4=", "4+9="),
                "note": ('"note": 3', '"note": 7'), "test": ('"8"', '"7"'),
                "template": ("{prompt}", "0{prompt}")}[changed]
    file = Path({"test": "test.jsonl", "template": "template"}.get(changed, "rows.jsonl"))
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    err = refused(capsys, train.main, [*argv, "--steps", "3", "--resume"])
    assert f"the {words} are not those that run/checkpoints/step_2 was made with" in err
    file.write_text(text)
    train.main([*argv, "--steps", "3", "--resume"])
    assert sound == Path("rows.jsonl").read_text() and len(metrics("run")) == 3


# ------------------------------------------------------------------------------- every file

def damage(file, how):
    data = file.read_bytes()
    middle = len(data) // 2
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes({"emptied": b"", "cut": data[:middle], "replaced": b"\xff\x00\n",
                          "edited": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]
                          }[how])


@pytest.mark.parametrize("how", ["removed", "emptied", "cut", "replaced", "edited"])
def test_every_file_of_a_run_folder_is_missed(how, finished, capsys):
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
            err = refused(capsys, train.main, RESUME)
            assert "run/config.json is " in err or f"{Path(name).name} is " in err \
                or checksums.NAME in err and name.endswith(checksums.NAME), err
            assert "run/checkpoints/step_" in err
        else:
            before = files()
            train.main(RESUME)
            after = files()
            if how != "edited":                              # which may change a number only
                said = f"run/{name}: " in capsys.readouterr().out
                cut = how in ("cut", "replaced")             # --save_tokens may be off
                assert said == (name in checkpoints.RECORDS and (cut or name != "tokens.jsonl"))
            rewritten = {name, "config.json", "summary.json"}
            assert all(after[path] == data for path, data in before.items()
                       if str(path.relative_to(finished)) not in rewritten)
        shutil.rmtree("run")
        shutil.copytree(Path.cwd().parent / "run-of-three", "run")
