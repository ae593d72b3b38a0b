"""Turns: a response is played with an environment, a class that the user writes.

    class Guess:                              # one object per response
        def __init__(self, row): ...          # a copy of the row; (self, row, seed): and a seed
        def reset(self, **row): ...           # if there is one: what is added to the prompt
        def step(self, text):                 # a turn of the policy, without its end
            return observation, reward, done  # what the policy reads next, the turn's reward

    prompt, opening ─► turn ─► step(turn) ─► observation, reward, done ─► turn ─► …
                       └ loss tokens         └ read by the policy, no loss tokens

The tokens of a response are its turns and, between them, the observations. What was sampled is
kept and never encoded again. A turn's reward stands at its last token in Rollout.turn_rewards; the
reward of the response is their sum. The turns are sampled by whatever sampler the run has, called
again with the prompt and all tokens so far for the responses that go on. An error of the class ends
the run with its traceback.
"""

import copy
import inspect
import math
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence

from features.feature import Feature, flag
from plumbing.data.reward_worker import load_function
from plumbing.data.task import encode_prompt, encode_text, reward_dtype
from plumbing.engines.wrapper import Wrapper
from plumbing.refusal import Refusal


# ---------------------------------------------------------------------------- a response is played

@dataclass
class Game:
    """What was played in one response; it travels with the rollout."""

    opening: str = ""            # what reset has added to the prompt
    environment: object = None   # the object of the class, if a reward function reads it
    messages: list = field(default_factory=list)     # those after the prompt, {"role", "content"}
    rewards: list = field(default_factory=list)      # one per turn that `step` has read
    ids: list = field(default_factory=list)          # tokens, observations included; of each:
    own: list = field(default_factory=list)          # written by the policy, not read
    logps: list = field(default_factory=list)        # its log-prob, 0 if it was read
    earned: list = field(default_factory=list)       # the reward of the turn that ends with it
    over: bool = False           # done, or ended by --max_turns
    out_of_turns: bool = False   # ended by --max_turns
    truncated: bool = False      # cut off by --max_completion_length

    @property
    def length(self):
        return len(self.ids)

    @property
    def turns(self):
        """The texts of the policy's turns, which alternate with observations."""
        return [message["content"] for message in self.messages[::2]]

    def write(self, role, text, ids, logps):
        """Add a turn of the policy (the assistant), or an observation."""
        self.messages.append({"role": role, "content": text})
        self.ids += ids
        self.logps += logps
        self.own += [role == "assistant"] * len(ids)
        self.earned += [0.0] * len(ids)


