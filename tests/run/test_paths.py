"""The paths that a run reads and the one it writes: plumbing/run/folder.py. python -m pytest tests/run/test_paths.py

Every flag that holds a text is tried with a path inside the folder that --overwrite_output_dir would
delete. The flags come from Settings, so a new one fails here until it has an entry.
"""

import json
import os
import shutil
from pathlib import Path
from typing import get_args, get_origin

import pytest

import train
from plumbing.run.arguments import flags
from plumbing.run.folder import TEXTS
from tiny_run import SMALL, TINY, TINY_MODEL, metrics

MODEL = "--model_name_or_path model --dataset_name rows.jsonl"
# flag: (the other flags of the run, its value: a path inside run/)
INSIDE = {
    "model_name_or_path": ("--dataset_name rows.jsonl", "run/checkpoints/step_1"),
    "teacher_model_name_or_path": (f"{MODEL} --algorithm grpo --advantage distillation", "run/checkpoints/step_1"),
    "dataset_name": ("--model_name_or_path model", "run/rows.jsonl"),
    "test_dataset_name": (MODEL, "run/rows.jsonl"),
    "stage2_dataset_name": (f"{MODEL} --stage2_step 1", "run/more.jsonl"),
    "verifier": (MODEL, "run/mine.py:reward"),
    "tool": (MODEL, "run/mine.py:tool"),
    "sampler": (MODEL, "run/own.py:Own"),
    "config": ("--prompts_per_step 4", "run/config.yaml"),
    "system_prompt": (MODEL, "@run/text"),
    "prompt_template": (MODEL, "@run/text"),
}


def has_a_text(f):
    """Whether a field of Settings is a str, or a list of them, with any content."""
    kinds = get_args(f.type) if get_origin(f.type) is not None else [f.type]
    kinds = [kind for given in kinds for kind in (get_args(given) or [given])]
    return str in kinds and "choices" not in f.metadata and "kind" not in f.metadata


FLAGS = sorted(f.name for f in flags() if has_a_text(f) and f.name not in TEXTS)


@pytest.fixture
def place(workplace):
    """A folder `run` with a run and all kinds of files, and a model and data outside of it."""
    train.main([*TINY, "--steps", "1", "--output_dir", "run"])
    shutil.copytree("run/checkpoints/step_1", "model")
    for name, last in (("rows.jsonl", 1), ("run/rows.jsonl", 2), ("run/more.jsonl", 3)):
        Path(name).write_text("".join(json.dumps({"prompt": f"{i}+{j}+{last}=", "answer": "4"}) + "\n" for i in range(9) for j in range(9)))
    Path("run/own.py").write_text("from rollout import Sampler\n\n\nclass Own(Sampler):\n    pass\n")
    Path("run/mine.py").write_text("def tool(text):\n    return ''\n\n\ndef reward(response, answer):\n    return 1.0\n")
    Path("run/text").write_text("{prompt}")
    Path("run/config.yaml").write_text("learning_rate: 1e-3\n")
    return workplace


