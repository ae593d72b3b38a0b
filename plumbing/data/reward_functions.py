"""Reward functions of one response: the reward r(x, y) of untrusted model output.

A response is data, never code. Nothing in this file evaluates it, and `guard_rail` limits what
libraries that do evaluate it can reach. math-verify can hang (`9^{9^{9^9}}`), run out of memory
or crash on text that a language model wrote, and a user's function can do anything. Therefore every
reward function except the exact match runs in a process of its own, with a time limit per response.
A response that makes its reward function fail gets reward 0 and is counted, and the run continues.

Functions that score a whole batch at a time are in batch_rewards.py. This file does not depend on
tasks, models or losses.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import queue
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

if __name__ == "__main__":                       # a worker, of which this file is the script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from plumbing.refusal import Refusal

LARGEST_REWARD = 1e15            # as in advantages.py, which a worker does not import
NO_NUMBER = f"not a finite number below {LARGEST_REWARD:g}"
MEMORY = 4 * 2 ** 30             # memory limit of a library's reward function, in bytes
MOST_REFERENCES = 2000           # that math-verify tries to read before training,
MOST_SECONDS = 10.0              # in at most this time
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}     # of the ASCII characters
CJK = "[\u3000-\u9fff\uac00-\ud7af]"


class RewardFunction:
    r"""r(x, y), called with (response, answer) -> float, the sum of its components.

    verifier: "math" (math-verify: `\boxed{\frac{84}{2}}`, `42.0`, `so it is 42` all equal 42),
    "exact" (equal except for white space at the ends), or "file.py:function": a user's function of
    (response, answer), which returns a number or a dict of named numbers, with the same names every
    time. The two are given by name if one parameter has a name of RESPONSES and one of ANSWERS,
    otherwise by position, which a note shows. If it has a parameter `problem`, it gets the data
    row. A function with verl's parameters is called as verl calls its compute_score.

    `exact` compares with the answer as it stands; the others get what final_answer leaves of it.

    A response cannot make a RewardFunction raise or hang: if the function fails on it or takes
    longer than `time_limit` seconds, the reward is 0 and the error is counted in `errors`. Several
    threads may call it at the same time; each gets its own worker process. Raises
    Refusal if there is no such function.
    """

    batched = False              # it scores one response at a time; a BatchRewardFunction a batch

    def __init__(self, verifier, time_limit=3.0):
        path, _, function = verifier.rpartition(":")
        if verifier in ("exact", "math"):
            self.name = verifier
            self.names = [self.name]                         # of the components of the reward
        elif not (path.endswith(".py") and function.isidentifier()):
            raise Refusal(f"--verifier {verifier!r} is not known: use math, exact or "
                          "file.py:function")
        elif not Path(path).is_file():
            raise Refusal(f"--verifier {verifier!r}: there is no file {path}")
        else:
            self.name = function
            self.names = None                                # set by the first reply
        self.verifier = verifier
        self.time_limit = time_limit
        self.errors = Counter()
        self.from_file = path.endswith(".py")
        self.parameters = []                                 # the names of the function's
        self.by_name = True                                  # or it is called by position
        self.first_error = None                              # what first went wrong
        self.warned = False                                  # whether it is printed
        self.shown = False                                   # a call by position
        self.idle = [] if verifier == "exact" else [self.start()]    # workers without a question

    def __call__(self, response, answer, row=None):
        return sum(self.components(response, answer, row).values())

    def components(self, response, answer, row=None):
        """The named components of the reward, {name: float}; all 0 if the function failed on this
        response. row: the row of the data, for functions that ask for it."""
        if self.verifier == "exact":
            return {"exact": float(response.strip() == answer.strip())}
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = self.start()
        if not (self.by_name or self.shown or response in (None, answer)):
            self.shown = True
            sys.stderr.write(
                f"note: --verifier {self.verifier} gets response and answer by position: "
                f"{self.name}({response[:40]!r}, {final_answer(answer)[:40]!r}); parameters named "
                "response and answer are filled by name\n")
        began = time.monotonic()
        row = row if NEED_ROW.intersection(self.parameters) else None
        line = self.ask(worker, [response, final_answer(answer), row], self.time_limit)
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
        start = repr((response or "")[:40])                  # None: find_unreadable
        self.first_error = self.first_error or f"{self.verifier}: {reply}, for {start}"
        return dict.fromkeys(self.names or [self.name], 0.0)

    def try_references(self, problems):
        """Score the reference answers of some problems before training -> the names of the
        components. Raises Refusal if the function fails on all of them: every reward would be
        0."""
        for p in problems:
            self.components(p.answer, p.answer, p.row)
        if self.errors.total() == len(problems):
            advice = ("is --verifier_timeout long enough?" if self.errors["timeout"] else
                      "return 0 for an answer that it cannot read")
            raise Refusal(f"--verifier {self.first_error}: it fails on each of the first "
                          f"{len(problems)} reference answers; {advice}")
        self.errors.clear()
        self.first_error = None
        return self.names

    def find_unreadable(self, problems):
        """(the problems whose reference answer math-verify cannot read, how many different ones it
        tried): at most MOST_REFERENCES from all over the data, for at most MOST_SECONDS."""
        distinct = list({p.answer: p for p in problems}.values())
        random.Random(0).shuffle(distinct)
        began = time.monotonic()
        unreadable = []
        for tried, problem in enumerate(distinct[:MOST_REFERENCES], 1):
            if not self(None, problem.answer):               # see load_math_verify
                unreadable.append(problem)
            if time.monotonic() - began > MOST_SECONDS:
                break
        self.errors.clear()
        self.first_error = None
        return unreadable, tried

    def start(self):
        worker = subprocess.Popen(
            [sys.executable, "-u", __file__, self.verifier, str(self.time_limit)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        worker.replies = queue.SimpleQueue()

        def read():                          # in a thread: the pipe stays open where a process that
            with worker.stdout:              # the function has started survives the worker
                for line in worker.stdout:
                    worker.replies.put(line)
            worker.replies.put(b"")
        threading.Thread(target=read, daemon=True).start()
        # once loaded, it reports the names of the function's parameters, or an error
        reply = json.loads(self.ask(worker, None, limit=120) or '"its process ended"')
        if isinstance(reply, str):
            self.end(worker)
            raise Refusal(f"--verifier {self.verifier!r} does not load: {reply}")
        self.parameters, self.by_name = reply
        return worker

    def ask(self, worker, question, limit):
        """Send a JSON line and return the reply line; b"" if the worker died or was killed after
        `limit` seconds."""
        timer = threading.Timer(limit, kill_group, [worker])
        timer.start()
        try:
            worker.stdin.write(json.dumps(question, default=str).encode() + b"\n")
            worker.stdin.flush()
            return worker.replies.get(timeout=limit)
        except (OSError, queue.Empty):
            return b""
        finally:
            timer.cancel()

    def end(self, worker):
        kill_group(worker)
        worker.wait()
        with contextlib.suppress(OSError):                   # a question that it did not read
            worker.stdin.close()

    def close(self):
        while self.idle:
            self.end(self.idle.pop())


def kill_group(worker):
    """Kill a worker, which leads a process group, with the processes that its function started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()


