"""The samplers of a run: plain, fast, over several processes, an inference engine, or a class of
the user's own. All have the same `sample` method (rollout.Sampler)."""

import os
from functools import lru_cache

from plumbing.data.reward_worker import load_function
from plumbing.engines.wrapper import Wrapper
from plumbing.parallel import processes
from plumbing.refusal import Refusal
from plumbing.speed.fast import FastSampler
from plumbing.speed.graphs import Graphs
from rollout import Sampler, StopStrings, join


def make_sampler(settings, policy, tokenizer, task, training=False):
    """What samples in rollouts (training) or in evaluations: the class that --sampler names, or the
    built-in one, as the features wrap it."""
    check_stop(tokenizer, task.stop)
    arguments = policy, tokenizer, task.max_completion_length, settings.temperature, task.stop
    if ":" in (settings.sampler or ""):                      # FILE.py:CLASS
        sampler = load_class(os.path.abspath(settings.sampler))(*arguments)
    elif settings.plain:
        sampler = Sampler(*arguments)
    else:
        sampler = FastSampler(*arguments)
        if settings.cuda_graphs and training and policy.device.type == "cuda":
            sampler.graphs = Graphs()
    for feature in settings.features:
        sampler = feature.wrap_sampler(settings, sampler, training)
    return sampler


def check_stop(tokenizer, stop):
    """Refuse a stop string that no token of the tokenizer ends."""
    try:
        if stop:
            StopStrings(tokenizer, list(stop))
    except ValueError as error:
        raise Refusal(f"--stop: {error}") from None


@lru_cache
def load_class(name):
    """The class FILE.py:CLASS, loaded once: sampling and every evaluation get the same class, so
    that they can share an engine."""
    return load_function(name)


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
        return join(processes.gather(rollout))
