"""Reward functions of a whole batch, called as TRL calls them.

    def reward(prompts, completions, completion_ids, **columns):  # lists of B elements, by name
        return [...]                              # B numbers; None: no reward for this one

A function with a parameter `completions` or `completion_ids` is such a function.

One call gets all responses of this process's share of the rollout batch, always whole groups. It
can therefore compare the responses of a group or send many responses to a judge model at a time. It
runs in the training process, without a time limit: the client of a judge model has one. Functions
that score one response at a time, in a separate process, are in reward_functions.py.
"""

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Set

from plumbing.data.datafiles import as_messages
from plumbing.data.reward_functions import (BATCH_PARAMETERS, LARGEST_REWARD, RewardFunction,
                                            describe, final_answer, is_number, load_function)
from plumbing.parallel.event_loop import run_async
from plumbing.refusal import Refusal
from plumbing.users_code import UsersCode

NOT_COLUMNS = ("prompts", "completions", "completion_ids")   # other names are columns of the data


def make_reward_function(verifier, time_limit, columns):
    """The RewardFunction of a --verifier, or the BatchRewardFunction if the user's function has one
    of BATCH_PARAMETERS. columns: the names of the data's columns."""
    function = RewardFunction(verifier, time_limit)
    if not function.from_file or not BATCH_PARAMETERS.intersection(function.parameters):
        return function
    function.close()
    return BatchRewardFunction(verifier, columns)


class BatchRewardFunction:
    """A reward function "file.py:function" of a whole batch, with one of BATCH_PARAMETERS.

    The function gets, by keyword, lists of B elements: prompts and completions (lists of messages
    where a chat template is used, a completion with one message; otherwise texts), completion_ids
    (the sampled token ids, the end-of-sequence token included) and each column of the data by its
    name, of the reference answers what final_answer leaves. Without **kwargs it gets only those
    that it names. It may be async. It returns one component of the reward: B numbers, with None for
    a response that does not have it.

    All of it is the function's to change: the next one gets copies of its own.

    rewards() raises Refusal, which ends the run, if the function raises or returns anything
    else.
    """

    batched = True
    from_file = True
    first_error = None
    warned = False

    def __init__(self, verifier, columns):
        self.verifier = verifier
        self.name = verifier.rpartition(":")[2]
        self.names = [self.name]                             # of the components of the reward
        self.errors = Counter()
        columns = [name for name in columns if name not in (*NOT_COLUMNS, "prompt", "completion")]
        every = [*NOT_COLUMNS, *columns]
        try:
            with UsersCode(f"--verifier {verifier}", loads=True):
                self.function = load_function(verifier)
            signature = inspect.signature(self.function)
        except Refusal:
            raise
        except (Exception, SystemExit) as error:             # whatever the user's file raises
            raise Refusal(f"--verifier {verifier!r} does not load: {describe(error)}")
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self.inputs = [name for name in every if takes_all or name in signature.parameters]
        try:
            signature.bind(**dict.fromkeys(self.inputs))
        except TypeError as error:
            raise Refusal(f"--verifier {verifier!r}: {error}; a reward function gets "
                          f"{', '.join(every)}")

    def rewards(self, texts, problems, ids, games, chat):
        """The rewards of B texts as a list of floats, with NaN for None. problems: B problems.
        ids: the token ids of the texts, B lists. games: what was played with an environment, or [];
        completions are then its messages. chat: whether a chat template is used."""
        completions = [*texts]
        if games:
            completions = [[*map(dict, game.messages)] for game in games]
        elif chat:
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        known = {"prompts": [as_messages(p) if chat else p.prompt for p in problems],
                 "completions": completions, "completion_ids": [*map(list, ids or [])]}
        rows = [copy_columns(p) for p in problems] if {*self.inputs}.difference(known) else []
        inputs = {name: known[name] if name in known else [row.get(name) for row in rows]
                  for name in self.inputs}
        try:
            with UsersCode(f"--verifier {self.verifier}"):
                rewards = self.function(**inputs)
                if inspect.isawaitable(rewards):
                    rewards, = run_async(rewards)
        except Refusal:
            raise
        except (Exception, SystemExit) as error:             # whatever the user's function raises
            raise Refusal(f"--verifier {self.verifier} raised {describe(error)}") from error
        return self.check_rewards(rewards, len(texts))

    def check_rewards(self, rewards, n):
        try:                                                 # which of a dict is of which text?
            values = [] if isinstance(rewards, (Mapping, Set)) else list(rewards)
        except TypeError:
            values = []
        if len(values) != n:
            raise Refusal(f"--verifier {self.verifier} returned {rewards!r:.80}: a list of {n} "
                          "numbers is needed, one per completion in their order")
        values = [math.nan if value is None else value for value in values]
        for value in values:
            if value is not math.nan and not is_number(value):
                raise Refusal(f"--verifier {self.verifier} returned {value!r:.80} for a "
                              "completion: a finite number or None is needed, below "
                              f"{LARGEST_REWARD:g}")
        return [float(value) for value in values]

    def close(self):
        pass


def copy_columns(problem):
    """A copy of a problem's row, with what final_answer leaves of the reference answer."""
    row = problem.copy_row()
    return {name: final_answer(value) if isinstance(value, str) and value == problem.answer
            else value for name, value in row.items()}
