"""eval.py passk: the checkpoint of a run with the run's settings, any other with those given.
python -m pytest tests/run/test_passk.py"""

import re
import shlex
import shutil

import pytest

import eval
import models
from tiny_run import SUMS, jsonl, read_json, write

ONCE = "--eval_samples 2 --eval_prompts 8"
STEP = "run/checkpoints/step_1"


@pytest.fixture
def passk(workplace, capsys):
    """passk(checkpoints and flags) -> what the command prints."""
    def print_it(line):
        capsys.readouterr()
        eval.main(["passk", *shlex.split(f"{line} --n 2 --k 2 --problems 8 --device cpu")])
        return capsys.readouterr().out
    return print_it


def first_rows(said, name):
    """The numbers behind a name, of every checkpoint."""
    return re.findall(rf"{name} +(\S+) \[(\S+), (\S+)\]", said)


@pytest.mark.parametrize("more", [
    "", "--temperature 0.5 --max_completion_length 7", "--algorithm dapo"])
def test_a_runs_checkpoint_scores_as_the_run_did(more, run, passk):
    """The same numbers: the same problems, prompts, lengths and random numbers."""
    run(f"{ONCE} {more}")
    summary = read_json("run/summary.json")
    said = passk(STEP)
    shutil.copytree(STEP, f"{STEP}/ema")                     # as a feature may save it
    assert passk(f"{STEP}/ema").replace("/ema", "") == said
    found, = first_rows(said, "pass@1")
    want = (summary["pass_at_1_after"], *summary["interval_after"])
    assert found == tuple(f"{x:.3f}" for x in want) and float(found[0]) > 0


def test_templates_stop_strings_and_held_out_rows_are_the_runs(run, own, passk):
    """What is typed holds; another data set is not read with the columns of the run's."""
    jsonl("rows.jsonl", [{"q": row["prompt"], "a": row["answer"]} for row in SUMS])
    jsonl("other.jsonl", SUMS)
    write("mine.py",
          "def reward(response, answer):\n    return float(response[:1] in '13579')\n")
    run(f"{own} {ONCE} --verifier mine.py:reward --prompt_template 1+{{prompt}} --stop , --seed 3 "
        "--columns q a")
    same, typed, other = (
        first_rows(passk(f"{STEP} --trust_run_code {more}"), "reward")
        for more in ("", "--temperature 1 --stop ,", "--dataset_name other.jsonl --seed 5"))
    assert same == typed != other, "another seed: other rows, other draws"
    assert float(same[0][0]) == pytest.approx(read_json("run/summary.json")["reward_after"],
                                              abs=6e-4)


def test_several_checkpoints_that_no_run_made(passk, tmp_path):
    """pass@1 is 0 where the verifier gives partial credit alone."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=2,
                 num_experts_per_tok=1, initializer_range=0.02)
    made = [models.saved(tmp_path / name, "tiny_moe", seed=seed, **sizes)
            for seed, name in enumerate(("one", "two"))]
    long = {"prompt": "+".join("1" * 30) + "=", "answer": "0"}
    jsonl("sums.jsonl", [long, *SUMS[:8]])
    jsonl("train.jsonl", [{"prompt": "9+9=", "answer": "9"}])
    write("mine.py", "def reward(response, answer):\n"
                     "    return {'some': .5 * (response[:1] < '5'), 'any': 2.0 * (response > '')}")
    said = passk(f"{shlex.join(made)} --dataset_name train.jsonl --test_dataset_name sums.jsonl "
                 "--verifier mine.py:reward --max_completion_length 4 --max_prompt_length 16")
    assert said.count("8 problems, 2 responses each") == 2
    assert [row[0] for row in first_rows(said, "pass@1")] == ["0.000", "0.000"]
    one, two = (float(mean) for mean, *_ in first_rows(said, "reward"))
    assert 0 < one != two > 0
