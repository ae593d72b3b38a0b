"""Reward functions of a whole batch, called as TRL calls them.

    def reward(prompts, completions, completion_ids, **columns):  # lists of B elements, by name
        return [...]                              # B numbers; None: no reward for this one

A function with a parameter `completions` or `completion_ids` is such a function.

One call gets all responses of this process's share of the rollout batch, always whole groups. It
can therefore compare the responses of a group or send many responses to a judge model at a time. It
runs in the training process, without a time limit: the client of a judge model has one. Functions
that judge one response at a time, in a separate process, are in verifiers.py.
"""

import ast
import asyncio
import inspect
import math
import sys
from collections import Counter
from pathlib import Path

from plumbing.data.datafiles import messages_of
from plumbing.data.verifiers import load_verifier

OURS = ("prompts", "completions", "completion_ids")          # other names are columns of the data
WHOLE = {"completions", "completion_ids"}                    # a parameter that asks for a batch


def is_whole_batch(kind):
    """Whether a verifier "file.py:function" has one of the parameters WHOLE and so takes a whole
    batch. For a function defined in the file this is read from the source text; the file is
    executed only if the name is something else, for example an imported function."""
    path, _, name = kind.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())            # bytes: it may begin with a BOM
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                own = node.args
                names = [a.arg for a in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
                return not WHOLE.isdisjoint(names)
        return not WHOLE.isdisjoint(inspect.signature(load_here(kind)).parameters)
    except BaseException:                                    # its worker process will say what
        return False


def load_here(kind):
    """The function behind "file.py:function", loaded in this process. The file's folder goes to the
    end of sys.path: a file in it that is called like a package must not replace the package."""
    before = list(sys.path)
    try:
        return load_verifier(kind)
    finally:
        folder = str(Path(kind.rpartition(":")[0]).resolve().parent)
        sys.path[:] = before if folder in before else [*before, folder]


class RewardFunction:
    """A reward function "file.py:function" for a whole batch, with one of the parameters WHOLE.

    The function gets, by keyword, lists of B elements: prompts (as in the data), completions (of a
    prompt that is a text, a text; of a conversation, a list with one message), completion_ids (the
    sampled token ids, the end-of-sequence token included) and each column of the data by its name.
    Without **kwargs it gets only those that it names. It may be async. It returns one part of the
    reward: B numbers, with None (or NaN) for a response that does not have this part.

    scores() raises ValueError, which ends the run, if the function raises or returns anything else.
    """

    whole = True

    def __init__(self, kind, columns=(), played=False):
        """played: with an environment, where every completion is a list of messages."""
        self.kind = kind
        self.played = played
        self.name = kind.rpartition(":")[2]
        self.names = [self.name]
        self.errors = Counter()
        self.complaint = None
        self.complained = False
        self.own = True
        self.columns = [name for name in columns if name not in (*OURS, "prompt", "completion")]
        try:
            self.function = load_here(kind)
            parameters = inspect.signature(self.function).parameters.values()
        except BaseException as error:                       # a user's file may call sys.exit()
            raise ValueError(f"verifier {kind!r} does not load: {one_line(error)}")
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters}
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
        missing = sorted(needed - {*OURS, *self.columns})
        if missing:
            raise ValueError(f"verifier {kind!r} asks for {', '.join(missing)}; a reward function "
                             f"gets {', '.join([*OURS, *self.columns])}")

    @property
    def note(self):
        """A line for the start of the run: what is different from a verifier of one response."""
        return (f"verifier {self.kind} takes whole batches, as TRL's reward functions do (it has a "
                f"parameter completions or completion_ids): it runs in this process, with no time "
                "limit, and an error in it ends the run")

    def scores(self, texts, problems, rows, ids=None, games=None):
        """The rewards of B texts as a list of floats, with NaN for None. rows: the data rows of the
        problems, as dicts. ids: the token ids of the texts, B lists. games: what was played with
        an environment; completions are then its messages."""
        given = {"prompts": [p.prompt if p.earlier is None else messages_of(p) for p in problems],
                 "completions": [text if p.earlier is None and not self.played else
                                 [{"role": "assistant", "content": text}]
                                 for text, p in zip(texts, problems)]}
        if games:
            given["completions"] = [game.messages for game in games]
        if ids is not None:
            given["completion_ids"] = ids
        given |= {name: [row.get(name) for row in rows] for name in self.columns}
        given = {name: x for name, x in given.items() if self.takes_all or name in self.takes}
        try:
            rewards = self.function(**given)
            if inspect.isawaitable(rewards):
                rewards = asyncio.run(wait_for(rewards))
        except Exception as error:                           # whatever the user's function raises
            raise ValueError(f"verifier {self.kind} {one_line(error)}") from error
        return self.checked(rewards, len(texts))

    def checked(self, rewards, n):
        try:
            rewards = list(rewards)
        except TypeError:
            raise ValueError(f"verifier {self.kind} returned {rewards!r:.80}, not a list")
        if len(rewards) != n:
            raise ValueError(f"verifier {self.kind} returned {len(rewards)} rewards for {n} "
                             "completions")
        return [self.number(value) for value in rewards]

    def number(self, value):
        if value is None:
            return math.nan
        try:
            number = math.inf if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.inf
        if math.isinf(number):
            raise ValueError(f"verifier {self.kind} returned {value!r:.80} for a completion: a "
                             "finite number or None is needed")
        return number

    def try_on(self, problems, rows, tokenizer):
        """Call the function once with the reference answers as completions, before training.
        Returns (note, error) as Verifier.try_on does."""
        answers = [p.answer for p in problems]
        ids = None
        if self.takes_all or "completion_ids" in self.takes:
            ids = [answer_ids(tokenizer, problem) for problem in problems]
        try:
            self.scores(answers, problems, rows, ids)
        except ValueError as error:
            return "", str(error).removeprefix("verifier ")
        return "", ""

    def complain(self):
        """Print once, on stderr, that some responses got no reward."""
        if self.complaint and not self.complained:
            self.complained = True
            sys.stderr.write(f"train.py: warning: {self.complaint}\n")

    def close(self):
        pass


def answer_ids(tokenizer, problem):
    """The token ids of a reference answer with the end-of-sequence token. Raises ValueError if the
    tokenizer does not know a character of it."""
    try:
        ids = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    except Exception as error:                               # tokenizers raises bare Exceptions
        raise ValueError(f"{problem.where}: the answer cannot be tokenized: {error}")
    return [*ids, tokenizer.eos_token_id]


async def wait_for(awaitable):
    return await awaitable


def one_line(error):
    """The error that a user's function raised, in one line."""
    return f"raised {type(error).__name__}: {error}".splitlines()[0][:200]
