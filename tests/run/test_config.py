"""--config FILE and the recipes. python -m pytest tests/run/test_config.py"""

import json
from pathlib import Path

import pytest
import torch
import yaml

import train
from session.arguments import parse
from session.config import read_node
from tiny_run import TINY, differences, write

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

REFUSED = {
    "steps: [1, 2]": "--steps [\"1\", \"2\"] is not an integer",
    "stepss: 3": "did you mean --steps",
    "stepss: 3\nsede: 1": "--sede",                          # all unknown names at once
    "steps: 3\nseed: 1\nsteps: 4": "line 3: steps stands twice",
    "steps: many": "--steps many is not an integer",
    "steps: 1:30": "--steps 1:30 is not an integer",
    "steps: null": "line 1: no value",
    "steps: {a: 1}": '--steps {"a": 1} is not an integer',
    "reward_weights: [1, x]": "--reward_weights x is not a number",
    "bf16: maybe": "--bf16 maybe is not true/false, yes/no or 1/0",
    "- steps": "not a mapping",
    "": "not a mapping",
    "steps: [1": "line 1: expected",
    "? [steps]\n: 1": "unhashable type",
    "resume: true": "resume can only be typed",
    "trust_run_code: true": "trust_run_code can only be typed",
    "epsilon: -1": "--epsilon",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_file_is_refused_in_one_line(text, refused):
    write("mine.py", "raise SystemExit('was run')")
    write("bad.yaml", text)
    said = refused("--config bad.yaml --output_dir run")
    assert REFUSED[text] in said and ("bad.yaml" in said or text == "epsilon: -1")


def test_a_list_of_one_is_its_value(workplace):
    write("a.yaml", "steps: [3]\n")
    assert parse(["--config", "a.yaml"]).steps == 3


def test_a_file_that_cannot_be_read_is_refused(refused):
    assert "--config bad.yaml: No such file" in refused("--config bad.yaml")
    Path("bad.yaml").write_bytes(b"\xff\xfe")
    assert "--config bad.yaml: not a text file" in refused("--config bad.yaml")


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(workplace):
    write("a.yaml", "algorithm: dr_grpo\nscale_rewards: batch\nlearning_rate: 1e-6\n"
                    "stop: '\\n'\nreward_weights: [1, 2]\nbf16: false\n")
    settings = parse(["--config", "a.yaml", "--learning_rate", "2e-6", "--model_name_or_path", "x",
                      "--dataset_name", "rows.jsonl", "--verifier", "exact", "math"])
    assert settings.scale_rewards == "batch" and settings.learning_rate == 2e-6
    assert settings.stop == ["\n"] and settings.reward_weights == [1.0, 2.0]
    assert settings.bf16 is False and settings.config == "a.yaml"


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


@pytest.mark.parametrize("settings, ends", [
    (dict(epsilon=0.2), (0.2, 4e-4)), (dict(epsilon=0.1), (0.1, 0.1)),       # 0.1: it was edited
    (dict(epsilon=0.2, epsilon_high=0.3), (0.2, 0.3)), (dict(epsilon_high=0.3), (3e-4, 0.3))])
def test_a_run_of_when_epsilon_set_one_end_keeps_its_range(settings, ends, workplace):
    Path("run").mkdir()
    resolved = dict(steps=1, epsilon=0.2, epsilon_high=4e-4)
    write("run/config.json", json.dumps(dict(settings=settings, resolved=resolved)))
    for line in ("--resume --output_dir run", "--config run/config.json"):
        found = parse(line.split())
        assert (found.epsilon, found.epsilon_high) == ends
    write("run/config.json", json.dumps(dict(settings=settings, resolved=dict(steps=1))))
    parse("--resume --output_dir run".split())               # an edited file


@pytest.mark.parametrize("text, flag, value", [
    ("stop: no", "stop", ["no"]), ("stop: [1.10, yes]", "stop", ["1.10", "yes"]),
    ("system_prompt: no", "system_prompt", "no"), ("system_prompt: '~'", "system_prompt", "~"),
    ("seed: 010", "seed", 10), ("chat_template: no", "chat_template", False),
    ("reward_weights: [1, 1e-1]", "reward_weights", [1, 0.1]), ("stop: '\\n'", "stop", ["\n"]),
    ("verifier: math", "verifier", ["math"])])
def test_a_value_is_text_that_is_read_as_on_the_command_line(text, flag, value, workplace):
    write("a.yaml", text)
    words = "--model_name_or_path x --dataset_name rows.jsonl --verifier exact math".split()
    words = words[:4] if flag == "verifier" else words
    found = getattr(parse(["--config", "a.yaml", *words]), flag)
    assert found == value and type(found) is type(value)


def test_a_mapping_keeps_the_types_of_json():
    """`no` stays a text: only JSON's words are numbers and switches."""
    node = yaml.compose("a: {b: false, c: [1, 1.5, null], d: no, e: 'false', f: 010}")
    assert read_node(node) == {"a": {"b": False, "c": [1, 1.5, None], "d": "no", "e": "false",
                                      "f": "010"}}


def test_the_code_of_a_recipe_is_looked_for_beside_it(workplace, monkeypatch):
    """And in the working directory first. It is run without another word."""
    Path("sub").mkdir()
    for place in ("sub/", ""):
        Path(f"{place}mine.py").touch()
        write("sub/a.yaml", "sampler: mine.py:Sampler")
        assert parse(["--config", "sub/a.yaml"]).sampler == f"{place}mine.py:Sampler"
    monkeypatch.chdir(ROOT)
    recipe = parse(["--config", "recipes/laptop-notes.yaml"])
    assert recipe.verifier == ["recipes/notes.py:reward"]


@pytest.mark.parametrize("config, steps", [
    ({"settings": {}, "resolved": {"steps": 3}}, 50), ({"settings": {"steps": 3}}, 3),
    ({"steps": 3}, 3)])
def test_a_json_file_may_be_the_config_of_a_run(config, steps, tmp_path):
    """Also of one that set no flag."""
    write(tmp_path / "config.json", json.dumps(config))
    assert parse(["--config", str(tmp_path / "config.json")]).steps == steps
    write(tmp_path / "config.json", "[]")
    with pytest.raises(ValueError, match="not a mapping"):
        parse(["--config", str(tmp_path / "config.json")])


def test_a_run_is_repeated_by_its_own_config_json(run):
    run("--steps 2 --algorithm grpo")
    train.main(["--config", "run/config.json", "--output_dir", "again"])
    assert differences("run", "again", 2) == []


def test_a_run_of_a_file_is_resumed_and_compared_with_it(run):
    words = [word.removeprefix("--") for word in TINY]
    write("a.yaml", json.dumps(dict(zip(words[::2], words[1::2])) | {"steps": 1}))
    train.main(["--config", "a.yaml", "--output_dir", "run"])
    write("b.yaml", "steps: 2\n")
    assert len(run("--config b.yaml --resume")) == 2
    write("b.yaml", "steps: 3\nseed: 1\n")
    said = run.refused("--config b.yaml --output_dir run --resume")
    assert "seed was 0 in run, now 1" in said


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted_and_says_what_it_needs(recipe, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)    # a Mac's recipe
    given = parse(["--config", str(recipe)]).explicit_flags
    text = recipe.read_text(encoding="utf-8")
    assert given.keys() == yaml.safe_load(text).keys() | {"config"}
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert len(comment) <= 28 and any("Needs:" in line for line in comment)
    assert any("Expect:" in line for line in comment)


def test_the_laptops_recipe_is_the_default_run():
    recipe = ["--config", str(ROOT / "recipes/laptop.yaml")]
    recipe, default = (vars(parse(argv)) for argv in (recipe, []))
    names = default.keys() - {"explicit_flags", "config"}
    assert all(recipe[name] == default[name] for name in names)
