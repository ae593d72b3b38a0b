"""Runs of train.main that keep their gradients, here or, as a script, in two of torchrun's.

    python -m torch.distributed.run --nproc_per_node=2 tests/pair_runs.py jobs.json

jobs.json: a list of [folder, flags]. In folder gradients.pt then holds a vector per update.
"""

import functools
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
import session.learner  # noqa: E402
import train  # noqa: E402
from plumbing.data import running_sum
from plumbing.data import tasks  # noqa: E402
from plumbing.parallel import processes  # noqa: E402

made = functools.cache(running_sum.running_sum)


def sums(*args):
    """The built-in task with a reward that any policy gets for half of its answers."""
    def verify(text, problem):
        return sum(map(ord, text)) % 2.0
    return replace(made(*args), train=list(made(*args).train), verify=verify)


def descent(args, actor):
    """Plain gradient descent: AdamW would make much of gradients that are 0 but for rounding."""
    return torch.optim.SGD(actor.parameters(), args.learning_rate)


def run(folder, flags):
    """One run of the script. AssertionError with what it printed if it does not end well."""
    gradients, out, update = [], io.StringIO(), train.update

    def watched(learner, mini):
        stats = update(learner, mini)
        gradients.append(torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().flatten()
            if not hasattr(p, "full_tensor") else p.grad.full_tensor().flatten()
            for p in learner.response_logp.parameters()]))
        return stats
    with (patch.object(train, "update", watched), patch.object(tasks, "running_sum", sums),
          patch.object(session.learner, "make_optimizer", descent),
          redirect_stdout(out), redirect_stderr(out)):
        try:
            train.main([*flags, "--output_dir", str(folder)])
        except SystemExit as stop:
            raise AssertionError(f"exit code {stop.code}: {out.getvalue()[-500:]}") from None
    if processes.rank() == 0:
        torch.save(gradients, Path(folder) / "gradients.pt")


if __name__ == "__main__":
    processes.stop = lambda: None                            # one group for all jobs
    torch.set_num_threads(1)
    for folder, flags in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(folder, flags)
    torch.distributed.destroy_process_group()
