"""GPU memory: a run that does not fit ends in its first minute and names the flags to change.

The longest update is run, not estimated; benchmarks/simulate.py counts the bytes of an update
without a GPU.
"""

from dataclasses import fields

import torch
from torch.random import fork_rng

from session.checks import is_met
from rollout import Rollout


def out_of_memory(settings):
    """The message after an out-of-memory error, which names the flags to change. Flags that save
    or take memory have `saves_memory` or `takes_memory` in their metadata."""
    more = [f"--{f.name}" for f in fields(settings)
            if f.metadata.get("saves_memory") and not getattr(settings, f.name)]
    more += ["--optim adamw_8bit"] if settings.optim.startswith("adamw_torch") else []
    taking = [f"--{f.name}, " for f in fields(settings)
              if is_met(settings, f.metadata.get("takes_memory", ""))]
    return ("out of GPU memory: lower --micro_batch_size (now "
            f"{settings.micro_batch_size or 'the whole mini-batch'}), --max_completion_length, "
            f"{''.join(taking)}--prompts_per_step (now {settings.prompts_per_step}) or "
            f"--eval_prompts (now {settings.eval_prompts})"
            + (f", or add {' or '.join(more)}" if more else ""))


def try_longest(learner, task):
    """Run forward and backward of a micro-batch of the longest prompts and responses that can
    occur, with room for gradients and for the optimizer's two moments. Weights, gradients and
    random numbers are restored. Raises torch.OutOfMemoryError if it does not fit."""
    policy = learner.policy
    rows = learner.rows_per_pass()
    rollout = longest(rows, min(rows, learner.settings.num_generations), task, policy)
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    kind = torch.uint8 if "8bit" in learner.settings.optim else None
    moments = [torch.empty_like(p, dtype=kind) for p in trained for _ in range(2)]
    options = learner.update_options
    with fork_rng([policy.device] if policy.device.type == "cuda" else []):
        for _ in range(2):                                   # the second beside the gradients
            new = learner.response_logp(rollout, temperature=learner.settings.temperature,
                                        **options)
            outputs = (new.logp, new.entropy, getattr(new, "values", None))
            sum(x.sum() for x in outputs if x is not None and x.requires_grad).backward()
    del moments
    learner.optimizer.zero_grad()


def longest(rows, group_size, task, policy):
    """A Rollout of random tokens: the longest prompts, of which one is shorter, so that attention
    needs a mask, and answers of --max_completion_length."""
    def tokens(*shape):
        return torch.randint(policy.config.vocab_size, shape, generator=generator)

    generator = torch.Generator().manual_seed(0)
    Q = rows // group_size
    P = max(map(len, task.ids.values()))
    T = task.max_completion_length
    seen = torch.ones(Q, P, dtype=torch.bool)                                       # [Q, P]
    seen[0, :P // 2] = False
    tensors = (tokens(Q, P), seen, tokens(rows, T), torch.ones(rows, T, dtype=torch.bool),
               torch.zeros(rows, T), torch.zeros(rows, dtype=torch.bool))
    return Rollout(*(x.to(policy.device) for x in tensors), [""] * rows, group_size)
