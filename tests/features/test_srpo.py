"""SRPO: two stages of prompts, history resampling, and two sources joined into one task.
python -m pytest tests/features/test_srpo.py"""

import json
import random
from itertools import product

import pytest
import torch

from features.srpo import Stages, join
from tiny_run import jsonl, load_task, write


@pytest.mark.parametrize("resample, stage2_step", [*product([False, True], [None, 5])])
def test_a_restored_stream_goes_on_exactly(resample, stage2_step):
    """At each of 40 places: save as JSON, restore into a new stream, compare the next draws."""
    def draw(stream, steps, rng):
        drawn = []
        for step in steps:
            drawn.append(stream.next(7))
            solved = torch.tensor([rng.random() < 0.2 for _ in drawn[-1]])          # [7]
            stream.record(solved, step)
        return drawn
    make = lambda: Stages([30, 11], 5, stage2_step, resample)
    for done in range(40):
        stream, restored = make(), make()
        draw(stream, range(1, done + 1), random.Random(done))
        restored.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        one, other = (draw(each, range(done + 1, done + 13), random.Random(7))
                      for each in (stream, restored))
        assert one == other


SOLVED, ALL = {1, 4, 7}, {*range(12)}
LEFT = [0, 2, 3, 5, 6, 8, 9, 10, 11]                         # mixed and all-wrong ones stay


@pytest.mark.parametrize("resample, epochs, left", [
    (True, [(12, SOLVED)], LEFT),
    (True, [(12, SOLVED), (9, {0})], LEFT[1:]),              # what has left stays away
    (True, [(12, ALL)], [*range(12)]),                       # all solved: starts again
    (True, [(12, ALL), (12, {0})], [*range(1, 12)]),
    (False, [(12, SOLVED)], [*range(12)])])
def test_history_resampling_drops_solved_prompts_and_keeps_the_others(resample, epochs, left,
                                                                              capsys):
    """epochs: how many are drawn, and which of them are solved."""
    stream = Stages([12, 0], resample=resample)
    for count, solved in epochs:
        drawn = stream.next(count)
        stream.record(torch.tensor([i in solved for i in drawn]), 1)
    assert sorted(stream.next(len(left))) == left
    assert ("starts again with all" in capsys.readouterr().out) == (ALL == epochs[0][1])


def test_two_joined_tasks_keep_their_sources_and_share_their_reward_functions(workplace):
    write("mine.py", "def long(completions, prompts):\n"
                     "    return [len(p) for p in prompts]\n")
    for name in ("x", "yy"):
        jsonl(f"{name}.jsonl", [{"prompt": f"{name}{i}", "answer": "a"} for i in range(10)])
    task = join(*(load_task(f"{name}.jsonl", verifier=["exact", "mine.py:long"])
                  for name in ("x", "yy")))
    assert task.name == "x.jsonl + yy.jsonl" and len(task.test) == 2
    assert [p.stage for p in task.train] == [1] * 9 + [2] * 9
    assert [p.prompt[0] for p in task.test] == ["x", "y"], "in turns"
    assert [p.prompt[:-1] for p in task.train] == ["x"] * 9 + ["yy"] * 9
    rewards = task.total(task.reward_components(["b"] * 18, task.train))
    assert rewards.tolist() == [2] * 9 + [3] * 9
    problems = [task.train[0], task.train[-1], task.train[1]]
    assert task.reward_components(["a", "a", "b"], problems).tolist() == [[1, 2], [1, 3], [0, 2]]