def final_answer(answer):
    """What follows `####` in the last line, as in GSM8K's answers; any other text as it is."""
    last_line = answer.rstrip().rpartition("\n")[2]
    final = last_line.removeprefix("####").strip()
    return final if last_line.startswith("####") and final else answer


def in_parallel(call, *arguments):
    """[call(*a) for a in zip(*arguments)], in that order, on one thread per core available to this
    process (torchrun's processes share the cores), at most 8."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with ThreadPoolExecutor(min(max(cores, 1), 8)) as pool:
        return list(pool.map(call, *arguments))


# ------------------------------------------------------------------------ inside the worker process

BATCH_PARAMETERS = {"completions", "completion_ids"}         # a parameter that asks for a batch
NEED_ROW = {"problem", "data_source", "extra_info"}          # parameters that take it, or a part
RESPONSES = {"response", "completion", "solution_str", "prediction", "output", "generation"}
ANSWERS = {"answer", "gold", "ground_truth", "reference", "target", "expected", "label", "solution"}

USER_FILES = set()               # those that load_function has read


def load_function(name):
    """The function, or class, that FILE.py:NAME names."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"verifier_{Path(path).stem}", path)
    if spec is None:
        raise Refusal(f"{path!r} is not a file of Python")
    USER_FILES.add(spec.origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                          # dataclasses look their module up
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    # last from now on: a file in it that is called like a package must not replace the package
    sys.path[:] = [*filter(folder.__ne__, sys.path), folder]
    return getattr(module, function)


def load_math_verify():
    """math-verify as a function of (response, answer). If response is None, it returns whether the
    answer can be read as mathematics."""
    import math_verify
    import sympy
    logging.disable()
    SEVERAL = sympy.Set, sympy.Tuple, sympy.MatrixBase       # answers written in several boxes
    # math-verify's own time limits use signals; ours kills the process
    parse = functools.partial(math_verify.parse, parsing_timeout=None)

    @functools.lru_cache
    def parse_answer(answer):                                # LaTeX is recognized only between $
        if "$" in answer or "boxed" in answer:
            return parse(answer)
        return parse(f"${answer}$") or parse(answer)

    def equal(response, answer):
        box = last_box(response)
        if box == "":                                        # cut off, or empty: no answer
            return False
        if word := as_word(answer):
            formulas = re.findall(r"\$([^$]+)\$", response)
            text = box if box is not None else formulas[-1] if formulas else response
            return plain_text(text) == word
        gold = parse_answer(normalize_gold(answer))
        if box is not None and not any(isinstance(x, SEVERAL) for x in gold):
            response = rf"\boxed{{{box}}}"
        found = parse(normalize_numbers(response))
        if tiny := [x for x in gold if isinstance(x, sympy.Number) and 0 < abs(x) < 1e-3]:
            # math-verify compares six decimals
            found = [x for x in found if isinstance(x, str) or x.is_number and
                     abs(x - tiny[0]) < 1e-6 * abs(tiny[0])]
        return math_verify.verify(gold, found, timeout_seconds=None)

    def readable(answer):
        if as_word(answer):
            return False
        parsed = parse_answer(normalize_gold(answer))        # expressions, and the text of the last
        if all(isinstance(x, str) for x in parsed):
            return False
        numbers = {*re.findall(r"\d+(?:\.\d+)?", answer)}
        if len(numbers) > 1 and "boxed" not in answer and any(
                equal(rf"\boxed{{{one}}}", answer) for one in numbers):
            return False                                     # a part is paid as the whole
        words = re.sub(r"\\[a-zA-Z]+(\{[^{}]*\})?", "", answer)      # without LaTeX's commands
        if re.search("[A-Za-z]{2}", words) is None:
            return True
        return equal(answer, answer)                         # `yes` is read as the product y·e·s

    return lambda response, answer: float(readable(answer) if response is None else
                                          equal(response, answer))


def last_box(text):
    r"""The content of the last \boxed{…} of a text; "" if it is empty or has no end; None if there
    is no box."""
    _, box, rest = text.rpartition(r"\boxed")
    rest = rest.lstrip()
    if not box or rest and rest[0] != "{":                 # \boxed 5
        return None
    depth = 0
    for place in re.finditer(r"\\.|[{}]", rest, re.S):       # \{ is no brace
        depth += {"{": 1, "}": -1}.get(place[0], 0)
        if not depth:
            return rest[1:place.start()].strip()
    return ""


def plain_text(text):
    r"""A text in lower case without \text{}, dollar signs and a full stop at its end."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    return " ".join(text.replace("$", "").split()).removesuffix(".").casefold()


def as_word(answer):
    """The plain text of a reference answer that is a word of three letters or more, several words,
    or a date such as 2024-01-05; None for any other. math-verify would read a product of letters,
    or a difference."""
    text = plain_text(last_box(answer) or answer)
    words = r"[^\W\d_]{3,}( [^\W\d_]+)*|\d{4}-\d\d-\d\d"
    return text if re.fullmatch(words, text) else None


def normalize_gold(answer):
    """As normalize_numbers, of a reference answer: `1 450` is 1450."""
    whole = re.fullmatch(r"[-+]?\d{1,3}( \d{3})+(\.\d+)?", answer.strip())
    return normalize_numbers(answer.replace(" ", "") if whole else answer)


def normalize_numbers(text):
    r"""Text in which math-verify finds the numbers that a reader finds: `\$18.90` is 18.90, `1e-05`
    is 0.00001, `is - 5` and `is −5` are -5, `is +5` is 5; `答案是４２` has the number 42; `1 1/2`
    is 3/2, `6.02 \times 10^{23}` is 602000000000000000000000, and `10^-3` is 0.001."""
    text = text.replace(r"\$", "").replace("\u2212", "-").translate(FULL_WIDTH)
    text = re.sub(f"(?<={CJK})(?=[-+.\\d])|(?<=\\d)(?={CJK})", " ", text)
    text = re.sub(r"(?<![\w.])(\d+) (\d+)/(\d+)(?![\w/])",
                  lambda x: f"{int(x[1]) * int(x[3]) + int(x[2])}/{x[3]}", text)
    text = re.sub(r"(?<![\w.^])(?:(\d+(?:\.\d+)?) ?(?:\\times|\\cdot|[×·*]) ?)?"
                  r"10(?:\^|\*\*)(?:\{([-+]?\d{1,2})\}|([-+]?\d{1,2})(?!\d))",
                  lambda x: f"{x[1] or 1}e{x[2] or x[3]}", text)
    text = re.sub(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?!\w)",
                  lambda number: format(Decimal(number[0]), "f"), text)
    return re.sub(r"((?:^|[=:]|####|\bis)[ \t]*)([-+])[ \t]*(?=\d)",
                  lambda sign: sign[1] + sign[2].strip("+"), text)


def find_names(signature):
    """The names of the parameters that take the response and the reference answer; None unless each
    is the only one of its kind and no other parameter must be given."""
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    found = [name for kind in (RESPONSES, ANSWERS) for name in named if name in kind]
    required = {p.name for p in parameters
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    one_each = len(found) == 2 and found[0] in RESPONSES and found[1] in ANSWERS
    return found if one_each and required <= {*found, *NEED_ROW} else None


def check_parameters(signature):
    """Raise TypeError for a function that cannot be called by position."""
    try:
        signature.bind("", "", **dict.fromkeys(NEED_ROW.intersection(signature.parameters)))
    except TypeError as error:
        raise TypeError(f"{error}; a reward function takes (response, answer), and the row as "
                        "problem, or the completions of a batch") from None


def awaited(function):
    """A function that may be async as one that is not. Its calls share an event loop."""
    loops = []

    def call(*inputs, **named):
        result = function(*inputs, **named)
        if inspect.isawaitable(result):
            import asyncio                                   # which others do not wait for
            if not loops:
                loops.append(asyncio.new_event_loop())
            result = loops[0].run_until_complete(result)
        return result
    return call


def bind_row(function, names, by_name):
    """A user's function, whose parameters have these names, as a function of (response, answer,
    row). by_name: those of response and answer, or None."""
    verl = {"solution_str", "ground_truth"} <= set(names)    # as its compute_score

    def call(response, answer, row):
        row = row or {}
        extras = {name: row if name == "problem" else row.get(name)
                  for name in names if name in NEED_ROW}
        if not by_name:
            return function(response, answer, **extras)
        reward = function(**dict(zip(by_name, (response, answer))), **extras)
        return reward["score"] if verl and isinstance(reward, dict) else reward
    return call


def check_reward(reward):
    """The result of a reward function as a float or as {name: float}; an error text if it is
    invalid."""
    components = reward if isinstance(reward, dict) else {"": reward}
    for name, value in components.items():
        if not is_number(value):
            return f"returned {value!r:.80}{f' for {name}' if name else ''}, " + NO_NUMBER
    if components is reward:
        numbers = {str(name): float(value) for name, value in components.items()}
        return numbers or "returned an empty dict"
    return float(reward)


def is_number(value):
    """Whether a value is a number below LARGEST_REWARD in size, and not a text that reads like
    one."""
    try:
        return abs(float(value)) < LARGEST_REWARD and not isinstance(value, (str, bytes))
    except (TypeError, ValueError, OverflowError):
        return False


def describe(error):
    """An error that a user's code raised, in one line, with the line of the user's file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename in USER_FILES]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200] + where


