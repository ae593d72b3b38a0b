"""How a task is made: the built-in task, or one from a data file, a hub id or a problem generator.

    built-in    running_sum.py: last digits of a running sum
    your data   load_task("rows.jsonl"), load_task("openai/gsm8k"), load_task("reasoning_gym:NAME")

datafiles.py reads and checks rows, verifiers.py judges responses, stream.py decides the order of
the prompts. This file does not depend on models or losses.
"""

import json
from functools import partial
from pathlib import Path

import torch

from plumbing.data.datafiles import gym_generators, gym_rows, load_problems
from plumbing.data.reward_functions import RewardFunction, is_whole_batch
from plumbing.data.running_sum import running_sum
from plumbing.data.task import Task
from plumbing.data.verifiers import Verifier, in_parallel
from plumbing.parallel import processes

ANSWER_LIMIT = 3.0               # seconds per response, unless --verifier_timeout is given


# ---------------------------------------------------------------------------------------- your data

def load_task(dataset_name, test_dataset_name=None, prompt_column=None, answer_column=None,
              verifier=(), time_limit=None, stop=(), chat=True, size=1024, seed=0,
              reward_weights=(), system_prompt=None, prompt_template="{prompt}",
              environment=False, rows=None):
    """A task from a data file, a hub id, or `reasoning_gym:NAME`; see datafiles.load_problems.

    verifier: a kind of verifier or a list of kinds, see verifiers.py and reward_functions.py;
    without one: math, or with an environment (features/turns.py) only its rewards. For
    reasoning_gym `size` problems of each generator are made with `seed`, and its own verifier is
    always the first. time_limit: seconds per response, None: 3; a reward function of a whole batch
    has none. The task's `notes` list the rows that were left out. Raises ValueError or
    FileNotFoundError.
    """
    kinds = [verifier] if isinstance(verifier, str) else list(verifier)
    made = rows and [(f"{dataset_name} row {i}", row) for i, row in enumerate(rows, 1)]
    if dataset_name.startswith("reasoning_gym:"):
        generators = gym_generators(dataset_name, size, seed)
        kinds = [f"reasoning_gym:{json.dumps(generators)}", *kinds]
        made = gym_rows(generators)
    kinds = kinds or ([] if environment else ["math"])
    train, test, row_of, notes = load_problems(dataset_name, test_dataset_name, prompt_column,
                                               answer_column, made)
    columns = list(dict.fromkeys(name for row in row_of.values() for name in row))
    verifiers = tuple(RewardFunction(kind, columns, environment) if is_whole_batch(kind)
                      else Verifier(kind, time_limit or ANSWER_LIMIT) for kind in kinds)
    single, whole = [[v for v in verifiers if v.whole == kind] for kind in (False, True)]
    first = train[:8]
    rows = [row_of[p] for p in first]

    def parts_of_one(response, problem):
        scores = [v.parts(response, problem.answer, row_of[problem]) for v in single]
        return {name: value for part in scores for name, value in part.items()}

    def parts(texts, problems, ids, games=None):
        rows = [row_of[p] for p in problems]
        judged = in_parallel(parts_of_one, texts, problems) if single else [{} for _ in texts]
        for v in whole:
            for one, value in zip(judged, v.scores(texts, problems, rows, ids, games)):
                one[v.name] = value
        return judged

    def trial(tokenizer):
        for v in whole:
            agreed_by_all(v, first, v.try_on(first, rows, tokenizer))

    def verify(response, problem):
        return task.total(task.judge([response], [problem])).item()

    task = Task(dataset_name, train, test, verify, tuple(stop), chat, sizes=(len(train),),
                notes=notes, verifiers=verifiers, parts=parts,
                reward_weights=tuple(reward_weights or ()), trial=trial,
                bounded=not any(v.own for v in verifiers), rows=row_of,
                system_prompt=system_prompt, prompt_template=prompt_template)
    for v in single:
        notes += agreed_by_all(v, first, v.try_on(first, rows))
    notes += [v.note for v in whole]
    if len(task.part_names) < sum(len(v.names or [v.name]) for v in verifiers):
        raise ValueError(f"--verifier {' '.join(kinds)}: two parts of the reward have the same "
                         f"name: {', '.join(task.part_names)}")
    return task


def agreed_by_all(verifier, problems, tried):
    """What follows from trying a verifier on reference answers in every process. tried: the result
    of its try_on. All processes use the first process's names for the parts of the reward. Returns
    a list of notes. Raises ValueError, in all processes, if the verifier fails on every reference
    answer, because every reward would then be 0."""
    note, failed = tried
    trials = processes.gather((verifier.names, failed))
    if all(failed for _, failed in trials):
        raise ValueError(f"verifier {trials[0][1]}: it fails on each of the first {len(problems)} "
                         "reference answers; return 0 for an answer that it cannot read; is "
                         "--verifier_timeout long enough?")
    verifier.names = next(names for names, failed in trials if not failed)
    return [note] if note else []


def of_run(settings, task=None):
    """The task of a run: `task` if it is given, else the one that the flags name. A Task needs only
    a name, train and test problems and a verify function. --stop adds strings to the task's own
    stop strings; --max_completion_length replaces its own limit."""
    task = task or from_arguments(settings)
    task.sizes = task.sizes or (len(task.train),)
    task.stop = tuple(dict.fromkeys((*task.stop, *settings.stop)))
    task.max_completion_length = settings.max_completion_length or task.max_completion_length
    return task


def text_or_file(settings, name):
    """The text of a flag, in which \\n becomes a line break. For @FILE: the text of that file
    without a byte order mark and without its last line break. None if the flag is not given. Raises
    ValueError if the file cannot be read."""
    text = getattr(settings, name)
    if text is None or not text.startswith("@"):
        return text and text.replace("\\n", "\n")
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--{name} {text}: cannot be read: {error}")


def from_arguments(settings):
    """The built-in task or the user's task, as train.py's flags say, and as the features of the run
    change it.

    Without --max_completion_length the longest response has 256 tokens; for the built-in task as
    many as its longest answer.
    """
    template = text_or_file(settings, "prompt_template")
    template = "{prompt}" if template is None else template
    if "{prompt}" not in template:
        raise ValueError(f"--prompt_template {settings.prompt_template}: it must contain "
                         "{prompt}, which is replaced by the prompt")
    prompt, answer = settings.columns or (None, None)
    load = partial(load_task, prompt_column=prompt, answer_column=answer,
                   verifier=settings.verifier, time_limit=settings.verifier_timeout,
                   stop=settings.stop, chat=settings.chat_template,
                   seed=settings.seed, reward_weights=settings.reward_weights,
                   system_prompt=text_or_file(settings, "system_prompt"), prompt_template=template,
                   environment=bool(getattr(settings, "environment", None)))
    if settings.dataset_name is None:
        task = running_sum(settings.min_terms, settings.max_terms, settings.verbose_answers)
    else:
        task = load(settings.dataset_name, settings.test_dataset_name)
        if settings.verifier_timeout and all(v.whole for v in task.verifiers):
            raise ValueError(f"--verifier_timeout {settings.verifier_timeout:g} has no effect on a "
                             "function of a whole batch: set a limit in the function")
    for feature in settings.features:
        task = feature.task(settings, task, load)
    task.weights(torch.zeros(1, len(task.part_names)))       # raises for a wrong number of weights
    task.max_completion_length = settings.max_completion_length or task.max_completion_length
    return task
