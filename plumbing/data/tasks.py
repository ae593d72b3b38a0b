"""How a task is made: the built-in task, or one from a data file or a hub id.

    built-in    running_sum.py: last digits of a running sum
    your data   load_task(settings, "rows.jsonl"), load_task(settings, "openai/gsm8k")

datafiles.py reads and checks rows, reward_functions.py scores responses, stream.py decides the
order of the prompts. This file does not depend on models or losses.
"""

from functools import partial
from pathlib import Path

import torch

from plumbing.data.datafiles import load_problems
from plumbing.data.reward_functions import RewardFunction
from plumbing.data.running_sum import running_sum
from plumbing.data.task import Task
from plumbing.parallel import processes
from plumbing.refusal import Refusal, refuse_os_errors

# ---------------------------------------------------------------------------------------- your data

def load_task(settings, dataset_name, test_dataset_name=None, rows=None):
    """A task from a data file or a hub id, read and scored as the flags say; see
    datafiles.load_problems.

    Without --verifier: math; with an environment nothing else than the environment gives rewards
    then. Rows need no answers where an environment plays them, or functions of a batch alone score.
    rows: dicts to use instead of the rows of a data set, which dataset_name then only names.
    """
    verifiers = settings.verifier or ([] if settings.played else ["math"])
    functions = [RewardFunction(verifier, settings.verifier_timeout or 3.0)
                 for verifier in verifiers]
    answers = not (settings.played or all(function.batched for function in functions))
    train, test, notes = load_problems(dataset_name, test_dataset_name, settings.columns, rows,
                                       settings.played, answers)
    for function in functions:
        if not function.names:
            # in one process: all must use the same names
            function.names = processes.on_first(lambda: function.find_names(train[:8]))
    task = Task(dataset_name, train, test, None, notes=notes, reward_functions=tuple(functions),
                played=settings.played, reward_weights=settings.reward_weights,
                system_prompt=read_text(settings.system_prompt),
                prompt_template=read_text(settings.prompt_template) or "{prompt}",
                chat_template_kwargs=settings.chat_template_kwargs)
    if "{prompt}" not in task.prompt_template:
        raise Refusal(f"--prompt_template {settings.prompt_template}: it must contain "
                      "{prompt}, which is replaced by the prompt")
    return task


def prepare_task(settings, task=None):
    """The task of a run: `task` if it is given, else the one that the flags name. A Task needs only
    a name, train and test problems and a verify function. --stop adds strings to the task's own
    stop strings; --max_completion_length replaces its own limit."""
    task = task or make_task(settings)
    if len({*task.component_names}) < len(task.component_names):
        raise Refusal("--verifier: two components of the reward have the same name: "
                      f"{', '.join(task.component_names)}")
    task.chat_template = settings.chat_template
    task.max_prompt_length = settings.max_prompt_length
    task.stop = tuple(dict.fromkeys((*task.stop, *settings.stop)))
    task.own_length = task.own_length or task.max_completion_length
    task.max_completion_length = settings.max_completion_length or task.max_completion_length
    return task


@refuse_os_errors()
def read_text(text):
    """The text of a flag, in which \\n becomes a line break. For @FILE: the text of that file
    without a byte order mark and without its last line break."""
    if text is None or not text.startswith("@"):
        return text and text.replace("\\n", "\n")
    return Path(text[1:]).read_text(encoding="utf-8-sig").removesuffix("\n")


def make_task(settings):
    """The built-in task or the user's task, as the flags of train.py and the features of the run
    define it."""
    if settings.dataset_name is None:
        task = running_sum(settings.min_terms, settings.max_terms, settings.verbose_answers)
    else:
        task = load_task(settings, settings.dataset_name, settings.test_dataset_name)
    for feature in settings.features:
        task = feature.task(settings, task, partial(load_task, settings))
    task.weights(torch.zeros(1, len(task.component_names)))  # raises for a wrong number of weights
    return task
