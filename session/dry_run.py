"""--dry_run: estimate the memory and the time of a run within minutes, without a run folder.

It runs the first rollout batch, an evaluation of a few held-out prompts, and the longest update
that can occur. If the supervised warm-up is not cached yet, it is made and cached where the run
will read it.
"""

import sys
import time
from dataclasses import replace

import torch

from rollout import Rollout
from session import screen
from session.metrics import rollout_metrics, what_helps

EVALUATED = 64      # held-out prompts, at most


class Estimate:
    """What a dry run measures: train.py evaluates with the settings `evaluation`, then trains with
    the settings `training`, where this object takes the place of Recorder and Saver: it keeps the
    batch and writes nothing."""

    step = 0

    def __init__(self, settings, learner, task, began):
        """began: when the script began, by time.perf_counter."""
        self.settings = settings
        self.learner = learner
        self.task = task
        self.prompts = min(settings.eval_prompts, len(task.test))    # of an evaluation of the run
        self.evaluation = replace(settings, eval_prompts=min(self.prompts, EVALUATED))
        self.training = replace(settings, steps=1, eval_steps=0)
        self.times = [began, time.perf_counter()]

    def evaluated(self, scores):
        """scores: what eval.held_out returned."""
        self.scores = scores
        self.times.append(time.perf_counter())

    def log(self, batch, *_):
        self.batch = batch

    def step_done(self, step):
        self.times.append(time.perf_counter())
        return False

    def print(self):
        """Print prompt, response, memory and time of the run."""
        screen.print_once(transcript(self.batch, self.task, self.settings))
        prompts = self.evaluation.eval_prompts
        if self.scores:
            screen.print_once(f"{prompts} held-out prompts before training: "
                              f"{screen.format_scores(self.scores)}")
        screen.print_once(peak_memory(self.learner, self.task, self.batch.rollout))
        start, evaluation, batch = (b - a for a, b in zip(self.times, self.times[1:]))
        screen.print_once(duration(self.settings, start, batch,
                                   evaluation * self.prompts / prompts))
        screen.print_once("dry run: no folder is left; leave out --dry_run to train")


def transcript(batch, task, settings):
    """The first prompt and response of the batch with its reward, and the pass rate of the batch.
    The start of the run has shown a prompt as the policy reads it."""
    rollout = batch.rollout
    problem = batch.problems[0]
    parts = dict(zip(task.component_names, batch.parts[0].tolist()))
    record = rollout_metrics(batch, task, settings)
    lines = [f"prompt: {problem.prompt!r}",
             f"response, {int(rollout.mask[0].sum())} tokens: {rollout.texts[0]!r}",
             *map(str, rollout.games[:1]),
             f"its reward: {batch.rewards[0]:g}{screen.format_components(parts)}; the reference "
             f"answer: {problem.answer!r}",
             f"first batch: pass rate {record['pass_rate']:.3f}, zero-variance groups "
             f"{record['zero_variance_groups']:.0%}, mean length {record['length']:.1f}, truncated "
             f"{record['truncated']:.0%}"]
    if record["pass_rate"] == 0:
        lines.append(f"note: {what_helps(rollout.games)}")
    return "\n".join(lines)


def peak_memory(learner, task, rollout):
    """The line about the memory that the longest update took, in GiB. Windows does not tell what a
    process took at most."""
    rows = min(learner.rows_per_pass(), learner.settings.mini_batch_rows // learner.world)
    T = task.max_completion_length
    pass_with_longest_responses(learner, rollout.take(torch.arange(rows)), T)
    longest = f"{rows} responses of {T} tokens in a pass"
    if learner.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2 ** 30
        return f"peak memory of the longest update, {longest}: {peak:.1f} GiB allocated"
    try:
        import resource
    except ImportError:
        return f"the longest update, {longest}, fits in memory; Windows does not tell its peak"
    unit = 1 if sys.platform == "darwin" else 1024           # of ru_maxrss, in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2 ** 30
    return f"peak memory of the longest update, {longest}: {peak:.1f} GiB resident"


def pass_with_longest_responses(learner, rollout, T):
    """Forward and backward of T random tokens after the prompts of a rollout, beside the gradients
    and moments of the update before."""
    ids = torch.randint(learner.policy.config.vocab_size, (len(rollout.mask), T),
                        device=learner.device)                                      # [b, T]
    mask = torch.ones_like(ids, dtype=torch.bool)                                   # [b, T]
    longest = Rollout(rollout.prompt_ids, rollout.prompt_mask, ids, mask, mask.float(),
                      rollout.truncated, rollout.texts, rollout.group_size,
                      own_prompts=rollout.own_prompts)
    new = learner.response_logp(longest, temperature=learner.settings.temperature,
                                **learner.update_options)
    outputs = (new.logp, new.entropy, new.values)                                   # [b, T] each
    sum(x.sum() for x in outputs if x is not None).backward()


def duration(settings, start, batch, evaluation):
    """The line about the seconds of the whole run, from those of its start, of a rollout batch and
    of an evaluation."""
    evaluations = 2 + ((settings.steps - 1) // settings.eval_steps if settings.eval_steps else 0)
    evaluations *= settings.eval_samples > 0
    total = start + settings.steps * batch + evaluations * evaluation
    return (f"the whole run takes about {total / 60:.1f} min: {start:.1f} s to start, "
            f"{settings.steps} batches of {batch:.1f} s, {evaluations} evaluations of "
            f"{evaluation:.1f} s")
