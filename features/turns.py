"""Turns: a response is played with an environment, a class that the user writes.

    prompt ─► turn ─► step(turn) ─► observation, reward, done ─► turn ─► …
              └ loss tokens         └ read by the policy, no loss tokens

The tokens of a response are its turns and, between them, the observations. What was sampled is
kept and never encoded again. A turn's reward stands at its last token in Rollout.turn_rewards; the
reward of the response is their sum. The turns are sampled by whatever sampler the run has, called
again with the prompt and all tokens so far for the responses that go on.
"""

import asyncio
import inspect
import math
import sys
import time
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from importlib import import_module
from numbers import Real
from pathlib import Path

import torch

from advantages import ADVANTAGES
from features.feature import Feature, flag, refuse
from plumbing.data.reward_functions import load_function
from plumbing.engines.wrapper import Wrapper

SLOW = 10            # seconds of a step from which on the first one is named
REWARDS = ("turn_reward_1", "turn_reward_2", "turn_reward_3", "turn_reward_4")      # metrics


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

    @cached_property
    def loaded_environment(self):
        """The Environment, loaded once: rollouts and evaluations play with the same class."""
        return Environment(self.environment)


class Turns(Feature):
    flags = Flags
    provides = ("turn_rewards",)

    @classmethod
    def on(cls, settings):
        return bool(settings.environment)

    @classmethod
    def check(cls, settings):
        if not cls.on(settings) and "turn_rewards" in ADVANTAGES[settings.advantage].reads:
            refuse(settings, "advantage", "needs an --environment, which rewards each turn")

    @classmethod
    def task(cls, settings, task, load):
        environment = settings.loaded_environment    # refused before a run begins
        if not settings.dataset_name:
            task = load(environment.name, rows=environment.find("rows")())
        if not settings.model_name_or_path:
            task.characters = environment.find("characters")
            teacher = environment.find("teacher")
            task.teacher = wraps(teacher)(lambda problem, rng: teacher(problem.row, rng))
        task.played = True
        task.bounded = False
        return task

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return TurnSampler(sampler, settings.loaded_environment, settings.max_turns,
                           settings.chat_template, settings.chat_template_kwargs)

    def __init__(self, run):
        self.weight = [*run.task.reward_weights, 1.0][0]     # of the return

    def after_scoring(self, learner, batch, old):
        batch.more["turn_rewards"] = self.weight * batch.rollout.turn_rewards       # [B, T]

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


