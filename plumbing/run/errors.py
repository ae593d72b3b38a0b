"""Errors: one line that says what was wrong and what to do, and an exit code."""

import sys
from contextlib import contextmanager

import torch

from plumbing.speed import processes
from plumbing.run.arguments import parse
from plumbing.speed.memory import advice

MAX_BAD_STEPS = 3                # updates in a row that were not finite, and the run stops


@contextmanager
def errors_in_one_line(argv):
    """What goes wrong in the block ends the script with one line on stderr: exit code 2 for what
    the user can change, 1 if another process is gone, 130 for a second Ctrl-C."""
    try:
        yield
    except (ValueError, OSError) as error:
        leave(2, error)
    except torch.OutOfMemoryError:
        leave(2, advice(parse(argv), torch.cuda.mem_get_info()[1]))
    except RuntimeError as error:
        if not processes.lost_another(error):
            raise
        leave(1, f"process {processes.rank()} stops, as another one of this job is gone; --resume "
                 "goes on from the last checkpoint")
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # below the terminal's ^C
        leave(130, "stopped at once; what came after the last checkpoint is lost, --resume goes on "
                   "from there")


def leave(code, why):
    sys.stderr.write(f"train.py: {why}\n")  # one write: print makes two, which processes would mix
    raise SystemExit(code)


def count_bad(args, folder, step, skipped, bad, batch):
    """Non-finite updates in a row; keeps the mini-batch for a look, stops if they are too many."""
    if not skipped:
        return 0
    kept = folder / f"bad_batch_step_{step}.pt"
    if processes.rank() == 0:
        torch.save({"step": step, **vars(batch.rollout), **batch.tensors}, kept)
    if bad + 1 >= MAX_BAD_STEPS:
        raise SystemExit(
            f"train.py: {bad + 1} updates in a row had a loss or gradient that is not finite; "
            f"stopped in batch {step}. The last mini-batch is in {kept}, the last checkpoint is "
            "intact; try a lower --learning_rate or --max_grad_norm")
    return bad + 1
