"""What a run prints on the screen and in its metrics: rewards beside pass@1, the clip range beside
the spread of log s, a collapse, a reference that never moves, progress through a pipe.
python -m pytest tests/run/test_screen.py"""

import itertools
import math
import re
import shlex
from losses import STATISTICS
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval
import train
from session import metrics as records_of
from session import screen
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
        low, high = summary[f"reward_interval_{when}"]
        assert low <= reward <= high and summary[f"pass_at_1_{when}"] == 0
        assert summary[f"interval_{when}"] == [0, pytest.approx(1 - .025 ** .5)]
    said = capsys.readouterr().out
    parts = first["reward_parts"]
    assert [*parts] == ["some", "any"] and first["verifier_errors"] == 0
    assert first["reward"] == pytest.approx(parts["some"] + 2 * parts["any"])
    assert first["pass_at_1"][0] == 0 and first["held_out_reward"][0] > 0
    assert first["held_out_parts"]["any"] == .25
    assert "after batch 1: held-out pass@1 0.000 [0.000, 0.842], greedy" in said
    rewards = [summary["reward_before"], first["held_out_reward"][0], summary["reward_after"]]
    best = {"step": rewards.index(max(rewards)), "pass_at_1": 0, "reward": max(rewards)}
    assert summary["best"] == best, "of equal pass@1 the highest reward"
    assert f"best:   batch {best['step']} of 2, held-out pass@1 0.000, mean reward" in said


# ------------------------------------------------------------------------------- what went wrong

@pytest.mark.parametrize("kept, said", [(1, True), (2, True), (5, False)])
def test_a_collapse_is_printed_at_its_batch_and_at_the_end(kept, said, run, judge, capsys):
    """kept: how many of five batches have only right responses; the others have only wrong ones."""
    judge(lambda n, right, problem: n < kept * 16)
    run("--steps 5 --learning_rate 0.002")
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("batch ")]
    told = ["COLLAPSED? pass rate below half its best" in line for line in lines]
    assert told == [n >= kept for n in range(5)]
    sentence = ("the run collapsed (pass rate below half its best): try a lower --learning_rate "
                "than 0.002")
    assert printed.rstrip().endswith(sentence) == said and ("collapsed" in printed) == said


EASY = "Are the problems too easy?"


@pytest.mark.parametrize("rule, reward, words, helps", [
    (lambda *_: 0, 0, "all rewards were equal, so", records_of.NEVER_RIGHT),
    (lambda *_: 1, 1, "all rewards were equal, so", EASY),
    (lambda n, right, problem: len(problem.prompt.strip()) / 100, None,
     "all rewards were equal within every group, so", records_of.NEVER_RIGHT)])
def test_three_batches_of_equal_rewards_are_reported_at_once(
        rule, reward, words, helps, run, judge, capsys):
    judge(rule)
    run("--steps 5")
    printed = capsys.readouterr().out.splitlines()
    note, = [i for i, text in enumerate(printed) if text.startswith("note: in the last 3 batches")]
    third = read_json("run/samples.jsonl")[2]["samples"][0]
    assert printed[note - 1].startswith("batch 3/5") and "zero-var 1.00" in printed[note - 1]
    assert words in printed[note] and reward in (None, third["reward"])
    answered = f"{third['prompt'].strip()!r} -> {third['response']!r}"
    assert f"with reward {third['reward']:g}: {answered}" in printed[note]
    assert helps in printed[note] and (EASY in printed[note]) == (helps == EASY)
    run("--steps 3 --advantage gae --algorithm ppo", folder="other")
    assert ("note: in the last" in capsys.readouterr().out) == (reward == 0), \
        "a critic, which begins with 0, learns from other rewards"


@pytest.mark.parametrize("returned, noted", [
    ("{'format': .5, 'math': 1.0 * (len(response) % 2)}", True),
    ("{'math': 1.0, 'format': 1.0}", False),
    ("{'format': .5, 'math': .5}", False),
    (".5", False)])
def test_a_first_component_that_stays_below_1_while_another_reaches_it_is_noted_once(
        returned, noted, run, own, capsys):
    write("mine.py", f"def reward(response, answer):\n    return {returned}\n")
    run(f"{own} --verifier mine.py:reward --steps 2")
    notes = [text for text in capsys.readouterr().out.splitlines() if "counts as right" in text]
    assert len(notes) == noted
    assert not noted or "of the reward, format, which stays below 1; math reaches 1" in notes[0]