class Environment:
    """The user's class in FILE.py:CLASS. Its attributes `role` ("user" or "tool") and `template`
    say how an observation is put before the policy: as a message of the chat template, or with
    template = False as it stands. Raises ValueError or FileNotFoundError if it does not load."""

    def __init__(self, name):
        self.name = name
        path = Path(name.rpartition(":")[0])
        if path.suffix != ".py" or not path.is_file():
            self.fail("FILE.py:CLASS is needed, and the file must exist")
        try:
            self.kind = load_function(name)
            self.seeded = "seed" in inspect.signature(self.kind).parameters
            inspect.signature(self.kind).bind({}, **{"seed": 0} if self.seeded else {})
            inspect.signature(self.kind.step).bind(None, "text")
        except (Exception, SystemExit) as error:     # whatever a user's file raises
            self.fail(f"does not load as a class with __init__(row) and step(text): "
                      f"{type(error).__name__}: {error}")
        self.role = getattr(self.kind, "role", "user")
        self.template = getattr(self.kind, "template", True)
        if self.role not in ("user", "tool"):
            self.fail(f"role is {self.role!r}: user or tool is needed")
        self.warned = set()      # of what the user was warned

    def fail(self, what):
        raise ValueError(f"--environment {self.name}: {what}")

    def find(self, name):
        """An attribute of the class that the flags make necessary."""
        if not hasattr(self.kind, name):
            self.fail(f"without --dataset_name the class needs rows(), and without "
                      f"--model_name_or_path characters and teacher(row, rng); it lacks {name}")
        return getattr(self.kind, name)

    def warn(self, text, about="template"):
        """Print a warning on stderr, the first one about each subject."""
        if about not in self.warned:
            self.warned.add(about)
            sys.stderr.write(f"train.py: warning: --environment {self.name}: {text}\n")

    def begin(self, row, uniforms):
        """An object of the class for one response. uniforms: random numbers that make its seed."""
        seed = {"seed": zlib.crc32(uniforms.numpy().tobytes())} if self.seeded else {}
        try:
            return self.kind(dict(row), **seed)
        except (Exception, SystemExit) as error:
            self.fail(f"__init__ raised {type(error).__name__}: {error}, for the row {row!r:.80}")

    def steps(self, objects, texts):
        """[(observation, reward, done)] of a turn of several responses: one after the other, or
        side by side if `step` is async."""
        async def every():
            return await asyncio.gather(*map(self.step, objects, texts))
        return asyncio.run(every())

    async def step(self, player, text):
        began = time.perf_counter()
        try:
            reply = player.step(text)
            reply = await reply if inspect.isawaitable(reply) else reply
        except (Exception, SystemExit) as error:
            self.fail(f"step raised {type(error).__name__}: {error}, for the turn {text[:60]!r}")
        seconds = time.perf_counter() - began
        if seconds > SLOW:
            self.warn(f"the first slow step took {seconds:.0f} s, for the turn {text[:60]!r}",
                      "time")
        return self.checked(reply, text)

    def checked(self, reply, text):
        match reply:
            case (observation, Real() as reward, done) if (
                    math.isfinite(reward) and str(done) in ("True", "False")     # NumPy's, too
                    and (done or isinstance(observation, str) and observation)):
                return observation, float(reward), bool(done)
        self.fail(f"step returned {reply!r:.120} for the turn {text[:60]!r}: (observation, reward, "
                  "done) is needed, with a finite number as reward, done True or False, and unless "
                  "done a text that is not empty as observation")


