"""eval.py passk: the checkpoint of a run with the run's settings, any other with those given.

python -m pytest tests/run/test_passk.py
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

import eval
import train
from moe import TinyMoE
from plumbing.data import running_sum
from tiny_run import SMALL, TINY

ONCE = ["--steps", "1", "--eval_samples", "2", "--eval_prompts", "8"]
RUN = [*TINY, *ONCE]
OF_DATA = [*SMALL, *ONCE]
SAME = "--n 2 --k 2 --problems 8 --device cpu --output scores.json".split()


def passk(*words):
    """What the command saved."""
    eval.main(["passk", "--model_name_or_path", *words, *SAME])
    return json.loads(Path("scores.json").read_text())


def refused(capsys, *words):
    """The one line on the error stream of a command that exits 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        eval.main(["passk", *words])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and error.startswith("eval.py: ") and "\n" not in error, error
    return error


def save_tiny(folder, seed=0, vocabulary=17):
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, intermediate_size=16, tie_word_embeddings=False,
        eos_token_id=15, pad_token_id=16 if vocabulary > 16 else 0, bos_token_id=None)
    TinyMoE(config).save_pretrained(folder)
    running_sum.builtin_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return [save_tiny(folder / name, seed) for name, seed in (("before", 0), ("after", 1))]


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums():
    return [{"prompt": f"{a}+{b}=", "answer": f"{(a + b) % 10}"}
            for a in range(1, 10) for b in range(1, 10)]


# ------------------------------------------------------------------------ the checkpoint of a run

@pytest.mark.parametrize("flags", [
    "", "--temperature 0.5 --top_k 3 --max_completion_length 7", "--algorithm dapo",
    "--top_p 0.8 --max_prompt_length 30"])
def test_a_runs_checkpoint_scores_as_the_run_did(flags, workplace, capsys):
    """The same numbers: the same problems, prompts, lengths and random numbers."""
    train.main([*RUN, *flags.split(), "--output_dir", "run"])
    summary = json.loads(Path("run/summary.json").read_text())
    capsys.readouterr()
    scores, = passk("run/checkpoints/step_1")["checkpoints"]
    assert scores["pass@1"] == [summary["pass_at_1_after"], *summary["interval_after"]]
    assert scores["pass@1"][0] > 0
    lines = capsys.readouterr().out.splitlines()
    line, = [line for line in lines if line.startswith("settings of run: ")]
    for word in flags.replace("--algorithm dapo", "").split():
        assert word in line.split("; given here: ")[0]


@pytest.fixture
def own(workplace, cold_start):
    """Flags of a run on rows.jsonl with a template, a stop string and a verifier of its own; its
    answers are right only in this form."""
    write_rows("rows.jsonl", sums())
    Path("mine.py").write_text(
        "def reward(response, answer):\n    return float(response[:1] in '13579')\n")
    return [*OF_DATA, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name",
            "rows.jsonl", "--verifier", "mine.py:reward", "--prompt_template", "1+{prompt}",
            "--stop", ",", "--max_completion_length", "6", "--seed", "3", "--output_dir", "run"]


def test_templates_stop_strings_and_held_out_rows_are_the_runs(own, capsys):
    train.main(own)
    capsys.readouterr()
    checkpoint = "run/checkpoints/step_1"
    error = refused(capsys, "--model_name_or_path", checkpoint, *SAME)
    assert "run/config.json names code that would be run: --verifier mine.py:reward" in error
    texts = {}
    for flags in (["--trust_run_code"], ["--verifier", "mine.py:reward"], ["--seed", "0"]):
        more = flags if "--seed" not in flags else [*flags, "--trust_run_code"]
        report = passk(checkpoint, *more)
        out = capsys.readouterr().out
        texts[flags[0]] = report["checkpoints"]
        assert "--prompt_template '1+{prompt}' --stop , " in out
        assert "first prompt" in out and "'1+" in out
    assert texts["--trust_run_code"] == texts["--verifier"]
    assert texts["--seed"] != texts["--verifier"], "another seed: other rows, other draws"


def test_what_is_given_holds_and_is_printed(workplace, capsys):
    train.main([*RUN, "--temperature", "0.5", "--output_dir", "run"])
    capsys.readouterr()
    report = passk("run/checkpoints/step_1", "--temperature", "0.7", "--max_completion_length", "3")
    assert report["temperature"] == 0.7
    assert report["checkpoints"][0]["mean_length"][0] <= 3
    assert report["settings"] in capsys.readouterr().out
    assert report["settings"] == ("settings of run: --min_terms 1 --max_terms 2; given here: "
                                  "--temperature 0.7 --max_completion_length 3 --device cpu")


def test_another_data_set_is_not_read_with_the_columns_of_the_runs(own, capsys):
    write_rows("rows.jsonl", [{"q": row["prompt"], "a": row["answer"]} for row in sums()])
    write_rows("other.jsonl", sums())
    train.main([*own, "--columns", "q", "a"])
    more = ["--trust_run_code", "--dataset_name", "other.jsonl"]
    report = passk("run/checkpoints/step_1", *more)
    assert report["dataset"] == "other.jsonl" and "--columns" not in report["settings"]