def refused(capsys, argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    out = capsys.readouterr()
    assert stop.value.code == 2 and out.err.count("\n") == 1 and "metrics are written" not in out.out, out
    return out.err


def test_every_flag_with_a_text_is_protected_from_overwriting(place, capsys):
    assert FLAGS == sorted(INSIDE)                           # a new flag: an entry above, or a name in folder.TEXTS
    before = sorted(Path("run").rglob("*"))
    for flag, (more, value) in INSIDE.items():
        verifier = [] if "--verifier" in more or flag in ("verifier", "config") else ["--verifier", "exact"]
        for path in (value, value.replace("run/", f"../{place.name}/run/")):         # however it is spelled
            err = refused(capsys, [*SMALL, "--steps", "1", *more.split(), *verifier, f"--{flag}", path, "--output_dir", "run",
                                   "--overwrite_output_dir"])
            assert "--overwrite_output_dir would delete" in err and f"--{flag} {path}" in err
    assert sorted(Path("run").rglob("*")) == before


def test_the_base_model_of_an_adapter_and_the_cold_start_are_protected(place, capsys):
    pytest.importorskip("peft")
    train.main([*TINY_MODEL, "--steps", "1", "--model_name_or_path", "run/checkpoints/step_1", "--use_peft", "--output_dir", "lora"])
    over = ["--steps", "1", "--output_dir", "run", "--overwrite_output_dir"]
    err = refused(capsys, [*TINY_MODEL, "--model_name_or_path", "lora/checkpoints/step_1", "--use_peft", *over])
    assert "would delete run/checkpoints/step_1 in run" in err
    os.unlink("runs/cold_start")
    shutil.copy("run/config.json", "runs/config.json")       # a run whose folder holds the cold starts, too
    Path("runs/cold_start").mkdir()
    err = refused(capsys, [*TINY, "--steps", "1", "--output_dir", "runs", "--overwrite_output_dir"])
    assert "would delete runs/cold_start" in err and Path("runs/cold_start").is_dir()


# ------------------------------------------------------------------ a run that fails

def failing(monkeypatch, argv, error, step=1):
    collect = train.collect

    def fail(*args):
        if args[-1] == step:
            raise error
        return collect(*args)
    with monkeypatch.context() as patch, pytest.raises(BaseException):
        patch.setattr(train, "collect", fail)
        train.main(argv)


@pytest.mark.parametrize("error", [ValueError("wrong"), RuntimeError("a bug"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_failed_start_leaves_no_folder_and_the_next_run_gets_its_name(error, workplace, monkeypatch):
    failing(monkeypatch, [*TINY, "--steps", "2"], error)
    assert not Path("runs/gspo").exists()
    train.main([*TINY, "--steps", "1"])
    assert len(metrics("runs/gspo")) == 1 and not Path("runs/gspo-2").exists()


def test_a_run_that_fails_later_keeps_what_it_has(workplace, monkeypatch):
    failing(monkeypatch, [*TINY, "--steps", "2", "--output_dir", "run"], ValueError("wrong"), step=2)
    assert len(metrics("run")) == 1 and Path("run/checkpoints/step_1").is_dir()
    failing(monkeypatch, [*TINY, "--steps", "2", "--output_dir", "run", "--resume"], ValueError("wrong"), step=2)
    assert len(metrics("run")) == 1 and Path("run/checkpoints/step_1").is_dir()


# ------------------------------------------------------------------ a checkpoint that does not exist

@pytest.mark.parametrize("asked, words", [
    ("run/checkpoints/step_50", "the checkpoints in run/checkpoints are run/checkpoints/step_9, run/checkpoints/step_10"),
    ("run/checkpoint/step_50", "the checkpoints in run are run/checkpoints/step_9, run/checkpoints/step_10"),
    ("./rum/checkpoints/step_9", "run/checkpoints/step_10"), ("nothing/at/all", "and no checkpoint in nothing"),
    ("checkpoints/SmolLM2-135M-Instruct", "python tests/make_smollm2.py makes it"), ("runs/gspo", "no checkpoint in runs")])
def test_a_checkpoint_that_does_not_exist_names_those_that_do(asked, words, workplace, capsys):
    Path("nothing").mkdir()
    for step in (9, 10):
        shutil.copytree(next(Path("runs/cold_start").iterdir()), f"run/checkpoints/step_{step}")
    err = refused(capsys, [*TINY_MODEL, "--model_name_or_path", asked, "--output_dir", "new"])
    assert f"--model_name_or_path {asked}: there is no such folder" in err and words in err and not Path("new").exists()
    teacher = ["--model_name_or_path", "run/checkpoints/step_9", "--algorithm", "grpo", "--advantage", "distillation"]
    err = refused(capsys, [*TINY_MODEL, *teacher, "--teacher_model_name_or_path", asked, "--output_dir", "new"])
    assert f"--teacher_model_name_or_path {asked}: there is no such folder" in err and words in err