def guard_rail(event, arguments):
    """Audit hook: raises PermissionError if a library's function writes files, starts programs or
    opens sockets. It is not a sandbox.

    sympy's parser uses eval. math-verify passes only digits and operators to it, but other
    libraries pass the whole response (recipes/reasoning.py): `__import__('os').system('…')` would
    run.
    """
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    writes = event == "open" and arguments[2] & writing
    acts = event.startswith(("os.", "shutil.", "subprocess.", "socket.", "ctypes."))
    if writes or acts and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(f"a reward function tried {event}")


def kill_after_run(time_limit):
    """Wait until the run has closed the pipe of questions, by its end or its death, and kill this
    process group a little later, with all that the function has started."""
    os.dup2(2, 1)                                            # replies are the worker's alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run = select.poll()
    run.register(0, 0)                                       # reports only that the pipe is closed
    run.poll()
    time.sleep(math.ceil(time_limit) + 1)
    os.killpg(0, signal.SIGKILL)


def run_worker(verifier, time_limit):
    """The worker: reads JSON lines [response, answer, row], writes rewards or error texts."""
    if hasattr(os, "fork") and os.fork() == 0:
        kill_after_run(time_limit)
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a function that reads or prints, or a program it starts, must not touch questions and replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)             # Ctrl-C is for the run

    def reply(value):
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        function = load_math_verify() if verifier == "math" else load_function(verifier)
        signature = inspect.signature(function)
        names = list(signature.parameters)
        by_name = find_names(signature)
        if not (by_name or BATCH_PARAMETERS.intersection(names)):
            check_parameters(signature)
    except BaseException as error:                           # a user's file may call sys.exit()
        return reply(describe(error))
    if verifier == "math":
        sys.addaudithook(guard_rail)
        if sys.platform == "linux":
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    questions.readline()                                     # the first message, without a question
    reply([names, by_name])
    function = bind_row(awaited(function), names, by_name)
    for line in questions:
        response, answer, row = json.loads(line)
        try:
            reward = check_reward(function(response, answer, row))
        except BaseException as error:
            reward = f"raised {describe(error)}"
        reply(reward)


if __name__ == "__main__":
    run_worker(sys.argv[1], float(sys.argv[2]))
