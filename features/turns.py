"""Turns: a response is played with an environment, a class of the user's own.

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
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch

from advantages import ADVANTAGES
from features.feature import Feature, flag, refuse
from plumbing.data.reward_functions import load_here
from plumbing.engines.wrapper import Wrapper

SLOW = 10            # seconds of a step from which on the first one is named
SHOWN = 4            # turns whose mean rewards are metrics


@dataclass(frozen=True)
class Flags:
    environment: str | None = flag(
        None, "FILE.py:CLASS that responses are played with, turn by turn: __init__(row) and "
              "step(text) -> (observation, reward, done) (docs/data.md#an-environment)",
        unset="a response is one turn", evaluation="kept", section="turns",
        also="environment_factory env tools",
        needs={"dataset_name": "its rows are what the environment is made of"},
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
        kept = getattr(settings, "top_p", 1) < 1 or getattr(settings, "top_k", 0)
        if cls.on(settings) and kept:
            refuse(settings, "environment", "cannot be combined with --top_p or --top_k: the sets "
                   "of tokens of several turns are not joined")

    @classmethod
    def task(cls, settings, task, load):
        _ = settings.loaded_environment              # refused before a run begins
        task.played = True
        task.bounded = False
        return task

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return TurnSampler(sampler, settings.loaded_environment, settings.max_turns,
                           settings.chat_template)

    def __init__(self, run):
        self.weight = run.task.weights(torch.zeros(1, len(run.task.part_names)))[0]

    def after_scoring(self, learner, batch, old):
        batch.more["turn_rewards"] = self.weight * batch.rollout.turn_rewards       # [B, T]

    def metrics(self, batch, mini, new):
        games = [game for rollout, _ in batch.sampled for game in rollout.games]
        rewards = {k: [g.rewards[k] for g in games if len(g.rewards) > k] for k in range(SHOWN)}
        return {"turns": mean([len(g.turns) for g in games]),
                "out_of_turns": mean([g.out_of_turns for g in games]),
                **{f"turn_reward_{k + 1}": mean(values) for k, values in rewards.items()}}

    def tokens(self, rollout):
        return {"turn_rewards": rollout.turn_rewards}                               # [G, T]


def mean(values):
    return sum(values) / len(values) if values else None


class Environment:
    """The user's class in FILE.py:CLASS. Its attributes `role` ("user" or "tool") and `template`
    say how an observation is put before the policy: as a message of the chat template, or with
    template = False as it stands. Raises ValueError or FileNotFoundError if it does not load."""

    def __init__(self, name):
        path, _, attribute = name.rpartition(":")
        self.name = name
        if not (path.endswith(".py") and attribute.isidentifier()):
            raise ValueError(f"--environment {name}: FILE.py:CLASS is needed")
        if not Path(path).is_file():
            raise FileNotFoundError(f"--environment {name}: there is no file {path}")
        try:
            self.kind = load_here(name)
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
        self.named = False       # whether a slow step was named

    def fail(self, what):
        raise ValueError(f"--environment {self.name}: {what}")

    def begin(self, row, seed):
        """An object of the class for one response."""
        try:
            return self.kind(dict(row), **{"seed": seed} if self.seeded else {})
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
        if seconds > SLOW and not self.named:
            self.named = True
            sys.stderr.write(f"train.py: warning: --environment {self.name}: a step took "
                             f"{seconds:.0f} s, for the turn {text[:60]!r}\n")
        return self.checked(reply, text)

    def checked(self, reply, text):
        for_turn = f"for the turn {text[:60]!r}"
        try:
            observation, reward, done = reply
        except (TypeError, ValueError):
            self.fail(f"step returned {reply!r:.80}, not (observation, reward, done), {for_turn}")
        try:
            number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"step returned the reward {reward!r:.80}: a finite number is needed, "
                      f"{for_turn}")
        if type(done).__name__ not in ("bool", "bool_"):     # NumPy's, too
            self.fail(f"step returned done as {done!r:.80}: True or False is needed, {for_turn}")
        if not done and not (isinstance(observation, str) and observation):
            self.fail(f"step returned the observation {observation!r:.80} and is not done: a text "
                      f"that is not empty is needed, {for_turn}")
        return observation, number, bool(done)


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
    """A response while it is played: its tokens, which of them the policy wrote, their log-probs
    and rewards."""

    def __init__(self, player):
        self.player = player             # the user's object
        self.game = Game()
        self.ids = []
        self.own = []
        self.logp = []
        self.rewards = []
        self.truncated = False

    def add(self, ids, logp=None):
        """Append tokens of the policy with their log-probs, or of an observation (logp None)."""
        self.ids += ids
        self.own += [logp is not None] * len(ids)
        self.logp += logp or [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)


class TurnSampler(Wrapper):
    """Samples responses of several turns, each turn by the sampler inside."""

    def __init__(self, sampler, environment, max_turns, chat_template):
        super().__init__(sampler)
        self.environment = environment
        self.max_turns = max_turns or math.inf
        self.between = None              # a plumbing.model.chat.Turns; None: no template
        if environment.template and chat_template and self.tokenizer.chat_template:
            chat = import_module("plumbing.model.chat")
            try:
                self.between = chat.read_turns(self.tokenizer, environment.role)
            except ValueError as error:
                environment.fail(f"{error}; template = False in the class inserts observations as "
                                 "they stand")
        parameters = inspect.signature(sampler.sample).parameters.values()
        self.limited = any(p.name == "limits" or p.kind is p.VAR_KEYWORD for p in parameters)

    def sample(self, prompts, group_size, uniforms=None, temperature=None, rows=None):
        """See rollout.Sampler.sample. rows: of the data, one per prompt. The turn that begins at
        token t of a response is drawn with its uniforms from t on."""
        rollout_py = import_module("rollout")        # transformers: --help does not wait for it
        G = group_size
        prompts = rollout_py.token_ids(self.tokenizer, prompts)
        ends = rollout_py.end_tokens(self.policy, self.tokenizer)
        if uniforms is None:
            uniforms = torch.rand(len(prompts) * G, self.sampler.max_new_tokens)    # [B, T]
        B, T = uniforms.shape
        seeds = [zlib.crc32(row.numpy().tobytes()) for row in uniforms[::G].cpu()]  # one per prompt
        responses = [Response(self.environment.begin(rows[i // G], seeds[i // G]))
                     for i in range(B)]
        first = None
        live = list(range(B))
        while live:
            if first is None:
                part = first = self.sampler.sample(prompts, G, uniforms=uniforms,
                                                   temperature=temperature)
            else:
                start = torch.tensor([len(responses[i].ids) for i in live])         # [b]
                places = (start[:, None] + torch.arange(T)) % T                     # [b, T]
                limits = {"limits": T - start} if self.limited else {}              # [b]
                part = self.sampler.sample(
                    [prompts[i // G] + responses[i].ids for i in live], 1,
                    uniforms=uniforms[live].cpu().gather(1, places), temperature=temperature,
                    **limits)
            if part.attached:
                self.environment.fail(f"the sampler attaches {', '.join(part.attached)} to its "
                                      "responses, which is not joined over several turns")
            live = self.step([responses[i] for i in live], live, part, ends, T)
        return assemble(self.tokenizer, first, responses)

    def step(self, responses, numbers, part, ends, T):
        """Add a turn to each of the responses, from the rollout `part`, and what the environment
        says to it. Returns the `numbers` of the responses that go on."""
        lists = (part.response_ids, part.sampler_logp, part.mask, part.truncated)
        turns = zip(responses, numbers, part.texts, *(x.tolist() for x in lists))
        ended = []
        for response, number, text, ids, logp, mask, truncated in turns:
            size = sum(mask)
            room = T - len(response.ids)
            if size > room:                          # of a sampler that takes no limits
                text = self.tokenizer.decode(ids[:room], skip_special_tokens=True)
            response.truncated = truncated or size > room
            response.add(ids[:min(size, room)], logp[:min(size, room)])
            response.game.messages.append({"role": "assistant", "content": text})
            if not response.truncated:
                ended.append((response, number, text))
        replies = self.environment.steps([r.player for r, _, _ in ended], [t for _, _, t in ended])
        live = []
        for (response, number, _), (observation, reward, done) in zip(ended, replies):
            game = response.game
            game.rewards.append(reward)
            response.rewards[-1] = reward
            game.out_of_turns = not done and len(game.rewards) >= self.max_turns
            if done or game.out_of_turns:
                continue
            ids = self.encode(observation, response.ids[-1], ends)
            room = T - len(response.ids)
            response.add(ids[:room])
            game.messages.append({"role": self.environment.role, "content": observation})
            response.truncated = len(ids) >= room
            if not response.truncated:
                live.append(number)
        return live

    def encode(self, observation, last, ends):
        """The token ids of an observation with the text of the chat template around it, after a
        turn whose last token is `last`."""
        text = observation
        end = []
        if self.between:
            text = self.between.before + observation + self.between.after
            end = [self.between.end] if self.between.end is not None and last not in ends else []
        try:
            ids = end + self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:                   # tokenizers raises nothing narrower
            self.environment.fail(f"the observation {observation[:40]!r} cannot be tokenized: "
                                  f"{error}")
        ids = ids[1:] if self.between and ids[:1] == [last] else ids
        if not ids:
            self.environment.fail(f"the observation {observation[:40]!r} has no token")
        return ids


def assemble(tokenizer, first, responses):
    """The Rollout of the responses that were played. first: that of their first turns."""
    engines = import_module("plumbing.engines.responses")
    device = first.mask.device
    width = max(len(r.ids) for r in responses)
    columns = {"response_ids": ([r.ids for r in responses], engines.pad_token(tokenizer)),
               "mask": ([r.own for r in responses], False),
               "sampler_logp": ([r.logp for r in responses], 0.0),
               "turn_rewards": ([r.rewards for r in responses], 0.0)}
    tensors = {name: engines.padded(rows, width, fill).to(device)                   # [B, T] each
               for name, (rows, fill) in columns.items()}
    for response in responses:
        response.game.length = len(response.ids)
    games = [response.game for response in responses]
    truncated = torch.tensor([response.truncated for response in responses], device=device)  # [B]
    return replace(first, **tensors, truncated=truncated, games=games,
                   texts=["\n".join(game.turns) for game in games])
