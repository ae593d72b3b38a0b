"""How a task is made: the built-in task, or one from a data file or a hub id.

    built-in    running_sum.py: last digits of a running sum
    your data   load_task(settings, "rows.jsonl"), load_task(settings, "openai/gsm8k")

datafiles.py reads and checks rows, reward_functions.py and batch_rewards.py score responses,
stream.py decides the order of the prompts. This file does not depend on models or losses.
"""

from functools import partial
from pathlib import Path

import torch

from advantages import ADVANTAGES
from plumbing.data.batch_rewards import make_reward_function
from plumbing.data.datafiles import load_problems
from plumbing.data.running_sum import running_sum
from plumbing.data.task import Task
from plumbing.parallel import processes
from plumbing.refusal import Refusal

ANSWER_LIMIT = 3.0               # seconds per response, unless --verifier_timeout is given


# ---------------------------------------------------------------------------------------- your data

def load_task(settings, dataset_name, test_dataset_name=None, rows=None):
    """A task from a data file or a hub id, read and scored as the flags say; see
    datafiles.load_problems.

    Without --verifier: math; with an environment, which needs no answers, nothing else than the
    environment gives rewards then. rows: dicts to use instead of the rows of a data set, which
    dataset_name then only names. The task's `notes` list the rows that were left out. Raises
    Refusal.
    """
    rows = rows and [(f"{dataset_name} row {i}", row) for i, row in enumerate(rows, 1)]
    train, test, notes = load_problems(dataset_name, test_dataset_name, settings.columns, rows,
                                       settings.played)
    verifiers = settings.verifier or ([] if settings.played else ["math"])
    columns = list(dict.fromkeys(name for p in [*train, *test] for name in p.row))
    time_limit = settings.verifier_timeout or ANSWER_LIMIT
    functions = tuple(make_reward_function(verifier, time_limit, columns)
                      for verifier in verifiers)

    template = read_text(settings, "prompt_template")
    template = "{prompt}" if template is None else template
    if "{prompt}" not in template:
        raise Refusal(f"--prompt_template {settings.prompt_template}: it must contain "
                      "{prompt}, which is replaced by the prompt")
    task = Task(dataset_name, train, test, None, notes=notes, reward_functions=functions,
                played=settings.played, reward_weights=settings.reward_weights,
                system_prompt=read_text(settings, "system_prompt"), prompt_template=template,
                chat_template_kwargs=settings.chat_template_kwargs)
    for f in functions:
        if f.from_file and not f.batched:    # by one process: all must use the same names
            f.names = processes.on_first(lambda: f.try_references(train[:8]))
    with_system = [p for p in [*train, *test] if p.earlier and p.earlier[0][0] == "system"]
    if task.system_prompt is not None and with_system:
        notes.append(f"note: {len(with_system)} of {len(train) + len(test)} prompts have a system "
                     "message of their own, which is used instead of --system_prompt")
    if len(set(task.component_names)) < len(task.component_names):
        raise Refusal(f"--verifier {' '.join(verifiers)}: two components of the reward have the "
                      f"same name: {', '.join(task.component_names)}")
    return task


def prepare_task(settings, task=None):
    """The task of a run: `task` if it is given, else the one that the flags name. A Task needs only
    a name, train and test problems and a verify function. --stop adds strings to the task's own
    stop strings; --max_completion_length replaces its own limit."""
    task = task or make_task(settings)
    task.chat_template = settings.chat_template
    task.max_prompt_length = settings.max_prompt_length
    task.stop = tuple(dict.fromkeys((*task.stop, *settings.stop)))
    task.own_length = task.own_length or task.max_completion_length
    task.max_completion_length = settings.max_completion_length or task.max_completion_length
    if settings.scale_rewards == "mean" and "scale" in ADVANTAGES[settings.advantage].reads:
        task.least_reward = 0.0
    return task


def read_text(settings, name):
    """The text of a flag, in which \\n becomes a line break. For @FILE: the text of that file
    without a byte order mark and without its last line break. None if the flag is not given. Raises
    Refusal if the file cannot be read."""
    text = getattr(settings, name)
    if text is None or not text.startswith("@"):
        return text and text.replace("\\n", "\n")
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"--{name} {text}: cannot be read: {error}")


def make_task(settings):
    """The built-in task or the user's task, as the flags of train.py and the features of the run
    define it."""
    if settings.dataset_name is None:
        task = running_sum(settings.min_terms, settings.max_terms, settings.verbose_answers)
    else:
        task = load_task(settings, settings.dataset_name, settings.test_dataset_name)
    for feature in settings.features:
        task = feature.task(settings, task, partial(load_task, settings))
    if settings.verifier_timeout and all(f.batched or f.verifier == "exact"
                                         for f in task.reward_functions):
        raise Refusal(f"--verifier_timeout {settings.verifier_timeout:g} has no effect: it is "
                      "for math and for functions of one response; a function of a whole batch "
                      "sets its own limit")
    task.weights(torch.zeros(1, len(task.component_names)))  # raises for a wrong number of weights
    return task
