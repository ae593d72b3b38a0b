"""Verifiers: the reward r(x, y) of untrusted model output.

A response is data, never code. Nothing in this file evaluates it, and `guard_rail` limits what
libraries that do evaluate it can reach. A math verifier can hang (`9^{9^{9^9}}`), run out of memory
or crash on text that a language model wrote, and a user's function can do anything. Therefore every
verifier except the exact match runs in a process of its own, with a time limit per response. A
response that makes its verifier fail gets reward 0 and is counted, and the run continues.

This file does not depend on tasks, models or losses.
"""

import functools
import importlib.util
import inspect
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MEMORY = 4 * 2 ** 30             # memory limit of a library's verifier, in bytes


class Verifier:
    r"""r(x, y) of one kind, called with (response, answer) -> float, the sum of its parts.

    kind: "math" (math-verify: `\boxed{\frac{84}{2}}`, `42.0`, `so it is 42` all equal 42), "exact"
    (equal except for white space at the ends), "reasoning_gym:GENERATORS" (that package's own
    verifier; GENERATORS is the JSON of datafiles.gym_generators), or "file.py:function": your own
    function of (response, answer), which returns a number or a dict of named numbers, with the same
    names every time. If it has a parameter `problem`, it gets the data row.

    A response cannot make a Verifier raise or hang: if the verifier fails on it or takes longer
    than `time_limit` seconds, the reward is 0 and the error is counted in `errors`. Several threads
    may call it at the same time; each gets its own worker process. Raises ValueError or
    FileNotFoundError if there is no such verifier.
    """

    whole = False                # judges one response at a time; a RewardFunction judges a batch

    def __init__(self, kind, time_limit=3.0):
        path, _, function = kind.rpartition(":")
        if kind in ("exact", "math") or kind.startswith("reasoning_gym:"):
            self.name = kind.split(":")[0]
            self.names = [kind.split(":")[0]]
        elif not (path.endswith(".py") and function.isidentifier()):
            raise ValueError(f"verifier {kind!r} is not known: use math, exact or file.py:function")
        elif not Path(path).is_file():
            raise FileNotFoundError(f"verifier {kind!r}: there is no file {path}")
        else:
            self.name = function
            self.names = None                                # set by the first reply
        self.kind = kind
        self.time_limit = time_limit
        self.errors = Counter()
        self.own = path.endswith(".py")
        self.wants_problem = False
        self.complaint = None                                # what first went wrong
        self.complained = False                              # whether it is said
        self.idle = [] if kind == "exact" else [self.start()]        # workers without an answer

    def __call__(self, response, answer, problem=None):
        return sum(self.parts(response, answer, problem).values())

    def parts(self, response, answer, problem=None):
        """The named parts of the reward, {name: float}; all 0 if the verifier failed on this
        response."""
        if self.kind == "exact":
            return {"exact": float(response.strip() == answer.strip())}
        worker = self.worker()
        began = time.monotonic()
        row = problem if self.wants_problem else None
        line = self.ask(worker, [response, answer, row], self.time_limit)
        late = time.monotonic() - began >= self.time_limit
        if late or not line:
            self.end(worker)
            reply = f"took longer than {self.time_limit:g} s" if late else "its process ended"
        else:
            self.idle.append(worker)
            reply = json.loads(line)
        if isinstance(reply, float):
            reply = {self.name: reply}
        if isinstance(reply, dict):
            self.names = self.names or list(reply)
            if set(reply) == set(self.names):
                return {name: reply[name] for name in self.names}
            reply = f"returned {' '.join(reply)}, but {' '.join(self.names)} before"
        self.errors["timeout" if late else "crash"] += 1
        self.complaint = self.complaint or f"{self.kind}: {reply}, for {response[:40]!r}"
        return dict.fromkeys(self.names or [self.name], 0.0)

    def try_on(self, problems, rows):
        """Judge the reference answers of some problems (rows: their data rows) before training, so
        that the names of the parts are known. Returns (note, error): a note if no reference answer
        is judged right, an error if the verifier failed on all of them, "" otherwise."""
        note = failed = ""
        if self.kind == "math" or self.own:
            right = [self(p.answer, p.answer, row) for p, row in zip(problems, rows)]
            if sum(self.errors.values()) == len(problems):
                failed = self.complaint
            elif self.kind == "math" and not any(right):
                first = problems[0].answer[:40]
                note = (f"math-verify reads answers like {first!r} only in $…$ or "
                        r"\boxed{…}: perhaps the verifier exact is meant")
        self.errors.clear()
        self.complaint = None
        return note, failed

    def complain(self):
        """Print the first error of a user's function, once, on stderr."""
        if self.complaint and self.own and not self.complained:
            self.complained = True
            sys.stderr.write(f"train.py: warning: verifier {self.complaint}: the reward is 0, and "
                             "verifier_errors counts such answers\n")

    def worker(self):
        worker = None
        while worker is None or worker.poll() is not None:   # an idle worker may have been killed
            try:
                worker = self.idle.pop()
            except IndexError:
                worker = self.start()
        return worker

    def start(self):
        worker = subprocess.Popen(
            [sys.executable, "-u", __file__, self.kind, str(self.time_limit)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # once loaded, it reports whether it needs the data row, or an error
        reply = json.loads(self.ask(worker, None, limit=120) or '"its process ended"')
        if isinstance(reply, str):
            self.end(worker)
            raise ValueError(f"verifier {self.kind!r} does not load: {reply}")
        self.wants_problem = reply
        return worker

    def ask(self, worker, question, limit):
        """Send a JSON line and return the reply line; b"" if the worker died or was killed after
        `limit` seconds."""
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        try:
            worker.stdin.write(json.dumps(question, default=str).encode() + b"\n")
            worker.stdin.flush()
            return worker.stdout.readline()
        except OSError:
            return b""
        finally:
            timer.cancel()

    def end(self, worker):
        worker.kill()
        worker.communicate()                                 # closes the pipes, waits for its end

    def close(self):
        while self.idle:
            self.end(self.idle.pop())


def in_parallel(call, *arguments, workers=None):
    """[call(*a) for a in zip(*arguments)], in that order, on `workers` threads. None: one thread
    per core available to this process (torchrun's processes share the cores), at most 8."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with ThreadPoolExecutor(workers or min(max(cores, 1), 8)) as pool:
        return list(pool.map(call, *arguments))


# ------------------------------------------------------------------------ inside the worker process

def load_verifier(kind):
    """The function (response, answer[, problem]) behind a kind of verifier."""
    if kind == "math":
        import math_verify
        logging.disable()
        # math-verify's own time limits use signals; ours kills the process
        parse = functools.partial(math_verify.parse, parsing_timeout=None)

        @functools.lru_cache
        def gold(answer):                                    # LaTeX is recognized only between $
            if "$" in answer or "boxed" in answer:
                return parse(answer)
            return parse(f"${answer}$") or parse(answer)
        return lambda response, answer: float(
            math_verify.verify(gold(answer), parse(response), timeout_seconds=None))
    if kind.startswith("reasoning_gym:"):
        import reasoning_gym
        data = [reasoning_gym.create_dataset(name, **options)
                for name, options in json.loads(kind.partition(":")[2])]
        entry = functools.lru_cache(lambda generator, row: data[generator][row])
        extract = reasoning_gym.utils.extract_answer
        return lambda response, answer, problem: data[problem["generator"]].score_answer(
            extract(response) or response, entry(problem["generator"], problem["row"]))
    path, _, function = kind.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"verifier_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                          # dataclasses look their module up
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return getattr(module, function)


def takes_problem(check):
    try:
        return "problem" in inspect.signature(check).parameters
    except (TypeError, ValueError):                          # written in C
        return False


def checked(reward):
    """The result of a verifier as a float or as {name: float}; an error text if it is invalid."""
    parts = reward if isinstance(reward, dict) else {"": reward}
    for name, value in parts.items():
        try:
            fine = math.isfinite(float(value)) and not isinstance(value, (str, bytes))
        except (TypeError, ValueError, OverflowError):
            fine = False
        if not fine:
            return f"returned {value!r:.80}{f' for {name}' if name else ''}, not a finite number"
    if parts is reward:
        return {str(name): float(value) for name, value in parts.items()} or "returned no parts"
    return float(reward)


def guard_rail(event, arguments):
    """Audit hook: raises PermissionError if a verifier writes files, starts programs or opens
    sockets. It is not a sandbox.

    sympy's parser uses eval. math-verify passes only digits and operators to it, but some of
    reasoning_gym's checkers pass the whole response: `__import__('os').system('…')` would run.
    """
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    writes = event == "open" and arguments[2] & writing
    acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "ctypes."))
    if writes or acts and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(f"a verifier tried {event}")


def verifier_worker(kind, time_limit):
    """The worker: reads JSON lines [response, answer, problem], writes rewards or error texts."""
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a verifier that reads or prints, or a program it starts, must not touch questions and replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)             # Ctrl-C is for the run

    def say(reply):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def text(error):
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]

    try:
        check = load_verifier(kind)
    except BaseException as error:                           # a user's file may call sys.exit()
        return say(text(error))
    if not kind.rpartition(":")[0].endswith(".py"):
        sys.addaudithook(guard_rail)
        if sys.platform == "linux":
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    questions.readline()                                     # the first message, without a question
    with_problem = takes_problem(check)
    say(with_problem)
    alarm = getattr(signal, "alarm", lambda seconds: None)   # Windows has none
    for line in questions:
        *texts, problem = json.loads(line)
        alarm(math.ceil(time_limit) + 1)                     # ends this process if the run has died
        try:
            reply = checked(check(*texts, **({"problem": problem} if with_problem else {})))
        except BaseException as error:
            reply = f"raised {text(error)}"
        alarm(0)
        say(reply)


if __name__ == "__main__":
    verifier_worker(sys.argv[1], float(sys.argv[2]))
