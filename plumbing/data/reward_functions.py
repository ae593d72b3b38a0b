"""Reward functions: what --verifier names, the reward r(x, y) of untrusted model output.

    math, exact        math-verify; equal except for white space at the ends
    FILE.py:FUNCTION   reward(response, answer), or reward(response, answer, problem) with the row
                       of the data -> a number, or a dict of named numbers, with names that its
                       first answers had
                       reward(prompts, completions, completion_ids, **columns), as in TRL, with
                       lists -> a list of numbers, None for a response without this reward

A parameter `completions`, `completion_ids` or `environments` (the objects that were played) tells
the second form. A response is data, never code, but math-verify can hang on one (`9^{9^{9^9}}`) and
a user's function can do anything. What scores one response therefore runs in processes of its own
(reward_worker.py), with a time limit. A function of a batch runs in the training process: it may
compare the responses of a group, or ask a judge for all of them at a time.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Timer

from plumbing.data import reward_worker
from plumbing.refusal import Refusal

BATCH = {"completions", "completion_ids", "environments"}    # a parameter that asks for a batch


class RewardFunction:
    """What a --verifier names. `scores` gives every response of a batch its components.

    A response cannot make a function of one response raise or hang: if it fails or takes longer
    than time_limit seconds, the components are 0 and `errors` grows. Errors of a function of a
    batch end the run, with their traceback.
    """

    def __init__(self, verifier, time_limit=3.0):
        self.verifier = verifier
        self.time_limit = time_limit
        self.function = None                                 # the user's
        self.inputs = {}                                     # its parameters
        if verifier not in ("exact", "math"):
            self.function = reward_worker.load_function(verifier)
            self.inputs = inspect.signature(self.function).parameters
        self.batched = not BATCH.isdisjoint(self.inputs)
        if not self.batched and next(iter(self.inputs), "") == "answer":
            raise Refusal(f"--verifier {verifier} reads the answer first, but the response comes "
                          "first: reward(response, answer)")
        # of the components of the reward; the first answers name those of a dict
        self.names = [verifier.rpartition(":")[2]] if self.batched or verifier == "exact" else []
        self.errors = 0
        self.idle = []                                       # workers without a question
        self.lost = None                                     # the first row that `math` cannot read

    def scores(self, texts, problems, ids=(), games=(), chat=False):
        """[{component: number}] of B texts to B problems, NaN for None; {}: the function failed.
        ids: the token ids of the texts; games: what was played with an environment, or (); chat:
        whether a chat template is used. Raises ValueError for a component that the first answers
        did not have."""
        if self.batched:
            return self.score_batch(texts, problems, ids, games, chat)
        if self.verifier == "exact":
            return [{"exact": float(text.strip() == problem.answer.strip())}
                    for text, problem in zip(texts, problems)]
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        with ThreadPoolExecutor(min(max(cores, 1), 8)) as pool:
            scores = list(pool.map(self.score, texts, problems))
        if self.verifier == "math" and {} in scores and not self.lost:
            self.lost = problems[scores.index({})]
            print(f"note: {self.lost.where}: no response can be right, because math cannot read "
                  f"the answer {self.lost.answer!r:.80}: use exact, or FILE.py:FUNCTION",
                  flush=True)
        scores = [parts or {} for parts in scores]
        self.errors += scores.count({})
        names = [*dict.fromkeys(chain(*scores))]
        self.names = self.names or names
        if not {*names} <= {*self.names}:
            raise ValueError(f"{self.verifier} returned {', '.join(names)}, but only "
                             f"{', '.join(self.names)} for the first reference answers: return "
                             "all components each time, 0 where one does not apply")
        return scores

    def score_batch(self, texts, problems, ids, games, chat):
        completions = [game.messages for game in games] or [
            [{"role": "assistant", "content": text}] if chat else text for text in texts]
        columns = {name for p in problems for name in p.row} - {"prompt", "completion"}
        inputs = {name: [p.row.get(name) for p in problems] for name in columns}
        inputs |= {"prompts": [p.messages() if chat else p.prompt for p in problems],
                   "completions": completions, "completion_ids": list(ids)}
        if games:
            inputs["environments"] = [game.environment for game in games]
        if not any(p.kind is p.VAR_KEYWORD for p in self.inputs.values()):
            inputs = {name: inputs[name] for name in self.inputs if name in inputs}
        rewards = self.function(**inputs)
        if inspect.iscoroutine(rewards):
            rewards = asyncio.run(rewards)
        if len(rewards) != len(texts):
            raise Refusal(f"--verifier {self.verifier} returned {len(rewards)} rewards for "
                          f"{len(texts)} completions")
        return [{self.names[0]: math.nan if value is None else float(value)} for value in rewards]

    def score(self, text, problem):
        """{component: number} of one response, by a worker; None if the function failed on it."""
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = self.start()
        line = self.ask(worker, [text, final_answer(problem.answer),
                                 problem.row if "problem" in self.inputs else None])
        if not line:                                         # it was killed, or has crashed
            worker.wait()
            return None
        self.idle.append(worker)
        return json.loads(line)

    def start(self):
        worker = subprocess.Popen([sys.executable, reward_worker.__file__, self.verifier],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
                                  start_new_session=True)
        if not worker.stdout.readline():                     # "ready"
            raise Refusal(f"--verifier {self.verifier} does not load: see above")
        return worker

    def ask(self, worker, question):
        """The reply to a question, a line of JSON; "" if the worker has died or was killed."""
        timer = Timer(self.time_limit, kill, [worker])
        timer.start()
        try:
            worker.stdin.write(json.dumps(question, default=str) + "\n")
            worker.stdin.flush()
            return worker.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def find_names(self, problems):
        """The names of the components, from the rewards of some reference answers, the first that
        it scores. Raises Refusal if the function fails on all of them: every reward would be 0."""
        scores = self.scores([p.answer for p in problems], problems)
        self.errors = 0
        if not any(scores):
            raise Refusal(f"--verifier {self.verifier} fails on each of the first {len(problems)} "
                          f"reference answers ({problems[0].where} …), or takes longer than "
                          "--verifier_timeout")
        return self.names


def kill(worker):
    """Kill a worker, which leads a process group, with the processes that its function started."""
    if hasattr(os, "killpg"):
        os.killpg(worker.pid, signal.SIGKILL)
    else:
        worker.kill()


def final_answer(answer):
    """What follows `####` in the last line, as in GSM8K's answers; any other text as it is."""
    last_line = answer.rstrip().rpartition("\n")[2]
    final = last_line.removeprefix("####").strip()
    return final if last_line.startswith("####") and final else answer
