"""The process in which a reward function scores untrusted responses, one at a time.

    python reward_worker.py math|FILE.py:FUNCTION

It reads a line of JSON for each response, [response, answer, row], and writes one: {component:
number}, or null if the function has failed. row: null for a function that does not read it.
reward_functions.py starts it, and kills it with all
that the function has started when a response takes too long.
"""

import importlib.util
import inspect
import json
import logging
import math
import os
import re
import sys
import traceback
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])   # not this folder, but the project's

from plumbing.refusal import Refusal


WORD = re.compile("[A-Za-z]{3,}|N/A")    # math-verify reads a product of its letters
MEMORY = 4 * 2 ** 30             # that math-verify may take, in bytes


def load_function(name):
    """The function, or class, that FILE.py:NAME names."""
    path, _, function = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise Refusal(f"{name} is not known: FILE.py:NAME of a file that exists is needed")
    file = Path(path).resolve()
    # named by its path: files of one name in two folders are two modules; a dot would be a package
    spec = importlib.util.spec_from_file_location(str(file).replace(".", "_"), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                          # dataclasses look their module up
    sys.path.append(str(file.parent))                        # it may import the files beside it
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise Refusal(f"{name}: {path} has no function or class {function!r}")
    return getattr(module, function)


def load_math():
    """math-verify as a function of (response, answer)."""
    import math_verify
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    logging.disable()
    if sys.platform == "linux":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # math-verify's own time limits use signals; ours kills the process
    parse = partial(math_verify.parse, parsing_timeout=None)

    def read(text, **options):
        """Of a text with a box the inside of the last one, up to its own closing brace."""
        box = text.rfind(r"\boxed")
        text = text if box < 0 else extract_boxed_content(text[box:])
        return parse(text if "$" in text else f"${text}$", **options)    # LaTeX is between $
    read_answer = lru_cache(partial(read, fallback_mode="no_fallback"))

    def equal(response, answer):
        """{}, no reward, for a word and for an answer that math-verify cannot read."""
        response, answer = (
            text.replace(r"\$", "").replace(r"\!", "").replace("\N{MINUS SIGN}", "-")
            for text in (response, answer))                  # dollars, thin spaces, −
        found = read(response) if r"\boxed" in response else parse(response)
        known = not WORD.fullmatch(answer) and read_answer(answer)
        return math_verify.verify(known, found, timeout_seconds=None) if known else {}
    return equal


def pass_on(questions, lines):
    """A thread of the worker: the questions go into a queue. After the last one the run has ended,
    or was killed: this process ends, too, whatever its function does."""
    for line in questions:
        lines.put(line)
    os._exit(0)


def run(verifier):
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a function that reads or prints must not touch questions and replies
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    function = load_math() if verifier == "math" else load_function(verifier)
    with_row = "problem" in inspect.signature(function).parameters
    name = verifier.rpartition(":")[2]
    print("ready", file=replies, flush=True)
    lines = SimpleQueue()
    Thread(target=pass_on, args=(questions, lines), daemon=True).start()
    failed = False
    while True:
        response, answer, row = json.loads(lines.get())
        try:
            reward = function(response, answer, **({"problem": row} if with_row else {}))
            parts = reward if isinstance(reward, dict) else {name: reward}
            reply = {str(part): float(number) for part, number in parts.items()}
            if not all(map(math.isfinite, reply.values())):
                raise ValueError(f"{reward!r} is not finite")
        except BaseException:                                # a user's function may call sys.exit()
            reply = None
            if not failed:
                traceback.print_exc()
            failed = True
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    run(sys.argv[1])
