"""On-policy distillation: every token's advantage is how much likelier a teacher finds it.

    --teacher_model_name_or_path   a frozen checkpoint scores the policy's own responses
    --self_distillation            the policy itself, or an average of the policies so far
                                   (--teacher_update_rate), scores them after a prompt that
                                   contains the right answer, or a right response of the same group
                                   (sibling: SDPO 2601.20802)

With --advantage distillation that is all (advantages.distillation: GKD 2306.13649);
--distillation_coef adds it to another advantage. The teacher's forwards run like those of --beta's
reference: in the same micro-batches and precision, divided over the processes. Its routers choose
by themselves: no ratio is formed with it, so there is nothing to stabilize, and after a hint routes
mean something else.
"""

import re
import sys
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from advantages import ADVANTAGES, distillation
from features.feature import Feature, flag, refuse, unescape
from features.moving import list_weights, move_towards, restore_weights
from losses import OBJECTIVES
from plumbing.data.task import encode_prompt
from plumbing.refusal import Refusal
from ratios import masked_mean


@dataclass(frozen=True)
class Flags:
    teacher_model_name_or_path: str | None = flag(
        None, "checkpoint of the teacher for --advantage distillation or --distillation_coef; it "
              "must have the same tokenizer as the policy", unset="no teacher", checkpoint=True,
        section="a teacher")
    self_distillation: str | None = flag(
        None, "use the policy itself as the teacher, which is shown this before the prompt "
              "(--hint_template): the right answer, or a right response of the same group "
              "(sibling; SDPO: only wrong responses of such groups are used)",
        unset="no teacher", choices=("answer", "sibling"),
        without={"teacher_model_name_or_path": "a run has only one teacher"})
    teacher_update_rate: float = flag(
        0.0, "the teacher of --self_distillation is an average of the policies so far, which moves "
             "by this share once per rollout batch; 0: it is the policy as it is",
        at_least=0, at_most=1, needs="self_distillation",
        without={"beta": "a run has one moving average, and the reference policy would be this "
                         "teacher"})
    hint_template: str = flag("{answer} {prompt}", "prompt that the teacher of --self_distillation "
                              "reads; {answer} and {prompt} are filled in, \\n stands for a line "
                              "break", read=unescape, needs="self_distillation",
                              must=(lambda text: "{answer}" in text and "{prompt}" in text,
                                    "contain {answer} and {prompt}"))
    distillation_coef: float = flag(
        0.0, "coefficient of log π_teacher - log π_old, which is added to the advantage of each "
             "token; 0: nothing is added", at_least=0,
        needs="teacher_model_name_or_path|self_distillation")


class Distillation(Feature):
    flags = Flags
    presets = {"sdpo": dict(objective="cispo", epsilon_high=1.0, reduction="sequence-mean",
                            advantage="distillation", self_distillation="sibling",
                            teacher_update_rate=0.05)}
    provides = ("teacher_logp",)

    @classmethod
    def on(cls, settings):
        return bool(settings.teacher_model_name_or_path or settings.self_distillation)

    @classmethod
    def check(cls, settings):
        alone = "teacher_logp" in ADVANTAGES[settings.advantage].reads
        if alone and settings.distillation_coef:
            refuse(settings, "distillation_coef", "adds distillation to another --advantage; "
                   "--advantage distillation has coefficient 1")
        for name in ("teacher_model_name_or_path", "self_distillation"):
            if getattr(settings, name) and not alone and not settings.distillation_coef:
                refuse(settings, name, "needs --advantage distillation, or --distillation_coef to "
                       "be added to another advantage")
        if settings.distillation_coef and not OBJECTIVES[settings.objective].per_token:
            refuse(settings, "distillation_coef", "gives every token its own advantage, and "
                   f"{settings.algorithm} takes one per response: use --algorithm gspo_token or "
                   "grpo")
        if settings.self_distillation == "sibling" and settings.num_generations < 2:
            refuse(settings, "self_distillation", "shows a right response of the same group: "
                   "--num_generations must be at least 2")

    def __init__(self, run):
        settings = run.settings
        self.run = run
        self.settings = settings
        self.teacher = None                                  # the policy as it is
        if settings.teacher_model_name_or_path:
            self.teacher, tokenizer = run.load_checkpoint("teacher_model_name_or_path")
            check_one_tokenizer(settings.teacher_model_name_or_path, run.tokenizer, tokenizer)
            return
        self.max_tokens = run.max_tokens()
        check_hints(settings, run.task, run.tokenizer, self.max_tokens)
        if settings.teacher_update_rate:
            self.teacher = run.load_reference()

    def after_scoring(self, learner, batch, old):
        settings = self.settings
        if settings.teacher_update_rate and batch.step > 1:
            move_towards(self.teacher, self.run.actor.policy, settings.teacher_update_rate)
        rollout = replace(batch.rollout, forced_routes=None)     # its routers choose by themselves
        if settings.self_distillation:
            rollout = hinted(settings, self.run.task, self.run.tokenizer, batch)
            check_room(self.max_tokens, rollout.prompt_ids.shape[1], rollout.mask.shape[1])
        logp = learner.score(rollout, scorer=self.teacher).logp                     # [B, T]
        taught = find_taught(settings.self_distillation, batch)                     # [B]
        batch.extras["taught"] = taught
        # responses that it does not teach get log π_old, so their advantage is 0
        batch.extras["teacher_logp"] = torch.where(taught[:, None], logp, batch.old_logp)  # [B, T]

    def advantages(self, batch):
        if self.settings.distillation_coef:
            mask = batch.rollout.mask                                               # [B, T]
            if batch.advantages.dim() == 1:
                batch.advantages = batch.advantages[:, None] * mask                 # [B, T]
            added = distillation(batch.extras["teacher_logp"], batch.old_logp, mask)  # [B, T]
            batch.advantages = batch.advantages + self.settings.distillation_coef * added

    def metrics(self, batch, mini, new):
        """KL(π_old || teacher) per token, by the estimator k1."""
        old_logp = batch.old_logp if batch.free_logp is None else batch.free_logp   # [B, T]
        kept = batch.rollout.mask & batch.extras["taught"][:, None]                 # [B, T]
        return {"teacher_kl": masked_mean(old_logp - batch.extras["teacher_logp"], kept)}

    def state_dict(self):
        moves = self.settings.teacher_update_rate
        return {"teacher": list_weights(self.teacher)} if moves else {}

    def load_state_dict(self, state):
        if self.settings.teacher_update_rate:
            restore_weights(self.teacher, state.get("teacher"))


