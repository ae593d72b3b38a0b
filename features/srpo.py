"""SRPO (2504.14286): two stages of prompts, and history resampling.

    stages       the first --stage2_step rollout batches use only the first source of problems; then
                 a new epoch begins with both
    resampling   at the end of an epoch, problems whose last responses were all right are left out
                 from then on; those with mixed or only wrong responses stay (--algorithm srpo)
"""

import itertools
from dataclasses import dataclass, replace

import torch

from features.feature import Feature, flag, refuse
from plumbing.data.stream import PromptStream
from plumbing.refusal import Refusal


@dataclass(frozen=True)
class Flags:
    stage2_dataset_name: str | None = flag(
        None, "SRPO: second source of problems, used after --stage2_step rollout batches",
        unset="for the built-in task, longer sums", section="two stages",
        needs={"dataset_name": "the second source of the built-in task is its longer sums",
               "stage2_step": "the number of rollout batches before this source is used"})
    stage2_step: int = flag(0, "SRPO: number of rollout batches before the second source of "
                            "problems is used; 0: one source only", at_least=0, without={
                                "environment": "an environment has one source of rows"})


class SRPO(Feature):
    flags = Flags
    presets = {"srpo": dict(objective="dapo", stage2_step=20)}

    @classmethod
    def on(cls, settings):
        return settings.stage2_step > 0 or resamples(settings)

    @classmethod
    def check(cls, settings):
        if settings.stage2_step and settings.dataset_name and not settings.stage2_dataset_name:
            refuse(settings, "stage2_step",
                   "needs --stage2_dataset_name: the problems of the second stage")

    @classmethod
    def task(cls, settings, task, load):
        if settings.stage2_dataset_name:
            return join(task, load(settings.stage2_dataset_name))
        if settings.stage2_step:                             # stage 2 adds the longer half
            task.train.sort(key=lambda problem: problem.prompt.count("+"))
            middle = (settings.min_terms + settings.max_terms) // 2
            task.train = [replace(problem, stage=2) if problem.prompt.count("+") >= middle
                          else problem for problem in task.train]
        return task

    def __init__(self, learner):
        super().__init__(learner)
        settings = self.settings
        train = learner.task.train
        first = sum(problem.stage == 1 for problem in train)
        sizes = (first, len(train) - first)
        if settings.stage2_step and not all(sizes):
            raise Refusal(f"--stage2_step {settings.stage2_step}: the two sources have {sizes[0]} "
                          f"and {sizes[1]} train prompts that fit, and both need some")
        learner.stream = Stages(sizes, learner.stream.seed, settings.stage2_step,
                                resamples(settings))

    def after_scoring(self, learner, batch, old):
        G = batch.group_size
        right = torch.cat([batch.task.right(parts, G) for _, parts in batch.sampled])   # [n]
        learner.stream.record(right.view(-1, G).all(-1), batch.step)                # [n / G]


def resamples(settings):
    """Whether prompts with only right responses are left out at the end of an epoch."""
    return settings.algorithm == "srpo"


class Stages(PromptStream):
    """sizes: the number of problems of the first source and of the second, which follow them.
    stage2_step: the first so many rollout batches use only the first source; 0: both from the
    start. resample: whether history resampling is on."""

    def __init__(self, sizes, seed=0, stage2_step=0, resample=False):
        self.stage2_step = stage2_step
        self.resample = resample
        self.stage = 1 if stage2_step else 2
        self.drawn = []                                      # since the last call of record
        self.solved = set()
        self.dropped = set()
        self.sizes = sizes
        super().__init__(sum(sizes), seed)

    def problems(self):
        everything = range(self.count if self.stage == 2 else self.sizes[0])
        left = [i for i in everything if i not in self.dropped]
        if not left:
            print(f"epoch {self.epoch}: all responses to all problems were correct; history "
                  "resampling starts again with all")
            self.dropped = set()
        return left or list(everything)

    def new_epoch(self):
        if self.resample:
            self.dropped |= self.solved
            self.solved = set()
        super().new_epoch()

    def next(self, n):
        numbers = super().next(n)
        self.drawn += numbers
        return numbers

    def record(self, all_correct, step):
        """After rollout batch `step`: whether all responses were correct, [Q] bool, for each
        problem that was drawn for it."""
        for number, correct in zip(self.drawn, all_correct.tolist(), strict=True):
            (self.solved.add if correct else self.solved.discard)(number)
        self.drawn = []
        if self.stage == 1 and step >= self.stage2_step:
            self.stage = 2
            print(f"stage 2: {self.sizes[1]} problems of the second source join after {step} "
                  "batches")
            self.new_epoch()

    def state_dict(self):
        return super().state_dict() | {"stage": self.stage, "solved": sorted(self.solved),
                                       "dropped": sorted(self.dropped)}

    def load_state_dict(self, state):
        self.stage = state["stage"]
        self.solved = set(state["solved"])
        self.dropped = set(state["dropped"])
        super().load_state_dict(state)


def join(first, second):
    """Join two tasks, made with the same flags, into one task with two sources, without the train
    problems that are held out in one of them. The reward functions of the first score both.
    Held-out problems of the two sources alternate, so that an evaluation of the first few has
    both."""
    held_out = {(p.prompt, p.earlier) for p in first.test + second.test}
    train = first.train + [replace(problem, stage=2) for problem in second.train]
    alternating = itertools.zip_longest(first.test, second.test)
    return replace(first, name=f"{first.name} + {second.name}",
                   train=[p for p in train if (p.prompt, p.earlier) not in held_out],
                   test=[p for pair in alternating for p in pair if p is not None],
                   notes=list(dict.fromkeys(first.notes + second.notes)))