# ------------------------------------------------------------------------------- the clip range

def test_the_clip_range_is_recorded_beside_the_spread_of_log_s_where_s_is_clipped(run):
    for record in run("--steps 2 --learning_rate 2e-3"):
        assert record["epsilon"] == 3.5e-4
        assert record["epsilon_over_std"] == 3.5e-4 / math.sqrt(record["log_s_var"])
    assert "epsilon" not in run("--algorithm grpo", folder="grpo")[0]


def test_while_no_group_has_a_signal_rounding_is_not_a_spread(run, judge):
    """Hard tasks begin with equal rewards. Against the sampler's log-probs, an unchanged policy
    differs by rounding."""
    judge(lambda n, right, problem: right if n >= 2 * 16 else 0)
    *equal, last = run("--old_logp sampler --steps 3 --warmup_steps 0")
    for record in equal:
        assert record["zero_variance_groups"] == 1 and record["epsilon_over_std"] is None
        assert 0 < record["log_s_var"] < records_of.ROUNDING
    assert len(equal) == 2 and last["zero_variance_groups"] < 1 and last["epsilon_over_std"] > 0


# ------------------------------------------------------------------------------- progress

def test_the_seconds_that_are_left_are_those_of_the_batches_of_this_run(run, monkeypatch, capsys):
    """A clock that ticks at every look: five of a batch."""
    run()
    capsys.readouterr()
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(records_of, "time", clock)
    monkeypatch.setattr(train, "time", clock)
    run("--resume --steps 4")
    left = re.findall(r"(\d+) s left", capsys.readouterr().out)
    assert left == [str(5 * 2), str(10 // 2), "0"]


@pytest.mark.parametrize("every, said", [(2, True), (3, True), (1, False)])
def test_a_reference_that_never_moves_is_reported(every, said, run, capsys):
    run(f"--steps 2 --beta 0.1 --sync_ref_model --ref_model_sync_steps {every}")
    words = (f"the reference policy moves after every {every} rollout batches "
             "(--ref_model_sync_steps), and never in this run of 2")
    assert (words in capsys.readouterr().out) == said


def test_before_the_first_update_any_log_s_is_an_error():
    first = dict(log_s_mean=3e-4, log_s_var=16e-8, clip_low=0.0, clip_high=0.0, grad_norm=1.0,
                 **{name: 0.0 for name in STATISTICS if "signal" in name},
                 tokens=9.0, skipped=False, overflow=False, empty=False)
    record = records_of.update_metrics([first, first | dict(log_s_mean=1.0, log_s_var=1.0)])
    assert record["log_s_noise"] == pytest.approx(5e-4)


# ------------------------------------------------------------------------------- the end

def test_a_response_that_reads_like_a_game_is_no_game():
    example = dict(prompt="1=", answer="1", before="  writes 1", after="1", right=[False, True])
    assert screen.format_example(example, False) == [
        "", "prompt  '1='   (right: '1')", "before  '  writes 1' wrong", "after   '1' right"]


def test_a_run_ends_with_eight_lines_whose_commands_run(run, own, capsys):
    write("mine.py", "def reward(response, answer):\n    return answer in response\n")
    own += "--verifier mine.py:reward --no_chat_template --save_tokens false"
    for line in ("", own):
        folder = f"run {len(line)}"
        run(f"{line} --eval_samples 1 --eval_prompts 8", folder=folder)
        said = capsys.readouterr().out.splitlines()
        last, = [i for i, text in enumerate(said) if text.startswith("batch 1/1")]
        end = list(filter(None, said[last + 1:]))
        assert [text.split()[0] for text in end[:5]] == ["prompt", "before", "after", "before:",
                                                          "after:"]
        one = read_json(Path(folder, "summary.json"))["example"]
        assert repr(one["prompt"]) in end[0] and repr(one["after"]) in end[2]
        assert end[2].endswith("right" if one["right"][1] else "wrong")
        assert len(end) == 8 and f"are in {folder}/" in end[5]
        shown = end[6].removeprefix("pictures: ").split(", ")
        assert len(shown) == 1 + (line == "")
        for command in [*shown, end[7].removeprefix("next: ")]:
            script, *words = shlex.split(command)[1:]
            assert script == "eval.py"
            eval.main(words)
        assert "temperature 0\n" in capsys.readouterr().out