class TurnSampler(Wrapper):
    """Samples responses of several turns, each turn by the sampler inside. The class attributes
    `role` ("user" or "tool") and `template` of an environment say how an observation is put before
    the policy: as a message of the chat template, or with template = False as it stands."""

    def __init__(self, sampler, settings):
        super().__init__(sampler, settings)
        from plumbing.model.chat import Turns, read_turns    # transformers: --help does not wait
        from rollout import end_tokens, pad_token
        self.kind = kind = settings.environment_class
        self.role = getattr(kind, "role", "user")
        self.pad = pad_token(self.tokenizer)
        self.ends = end_tokens(self.policy, self.tokenizer)
        self.between = Turns(end=None, before="", after="")
        chat = settings.chat_template and self.tokenizer.chat_template
        if chat and getattr(kind, "template", True):
            self.between = read_turns(self.tokenizer, self.role, **settings.chat_template_kwargs)
        tokens = self.tokenizer.added_tokens_decoder.values()
        self.control = [token.content for token in tokens if token.special]

    def sample(self, prompts, group_size, uniforms, temperature=None, *, problems, task):
        """See rollout.Sampler.sample; prompts: lists of token ids. problems: one per prompt, of the
        task; each response gets a copy of its row. The turn that begins at token t of a response is
        drawn with its uniforms [B, T] from t on."""
        G = group_size
        uniforms = uniforms.cpu()                                                   # [B, T]
        each = [problem for problem in problems for _ in range(G)]                  # B
        players = [self.begin(p, uniforms[i - i % G]) for i, p in enumerate(each)]  # B
        asked = any("environments" in function.inputs for function in task.reward_functions)
        games = [Game(reset(player, problem), player if asked else None)
                 for player, problem in zip(players, each)]                         # B
        prompts = [encode_prompt(task, self.tokenizer, each[i].opened(game)) if game.opening
                   else prompts[i // G] for i, game in enumerate(games)]            # B
        own_prompts = any(ids != prompts[i - i % G] for i, ids in enumerate(prompts))
        live = list(range(len(games)))
        first, size = (prompts, 1) if own_prompts else (prompts[::G], G)
        turns = [self.play_turn(first, size, games, players, uniforms, temperature)]
        while live := [i for i in live if not (games[i].over or games[i].truncated)]:
            some, whose = ([x[i] for i in live] for x in (games, players))
            so_far = [prompts[i] + games[i].ids for i in live]
            turns.append(self.play_turn(so_far, 1, some, whose, uniforms[live], temperature))
        return replace(self.join(turns, games), group_size=G, own_prompts=own_prompts)

    def begin(self, problem, uniforms):
        """An object of the class. Its seed is the same for all responses to a prompt."""
        row = copy.deepcopy(problem.row)
        if "seed" not in inspect.signature(self.kind).parameters:
            return self.kind(row)
        return self.kind(row, seed=zlib.crc32(uniforms[:2].numpy().tobytes()))

    def play_turn(self, prompts, group_size, games, players, uniforms, temperature):
        """Sample a turn of each game and let its environment answer. Returns the rollout of the
        turns."""
        T = uniforms.shape[1]
        rolled = torch.stack([u.roll(-game.length) for u, game in zip(uniforms, games)])    # [b, T]
        limits = torch.tensor([T - game.length for game in games])                  # [b]
        turns = self.sampler.sample(prompts, group_size, rolled, temperature, limits=limits)
        for game, text, ids, logps, truncated in zip(
                games, turns.texts, turns.token_lists(), turns.sampler_logp.tolist(),
                turns.truncated.tolist()):
            game.write("assistant", text, ids, logps[:len(ids)])
            game.truncated = truncated
        for game, player in zip(games, players):
            if not game.truncated:
                self.answer(game, T, *player.step(game.turns[-1]))
        return turns

    def answer(self, game, T, observation, reward, done):
        """Add to the game what its environment answers to the turn."""
        if not math.isfinite(reward):
            raise Refusal(f"--environment: step gave the reward {reward}, which is not finite, for "
                          f"{game.turns[-1]!r:.80}")
        game.earned[-1] = float(reward)
        game.rewards.append(float(reward))
        game.out_of_turns = not done and len(game.rewards) == self.settings.max_turns
        game.over = bool(done or game.out_of_turns)
        if not game.over:
            ids = self.encode(observation, game.ids[-1])[:T - game.length]
            game.write(self.role, observation, ids, [0.0] * len(ids))
            game.truncated = game.length == T

    def encode(self, observation, last):
        """The token ids of an observation with the text of the chat template around it, after a
        turn whose last token is `last`. A control token in an observation is encoded as ordinary
        text there: it must not end the message and begin another one."""
        end, before, after = self.between
        forged = before and any(token in observation for token in self.control)
        ids = []
        for piece in (before, observation, after) if forged else [before + observation + after]:
            ids += encode_text(self.tokenizer, piece, add_special_tokens=False,
                               split_special_tokens=bool(forged) and piece is observation)
        if end is not None and last not in self.ends:
            ids = [end, *ids]
        if before and ids[:1] == [last]:             # the policy wrote the template's first token
            ids = ids[1:]
        return ids

    def join(self, turns, games):
        """The Rollout of what was played. turns: the first turns, the second ones ..."""
        first = turns[0]

        device = first.mask.device

        def pad(name, fill, dtype=None):
            rows = [torch.tensor(getattr(game, name), dtype=dtype) for game in games]
            return pad_sequence(rows, batch_first=True, padding_value=fill).to(device)
        return replace(first, response_ids=pad("ids", self.pad), mask=pad("own", False),
                       sampler_logp=pad("logps", 0.0),
                       turn_rewards=pad("earned", 0.0, reward_dtype(device)),
                       truncated=first.truncated.new_tensor([game.truncated for game in games]),
                       games=games, texts=["\n".join(game.turns) for game in games])


def reset(player, problem):
    """What reset adds to the prompt; "" if it returns None or the class has none."""
    return hasattr(player, "reset") and player.reset(**copy.deepcopy(problem.row)) or ""


# ------------------------------------------------------------------------ what a run does with it

@dataclass(frozen=True)
class Flags:
    environment: str | None = flag(
        None, "FILE.py:CLASS that responses are played with, turn by turn: __init__(row) and "
              "step(text) -> (observation, reward, done) (docs/data.md#an-environment)",
        unset="a response is one turn", section="turns",
        without={"shard": "each process plays by itself, with weights of its own",
                 "stage2_dataset_name": "an environment has one source of rows",
                 "routing_replay=rollout": "the routes of several turns are not joined"})
    max_turns: int | None = flag(None, "largest number of turns in a response",
                                 unset="until the environment is done", at_least=1)

    @cached_property
    def environment_class(self):
        """The class, loaded once: rollouts and evaluations play with the same."""
        return load_function(self.environment)


class Turns(Feature):
    flags = Flags
    provides = ("turn_rewards",)

    @classmethod
    def on(cls, settings):
        return settings.environment is not None

    @classmethod
    def task(cls, settings, task, load):
        kind = settings.environment_class
        if not settings.dataset_name:
            task = load(settings.environment, rows=[*kind.rows()])
        if not settings.model_name_or_path:                  # the tiny MoE and its warm-up
            task.characters = kind.characters
            task.teacher = kind.teacher
        return task

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        return TurnSampler(sampler, settings)

    def after_scoring(self, learner, batch, old):
        batch.extras["turn_rewards"] = batch.rollout.turn_rewards                   # [B, T]

    def metrics(self, batch, mini, new):
        games = [game for rollout, _ in batch.sampled for game in rollout.games]
        return {"turns": sum(len(game.turns) for game in games) / len(games),
                "out_of_turns": sum(game.out_of_turns for game in games) / len(games)}

    def tokens(self, rollout):
        return {"turn_rewards": rollout.turn_rewards}                               # [G, T]
