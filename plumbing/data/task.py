"""A task: prompts, reference answers, and the reward of a response.

This file does not depend on models or losses.
"""

import hashlib
import json
import math
import re
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Callable

import torch

from advantages import (LARGEST_REWARD, as_decimals, groups_with_signal, with_group_mean,
                        without_rounding)
from plumbing.data.datafiles import as_messages
from plumbing.data.reward_functions import in_parallel
from plumbing.parallel import processes
from plumbing.refusal import Refusal, is_bug

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
    reward_functions: tuple = ()         # RewardFunction, BatchRewardFunction
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
    least_reward: float = -math.inf      # the smallest that the advantage can use
    played: bool = False         # with an environment: the first component is the return
    penalties: tuple = ()        # names of the components that features add after its own

    def digests(self):
        """SHA-256 of the training prompts, of the other columns of their rows and of the test rows,
        by which --resume notices that they, or their order, are no longer the same."""
        def digest(values):
            text = "".join(json.dumps(value, default=lambda x: type(x).__name__)
                           for value in values)
            return hashlib.sha256(text.encode()).hexdigest()
        return {"prompts": digest([p.prompt, p.earlier] for p in self.train),
                "answers": digest([p.answer, p.row] for p in self.train),
                "test": digest([p.prompt, p.earlier, p.answer, p.row] for p in self.test)}

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
        """The names of the K components of the reward. A response is right if the first is 1."""
        names = ["return"] if self.played else []
        names += [name for f in self.reward_functions for name in f.names or [f.name]]
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

    def total(self, components, group_size=1):
        """Rewards [B] float32, the weighted sums of their components [B, K].

        NaN means that a response does not have this component. A response without any gets the mean
        reward of its group (0 if the whole group has none), so its advantage is 0.

        Sums that are equal on paper must be equal numbers: rounding differences within a group
        would become advantages. Components are therefore added in float64, each as the decimal
        number that it prints as (0.1, not float32's 0.100000001), and the sum is rounded once.
        Raises Refusal for a reward below least_reward or beyond LARGEST_REWARD.
        """
        rewards = self.weighted_sum(components, group_size)                         # [B]
        if not rewards.abs().max() < LARGEST_REWARD:
            raise Refusal(f"a reward is {rewards[rewards.abs().argmax()]:g}: rewards must be "
                          f"finite and below {LARGEST_REWARD:g} in size, or the sums of their "
                          "squares overflow; return smaller ones, or lower --reward_weights")
        if rewards.min() < self.least_reward:
            raise Refusal(f"a reward is {rewards.min():g}: --scale_rewards mean (MaxRL) divides by "
                          "the mean reward of a group and needs rewards of at least 0; add a "
                          "constant to them, or use --scale_rewards group or none")
        return rewards

    def weighted_sum(self, components, group_size):
        """`total` without its check."""
        K = len(self.component_names)                        # after them, DAPO's penalty
        weights = self.weights(components)
        if components.shape[1] == 1 and not components.isnan().any():
            return components[:, 0] * weights[0]                                    # [B]
        weights = torch.tensor(weights, dtype=torch.float64)                        # [K+]
        parts = components.cpu()                             # some devices have no float64
        values = as_decimals(parts).nan_to_num(nan=0.0) * weights                   # [B, K+]
        missing = parts[:, :K].isnan().all(1)                                       # [B]
        rewards = without_rounding(values[:, :K].sum(1), values[:, :K].abs().sum(1))    # [B]
        rewards = rewards.masked_fill(missing, torch.nan)                           # [B]
        rewards = with_group_mean(rewards, group_size) + values[:, K:].sum(1)       # [B]
        return rewards.float().to(components.device)

    def groups_with_signal(self, settings, rollout, parts):
        """Which groups of a rollout with these reward components [B, K] the --advantage learns
        from, [prompts] bool: see advantages.groups_with_signal."""
        G = rollout.group_size
        turns = {"turn_rewards": rollout.turn_rewards} if self.played else {}
        return groups_with_signal(settings.advantage, self.total(parts, G), G,
                                  settings.scale_rewards, parts=parts, mask=rollout.mask,
                                  part_weights=self.weights(parts), **turns)        # [prompts]

    def reward_components(self, texts, problems, ids=None, games=()):
        """The components of the rewards [B, K] of B responses to B problems. Several are scored at
        a time; the responses to a prompt are adjacent.

        ids: the token ids of every response, for functions that ask for completion_ids. games: what
        was played with an environment, a features.turns.Game for every response. NaN means that a
        response does not have this component; one without any is counted as an error.
        """
        if self.verify:
            rewards = [float(self.verify(text, p)) for text, p in zip(texts, problems)]
            return torch.tensor(rewards).view(-1, 1)
        single = [f for f in self.reward_functions if not f.batched]
        batched = [f for f in self.reward_functions if f.batched]

        def score_response(text, problem):
            return {name: value for f in single for name, value in
                    f.components(text, problem.answer, problem.row).items()}
        scores = in_parallel(score_response, texts, problems)        # B times {component: number}
        chat = self.uses_chat(self.tokenizer)
        for f in batched:
            for score, value in zip(scores, f.rewards(texts, problems, ids, games, chat)):
                score[f.name] = value
        for score, game in zip(scores, games):
            score["return"] = math.fsum(game.rewards)        # ten times 0.1 is 1
        components = torch.tensor([[score.get(name, 0.0) for name in self.component_names]
                                   for score in scores])                            # [B, K]
        missing = components.isnan().all(1).nonzero().flatten().tolist()
        if missing:
            batched[0].errors["none"] += len(missing)
            batched[0].first_error = (
                f"{' '.join(f.verifier for f in self.reward_functions)} gave no reward for "
                f"{texts[missing[0]][:40]!r}")
        for f in self.reward_functions:
            if f.from_file and f.first_error and not f.warned:
                f.warned = True
                reward = "the mean of the group" if f.batched else 0
                sys.stderr.write(f"train.py: warning: --verifier {f.first_error}: the reward is "
                                 f"{reward}, and verifier_errors counts such responses\n")
        return components

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

    def filter_prompts(self, tokenizer):
        """Tokenize every prompt and remove those that encode_prompt refuses. Returns a text that
        shows the first prompt as the policy reads it, and notes; "" for the built-in task. Raises
        Refusal if no prompt of a split is left."""
        if self.one_width:
            self.encode(tokenizer, self.train[:1])
            return ""
        refused = []

        def fitting(problems, split):
            left = []
            for problem in problems:
                try:
                    self.encode(tokenizer, [problem])
                    left.append(problem)
                except Refusal as error:
                    refused.append(str(error))
            if problems and not left:
                raise Refusal(f"none of the {len(problems)} {split} prompts fits; {refused[-1]}")
            return left
        total = len(self.train) + len(self.test)
        self.train = fitting(self.train, "train")
        self.test = fitting(self.test, "test")
        notes = [f"{len(refused)} of {total} prompts left out; {refused[0]}"] if refused else []
        for function in self.reward_functions:
            if function.verifier == "math":
                notes += describe_unreadable(function, self.train + self.test)
        if self.uses_chat(tokenizer):
            notes += describe_template(self, tokenizer)
        elif self.chat_template_kwargs:
            notes.append("note: --chat_template_kwargs has no effect: these prompts have no chat "
                         "template")
        first, = self.encode(tokenizer, self.train[:1])
        return "\n".join([*notes, describe_prompt(tokenizer, first)])


