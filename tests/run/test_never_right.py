"""A policy that is never right is told what helps, and a few supervised steps do.
python -m pytest tests/run/test_never_right.py"""

import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import eval
from plumbing.data import tasks
from session.arguments import parse
from session.metrics import NEVER_RIGHT
from tiny_run import python

ROOT = Path(__file__).parents[2]
NOTES = (f"--config {ROOT}/recipes/laptop-notes.yaml --verifier {ROOT}/recipes/notes.py:reward "
         "--system_prompt 'Write JSON.'")


def test_what_helps_stands_on_the_page_that_the_note_names():
    """The note: tests/run/test_screen.py."""
    page, _, section = NEVER_RIGHT.rpartition("(")[2].rstrip(")").partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"## {section.replace('-', ' ').capitalize()}\n" in text


def test_supervised_steps_read_the_prompts_of_the_run(own, cold_start, capsys):
    """Prompts with their template, the answer and what ends a response in the loss, alone."""
    from recipes import supervised
    settings = parse((own + "--verifier exact --prompt_template 0+{prompt} --stop ,").split())
    task = tasks.prepare_task(settings)
    tokenizer = AutoTokenizer.from_pretrained(cold_start)
    for row, problem in zip(supervised.rows(settings, task, tokenizer), task.train, strict=True):
        labels = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(row["input_ids"]) == f"0+{problem.prompt}{problem.answer},"
        assert tokenizer.decode(labels) == f"{problem.answer},"
        assert row["input_ids"][-len(labels):] == labels
    Path("run").mkdir()
    Path("run/kept").touch()
    for words, more in (("need --output_dir", ""), ("run is not empty", "--output_dir run")):
        with pytest.raises(SystemExit):
            supervised.main(f"{own} {more}".split())
        assert words in capsys.readouterr().err


@pytest.mark.checkpoint
def test_twenty_supervised_steps_end_the_zeros(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from make_smollm2 import FOLDER, make_smollm2
    model = make_smollm2(str(ROOT / FOLDER))
    monkeypatch.chdir(tmp_path)
    python(ROOT / "recipes/notes.py")
    python(*shlex.split(f"{ROOT}/recipes/supervised.py {NOTES} --model_name_or_path {model} "
                        "--steps 20 --prompts_per_step 8 --learning_rate 5e-5 --device cpu "
                        "--output_dir taught"))
    rates = [right(folder) for folder in (model, "taught")]
    assert rates[0] == 0 and rates[1] > 0.5


def right(folder):
    """The share of right responses to 16 held-out notes."""
    settings = parse(shlex.split(f"{NOTES} --model_name_or_path {folder} --device cpu "
                                 "--eval_prompts 16"))
    task = tasks.prepare_task(settings)
    policy, tokenizer = eval.load_policy(settings, task, torch.device("cpu"), folder)
    sampler = eval.make_sampler(settings, policy, tokenizer, task)
    answers = eval.evaluate(sampler, task, task.test[:16], 2, 1.0)
    return answers["pass_at_1"][0]