def check_one_tokenizer(name, policy_tokenizer, teacher_tokenizer):
    """Raises Refusal unless every token of one tokenizer has the same number in the other."""
    mine = policy_tokenizer.get_vocab()
    theirs = teacher_tokenizer.get_vocab()
    differ = [token for token in {**mine, **theirs} if mine.get(token) != theirs.get(token)]
    if differ:
        raise Refusal(f"--teacher_model_name_or_path {name} has another tokenizer than the "
                      f"policy: {len(differ)} tokens differ, for example {differ[0]!r}; "
                      "distillation compares the log-probs of the same tokens")


# ----------------------------------------------------------------------------------------- hints

def check_hints(settings, task, tokenizer, max_tokens):
    """Raises Refusal if a prompt with its hint, and a response after it, is longer than the
    `max_tokens` that the policy can read (None: any number). A response of the same group has at
    most --max_completion_length tokens."""
    sibling = settings.self_distillation == "sibling"
    tried = task.train[:1] if max_tokens is None else task.train
    problems = [replace(problem, answer="") if sibling else problem for problem in tried]
    longest = max(len(hinted_prompt(settings, task, tokenizer, problem)) for problem in problems)
    if sibling:
        longest += task.max_completion_length
    check_room(max_tokens, longest, task.max_completion_length)


def check_room(max_tokens, longest, response):
    """Raises Refusal if `longest` tokens, a prompt with its hint, and a response do not fit."""
    if max_tokens is not None and longest + response > max_tokens:
        raise Refusal(
            f"--self_distillation: a prompt with its hint can have {longest} tokens, and with "
            f"--max_completion_length {response} it needs {longest + response} positions; the "
            f"policy has {max_tokens}: lower --max_completion_length, or --max_prompt_length to "
            "leave out longer prompts, or shorten --hint_template")


def find_right(batch):
    """Which responses are right, [Q, G] bool."""
    return (batch.parts[:, 0] >= 1).view(-1, batch.group_size)                      # [Q, G]


def find_taught(hint, batch):
    """Which responses the teacher teaches, [B] bool: with a right response of the group as the
    hint, the wrong ones of groups that have a right one, else all."""
    if hint != "sibling":
        return torch.ones_like(batch.rollout.truncated)                             # [B]
    right = find_right(batch)                                                       # [Q, G]
    return (right.any(-1, keepdim=True) & ~right).flatten()                         # [B]


def hinted(settings, task, tokenizer, batch):
    """The rollout after prompts made by --hint_template, which contain the right answers, or the
    first right response of each group ("" without one)."""
    G = batch.group_size
    answers = [problem.answer for problem in batch.problems]                        # B
    if settings.self_distillation == "sibling":
        right = find_right(batch)                                                   # [Q, G]
        texts = [batch.rollout.texts[i * G + row.int().argmax()] for i, row in enumerate(right)]
        answers = [text if row.any() else "" for text, row in zip(texts, right) for _ in range(G)]
    problems = [replace(problem, answer=answer)
                for problem, answer in zip(batch.problems, answers)]                # B
    prompts = {problem: hinted_prompt(settings, task, tokenizer, problem)
               for problem in {*problems}}
    plain = import_module("rollout")             # transformers: --help does not wait for it
    ids, mask = plain.left_pad([prompts[problem] for problem in problems],
                               plain.pad_token(tokenizer), batch.rollout.mask.device)   # [B, P]
    return replace(batch.rollout, prompt_ids=ids, prompt_mask=mask, prefix=0, forced_routes=None)


def hinted_prompt(settings, task, tokenizer, problem):
    """Token ids of a prompt that contains its answer, of any length: see check_hints."""
    parts = {"answer": problem.answer, "prompt": problem.prompt}
    text = re.sub(r"\{(answer|prompt)\}", lambda place: parts[place[1]], settings.hint_template)
    any_length = replace(task, max_prompt_length=sys.maxsize)
    return encode_prompt(any_length, tokenizer, replace(problem, prompt=text))
