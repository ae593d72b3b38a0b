"""What a run prints on the screen and in its summary: rewards beside pass@1, batches that teach
little, commands that run. python -m pytest tests/run/test_screen.py"""

import shlex

import pytest

import eval
from tiny_run import read_json, write


def test_the_reward_and_its_parts_stand_beside_pass_at_1(run, own, capsys):
    write("mine.py", "def reward(response, answer):\n"
                     "    return {'some': .5 * (answer < '5'), 'any': .25}\n")
    first, _ = run(f"{own} --verifier mine.py:reward --steps 2 --eval_samples 2 --eval_prompts 2 "
                   "--eval_steps 1 --reward_weights 1 2")
    summary = read_json("run/summary.json")
    for when in ("before", "after"):
        parts, reward = summary[f"reward_parts_{when}"], summary[f"reward_{when}"]
        assert parts.keys() == {"some", "any"} and parts["any"] == .25 and 0 < parts["some"] <= .5
        assert reward == pytest.approx(parts["some"] + 2 * parts["any"])
        assert summary[f"pass_at_1_{when}"] == 0
    parts = first["reward_parts"]
    assert [*parts] == ["some", "any"] and first["verifier_errors"] == 0
    assert first["reward"] == pytest.approx(parts["some"] + 2 * parts["any"])
    assert first["pass_at_1"][0] == 0 and first["held_out_reward"][0] > 0
    assert first["held_out_parts"]["any"] == .25


@pytest.mark.parametrize("more, reward, flag", [
    ("", 0, "--verifier"), ("", .5, None), ("--max_completion_length 2", .5, "_length")])
def test_three_batches_in_a_row_that_teach_little_are_noted_once(more, reward, flag, run, judge,
                                                                 capsys):
    """reward: of every other response."""
    judge(lambda n, right, problem: reward * (n % 2))
    run(f"--steps 5 {more}")
    printed = capsys.readouterr().out.splitlines()
    notes = [i for i, text in enumerate(printed) if text.startswith("note: ")]
    assert len(notes) == bool(flag)
    if flag:
        shown = read_json("run/samples.jsonl")[2]["samples"][0]
        assert printed[notes[0] - 1].startswith("batch 3/5") and flag in printed[notes[0]]
        assert f"{shown['prompt'].strip()!r} -> {shown['response']!r}" in printed[notes[0] + 1]


def test_a_run_ends_with_commands_that_run(run, capsys):
    run("--eval_samples 1 --eval_prompts 8", folder="a run")
    *_, last = capsys.readouterr().out.splitlines()
    commands = last.partition("next: ")[2].replace("a run", "'a run'").replace("PROMPT", "3+8=")
    for command in commands.split(", "):
        _, script, *words = shlex.split(command)
        assert script == "eval.py"
        eval.main(words)
    assert "temperature 0\n" in capsys.readouterr().out
