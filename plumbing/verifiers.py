"""Verifiers: the reward r(x, y) of a text that nobody vouches for.

A response is data and never code: nothing here evaluates it, and what some library evaluates is held back by `guard_rail`. A
maths verifier can hang (`9^{9^{9^9}}`), run out of memory or crash on what a language model writes, and a user's own function can
do anything. So all but the exact match work in a process of their own with a time limit per answer; an answer that breaks its
verifier gets reward 0, is counted, and the run goes on.

Knows nothing of tasks, models or losses.
"""

import functools
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path


class Verifier:
    r"""r(x, y) of one kind, called with (response, answer) -> float. A response never makes it raise or hang: one that
    crashes it, or takes longer than `time_limit` seconds, gets 0 and is counted in `errors`. Each thread gets its own worker.

    kind: "math" (math-verify: `\boxed{\frac{84}{2}}`, `42.0`, `so it is 42` all equal 42), "exact" (equal but for white space at
    the ends), "file.py:function" (your own function of two strings), "reasoning_gym:NAME:SEED:SIZE" (that package's own; `answer`
    is the number of the problem). Raises ValueError or FileNotFoundError if there is no such verifier.
    """

    def __init__(self, kind, time_limit=3.0):
        if not (time_limit > 0 and math.isfinite(time_limit)):
            raise ValueError(f"time_limit {time_limit} is not a number of seconds above 0")
        path, _, function = kind.rpartition(":")
        if kind not in ("exact", "math") and not kind.startswith("reasoning_gym:"):
            if not (path.endswith(".py") and function.isidentifier()):
                raise ValueError(f"verifier {kind!r} is not known: use math, exact or file.py:function")
            if not Path(path).is_file():
                raise FileNotFoundError(f"verifier {kind!r}: there is no file {path}")
        self.kind, self.time_limit, self.errors = kind, time_limit, Counter()
        self.idle = [] if kind == "exact" else [self.start()]        # workers that wait for an answer to check

    def start(self):
        worker = subprocess.Popen([sys.executable, "-u", __file__, "--verifier", self.kind, str(self.time_limit)],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        complaint = self.ask(worker, None, limit=120)                # once loaded it says "", or what is wrong
        if complaint != b'""\n':
            self.end(worker)
            raise ValueError(f"verifier {self.kind!r} does not load: {json.loads(complaint or '0') or 'its process ended'}")
        return worker

    def ask(self, worker, question, limit):
        """A JSON line in, a JSON line out; b"" if the worker died, or was killed after `limit` seconds."""
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        try:
            worker.stdin.write(json.dumps(question).encode() + b"\n")
            worker.stdin.flush()
            return worker.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()

    def end(self, worker):
        worker.kill()
        worker.communicate()                                         # closes the pipes and collects the process

    def __call__(self, response, answer):
        if self.kind == "exact":
            return float(response.strip() == answer.strip())
        worker = None
        while worker is None or worker.poll() is not None:           # one that somebody else killed is no answer's fault
            try:
                worker = self.idle.pop()
            except IndexError:
                worker = self.start()
        started = time.monotonic()
        line = self.ask(worker, [response, answer], self.time_limit)
        late = time.monotonic() - started >= self.time_limit
        if late or not line:
            self.end(worker)
        else:
            self.idle.append(worker)
        reward = None if late else json.loads(line or "null")
        if reward is None:
            self.errors["timeout" if late else "crash"] += 1
            return 0.0
        return reward

    def close(self):
        while self.idle:
            self.end(self.idle.pop())


def load_verifier(kind):
    """The function (response, answer) -> number behind a kind of verifier; called inside its worker process."""
    if kind == "math":
        import math_verify
        logging.disable()
        parse = functools.partial(math_verify.parse, parsing_timeout=None)   # its own limits are signals; ours kills the process

        @functools.lru_cache
        def gold(answer):                                                        # bare LaTeX is only parsed between dollars
            return parse(answer) if "$" in answer or "boxed" in answer else parse(f"${answer}$") or parse(answer)
        return lambda response, answer: math_verify.verify(gold(answer), parse(response), timeout_seconds=None)
    if kind.startswith("reasoning_gym:"):
        import reasoning_gym
        _, name, seed, size = kind.split(":")
        data = reasoning_gym.create_dataset(name, seed=int(seed), size=int(size))
        entry = functools.lru_cache(data.__getitem__)
        return lambda response, row: data.score_answer(reasoning_gym.utils.extract_answer(response) or response, entry(int(row)))
    path, _, function = kind.rpartition(":")
    spec = importlib.util.spec_from_file_location("verifier", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return getattr(module, function)


def guard_rail(event, arguments):
    """Audit hook: checking an answer has no business writing files, starting programs or opening sockets. Not a sandbox.

    sympy's parser is built on eval. math-verify gives it only digits and operators, but some of reasoning_gym's checkers give it
    the whole response: without this, `__import__('os').system('…')` from a model would run.
    """
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "ctypes.")) and event not in ("os.listdir", "os.scandir")
    if writes or acts:
        raise PermissionError(f"a verifier tried {event}")


def verifier_worker(kind, time_limit):
    """The worker process: JSON lines [response, answer] in, the reward out (null if the verifier crashed), until end of input."""
    questions, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)                     # a verifier that reads or prints, or a program it starts,
    os.dup2(2, 1)                                                    # must not touch the questions and replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)                     # Ctrl-C is for the run

    def say(reply):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        check = load_verifier(kind)
    except BaseException as error:                                   # a user's file may do anything, sys.exit() too
        return say(f"{type(error).__name__}: {error}".splitlines()[0])
    posix = os.name == "posix"                                       # signals; Windows has none
    if not kind.rpartition(":")[0].endswith(".py"):
        sys.addaudithook(guard_rail)
        if sys.platform == "linux":
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (4 * 2 ** 30,) * 2)       # bytes: 9^{9^{9^9}} must not eat the machine
    say("")
    questions.readline()                                             # the greeting
    for line in questions:
        if posix:
            signal.alarm(math.ceil(time_limit) + 1)                  # ends this process even if the run that asked is gone
        try:
            reward = float(check(*json.loads(line)))
        except BaseException:
            reward = math.nan
        if posix:
            signal.alarm(0)
        say(reward if math.isfinite(reward) else None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--verifier"]:
        verifier_worker(sys.argv[2], float(sys.argv[3]))
        sys.exit()
    check = Verifier("math", time_limit=1.0)
    print("math-verify against the right answer 42, at most 1 second per answer\n")
    for response in ("so 6 * 7 = 42.", r"\boxed{\frac{84}{2}}", "It is 41.", "__import__('os')", "", "$10^{10^{10}} + 42$"):
        start = time.monotonic()
        print(f"  {response!r:36} reward {check(response, '42'):.0f}  {time.monotonic() - start:5.2f} s")
    print(f"\n  exact match: {Verifier('exact')(' 42 ', '42'):.0f} for ' 42 ', {Verifier('exact')('42.0', '42'):.0f} for '42.0'")
    print(f"  answers that broke math-verify, reward 0: {dict(check.errors)}")
    check.close()
