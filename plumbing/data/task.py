"""A task: prompts, reference answers, and the reward of a response.

This file does not depend on models or losses.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from typing import Callable

import torch

from advantages import LARGEST_REWARD, without_rounding
from plumbing.refusal import Refusal

CHARACTERS = "0123456789+=,. "   # the vocabulary of the built-in task, one token per character

@dataclass
class Task:
    name: str
    train: list                  # of Problem; disjoint from test, unless `notes` says otherwise
    test: list
    verify: Callable | None      # (response, problem) -> reward, a number or bool; None: what the
    #                              reward_functions and the environment give
    stop: tuple = ()             # strings that end a response, besides the end-of-sequence token
    first_error: Callable | None = None  # (response, problem) -> index of its first wrong character
    teacher: Callable | None = None      # (problem, random.Random) -> a response, right or wrong,
    #                                      for the supervised warm-up of a tiny MoE
    one_width: bool = False      # all prompts have the same number of tokens
    notes: list = field(default_factory=list)    # messages for the user about loading
    reward_functions: tuple = ()         # of RewardFunction
    reward_weights: tuple = ()   # one per component, in their order; (): 1 each
    ids: dict = field(default_factory=dict)      # problem -> token ids, made by `tokenizer`
    tokenizer: object = None
    system_prompt: str | None = None     # a message before every prompt without one of its own
    prompt_template: str = "{prompt}"    # the text that the policy reads for a prompt
    chat_template: bool = True   # whether the tokenizer's chat template is used, if it has one
    chat_template_kwargs: dict = field(default_factory=dict)     # variables of the chat template
    max_prompt_length: int = 1024        # the longest prompt in tokens
    characters: str = CHARACTERS         # the vocabulary of a tiny MoE for this task
    max_completion_length: int = 256     # the longest response in tokens, unless a flag sets it
    own_length: int | None = None        # what it was before a flag set it
    played: bool = False         # with an environment: the first component is the return
    penalties: tuple = ()        # names of the components that features add after its own

    def digest(self):
        """SHA-256 of the training rows, by which --resume notices that they, or their order, are no
        longer the same."""
        rows = [(p.messages(), p.answer, p.row) for p in self.train]
        text = json.dumps(rows, default=lambda value: type(value).__name__)
        return hashlib.sha256(text.encode()).hexdigest()

    def draw_uniforms(self, generator, *rows):
        """The random numbers that draw the tokens of responses, [*rows, max_completion_length].

        A token's number does not depend on the limit, so that runs with different limits sample
        the same responses from the same policy. The first own_length of a response come from
        `generator`, further ones, drawn position by position, from a second one."""
        T = self.max_completion_length
        limit = self.own_length or T
        beyond = torch.Generator().manual_seed(-1 - generator.initial_seed())
        uniforms = torch.rand(*rows, limit, generator=generator)[..., :T]               # [*rows, ·]
        if T <= limit:
            return uniforms                                                             # [*rows, T]
        further = torch.rand(T - limit, *rows, generator=beyond)                        # [·, *rows]
        return torch.cat([uniforms, further.movedim(0, -1)], -1)                        # [*rows, T]

    @property
    def component_names(self):
        """The names of the K components of the reward."""
        names = ["return"] if self.played else []
        names += [name for function in self.reward_functions for name in function.names]
        return names or ["correct"]

    def weights(self, components):
        """The weights of the columns of components [B, K]. Those of `penalties` have weight 1.

        Raises Refusal if --reward_weights does not have one number per component.
        """
        names = self.component_names
        weights = self.reward_weights or [1.0] * len(names)
        if len(weights) != len(names):
            raise Refusal(f"--reward_weights holds {len(weights)} numbers, but the reward has "
                          f"{len(names)} components: {', '.join(names)}")
        return [*weights, *[1.0] * (components.shape[1] - len(weights))]

    def total(self, components):
        """Rewards [B], the weighted sums of their components [B, K], both float64. NaN means that a
        response does not have this component; the reward of one without any is NaN, also beside a
        penalty. Raises Refusal for a reward beyond LARGEST_REWARD."""
        K = len(self.component_names)                        # after them, DAPO's penalty
        weights = torch.tensor(self.weights(components), dtype=components.dtype)    # [K+]
        values = components.masked_fill(components.isnan(), 0.0)                    # [B, K+]
        values = values * weights.to(components.device)                             # [B, K+]
        ungraded = components[:, :K].isnan().all(1)                                 # [B]
        rewards = without_rounding(values[:, :K].sum(1), values[:, :K].abs().sum(1))    # [B]
        rewards = rewards + values[:, K:].sum(1)                                    # [B]
        if (rewards.abs() >= LARGEST_REWARD).any():
            raise Refusal(f"rewards from {rewards.min():g} to {rewards.max():g}: they must be "
                          f"below {LARGEST_REWARD:g} in size, or the sums of their squares "
                          "overflow")
        return rewards.masked_fill(ungraded, torch.nan)

    def right(self, components, group_size):
        """Which responses are right, [B] bool: those whose first component, of components [B, K],
        is at least 1. Where it is NaN for all responses to a prompt, the first component of the
        next function decides."""
        firsts = [0, *(self.component_names.index(f.names[0]) for f in self.reward_functions)]
        groups = components[:, firsts].view(-1, group_size, len(firsts))            # [Q, G, F]
        silent = groups.isnan().all(1, keepdim=True)                                # [Q, 1, F]
        decides = silent.int().argmin(-1, keepdim=True)                             # [Q, 1, 1]
        return groups.take_along_dim(decides, -1).flatten() >= 1                    # [B]

    def reward_components(self, texts, problems, ids=(), games=()):
        """The components of the rewards [B, K] of B responses to B problems; the responses to a
        prompt are adjacent.

        ids: the token ids of every response, for functions that ask for completion_ids. games: what
        was played with an environment, a features.turns.Game for every response. NaN means that a
        response does not have this component.
        """
        if self.verify:
            rewards = [float(self.verify(text, p)) for text, p in zip(texts, problems)]
            return torch.tensor(rewards, dtype=torch.float64).view(-1, 1)
        scores = [{} for _ in texts]
        for score, game in zip(scores, games):
            score["return"] = math.fsum(game.rewards)        # ten times 0.1 is 1
        chat = self.uses_chat(self.tokenizer)
        for function in self.reward_functions:
            parts = function.scores(texts, problems, ids, games, chat)
            for score, some in zip(scores, parts):
                score |= some
        return torch.tensor([[score.get(name, 0.0) for name in self.component_names]
                             for score in scores], dtype=torch.float64)             # [B, K]

    def uses_chat(self, tokenizer):
        """Whether prompts go through the tokenizer's chat template."""
        return self.chat_template and bool(getattr(tokenizer, "chat_template", None))

    def encode(self, tokenizer, problems):
        """The token ids of problems; each problem is tokenized once. Raises Refusal as
        encode_prompt does."""
        if self.tokenizer is not tokenizer:
            self.tokenizer = tokenizer
            self.ids = {}
        for problem in problems:
            if problem not in self.ids:
                self.ids[problem] = encode_prompt(self, tokenizer, problem)
        return [[*self.ids[problem]] for problem in problems]      # a sampler may change its own

    def sample(self, sampler, problems, group_size, uniforms, **options):
        """G responses to each of Q problems -> (Rollout, B problems, those that were answered: the
        reset of an environment adds to the prompt). uniforms [B, T], options: for the sampler."""
        prompts = self.encode(sampler.tokenizer, problems)
        if self.played:
            options |= {"problems": problems, "task": self}
        rollout = sampler.sample(prompts, group_size, uniforms=uniforms, **options)
        problems = [p for p in problems for _ in range(group_size)]                 # B
        if self.played:
            problems = [p.opened(game) for p, game in zip(problems, rollout.games)]
        return rollout, problems

    def filter_prompts(self, tokenizer):
        """Tokenize every prompt and remove those that encode_prompt refuses. Returns a text that
        shows the first prompt as the policy reads it, with a note; "" for the built-in task. Raises
        Refusal if no prompt of a split is left."""
        if self.one_width:
            self.encode(tokenizer, self.train[:1])
            return ""
        refused = []

        def fitting(problems):
            left = []
            for problem in problems:
                try:
                    self.encode(tokenizer, [problem])
                    left.append(problem)
                except Refusal as error:
                    refused.append(str(error))
            if not left:
                raise Refusal(f"none of {len(problems)} prompts fits; {refused[-1]}")
            return left
        self.train = fitting(self.train)
        self.test = fitting(self.test)
        notes = [f"{len(refused)} prompts left out; {refused[0]}\n"] if refused else []
        first, = self.encode(tokenizer, self.train[:1])
        text = tokenizer.decode(first, skip_special_tokens=False)
        return "".join([*notes, f"first prompt, {len(first)} tokens: {text!r}"])


