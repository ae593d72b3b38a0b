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
from session.metrics import NEVER_RIGHT, rollout_metrics

EVALUATED = 64      # held-out prompts, at most


def print_estimate(settings, learner, task, train, held_out, began):
    """Print prompt, response, memory and time of the run. train, held_out: those of train.py and
    eval.py; began: when the script began, by time.perf_counter."""
    loaded = time.perf_counter()
    evaluated_by_run = min(settings.eval_prompts, len(task.test))
    few = replace(settings, eval_prompts=min(evaluated_by_run, EVALUATED))
    scores = held_out(few, learner, task)
    evaluated = time.perf_counter()
    first = FirstBatch()
    train(replace(settings, steps=1, eval_steps=0), learner, task, first, first)
    trained = time.perf_counter()
    screen.print_once(transcript(first.batch, task, settings))
    if scores:
        screen.print_once(f"{few.eval_prompts} held-out prompts before training: "
                          f"{screen.format_scores(scores)}")
    screen.print_once(peak_memory(learner, task, first.batch.rollout))
    screen.print_once(duration(settings, loaded - began, trained - evaluated,
                               (evaluated - loaded) * evaluated_by_run / few.eval_prompts))
    screen.print_once("dry run: no folder is left; leave out --dry_run to train")


class FirstBatch:
    """Takes the place of Recorder and Saver: keeps the batch, writes nothing."""

    step = 0

    def log(self, batch, *_):
        self.batch = batch

    def step_done(self, step):
        return False


def transcript(batch, task, settings):
    """The first prompt and response of the batch with its reward, and the pass rate of the batch.
    The start of the run has shown a prompt as the policy reads it."""
    rollout = batch.rollout
    problem = batch.problems[0]
    parts = dict(zip(task.component_names, batch.parts[0].tolist()))
    record = rollout_metrics(batch, task, settings)
    lines = [f"prompt: {problem.prompt!r}",
             f"response, {int(rollout.mask[0].sum())} tokens: {rollout.texts[0]!r}",
             *map(screen.format_game, rollout.games[:1]),
             f"right: {problem.answer!r}; reward {batch.rewards[0]:g}"
             f"{screen.format_components(parts)}",
             f"first batch: pass rate {record['pass_rate']:.3f}, zero-variance groups "
             f"{record['zero_variance_groups']:.0%}, mean length {record['length']:.1f}, truncated "
             f"{record['truncated']:.0%}"]
    if record["pass_rate"] == 0:
        lines.append(f"note: {NEVER_RIGHT}")
    return "\n".join(lines)


def peak_memory(learner, task, rollout):
    """The line about the memory that the longest update took, in GiB. Windows does not tell what a
    process took at most."""
    rows = learner.rows_per_pass()
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
                      rollout.truncated, rollout.texts, rollout.group_size)
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
