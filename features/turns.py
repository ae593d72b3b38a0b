"""Turns: a response is played with an environment, a class that the user writes.

    class Guess:                              # one object per response
        def __init__(self, row): ...          # a copy of the row
        def reset(self, **row): ...           # if there is one: what is added to the prompt
        def step(self, text):                 # a turn of the policy, without its end
            return observation, reward, done  # what the policy reads next, the turn's reward
        def close(self): ...                  # if there is one: at the end, also after an error

    prompt, opening ─► turn ─► step(turn) ─► observation, reward, done ─► turn ─► …
                       └ loss tokens         └ read by the policy, no loss tokens

The tokens of a response are its turns and, between them, the observations. What was sampled is
kept and never encoded again. A turn's reward stands at its last token in Rollout.turn_rewards; the
reward of the response is their sum. The turns are sampled by whatever sampler the run has, called
again with the prompt and all tokens so far for the responses that go on.
"""

import asyncio
import inspect
import math
import random
import sys
import time
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, wraps
from importlib import import_module
from numbers import Real

import torch
from torch.nn.utils.rnn import pad_sequence

from features.feature import Feature, flag
from plumbing.data.reward_functions import LARGEST_REWARD, describe, is_number, load_function
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.task import encode_prompt
from plumbing.engines.wrapper import Wrapper
from plumbing.parallel.event_loop import run_async
from plumbing.refusal import Refusal
from plumbing.users_code import UsersCode

SLOW = 10            # seconds of a call from which on the first one is named
REWARDS = ("turn_reward_1", "turn_reward_2", "turn_reward_3", "turn_reward_4")      # metrics


# ---------------------------------------------------------------------------- a response is played

@dataclass
class Game:
    """What was played in one response; it travels with the rollout."""

    messages: list               # {"role": …, "content": …}, those after the prompt
    rewards: list                # one per turn that `step` has read
    length: int = 0              # tokens, observations included
    out_of_turns: bool = False   # ended by --max_turns
    opening: str = ""            # what reset has added to the prompt

    @property
    def turns(self):
        """The texts of the policy's turns, which alternate with observations."""
        return [message["content"] for message in self.messages[::2]]

    def __str__(self):
        """A line per turn and observation."""
        rewards = iter(self.rewards)
        opening = [{"role": "reset", "content": self.opening}] if self.opening else []
        return "\n".join(
            f"  reads   {m['content']!r:.100}" if m["role"] != "assistant" else
            f"  writes  {m['content']!r:.80}   reward {next(rewards, 0):g}"
            for m in opening + self.messages)


@dataclass
class Token:
    """A token of a response."""

    id: int
    own: bool                # written by the policy, not read
    logp: float = 0.0
    reward: float = 0.0      # of the turn that ends with it


@dataclass
class Response:
    """A response while it is played."""

    prompt: list             # token ids
    uniforms: torch.Tensor   # [T] random numbers, one per token
    player: object           # of the user's class
    game: Game
    tokens: list             # of Token
    done: bool = False
    truncated: bool = False

    @property
    def room(self):
        """The number of tokens that it may still have."""
        return len(self.uniforms) - len(self.tokens)


