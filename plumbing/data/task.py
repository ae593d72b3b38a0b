"""A task: prompts, reference answers, and how a response is judged.

This file does not depend on models or losses.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable

import torch

from advantages import with_group_mean
from plumbing.data.datafiles import messages_of

CHARACTERS = "0123456789+=,. "   # the vocabulary of the built-in task, one token per character


@dataclass
class Task:
    name: str
    train: list                  # of Problem; disjoint from test, unless `notes` says otherwise
    test: list
    verify: Callable             # (response, problem) -> reward, a number or bool
    stop: tuple = ()             # strings that end a response, besides the end-of-sequence token
    chat: bool = False           # put prompts through the tokenizer's chat template, if it has one
    first_error: Callable | None = None  # (response, problem) -> index of its first wrong character
    teacher: Callable | None = None      # (problem, random.Random) -> a response, right or wrong,
    #                                      on which the cold start of a tiny MoE is supervised
    one_width: bool = False      # all prompts have the same number of tokens
    sizes: tuple = ()            # train problems per source, in the order of `train`
    notes: list = field(default_factory=list)    # messages for the user about loading
    verifiers: tuple = ()        # of Verifier; () for the built-in task
    parts: Callable | None = None        # (responses, problems, token ids) -> [{name: number}]
    names: list = field(default_factory=list)    # of these parts; []: those of the verifiers
    reward_weights: tuple = ()   # one per part, in the order of the parts; (): 1 each
    bounded: bool = False        # every part of the reward is known to be between 0 and 1
    ids: dict = field(default_factory=dict)      # problem -> token ids, made by `tokenizer`
    tokenizer: object = None
    reported: int = 0            # number of verifier errors already returned by new_errors()
    trial: Callable | None = None        # tokenizer -> None; tries reward functions, may raise
    system_prompt: str | None = None     # a message before every prompt
    prompt_template: str = "{prompt}"    # the text that the policy reads for a prompt
    characters: str = CHARACTERS         # the vocabulary of a tiny MoE for this task
    max_completion_length: int = 256     # the longest response in tokens, unless a flag says it
    rows: dict = field(default_factory=dict)     # problem -> its row in the data, for verifiers
    played: bool = False         # with an environment: the first part of the reward is the return

    @property
    def verifier_errors(self):
        """How often verifiers have timed out or crashed so far, as a Counter with the keys
        "timeout" and "crash"."""
        return sum((verifier.errors for verifier in self.verifiers), Counter())

    def new_errors(self):
        """The number of verifier errors since the last call, in this process."""
        before = self.reported
        self.reported = sum(self.verifier_errors.values())
        return self.reported - before

    def digest_prompts(self):
        """SHA-256 of the training prompts, by which --resume notices that they, or their order,
        are no longer the same."""
        digest = hashlib.sha256()
        for problem in self.train:
            digest.update(json.dumps([problem.prompt, problem.earlier]).encode())
        return digest.hexdigest()

    @property
    def part_names(self):
        """The names of the K parts of the reward. A response is right if its first part is 1."""
        own = ["return"] * self.played
        own += [name for v in self.verifiers for name in v.names or [v.name]]
        return self.names or list(dict.fromkeys(own)) or ["correct"]

    def weights(self, parts):
        """The weights of the columns of parts [B, K]. Columns that do not come from a verifier (the
        overlong penalty) have weight 1.

        Raises ValueError if --reward_weights does not have one number per part.
        """
        names = self.part_names
        weights = self.reward_weights or [1.0] * len(self.part_names)
        if len(weights) != len(names):
            raise ValueError(f"--reward_weights holds {len(weights)} numbers, but the reward has "
                             f"{len(names)} parts: {', '.join(names)}")
        return [*weights, *[1.0] * (parts.shape[1] - len(weights))]

    def total(self, parts, group_size=1):
        """Rewards [B] float32, the weighted sums of their parts [B, K].

        NaN means that a response does not have this part. A response without any part gets the mean
        reward of its group (0 if the whole group has none), so its advantage is 0.
        """
        K = len(self.part_names)                             # after them, DAPO's penalty
        lost = parts[:, :K].isnan().all(1)                                          # [B]
        if not lost.any():
            return self.weighted_sum(parts)                                         # [B]
        rewards = self.weighted_sum(parts[:, :K]).masked_fill(lost, torch.nan)      # [B]
        return with_group_mean(rewards, group_size) + parts[:, K:].sum(1)           # [B]

    def weighted_sum(self, parts):
        """The sums [B] float32 of parts [B, K] times their weights, without those that are NaN.

        Sums that are equal on paper must be equal numbers: rounding differences within a group
        would become advantages. Several parts are therefore added in float64, each as the decimal
        number that it prints as (0.1, not float32's 0.100000001), and the sum is rounded once.
        """
        weights = self.weights(parts)
        if len(self.part_names) == 1:                        # only DAPO's penalty may be added
            return sum(weight * column for weight, column in zip(weights, parts.T))
        decimals = torch.from_numpy(parts.cpu().numpy().astype(str).astype("float64"))  # [B, K]
        decimals = decimals.nan_to_num(nan=0.0)              # a part that a response does not have
        total = sum(weight * column for weight, column in zip(weights, decimals.T))     # [B]
        return total.float().to(parts.device)                                           # [B]

    def judge(self, texts, problems, ids=None, games=None):
        """The parts of the rewards [B, K] of B = Q·G responses to Q problems; the G responses to a
        problem are adjacent, in the order of `problems`. Several responses are verified at a time.

        ids: the token ids of every response, for reward functions that ask for completion_ids.
        games: what was played with an environment, a features.turns.Game for every response. NaN
        means that a response does not have this part; one without any part is counted as an error.
        """
        G = len(texts) // len(problems)
        asked = [problem for problem in problems for _ in range(G)]                 # B
        if self.parts is None:
            rewards = [float(self.verify(text, p)) for text, p in zip(texts, asked)]
            return torch.tensor(rewards).view(-1, 1)
        scores = self.parts(texts, asked, ids, games) if games else self.parts(texts, asked, ids)
        for row, game in zip(scores, games or []):
            row["return"] = math.fsum(game.rewards)          # ten times 0.1 is 1
        parts = torch.tensor([[row.get(name, 0.0) for name in self.part_names] for row in scores])
        lost = parts.isnan().all(1).nonzero().flatten().tolist()
        if lost:
            first = next(v for v in self.verifiers if v.whole)
            first.errors["none"] += len(lost)
            first.complaint = (f"{' and '.join(v.kind for v in self.verifiers)} gave no reward for "
                               f"{texts[lost[0]][:40]!r}: such responses get the mean of their "
                               "group, and verifier_errors counts them")
        for verifier in self.verifiers:
            verifier.complain()
        return parts

    def encode(self, tokenizer, problems, chat, max_prompt_length):
        """The token ids of problems; each problem is tokenized once. Raises ValueError as
        encode_prompt does."""
        if self.tokenizer is not tokenizer:
            self.tokenizer = tokenizer
            self.ids = {}
        for problem in problems:
            if problem not in self.ids:
                self.ids[problem] = encode_prompt(tokenizer, problem, chat, max_prompt_length,
                                                  self.system_prompt, self.prompt_template)
        return [self.ids[problem] for problem in problems]

    def keep_what_fits(self, tokenizer, chat, max_prompt_length):
        """Tokenize every prompt and remove those that encode_prompt refuses; then try the reward
        functions of whole batches, which may ask for tokens. Returns a text that shows the first
        prompt as the policy reads it, and a note about the removed prompts; "" for the built-in
        task. Raises ValueError if no prompt of a train source, or of the test split, is left, or if
        a reward function fails."""
        if self.one_width:
            self.encode(tokenizer, self.train[:1], chat, max_prompt_length)
            return ""
        refused = []

        def fits(problem):
            try:
                return self.encode(tokenizer, [problem], chat, max_prompt_length)
            except ValueError as error:
                refused.append(str(error))

        def kept(problems, what):
            left = [problem for problem in problems if fits(problem)]
            if problems and not left:
                raise ValueError(f"none of the {len(problems)} {what} prompts fits; {refused[-1]}")
            return left
        ends = [sum(self.sizes[:i + 1]) for i in range(len(self.sizes))]
        sources = [kept(self.train[end - size:end], "train") for size, end in zip(self.sizes, ends)]
        total = len(self.train) + len(self.test)
        self.test = self.train if self.test is self.train else kept(self.test, "test")
        self.train = sum(sources, [])
        self.sizes = tuple(map(len, sources))
        if self.trial:
            self.trial(tokenizer)
        note = f"{len(refused)} of {total} prompts left out; {refused[0]}\n" if refused else ""
        return note + shown(tokenizer, self.encode(tokenizer, self.train[:1], chat,
                                                   max_prompt_length)[0])


def shown(tokenizer, ids):
    """The first prompt as the policy reads it, special tokens included, for the screen."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    inside = ""
    if text.rstrip().endswith("<think>"):
        inside = ("\nthe chat template opens <think>: this is part of the prompt, and a response, "
                  "as a verifier reads it, begins inside")
    text = text if len(text) <= 1200 else f"{text[:800]} … {text[-300:]}"
    return f"first prompt, {len(ids)} tokens: {text!r}{inside}"


def encode_prompt(tokenizer, problem, chat, max_prompt_length, system=None, template="{prompt}"):
    """The token ids of a prompt. If `chat` is set and the tokenizer has a chat template, the prompt
    goes through it.

    template: the text that the policy reads, with {prompt} in place of the prompt, or of the last
    message of a conversation. system: a system message; without a chat template it is put before
    the prompt, separated by an empty line. Raises ValueError that names the row if the prompt has
    no tokens, more than max_prompt_length tokens, or cannot be tokenized.
    """
    where = problem.where or repr(problem.prompt[:40])
    characters = len(problem.prompt) + sum(len(text) for _, text in problem.earlier or ())
    if characters > 100 * max_prompt_length:                 # do not tokenize a very long text
        raise ValueError(f"{where}: the prompt has {characters} characters, far too many for "
                         f"{max_prompt_length} tokens")
    try:
        text = template.replace("{prompt}", problem.prompt)
        if chat and tokenizer.chat_template:
            messages = messages_of(problem._replace(prompt=text, earlier=problem.earlier or ()))
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
                check_system(tokenizer, messages)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        elif problem.earlier is not None:
            raise ValueError("it is a list of messages, which needs a chat template: give texts")
        else:
            ids = tokenizer(f"{system}\n\n{text}" if system else text)["input_ids"]
    except Exception as error:                               # tokenizers raises bare Exceptions
        raise ValueError(f"{where}: the prompt cannot be tokenized: {error}")
    if not 1 <= len(ids) <= max_prompt_length:
        raise ValueError(f"{where}: the prompt has {len(ids)} tokens; between 1 and "
                         f"{max_prompt_length} fit")
    return ids


def check_system(tokenizer, messages):
    """Raise ValueError if the chat template refuses or drops the system message; not every template
    supports one."""
    advice = "use --prompt_template instead of --system_prompt"
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:                               # a template may raise anything
        raise ValueError(f"the chat template takes no system message ({error}): {advice}")
    if messages[0]["content"].strip() not in text:
        raise ValueError(f"the chat template drops the system message: {advice}")
