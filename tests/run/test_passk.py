"""eval.py passk: the checkpoint of a run with the run's settings, any other with those given.

python -m pytest tests/run/test_passk.py
"""

import shlex

import pytest

import eval
import models
from tiny_run import SUMS, jsonl, read_json, write

ONCE = "--eval_samples 2 --eval_prompts 8"
SAME = "--n 2 --k 2 --problems 8 --device cpu --output scores.json"
STEP = "run/checkpoints/step_1"


def passk(line):
    """What the command saved."""
    eval.main(["passk", "--model_name_or_path", *shlex.split(f"{line} {SAME}")])
    return read_json("scores.json")


@pytest.fixture
def wrong(refused):
    """wrong(checkpoints and flags): the one line of the command."""
    return lambda line: refused(f"passk --model_name_or_path {line}", main=eval.main)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints that no run made."""
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=2,
                 num_experts_per_tok=1, initializer_range=0.02)
    return [models.saved(folder / name, "tiny_moe", seed=seed, **sizes)
            for seed, name in enumerate(("before", "after"))]


# ------------------------------------------------------------------------ the checkpoint of a run

@pytest.mark.parametrize("more", [
    "", "--temperature 0.5 --top_k 3 --max_completion_length 7", "--algorithm dapo",
    "--top_p 0.8 --max_prompt_length 30"])
def test_a_runs_checkpoint_scores_as_the_run_did(more, run, capsys):
    """The same numbers: the same problems, prompts, lengths and random numbers."""
    run(f"{ONCE} {more}")
    summary = read_json("run/summary.json")
    capsys.readouterr()
    scores, = passk(STEP)["checkpoints"]
    assert scores["pass@1"] == [summary["pass_at_1_after"], *summary["interval_after"]]
    assert scores["pass@1"][0] > 0
    lines = capsys.readouterr().out.splitlines()
    line, = [line for line in lines if line.startswith("settings of run: ")]
    for word in more.replace("--algorithm dapo", "").split():
        assert word in line.split("; command line: ")[0]


@pytest.fixture
def odd(own):
    """Flags of a run of one's own with a template, a stop string and a verifier."""
    write("mine.py",
        "def reward(response, answer):\n    return float(response[:1] in '13579')\n")
    return (f"{own} {ONCE} --verifier mine.py:reward --prompt_template 1+{{prompt}} --stop , "
            "--seed 3")


def test_templates_stop_strings_and_held_out_rows_are_the_runs(odd, run, wrong, capsys):
    run(odd)
    assert ("run/config.json names code that would be run: --verifier mine.py:reward"
            ) in wrong(f"{STEP} {SAME}")
    found = []
    typed = "--verifier mine.py:reward"
    for more in ("--trust_run_code", typed, "--seed 5 --trust_run_code"):
        found.append(passk(f"{STEP} {more}")["checkpoints"])
        out = capsys.readouterr().out
        assert "--prompt_template '1+{prompt}' --stop , " in out
        assert "first prompt" in out and "'1+" in out
    assert found[0] == found[1] != found[2], "another seed: other rows, other draws"


def test_what_is_given_holds_and_is_printed(run, capsys):
    run(f"{ONCE} --temperature 0.5")
    capsys.readouterr()
    report = passk(f"{STEP} --temperature 0.7 --max_completion_length 3")
    assert report["temperature"] == 0.7
    assert report["checkpoints"][0]["mean_length"][0] <= 3
    assert report["settings"] in capsys.readouterr().out
    assert report["settings"] == ("settings of run: --min_terms 1 --max_terms 2; command line: "
                                  "--temperature 0.7 --max_completion_length 3 --device cpu")


def test_another_data_set_is_not_read_with_the_columns_of_the_runs(odd, run):
    jsonl("rows.jsonl", [{"q": row["prompt"], "a": row["answer"]} for row in SUMS])
    jsonl("other.jsonl", SUMS)
    run(f"{odd} --columns q a")
    report = passk(f"{STEP} --verifier mine.py:reward --dataset_name other.jsonl")
    assert report["dataset"] == "other.jsonl" and "--columns" not in report["settings"]