class TurnSampler(Wrapper):
    """Samples responses of several turns, each turn by the sampler inside."""

    def __init__(self, sampler, settings):
        super().__init__(sampler, settings)
        rollout = import_module("rollout")           # transformers: --help does not wait for it
        chat = import_module("plumbing.model.chat")
        self.environment = environment = settings.loaded_environment
        self.max_turns = settings.max_turns
        self.max_turn_length = settings.max_turn_length or math.inf
        self.pad = rollout.pad_token(self.tokenizer)
        self.ends = rollout.end_tokens(self.policy, self.tokenizer)
        self.between = chat.Turns(end=None, before="", after="")
        self.split = lambda text: [text]             # in pieces that are encoded one by one
        if environment.template and settings.chat_template and self.tokenizer.chat_template:
            variables = settings.chat_template_kwargs
            with environment.errors_in_one_line("its conversation", "template = False in the class "
                                                "inserts observations as they stand"):
                self.between = chat.read_turns(self.tokenizer, environment.role, **variables)
                self.split = partial(chat.split_control_tokens,
                                     chat.control_tokens(self.tokenizer))
                words = chat.changed_words(self.tokenizer, self.between, environment.role,
                                           **variables)
                if words is not None:
                    environment.warn("words", f"the chat template writes {chat.PROBE!r} as "
                                     f"{words!r}; observations are inserted unchanged")
                if chat.drops_thinking(self.tokenizer, **variables):
                    environment.warn("thinking", "the chat template drops the thinking of earlier "
                                     "turns; here the policy reads all that it has written")
        self.limited = any(p.name == "limits" or p.kind is p.VAR_KEYWORD
                           for p in inspect.signature(sampler.sample).parameters.values())

    @UsersCode("--environment")
    def sample(self, prompts, group_size, uniforms, temperature=None, *, problems, task=None):
        """See rollout.Sampler.sample; prompts: lists of token ids. problems: one per prompt, of the
        task; each response gets a copy of its row. The turn that begins at token t of a response is
        drawn with its uniforms [B, T] from t on; the seed of an environment is the same for all
        responses to a prompt."""
        G = group_size
        each = [problem for problem in problems for _ in range(G)]                  # B
        seeds = [make_seed(group[0]) for group in uniforms.cpu().split(G) for _ in range(G)]
        with self.environment.players() as begin:
            players = list(map(begin, each, seeds))                                 # B
            openings = self.environment.reset_all(players, each, seeds)             # B
            games = [Game([], [], opening=opening) for opening in openings]         # B
            read = self.open_prompts(prompts, each, games, task)                    # B
            own_prompts = any(ids != read[i - i % G] for i, ids in enumerate(read))
            responses = [Response(*inputs, [])
                         for inputs in zip(read, uniforms.cpu(), players, games)]   # B
            first = (read, 1) if own_prompts else (read[::G], G)
            turns = [self.play_turn(*first, responses, temperature)]
            while live := [r for r in responses if not (r.done or r.truncated)]:
                so_far = [r.prompt + [token.id for token in r.tokens] for r in live]
                turns.append(self.play_turn(so_far, 1, live, temperature))
        return replace(self.join(turns, responses), group_size=G, own_prompts=own_prompts)

    def open_prompts(self, prompts, problems, games, task):
        """The token ids of the prompts that B responses begin with: those of their groups, or where
        there is an opening, those of the prompt that it is added to."""
        @cache
        def encode(problem):
            try:
                return encode_prompt(task, self.tokenizer, problem)
            except Refusal as error:
                self.environment.fail(f"with what reset returned: {error}")
        if any(len(self.split(game.opening)) > 1 for game in games):
            self.environment.warn("control", "what reset returns contains control tokens, which "
                                  "the policy reads as such")
        G = len(problems) // len(prompts)
        return [encode(problem.opened(game)) if game.opening else prompts[i // G]
                for i, (problem, game) in enumerate(zip(problems, games))]

    def play_turn(self, prompts, group_size, responses, temperature):
        """Sample a turn of each response and let its environment answer. Returns the rollout of
        the turns."""
        uniforms = torch.stack([r.uniforms.roll(-len(r.tokens)) for r in responses])    # [b, T]
        limits = torch.tensor([min(r.room, self.max_turn_length) for r in responses])   # [b]
        options = {"limits": limits} if self.limited else {}
        turns = self.sampler.sample(prompts, group_size, uniforms, temperature, **options)
        if turns.forced_routes or turns.kept_tokens:
            self.environment.fail("the sampler attaches routes or kept tokens to its responses, "
                                  "which are not joined over several turns")
        for response, *turn in zip(responses, turns.token_lists(), turns.sampler_logp.tolist(),
                                   turns.texts, turns.truncated.tolist()):
            self.write(response, *turn)
        live = [r for r in responses if not r.truncated]
        for response, reply in zip(live, self.environment.step_all(live)):
            self.read(response, *reply)
        return turns

    def write(self, response, ids, logp, text, truncated):
        """Add a turn of the policy to the response. truncated: it has no end. A turn that
        --max_turn_length cuts is followed by what its environment answers."""
        limit = min(response.room, self.max_turn_length)
        if len(ids) > limit:                         # from a sampler that takes no limits
            ids = ids[:limit]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            truncated = True
        if not self.environment.skip_special_tokens:
            text = self.tokenizer.decode(ids[:-1] if ids[-1] in self.ends else ids)
            for string in self.settings.stop:
                text = text.partition(string)[0]
        response.tokens += [Token(token, True, x) for token, x in zip(ids, logp)]
        response.game.messages.append({"role": "assistant", "content": text})
        cut = len(ids) == self.max_turn_length and response.room > 0
        response.truncated = truncated and not cut

    def read(self, response, observation, reward, done):
        """Add to the response what its environment answers to the turn."""
        game = response.game
        last = response.tokens[-1]
        last.reward = reward
        game.rewards.append(reward)
        game.out_of_turns = not done and len(game.rewards) == self.max_turns
        response.done = done or game.out_of_turns
        if not response.done:
            ids = self.encode(observation, last.id)
            response.tokens += [Token(token, False) for token in ids[:response.room]]
            response.truncated = not response.room
            game.messages.append({"role": self.environment.role, "content": observation})

    def encode(self, observation, last):
        """The token ids of an observation with the text of the chat template around it, after a
        turn whose last token is `last`."""
        end, before, after = self.between
        text = before + observation + after
        first, *rest = self.split(observation)       # a control token in it must not end a turn
        pieces = [before + first, *rest]
        pieces[-1] += after
        with self.environment.errors_in_one_line("tokenizing", f"for the observation {text!r:.80}"):
            ids = sum(self.tokenizer(pieces, add_special_tokens=False)["input_ids"], [])
        if end is not None and last not in self.ends:
            ids = [end, *ids]
        if before and ids[:1] == [last]:             # the policy wrote the template's first token
            ids = ids[1:]
        return ids or self.environment.fail(f"the observation {text!r:.80} has no token")

    def join(self, turns, responses):
        """The Rollout of what was played. turns: the first turns, the second ones ..."""
        first = turns[0]
        def pad(name, fill):
            rows = [torch.tensor([getattr(token, name) for token in r.tokens]) for r in responses]
            return pad_sequence(rows, batch_first=True, padding_value=fill).to(first.mask.device)
        for response in responses:
            response.game.length = len(response.tokens)
        games = [r.game for r in responses]
        return replace(first, response_ids=pad("id", self.pad), mask=pad("own", False),
                       sampler_logp=pad("logp", 0.0), turn_rewards=pad("reward", 0.0),
                       truncated=first.truncated.new_tensor([r.truncated for r in responses]),
                       replayed=any(x.replayed for x in turns), games=games,
                       texts=["\n".join(game.turns) for game in games])


def make_seed(uniforms):
    """The seed of an environment: from the first two random numbers of a response, whatever the
    length limit is."""
    return zlib.crc32(uniforms[:2].numpy().tobytes())


# -------------------------------------------------------------------------------- the user's class

def run_cancels():
    """Whether the run, not the user's code, has cancelled the task that this is called in."""
    try:
        return asyncio.current_task().cancelling() > 0
    except RuntimeError:                                     # a plain step, outside any loop
        return False
    except AttributeError:                                   # Python 3.10 does not tell
        return True


class Environment:
    """The user's class in FILE.py:CLASS. Its attributes `role` ("user" or "tool") and `template`
    say how an observation is put before the policy: as a message of the chat template, or with
    template = False as it stands. With skip_special_tokens = False it reads the special tokens in
    the policy's turns. Whatever is wrong with the class or with what it returns raises Refusal with
    one line."""

    @UsersCode("--environment", loads=True)
    def __init__(self, name):
        self.name = name
        self.fail_prefix = f"--environment {name}: "
        self.warned = set()      # subjects of warnings
        with self.errors_in_one_line("loading it", "FILE.py:CLASS is needed, a class with "
                                     "__init__(row) and step(text)"):
            self.kind = load_function(name)
            self.seeded = "seed" in inspect.signature(self.kind).parameters
            self.kind.step           # it must have one
        self.role = getattr(self.kind, "role", "user")
        self.template = getattr(self.kind, "template", True)
        self.skip_special_tokens = getattr(self.kind, "skip_special_tokens", True)
        if self.role not in ("user", "tool"):
            self.fail(f"role is {self.role!r}: user or tool is needed")

    def fail(self, what):
        raise Refusal(self.fail_prefix + what)

    @contextmanager
    def errors_in_one_line(self, what, note):
        """Whatever the user's code raises in the block becomes one line, all but Ctrl-C: a
        cancelled task and exceptions of the user's own derive from BaseException alone."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, Refusal) and str(error).startswith(self.fail_prefix):
                raise                                        # it is one line already
            if isinstance(error, asyncio.CancelledError) and run_cancels():
                raise
            self.fail(f"{what} raised {describe(error)} ({note})")

    def warn(self, subject, text):
        """Print a warning on stderr, the first one about each subject."""
        if subject not in self.warned:
            self.warned.add(subject)
            sys.stderr.write(f"train.py: warning: --environment {self.name}: {text}\n")

    @UsersCode("--environment")
    def teach(self, row, rng):
        """A game of the class's teacher: its turns and, between them, what the policy reads."""
        with self.errors_in_one_line("teacher", f"for the row {row!r:.80}"):
            game = self.kind.teacher(row, rng)
            if (isinstance(game, (list, tuple)) and game
                    and (len(game) % 2 or hasattr(self.kind, "reset"))
                    and all(isinstance(text, str) and text for text in game)):
                return game
        self.fail(f"teacher returned {game!r:.120} for the row {row!r:.80}: a list of texts is "
                  "needed, turns and between them what is read; the last is a turn, and the first "
                  "unless it is what reset returns")

    def begin(self, problem, seed):
        """An object of the class for one response."""
        row = problem.copy_row()
        with self.errors_in_one_line("__init__", f"for the row {row!r:.80}"):
            return self.kind(row, seed=seed) if self.seeded else self.kind(row)

    @contextmanager
    def players(self):
        """`begin`, whose objects are closed at the end of the block if the class has close(); also
        after an error, which an error of close() does not replace."""
        begun = []

        def begin(*inputs):
            begun.append(self.begin(*inputs))
            return begun[-1]
        try:
            yield begin
        except BaseException:
            with suppress(Refusal):
                self.close(begun)
            raise
        self.close(begun)

    def close(self, players):
        """Call close() of every object of the class, if it has one; it may be async. Raises the
        first Refusal at the end."""
        failed = []

        @contextmanager
        def in_close():
            try:
                with self.errors_in_one_line("close", "of an object of the class"):
                    yield
            except Refusal as error:
                failed.append(error)

        async def finish(call):
            with in_close():
                await call
        calls = []
        for player in players if hasattr(self.kind, "close") else []:
            with in_close():
                calls.append(player.close())
        if waits := [call for call in calls if inspect.isawaitable(call)]:
            run_async(*map(finish, waits))
        if failed:
            raise failed[0]

    def call_all(self, name, calls, notes):
        """What calls of the method `name` return: one after the other, or side by side in the event
        loop of the run if it is async. notes: what each is for, for the line of an error."""
        async def finish(reply, note):
            with self.in_call(name, note):
                return await reply
        replies = []
        for call, note in zip(calls, notes):
            with self.in_call(name, note):
                replies.append(call())
        if any(map(inspect.isawaitable, replies)):
            replies = run_async(*map(finish, replies, notes))
        return replies

    @contextmanager
    def in_call(self, name, note):
        """The block is the user's method of this name."""
        began = time.perf_counter()
        with self.errors_in_one_line(name, note):
            yield
        if time.perf_counter() - began > SLOW:
            self.warn("time", f"the first slow {name} took over {SLOW} s, {note}")

    def reset_all(self, players, problems, seeds):
        """What reset adds to the prompts of the objects of B responses; "" if it returns None or
        the class has none. It gets the columns of the row by name, and a parameter `seed` that is
        no column the seed of the response."""
        if not hasattr(self.kind, "reset"):
            return [""] * len(players)

        def reset(player, problem, seed):
            row = {"seed": seed, **problem.copy_row()}
            parameters = inspect.signature(player.reset).parameters
            every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            names = {*parameters, *(problem.row if every else ())}
            return player.reset(**{name: row[name] for name in row if name in names})
        calls = [partial(reset, *inputs) for inputs in zip(players, problems, seeds)]
        notes = [f"for the row {problem.row!r:.80}" for problem in problems]
        return list(map(self.check_opening, self.call_all("reset", calls, notes), notes))

    def check_opening(self, reply, note):
        match reply:
            case None | (None, _):
                return ""
            case str(text) | (str(text), _):
                return text
        self.fail(f"reset returned {reply!r:.120} {note}: a text that is added to the prompt, None "
                  "or (text, info) is needed")

    def step_all(self, responses):
        """[(observation, reward, done)] of the last turns of responses."""
        texts = [response.game.turns[-1] for response in responses]
        calls = [partial(r.player.step, text) for r, text in zip(responses, texts)]
        notes = [f"for the turn {text[:60]!r}" for text in texts]
        return list(map(self.check_reply, texts, self.call_all("step", calls, notes)))

    def check_reply(self, text, reply):
        with self.errors_in_one_line("reading what step returned", f"for {text[:60]!r}"):
            match reply:                                     # an array as done is no truth value
                case (observation, Real() as reward, done) if (
                        is_number(reward) and done in (True, False)
                        and (done or isinstance(observation, str) and observation)):
                    return observation, float(reward), bool(done)
        self.fail(f"step returned {reply!r:.120} for the turn {text[:60]!r}: (observation, reward, "
                  f"done) is needed, with a finite number below {LARGEST_REWARD:g} as reward, done "
                  "True or False, and unless done a text that is not empty as observation")


# ------------------------------------------------------------------------ what a run does with it

@dataclass(frozen=True)
class Flags:
    environment: str | None = flag(
        None, "FILE.py:CLASS that responses are played with, turn by turn: __init__(row) and "
              "step(text) -> (observation, reward, done) (docs/data.md#an-environment)",
        unset="a response is one turn", evaluation="kept", section="turns",
        also="environment_factory env tools",
        without={"shard": "each process plays by itself, with weights of its own",
                 "stage2_dataset_name": "an environment has one source of rows",
                 "routing_replay=rollout": "the routes of several turns are not joined"})
    max_turns: int | None = flag(None, "largest number of turns in a response",
                                 unset="until the environment is done", at_least=1,
                                 needs="environment", evaluation="kept")
    max_turn_length: int | None = flag(
        None, "largest number of tokens in a turn of the policy; its environment answers a turn "
              "that is cut, too", unset="what is left of --max_completion_length", at_least=1,
        needs="environment", evaluation="kept")

    @cached_property
    def loaded_environment(self):
        """The Environment, loaded once: rollouts and evaluations play with the same class."""
        return Environment(self.environment)


class Turns(Feature):
    flags = Flags
    provides = ("turn_rewards",)

    @classmethod
    def on(cls, settings):
        return settings.environment is not None

    @classmethod
    def task(cls, settings, task, load):
        environment = settings.loaded_environment    # refused before a run begins
        with environment.errors_in_one_line("its data", "without --dataset_name the class needs "
                                            "rows(), and without --model_name_or_path characters "
                                            "and teacher(row, rng)"):
            if not settings.dataset_name:
                with UsersCode("--environment"):
                    rows = [*environment.kind.rows()]
                task = load(environment.name, rows=rows)
            if not settings.model_name_or_path:
                task.characters = environment.kind.characters
                if twice := [c for c, n in Counter(task.characters).items() if n > 1]:
                    environment.fail(f"characters has {twice[0]!r} more than once")
                task.teacher = wraps(environment.kind.teacher)(
                    lambda row, rng: environment.teach(row, rng))
                # tried once here, where an error is one line
                first = task.train[0]
                turns = task.teacher(first.copy_row(), random.Random(0))
                builtin_tokenizer(task.characters)([first.prompt, *turns])
        limit = settings.max_completion_length or task.max_completion_length
        if settings.max_turn_length and settings.max_turn_length >= limit:
            task.notes.append(f"note: --max_turn_length {settings.max_turn_length} has no effect: "
                              f"a response has at most {limit} tokens (--max_completion_length)")
        if hasattr(environment.kind, "reset"):
            task.notes.append("note: the first prompt is shown without what reset() adds")
        return task

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return TurnSampler(sampler, settings)

    def after_scoring(self, learner, batch, old):
        batch.extras["turn_rewards"] = batch.rollout.turn_rewards                   # [B, T]

    def metrics(self, batch, mini, new):
        games = [game for rollout, _ in batch.sampled for game in rollout.games]
        return {"turns": mean([len(g.turns) for g in games]),
                "out_of_turns": mean([g.out_of_turns for g in games]),
                **{name: mean([g.rewards[k] for g in games if g.rewards[k:]])
                   for k, name in enumerate(REWARDS)}}

    def tokens(self, rollout):
        return {"turn_rewards": rollout.turn_rewards}                               # [G, T]


def mean(values):
    return sum(values) / len(values) if values else None
