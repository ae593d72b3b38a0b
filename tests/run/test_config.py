"""--config FILE and the recipes. python -m pytest tests/run/test_config.py"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

import train
from session.arguments import parse
from tiny_run import ROOT, TINY, write

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
REFUSED = {
    "steps: [1, 2]": "arguments: 2", "stepss: 3\nsede: 1": "--stepss=3 --sede=1",
    "steps: many": "invalid int value: 'many'", "stop: [a, null]": "cannot stand in a list",
    "stop: [[a]]": "cannot stand in a list", "steps: 3\nseed: 1\nsteps: 4": "steps is set twice",
    "reward_weights: [1, x]": "invalid finite value: 'x'", "bf16: maybe": "--bf16",
    "- steps": "must be a mapping", "": "must be a mapping", "steps: [1": "bad.yaml",
    "epsilon: -1": "clip range"}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_file_is_refused(text, refused):
    write("bad.yaml", text)
    said = refused("--config bad.yaml --output_dir run")
    assert REFUSED[text] in said and ("bad.yaml: " in said or "epsilon" in said)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(workplace):
    write("a.yaml", "algorithm: dr_grpo\nscale_rewards: batch\nlearning_rate: 1e-6\n"
                    "stop: '\\n'\nreward_weights: [1, 2]\nbf16: false\n"
                    "chat_template_kwargs: {b: false, c: 1.5}\n")
    settings = parse(["--config", "a.yaml", "--learning_rate", "2e-6", "--model_name_or_path", "x",
                      "--dataset_name", "rows.jsonl", "--verifier", "exact", "math"])
    assert settings.scale_rewards == "batch" and settings.learning_rate == 2e-6
    assert settings.stop == ["\n"] and settings.reward_weights == [1.0, 2.0]
    assert settings.bf16 is False and settings.config == ["a.yaml"]
    assert settings.chat_template_kwargs == {"b": False, "c": 1.5}


@pytest.mark.parametrize("text, flag, value", [
    ("system_prompt: null", "system_prompt", None), ("steps:", "steps", 50),
    ("system_prompt: 'null'", "system_prompt", "null"), ("stop: [no, 010]", "stop", ["no", "010"]),
    ("seed: 010", "seed", 10), ("reward_weights: [-0.00001]", "reward_weights", [-1e-5]),
    (f"system_prompt: '{'x: ' * 200}'", "system_prompt", "x: " * 200)])
def test_a_value_of_a_recipe_is_the_text_that_stands_there(text, flag, value, workplace):
    write("a.yaml", f"model_name_or_path: x\ndataset_name: rows.jsonl\n{text}\n")
    assert getattr(parse(["--config", "a.yaml"]), flag) == value


def test_the_config_of_a_run_is_a_recipe_of_the_same_run(workplace):
    """And of two recipes the later decides."""
    write("a.yaml", "algorithm: sapo\nstop: ['\\n', '-']\nconstants: {tau_negative: 3}\nseed: 4\n")
    write("b.yaml", "seed: 5\nreward_weights: [1, -1e-5]\nmodel_name_or_path: x\n"
                    "dataset_name: rows.jsonl\nsystem_prompt: ''\n")
    settings = parse("--config a.yaml --config b.yaml --max_grad_norm inf".split())
    assert (settings.seed, settings.stop) == (5, ["\n", "-"])
    write("config.json", json.dumps(asdict(settings)))
    again = parse(["--config", "config.json"])
    assert asdict(again) == asdict(settings) | {"config": ["config.json"]}


@pytest.mark.parametrize("file, typed, ends", [
    ("", "--epsilon 0.2", (0.2, 0.2)),                       # of gspo, whose own are 3e-4 and 4e-4
    ("", "--epsilon_high 0.2", (3e-4, 0.2)),
    ("epsilon: 0.1\nepsilon_high: 0.3", "", (0.1, 0.3)),
    ("epsilon: 0.1\nepsilon_high: 0.3", "--epsilon 0.2", (0.2, 0.2)),
    ("epsilon: 0.1\nepsilon_high: 0.3", "--epsilon_high 0.2", (0.1, 0.2)),
    ("epsilon: 0.1", "", (0.1, 0.1)), ("epsilon: 0.1", "--epsilon_high 0.2", (0.1, 0.2)),
    ("epsilon_high: 0.3", "--epsilon 0.2", (0.2, 0.2)),
    ("algorithm: icepop", "", (0.5, 4.0)), ("algorithm: icepop", "--epsilon 0.2", (0.2, 0.2)),
    ("algorithm: icepop", "--epsilon_high 3", (0.5, 3.0)),
    ("algorithm: cispo", "--epsilon_high 0.2", (1.0, 0.2))])
def test_epsilon_alone_sets_both_ends_and_epsilon_high_leaves_epsilon(file, typed, ends, workplace):
    write("a.yaml", file or "steps: 3")
    settings = parse(["--config", "a.yaml", *typed.split()])
    assert (settings.epsilon, settings.epsilon_high) == ends


def test_the_code_of_a_recipe_is_looked_for_beside_it(workplace, monkeypatch):
    Path("sub").mkdir()
    Path("sub/mine.py").touch()
    write("sub/a.yaml", "sampler: mine.py:Sampler")
    assert parse(["--config", "sub/a.yaml"]).sampler == str(Path("sub/mine.py:Sampler"))
    monkeypatch.chdir(ROOT)
    recipe = parse(["--config", "recipes/laptop-notes.yaml"])
    assert recipe.verifier == [str(Path("recipes/notes.py:reward"))]


def test_a_run_of_a_file_is_resumed_and_compared_with_it(run):
    words = [word.removeprefix("--") for word in TINY]
    write("a.yaml", json.dumps(dict(zip(words[::2], words[1::2])) | {"steps": 1}))
    train.main(["--config", "a.yaml", "--output_dir", "run"])
    write("b.yaml", "steps: 2\nepsilon: 0.1\nepsilon_high: 0.3\n")
    assert len(run("--config b.yaml --epsilon 3e-4 --epsilon_high 4e-4 --resume")) == 2
    write("b.yaml", "steps: 3\nseed: 1\n")
    assert "--seed 1: this run has 0" in run.refused("--config b.yaml --output_dir run --resume")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted_and_says_what_it_needs(recipe, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)    # a Mac's recipe
    parse(["--config", str(recipe)])
    comment = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    assert len(comment) <= 28 and any("Needs:" in line for line in comment)
    assert any("Expect:" in line for line in comment)


def test_the_laptops_recipe_is_the_default_run():
    file = ROOT / "recipes/laptop.yaml"
    recipe, default = (asdict(parse(argv)) for argv in (["--config", str(file)], []))
    assert recipe | {"config": []} == default and yaml.safe_load(file.read_text(encoding="utf-8"))


def test_a_typed_epsilon_over_a_recipe_with_both_ends_is_resumed_by_the_same_command(tmp_path):
    write(tmp_path / "mine.yaml", "epsilon: 0.2\nepsilon_high: 0.3\n")
    words = f"--config {tmp_path}/mine.yaml --epsilon 0.1 --output_dir {tmp_path}".split()
    settings = parse(words)
    write(tmp_path / "config.json", json.dumps(asdict(settings)))
    assert (settings.epsilon, settings.epsilon_high) == (0.1, 0.1)
    assert parse([*words, "--resume"]).epsilon_high == 0.1
