"""On-policy distillation: how the teacher's log-probs log π_T are computed.

    --teacher_model_name_or_path   a frozen checkpoint scores the policy's own responses
    --self_distillation            the policy itself, or an average of the policies so far
                                   (--teacher_update_rate), scores them after a prompt that
                                   contains the right answer, or a right response of the same group
                                   (sibling: SDPO 2601.20802)

`advantages.distillation` turns them into advantages. The teacher's forwards run like those of
--beta's reference: in the same micro-batches and precision, divided over the processes. With
--routing_replay the teacher keeps its own routers' choices: no ratio is formed with it, so there is
nothing to stabilize, and after a hint its routes mean something else.
"""

import re
import sys
from dataclasses import replace

import torch

from plumbing.data.task import encode_prompt
from plumbing.model.actor import make_scorer
from plumbing.model.policy import load_policy, most_tokens
from rollout import Rollout, Scorer, left_pad, pad_token
from routes import routers_of


class Teacher(Scorer):
    """A frozen Scorer of another policy. A dense teacher of a mixture of experts has no routes to
    record."""

    def __init__(self, scorer):
        super().__init__(scorer.policy)
        self.scorer = scorer

    def forward(self, rollout, record=False, **options):
        record = record and bool(routers_of(self.policy))    # a dense one has none
        return self.scorer(rollout, record=record, **options)


def teacher_of(args, task, device, tokenizer):
    """The frozen Scorer of --teacher_model_name_or_path, or None. --load_in_4bit is about the
    policy; the teacher keeps the weights of its checkpoint.

    Raises ValueError for a checkpoint that cannot be loaded or has another tokenizer."""
    name = args.teacher_model_name_or_path
    if name is None:
        return None
    args = replace(args, algorithm="grpo", routing_replay="none", router_aux_loss_coef=0.0,
                   load_in_4bit=False)
    try:
        teacher, other = load_policy(args, task, device, name)
    except ValueError as error:
        what = str(error).replace("--model_name_or_path", "--teacher_model_name_or_path")
        raise ValueError(what) from None
    check_one_tokenizer(name, tokenizer, other)
    return Teacher(make_scorer(args, teacher)).to(device).requires_grad_(False)


def check_one_tokenizer(name, own, other):
    """Raises ValueError unless every token of one tokenizer has the same number in the other."""
    mine = own.get_vocab()
    theirs = other.get_vocab()
    differ = [token for token in {**mine, **theirs} if mine.get(token) != theirs.get(token)]
    if differ:
        raise ValueError(f"--teacher_model_name_or_path {name} has another tokenizer than the "
                         f"policy: {len(differ)} tokens differ, for example {differ[0]!r}; "
                         "distillation compares the log-probs of the same tokens")


def check_hints(args, task, policy, tokenizer):
    """Raises ValueError if a prompt with its hint, and a response after it, is longer than the
    policy can read. A response of the same group has at most --max_completion_length tokens."""
    if not args.self_distillation:
        return
    sibling = args.self_distillation == "sibling"
    some = task.train[:1] if most_tokens(policy) is None else task.train
    problems = [problem._replace(answer="") if sibling else problem for problem in some]
    longest = max(len(hinted_prompt(args, task, tokenizer, problem)) for problem in problems)
    check_room(policy, longest + sibling * task.max_completion_length, task.max_completion_length)


def check_room(policy, longest, response):
    """Raises ValueError if `longest` tokens, a prompt with its hint, and a response do not fit."""
    limit = most_tokens(policy)
    if limit is not None and longest + response > limit:
        raise ValueError(
            f"--self_distillation: a prompt with its hint can have {longest} tokens, and with "
            f"--max_completion_length {response} it needs {longest + response} positions; the "
            f"policy has {limit}: lower --max_completion_length, or --max_prompt_length to leave "
            "out longer prompts, or shorten --hint_template")


def teacher_logp(args, learner, task, batch, teacher):
    """log π_T [B, T] of a rollout batch's responses; teacher: its Scorer, None for the policy
    itself. Responses that it does not teach get log π_old, so their advantage is 0."""
    if not args.self_distillation:
        return learner.score(batch.rollout, scorer=teacher).logp
    answers = [problem.answer for problem in batch.problems]
    if args.self_distillation == "sibling":
        right = right_of(batch)                                                     # [Q, G]
        texts = [batch.rollout.texts[i * batch.group_size + row.int().argmax()]
                 for i, row in enumerate(right)]
        answers = [text if row.any() else "" for text, row in zip(texts, right)]
    rollout = hinted(args, task, learner.tokenizer, batch, answers)
    check_room(learner.policy, rollout.prompt_ids.shape[1], rollout.mask.shape[1])
    logp = learner.score(rollout, scorer=teacher).logp                              # [B, T]
    if args.self_distillation == "sibling":
        logp = torch.where(taught(args, batch)[:, None], logp, batch.old_logp)      # [B, T]
    return logp


def right_of(batch):
    """Which responses are right, [Q, G] bool."""
    return (batch.parts[:, 0] >= 1).view(-1, batch.group_size)                      # [Q, G]


def taught(args, batch):
    """Which responses the teacher teaches, [B] bool: with a right response of the group as the
    hint, the wrong ones of groups that have a right one, else all."""
    if args.self_distillation != "sibling":
        return torch.ones_like(batch.rollout.truncated)                             # [B]
    right = right_of(batch)                                                         # [Q, G]
    return (right.any(-1, keepdim=True) & ~right).flatten()                         # [B]


def hinted(args, task, tokenizer, batch, answers):
    """The rollout with prompts made by --hint_template, which contain the answers, a text per
    prompt."""
    prompts = [hinted_prompt(args, task, tokenizer, problem._replace(answer=answer))
               for problem, answer in zip(batch.problems, answers)]
    old = batch.rollout
    ids, mask = left_pad(prompts, pad_token(tokenizer), old.mask.device)            # [Q, P]
    return Rollout(ids, mask, old.response_ids, old.mask, old.sampler_logp, old.truncated,
                   old.texts, old.group_size, old.kept)


def hinted_prompt(args, task, tokenizer, problem):
    """Token ids of a prompt that contains its answer, of any length: see check_hints."""
    parts = {"answer": problem.answer, "prompt": problem.prompt}
    text = re.sub(r"\{(answer|prompt)\}", lambda place: parts[place[1]], args.hint_template)
    return encode_prompt(tokenizer, problem._replace(prompt=text), args.chat_template, sys.maxsize,
                         task.system_prompt, task.prompt_template)