def describe_unreadable(function, problems):
    """[a note] about the reference answers that math-verify cannot read, or of which it pays a
    part, if there are any."""
    unreadable, tried = processes.on_first(lambda: function.find_unreadable(problems))
    if not unreadable:
        return []
    examples = ", ".join(f"{p.answer[-40:]!r} ({p.where})" for p in unreadable[:3])
    return [f"note: math-verify misreads {len(unreadable)} of {tried} different reference "
            f"answers that were tried, such as {examples}: at most the same text in \\boxed{{}} "
            "gets a reward, or a part of it does, too; write them as numbers or LaTeX, leave "
            "these rows out, or use --verifier exact"]


def describe_prompt(tokenizer, ids):
    """The first prompt as the policy reads it, special tokens included, for the screen."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text = text if len(text) <= 1200 else f"{text[:800]} … {text[-300:]}"
    return f"first prompt, {len(ids)} tokens: {text!r}"


def describe_template(task, tokenizer):
    """[notes] on variables that the chat template does not have, on a template that prints today's
    date, and on functions that get messages for rows that are texts, unlike in TRL."""
    template = tokenizer.get_chat_template()
    names = [name for name in task.chat_template_kwargs
             if not re.search(rf"\b{re.escape(name)}\b", template)]
    notes = [f"note: --chat_template_kwargs {name} has no effect: the chat template has no such "
             "variable" for name in names]
    try:
        # strftime_now: in place of the function that reads the clock
        encode_prompt(task, tokenizer, task.train[0], strftime_now="")
    except Refusal:
        notes.append("note: the chat template prints today's date: a run that is resumed on "
                     "another day reads other prompts")
    if any(p.earlier is None for p in task.train) and not task.played:
        notes += [f"note: --verifier {f.verifier} gets messages, because the prompts go through "
                  "the chat template: the text of a completion is completion[0]['content']"
                  for f in task.reward_functions if f.batched and "completions" in f.inputs]
    return notes


def encode_prompt(task, tokenizer, problem, **variables):
    """The token ids of a prompt of the task. If the task uses a chat template and the tokenizer has
    one, the prompt goes through it; variables: further ones of the template.

    The task's prompt_template stands for the prompt, or for the last message of a conversation. Its
    system_prompt is a system message, unless the conversation begins with its own; without a chat
    template it is put before the prompt, separated by an empty line. Raises Refusal that names
    the row if the prompt has no tokens, too many of them, or cannot be tokenized.
    """
    system = task.system_prompt
    where = problem.where or repr(problem.prompt[:40])
    text = task.prompt_template.replace("{prompt}", problem.prompt)
    try:
        if task.uses_chat(tokenizer):
            messages = as_messages(replace(problem, prompt=text))
            render = partial(tokenizer.apply_chat_template, **task.chat_template_kwargs | variables)
            if system is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
                if system.strip() not in render(messages, tokenize=False):
                    raise Refusal("the chat template drops the system message: use "
                                  "--prompt_template instead of --system_prompt")
            ids = render(messages, add_generation_prompt=True)["input_ids"]
        elif problem.earlier is not None:
            raise Refusal("it is a list of messages, which needs a chat template: give texts")
        else:
            ids = encode_text(tokenizer, f"{system}\n\n{text}" if system else text)
    except Exception as error:                               # tokenizers raises bare Exceptions
        if is_bug(error):
            raise
        raise Refusal(f"{where}: the prompt cannot be tokenized: {error}")
    if not 1 <= len(ids) <= task.max_prompt_length:
        raise Refusal(f"{where}: the prompt has {len(ids)} tokens; between 1 and "
                      f"{task.max_prompt_length} fit")
    return ids


def encode_text(tokenizer, text):
    """The token ids of a text with the special tokens that the tokenizer puts before it (BOS), but
    without those that some put after it: a response would begin after the end of the sequence."""
    ids = tokenizer(text)["input_ids"]
    if not ids or ids[-1] not in tokenizer.all_special_ids:
        return ids
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    while ids and ids[-1:] != plain[-1:]:
        ids.pop()
    return ids