def test_two_runs_are_compared_under_one_setting(run, wrong):
    for name, temperature in (("one", "0.5"), ("two", "0.7"), ("three", "0.5")):
        run(f"{ONCE} --temperature {temperature}", folder=name)
    one, two, three = (f"{name}/checkpoints/step_1" for name in ("one", "two", "three"))
    assert ("one and two were evaluated with other settings: give --temperature"
            ) in wrong(f"{one} {two} {SAME}")
    assert passk(f"{one} {two} --temperature 1")["temperature"] == 1
    assert passk(f"{one} {three}")["difference"]["pass@1"][0] is not None


# ------------------------------------------------------------------ a checkpoint that no run made

def test_the_mean_reward_and_its_parts_of_rows_that_fit(checkpoints, tmp_path, monkeypatch, capsys):
    """pass@1 is 0 where the verifier gives partial credit alone."""
    monkeypatch.chdir(tmp_path)
    long = {"prompt": "+".join("1" * 30) + "=", "answer": "0"}
    jsonl("sums.jsonl", [long, *SUMS[:8]])
    jsonl("train.jsonl", [{"prompt": "9+9=", "answer": "9"}])
    write("mine.py", "def reward(response, answer):\n"
                     "    return {'some': .5 * (response[:1] < '5'), 'any': 2.0}\n")
    more = ("--dataset_name train.jsonl --test_dataset_name sums.jsonl --verifier mine.py:reward "
            "--max_completion_length 4 --max_prompt_length 16")
    eval.main(["passk", "--model_name_or_path", *checkpoints, *more.split(),
               *"--n 4 --k 1 4 --problems 9 --device cpu --seed 2".split()])
    report = read_json("runs/passk.json")
    printed = capsys.readouterr().out
    assert "default settings, not those of a run; command line: --dataset_name" in printed
    assert "1 of 10 prompts left out; " in printed and "has 60 tokens" in printed
    assert "pass@4" in printed and "after minus before" in printed
    before, after = report["checkpoints"]
    for one in (before, after):
        assert one["problems"] == 8 and one["reward_parts"]["any"] == 2
        assert one["reward"][0] == pytest.approx(sum(one["reward_parts"].values()))
        for key in ("pass@1", "pass@4", "truncated", "reward", "mean_length"):
            mean, low, high = one[key]
            assert low is None or low <= mean <= high
            gain = pytest.approx(after[key][0] - before[key][0], abs=1e-9)
            assert key == "truncated" or report["difference"][key][0] == gain
    assert report["n"] == 4 and report["difference"]["reward"][0] != 0


def test_passk_refuses(checkpoints, wrong):
    before, after = checkpoints
    small = models.saved("small", vocab_size=12, pad_token_id=0, num_hidden_layers=1)
    jsonl("words.jsonl", [{"prompt": "How many legs has a spider?", "answer": "8"},
                          {"prompt": "And a cat?", "answer": "4"}])      # no tokens for these
    jsonl("sums.jsonl", SUMS)
    for line, words in {
            f"{before} --n 8 --k 1 16": "k is 16: pass@k needs 1 <= k <= n = 8",
            "./nothing": "there is no such folder",
            "runs/gspo/checkpoints/step_9": "there is no such folder",
            f"{before} {after} {before}": "3 checkpoints: give one, or two",
            f"{before} --temprature 1": "unknown argument --temprature",
            f"{before} --n 0": "--n 0",
            f"{before} --output .": "--output . is a folder",
            f"{before} --output sums.jsonl/x.json": "sums.jsonl is a file, or read-only",
            small: "token 16, its model has 12 tokens",      # a model of another vocabulary
            f"{before} --dataset_name words.jsonl --verifier exact": "words.jsonl",
            f"{before} --dataset_name sums.jsonl --verifier exact --max_prompt_length 2":
                "prompts fits"}.items():
        assert words in wrong(f"{line} --device cpu"), line