def reward_dtype(device):
    """The format of rewards: float64, or float32 on MPS, which has no other."""
    return torch.float32 if device.type == "mps" else torch.float64


def encode_prompt(task, tokenizer, problem):
    """The token ids of a prompt of the task. If the task uses a chat template and the tokenizer has
    one, the prompt goes through it.

    The task's prompt_template stands for the prompt, or for the last message of a conversation. Its
    system_prompt is a system message, unless the conversation begins with its own; without a chat
    template it is put before the prompt, separated by an empty line. Raises Refusal that names
    the row if the prompt has no tokens or too many of them.
    """
    system = task.system_prompt
    where = problem.where or repr(problem.prompt[:40])
    text = task.prompt_template.replace("{prompt}", problem.prompt)
    if task.uses_chat(tokenizer):
        messages = replace(problem, prompt=text).messages()
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                **task.chat_template_kwargs)["input_ids"]
        except Exception as error:               # of the template, a program of its own
            raise Refusal(f"{where}: the chat template fails with these messages and "
                          f"--chat_template_kwargs: {error}") from error
    elif problem.earlier is not None:
        raise Refusal(f"{where}: it is a list of messages, which needs a chat template: give texts")
    else:
        ids = encode_text(tokenizer, f"{system}\n\n{text}" if system else text)
        if ids[-1:] == [tokenizer.eos_token_id]:     # some add it: the response would begin after
            ids = ids[:-1]                           # the end
    if not 1 <= len(ids) <= task.max_prompt_length:
        raise Refusal(f"{where}: the prompt has {len(ids)} tokens; between 1 and "
                      f"{task.max_prompt_length} fit")
    return ids


def encode_text(tokenizer, text, **options):
    """The token ids of a text. Raises Refusal for a character that a tiny MoE's tokenizer lacks."""
    try:
        return tokenizer(text, **options)["input_ids"]
    except Exception:                            # tokenizers raises no other class
        lacking = sorted({*text} - {*tokenizer.get_vocab()})
        raise Refusal(f"{text[:80]!r}: the tokenizer lacks {' '.join(lacking)}") from None