def test_two_runs_are_compared_under_one_setting(workplace, capsys):
    for name, temperature in (("one", "0.5"), ("two", "0.7"), ("three", "0.5")):
        train.main([*RUN, "--temperature", temperature, "--output_dir", name])
    one, two, three = (f"{name}/checkpoints/step_1" for name in ("one", "two", "three"))
    error = refused(capsys, "--model_name_or_path", one, two, *SAME)
    assert "one and two were evaluated with other settings: give --temperature" in error
    assert passk(one, two, "--temperature", "1")["temperature"] == 1
    assert passk(one, three)["difference"]["pass@1"][0] is not None


# ------------------------------------------------------------------ a checkpoint that no run made

def test_two_checkpoints_and_their_difference(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    eval.main(["passk", "--model_name_or_path", *checkpoints, "--n", "4", "--k", "1", "4",
               "--problems", "6", "--device", "cpu"])
    report = json.loads(Path("runs/passk.json").read_text())
    printed = capsys.readouterr().out
    assert report["n"] == 4 and len(report["checkpoints"]) == 2
    for one in report["checkpoints"]:
        assert one["problems"] == 6
        for key in ("pass@1", "pass@4", "truncated"):
            mean, low, high = one[key]
            assert low <= mean <= high
    before, after = report["checkpoints"]
    for key in ("pass@1", "pass@4", "reward", "mean_length"):
        gain = pytest.approx(after[key][0] - before[key][0])
        assert report["difference"][key][0] == gain
    assert "default settings, not those of a run; given here: --device cpu" in printed
    assert "pass@4" in printed and "after minus before" in printed


def test_the_mean_reward_and_its_parts_of_rows_that_fit(checkpoints, tmp_path, monkeypatch, capsys):
    """pass@1 is 0 where the verifier gives partial credit alone."""
    monkeypatch.chdir(tmp_path)
    long = {"prompt": "+".join("1" * 30) + "=", "answer": "0"}
    write_rows("sums.jsonl", [long, *sums()[:8]])
    write_rows("train.jsonl", [{"prompt": "9+9=", "answer": "9"}])
    Path("mine.py").write_text("def reward(response, answer):\n"
                               "    return {'some': .5 * (response[:1] < '5'), 'any': 2.0}\n")
    flags = ["--dataset_name", "train.jsonl", "--test_dataset_name", "sums.jsonl", "--verifier",
             "mine.py:reward", "--max_completion_length", "4", "--max_prompt_length", "16"]
    report = passk(*checkpoints, *flags)
    printed = capsys.readouterr().out
    assert "1 of 10 prompts left out; " in printed and "has 60 tokens" in printed
    before, after = report["checkpoints"]
    for one in (before, after):
        assert one["problems"] == 8 and one["reward_parts"]["any"] == 2
        assert one["reward"][0] == pytest.approx(sum(one["reward_parts"].values()))
    gain = after["reward"][0] - before["reward"][0]
    assert report["difference"]["reward"][0] == pytest.approx(gain, abs=1e-9) != 0
    report = passk(checkpoints[0], checkpoints[0], *flags)
    assert report["difference"]["reward"] == [0, None, None]
    assert "reward       +0.000 [all equal]" in capsys.readouterr().out


def test_passk_refuses(checkpoints, tmp_path, capsys):
    one = ["--model_name_or_path", checkpoints[0], "--device", "cpu"]
    words = refused(capsys, *one, "--n", "8", "--k", "1", "16")
    assert "k is 16: pass@k needs 1 <= k <= n = 8" in words
    for nothing in (str(tmp_path / "nothing"), "runs/gspo/checkpoints/step_9"):
        assert "there is no such folder" in refused(capsys, "--model_name_or_path", nothing)
    three = refused(capsys, "--model_name_or_path", *checkpoints, checkpoints[0])
    assert "3 checkpoints: give one, or two" in three
    assert "unknown argument --temprature" in refused(capsys, *one, "--temprature", "1")
    assert "--n 0" in refused(capsys, *one, "--n", "0")
    small = save_tiny(tmp_path / "small", vocabulary=12)     # a model of another vocabulary
    error = refused(capsys, "--model_name_or_path", small)
    assert "token 16, its model has 12 tokens" in error
    words = tmp_path / "words.jsonl"                         # no tokens for these words
    write_rows(words, [{"prompt": "How many legs has a spider?", "answer": "8"},
                       {"prompt": "And a cat?", "answer": "4"}])
    data = ["--dataset_name", str(words), "--verifier", "exact"]
    assert "words.jsonl" in refused(capsys, *one, *data)
    write_rows(words, sums())
    short = refused(capsys, *one, *data, "--max_prompt_length", "2")
    assert "prompts fits" in short
