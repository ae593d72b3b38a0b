"""The samplers of a run: plain, fast, over several processes, an inference engine, or a class of
the user's own. All have the same `sample` method (rollout.Sampler)."""

from functools import lru_cache, wraps
from pathlib import Path
from traceback import extract_tb

import torch

from plumbing.data.reward_functions import USER_FILES, describe, load_function
from plumbing.engines.wrapper import Wrapper
from plumbing.parallel import processes
from plumbing.refusal import Refusal, in_project
from plumbing.speed.fast import FastSampler
from plumbing.speed.rollouts import concat
from plumbing.users_code import UsersCode
from rollout import Sampler, StopStrings


def make_sampler(settings, policy, tokenizer, task, training=False):
    """What samples in rollouts (training) or in evaluations: the class that --sampler names, or the
    built-in one, as the features wrap it."""
    check_stop(tokenizer, task.stop)
    arguments = policy, tokenizer, task.max_completion_length, settings.temperature, task.stop
    if ":" in (settings.sampler or ""):                      # FILE.py:CLASS
        name = settings.sampler
        file = Path(name.rpartition(":")[0]).resolve()
        sampler_class = load_class(name, file, file.stat().st_mtime_ns)
        sampler = name_in_errors(f"--sampler {name}: __init__", sampler_class)(*arguments)
        sampler.sample = name_in_errors(f"--sampler {name}: sample", sampler.sample)
    elif settings.plain:
        sampler = Sampler(*arguments)
    else:
        sampler = FastSampler(*arguments)
        sampler.cuda_graphs = settings.cuda_graphs
    for feature in settings.features:
        sampler = feature.wrap_sampler(settings, sampler, training)
    return sampler


def name_in_errors(what, call):
    """The user's function `call`, whose errors become one line about `what`; those of this
    project's functions that it calls keep their traceback."""
    @wraps(call)
    def called(*args, **options):
        try:
            with UsersCode("--sampler"):
                return call(*args, **options)
        except (Refusal, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:             # whatever the user's file raises
            files = [frame.filename for frame in extract_tb(error.__traceback__)[1:]]
            files = [file for file in files if file in USER_FILES or in_project(file)]
            if files and files[-1] not in USER_FILES:
                raise
            raise Refusal(f"{what} raised {describe(error)}") from error
    return called


def check_stop(tokenizer, stop):
    """Refuse a stop string that no token of the tokenizer ends."""
    try:
        if stop:
            StopStrings(tokenizer, list(stop))
    except ValueError as error:
        raise Refusal(f"--stop: {error}") from None


@lru_cache
def load_class(name, file, changed):
    """The class FILE.py:CLASS, loaded once per version of the file: sampling and every evaluation
    get the same class, so that they can share an engine. Raises Refusal if it does not load or
    has no method `sample`."""
    try:
        with UsersCode("--sampler", loads=True):
            loaded = load_function(name)
    except Refusal:
        raise
    except (Exception, SystemExit) as error:                 # whatever the user's file raises
        raise Refusal(f"--sampler {name} does not load: {describe(error)}")
    if not hasattr(loaded, "sample"):
        raise Refusal(f"--sampler {name}: {loaded!r} has no method sample")
    return loaded


# --------------------------------------------------------------------------------------- wrappers

class SharedSampler(Wrapper):
    """Each process samples for its share of the prompts; every process gets the whole rollout."""

    def __init__(self, sampler, actor):
        super().__init__(sampler)
        self.actor = actor

    def sample(self, prompts, group_size, uniforms, problems=None, **options):
        """problems: one per prompt, for an environment (features/turns.py)."""
        share = processes.share(len(prompts))
        options |= {} if problems is None else {"problems": problems[share]}
        uniforms = uniforms.unflatten(0, (len(prompts), group_size))[share].flatten(0, 1)
        with processes.gathered(self.actor) as policy:
            self.policy = policy
            rollout = self.sampler.sample(prompts[share], group_size, uniforms=uniforms, **options)
        return concat(processes.gather(rollout))