@dataclass
class Game:
    """What was played in one response; it travels with the rollout."""

    messages: list = field(default_factory=list)     # {"role": …, "content": …} after the prompt
    rewards: list = field(default_factory=list)      # one per turn that `step` has read
    length: int = 0                                  # tokens, observations included
    out_of_turns: bool = False                       # ended by --max_turns

    @property
    def turns(self):
        """The texts of the policy's turns."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]


class Response:
    """A response while it is played."""

    def __init__(self, prompt, uniforms, player):
        self.prompt = prompt
        self.uniforms = uniforms         # [T]
        self.player = player             # the user's object
        self.game = Game()
        self.tokens = []                 # [id, whether the policy wrote it, log-prob, reward] each
        self.truncated = False

    def add(self, ids, own, logp):
        """Append tokens; those beyond the limit are dropped, and the response is then truncated."""
        self.tokens += [[token, own, x, 0.0] for token, x in zip(ids, logp)]
        self.truncated = len(self.tokens) > len(self.uniforms)
        del self.tokens[len(self.uniforms):]

    def ids(self):
        return [token[0] for token in self.tokens]


class TurnSampler(Wrapper):
    """Samples responses of several turns, each turn by the sampler inside."""

    def __init__(self, sampler, environment, max_turns, chat_template, variables=None):
        super().__init__(sampler)
        rollout = import_module("rollout")           # transformers: --help does not wait for it
        self.environment = environment
        self.max_turns = max_turns or math.inf
        self.pad = rollout.pad_token(self.tokenizer)
        self.ends = rollout.end_tokens(self.policy, self.tokenizer)
        self.between = None              # a plumbing.model.chat.Turns; None: no template
        if environment.template and chat_template and self.tokenizer.chat_template:
            chat = import_module("plumbing.model.chat")
            try:
                self.between = chat.read_turns(self.tokenizer, environment.role, **variables or {})
                if chat.drops_thinking(self.tokenizer, **variables or {}):
                    environment.warn("the chat template drops the thinking of earlier turns; here "
                                     "the policy reads all that it has written")
            except ValueError as error:
                environment.fail(f"{error}; template = False in the class inserts observations as "
                                 "they stand")
        parameters = inspect.signature(sampler.sample).parameters.values()
        self.limited = any(p.name == "limits" or p.kind is p.VAR_KEYWORD for p in parameters)

    def sample(self, prompts, group_size, uniforms, temperature=None, *, rows):
        """See rollout.Sampler.sample; prompts: lists of token ids. rows: of the data, one per
        prompt. The turn that begins at token t of a response is drawn with its uniforms [B, T] from
        t on; the seed of an environment is the same for all responses to a prompt."""
        G = group_size
        uniforms = uniforms.cpu()
        live = responses = [
            Response(prompts[i // G], uniform,
                     self.environment.begin(rows[i // G], uniforms[i - i % G]))
            for i, uniform in enumerate(uniforms)]
        first = None
        while live:
            lengths = [len(r.tokens) for r in live]
            rolled = [r.uniforms.roll(-n) for r, n in zip(live, lengths)]
            options = {"uniforms": torch.stack(rolled), "temperature": temperature}
            if self.limited:
                options["limits"] = uniforms.shape[1] - torch.tensor(lengths)       # [b]
            if first is None:
                part = first = self.sampler.sample(prompts, G, **options)
            else:
                part = self.sampler.sample([r.prompt + r.ids() for r in live], 1, **options)
            if part.attached:
                self.environment.fail(f"the sampler attaches {', '.join(part.attached)} to its "
                                      "responses, which is not joined over several turns")
            self.write(live, part)
            live = self.read([r for r in live if not r.truncated])
        return self.join(first, responses)

    def write(self, responses, part):
        """Add to each response its turn, a row of the rollout `part`."""
        rows = zip(responses, part.response_ids, part.mask, part.sampler_logp, part.texts,
                   part.truncated.tolist())
        for response, ids, own, logp, text, truncated in rows:
            start = len(response.tokens)
            response.add(ids[own].tolist(), True, logp[own].tolist())
            if response.truncated:                   # by a sampler that takes no limits
                text = self.tokenizer.decode(response.ids()[start:], skip_special_tokens=True)
            response.truncated |= truncated
            response.game.messages.append({"role": "assistant", "content": text})

    def read(self, responses):
        """Add to each response what the environment says to its turn. Returns those that go on."""
        replies = self.environment.steps([r.player for r in responses],
                                         [r.game.turns[-1] for r in responses])
        live = []
        for response, (observation, reward, done) in zip(responses, replies):
            game = response.game
            game.rewards.append(reward)
            response.tokens[-1][3] = reward
            game.out_of_turns = not done and len(game.rewards) >= self.max_turns
            if not done and not game.out_of_turns:
                ids = self.encode(observation, response.tokens[-1][0])
                response.add(ids, False, [0.0] * len(ids))
                response.truncated |= len(response.tokens) == len(response.uniforms)
                game.messages.append({"role": self.environment.role, "content": observation})
                live += [response] * (not response.truncated)
        return live

    def encode(self, observation, last):
        """The token ids of an observation with the text of the chat template around it, after a
        turn whose last token is `last`."""
        chat = self.between
        text = chat.before + observation + chat.after if chat else observation
        ended = not chat or chat.end is None or last in self.ends
        try:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:                   # tokenizers raises nothing narrower
            self.environment.fail(f"the observation {observation[:40]!r} cannot be tokenized: "
                                  f"{error}")
        ids = ids if ended else [chat.end, *ids]
        ids = ids[1:] if chat and ids[:1] == [last] else ids
        if not ids:
            self.environment.fail(f"the observation {observation[:40]!r} has no token")
        return ids

    def join(self, first, responses):
        """The Rollout of what was played. first: that of the first turns."""
        padded = import_module("plumbing.engines.responses").padded
        columns = [[*zip(*r.tokens)] for r in responses]
        width = max(len(ids) for ids, *_ in columns)
        ids, mask, logp, rewards = (
            padded([column[k] for column in columns], width, fill).to(first.mask.device)
            for k, fill in enumerate((self.pad, False, 0.0, 0.0)))                  # [B, T] each
        for response in responses:
            response.game.length = len(response.tokens)
        games = [r.game for r in responses]
        return replace(first, response_ids=ids, mask=mask, sampler_logp=logp, turn_rewards=rewards,
                       truncated=first.truncated.new_tensor([r.truncated for r in responses]),
                       games=games, texts=["\n".join(game.turns) for game in games])
