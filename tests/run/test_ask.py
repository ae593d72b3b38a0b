"""eval.py ask: a checkpoint answers a prompt of one's own.
python -m pytest tests/run/test_ask.py"""

import re

import pytest

import eval
from plumbing.data.reward_functions import RewardFunction
from tiny_run import jsonl, write


@pytest.fixture
def asked(workplace, capsys):
    """asked(*words) -> what `eval.py ask` prints."""
    def ask(*words):
        capsys.readouterr()
        eval.main(["ask", *words])
        return capsys.readouterr().out
    return ask


def test_the_built_in_task_answers_and_is_judged(asked, run):
    run("--temperature 0.7")
    said = asked("run/checkpoints/step_1", "3+8=", "--n", "3", "--answer", "3,1.")
    found = re.findall(r"temperature ([\d.]+)   reward ([01])\n(.*)", said)
    assert [temperature for temperature, *_ in found] == ["0", "0.7", "0.7", "0.7"]
    assert all((reward == "1") == (text == "3,1.") for _, reward, text in found)
    assert "reward" not in asked("run/checkpoints/step_1", "3+8=", "--n", "1")


def test_a_function_reads_the_row_of_a_prompt_of_the_test_data(asked, run, own, calls):
    """Of another prompt there is none; nothing is judged without --answer."""
    jsonl("test.jsonl", [{"prompt": "1+1=", "answer": "2", "largest": 7}])
    write("mine.py", "def reward(response, answer, problem):\n    return problem['largest']\n")
    run(own + "--verifier mine.py:reward --test_dataset_name test.jsonl")
    typed = ("--verifier", "mine.py:reward", "--n", "1")
    ask = lambda *words: asked("run/checkpoints/step_1", *words, *typed)
    assert ask("1+1=", "--answer", "2").count("reward 7") == 2
    with pytest.raises(SystemExit, match="reads the row"):
        ask("3+8=", "--answer", "1")
    judged = calls(RewardFunction, "scores")
    assert "reward" not in ask("3+8=") and len(judged) == 1, "the names of the components"


def test_a_prompt_goes_through_the_runs_template_and_verifier(asked, run, own):
    jsonl("rows.jsonl", [{"prompt": f"{a}+{a}", "answer": "1"} for a in range(1, 10)])
    write("mine.py", "def reward(response, answer):\n    return answer == 'yes'\n")
    run(own + "--verifier mine.py:reward --prompt_template {prompt}=")
    with pytest.raises(SystemExit, match="names code"):      # of a folder, not typed
        asked("run/checkpoints/step_1", "3+8")
    typed = ("--verifier", "mine.py:reward", "--n", "1")
    said = asked("run/checkpoints/step_1", "3+8", *typed, "--answer", "yes")
    assert said.count("reward 1") == 2
    greedy = said.split("reward 1\n")[1].split("\n")[0]
    other = asked("run/checkpoints/step_1", "3+8=", *typed, "--prompt_template", "{prompt}")
    assert other.split("temperature 0\n")[1].split("\n")[0] == greedy
