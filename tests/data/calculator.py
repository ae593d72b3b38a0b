"""Responses with tool output: the results of a calculator are not in the loss mask.

    prompt     3+8+5=
    response   sum(3,8)=11,sum(11,5)=16.
                         ^^           ^^   inserted by the loop: no loss token, in no ratio

The policy never learns to add, because the tool's tokens are masked in the cold start too. It has
to learn what to ask. The teacher of the cold start asks for 8 instead of 9 three times out of five,
and RL corrects this.

Three cold starts of 12 rollout batches went from 0.50, 0.53, 0.54 held-out pass@1 to 0.95, 0.90,
0.95 (db735d8).
"""

import json
import random
import re
from pathlib import Path

import train
from plumbing.data.datafiles import Problem
from plumbing.data.running_sum import longest_answer
from plumbing.data.task import CHARACTERS, Task
from plumbing.run.arguments import parse

CALL = re.compile(r"sum\((\d+),(\d+)\)=$")
FLAGS = ("--steps 12 --cold_start_steps 240 --hidden_size 64 --num_hidden_layers 3 "
         "--prompts_per_step 16 --device cpu").split()


def calculator(text):
    """The text to insert after a response that ends with a call, and "" for any other response."""
    call = CALL.search(text)
    return str(int(call[1]) + int(call[2])) if call else ""


def task_with_calculator(low=3, high=4, habit=0.6, tool=calculator, train_size=2048, test_size=256):
    """The task: sums of `low` to `high` terms from 1 to 9. A response is right if its last number
    is the sum."""
    def calls(terms):
        total = terms[0]
        text = ""
        for term in terms[1:]:
            text += f"sum({total},{term})="
            total = calculator(text)
            text += f"{total},"
        return text[:-1] + "."

    def teacher(problem, rng):
        terms = [int(c) for c in problem.prompt if c.isdigit()]
        return calls([8 if t == 9 and rng.random() < habit else t for t in terms])

    def verify(response, problem):
        last = re.search(r"(\d+)\.$", response)
        return float(bool(last) and last[1] == re.search(r"(\d+)\.$", problem.answer)[1])

    rng = random.Random(0)
    problems = {}
    while len(problems) < train_size + test_size:
        terms = rng.choices(range(1, 10), weights=[1] * 8 + [3], k=rng.randint(low, high))
        prompt = "+".join(map(str, terms)) + "="
        problems[prompt] = Problem(prompt.ljust(2 * high), calls(terms))
    rows = list(problems.values())
    return Task(f"sums of {low} to {high} terms with a calculator, habit {habit:g}",
                rows[test_size:], rows[:test_size], verify, teacher=teacher, tool=tool,
                sizes=(train_size,), one_width=True, characters=CHARACTERS + "sum()")


def run(seed, folder, *more):
    """Make one cold start, train it, and return its summary.json."""
    task = task_with_calculator()
    args = parse([*FLAGS, *more, "--seed", str(seed), "--output_dir", str(folder),
                  "--max_completion_length", str(longest_answer(task))])
    train.run_script(args, task)
    return json.loads((Path(folder) / "summary.json").read_text())
