"""Errors: one line that says what was wrong and what to do, and an exit code."""

import sys
from contextlib import contextmanager

import torch

from plumbing import processes
from plumbing.arguments import parse
from plumbing.memory import advice


@contextmanager
def errors_in_one_line(argv):
    """What goes wrong inside the block ends the script with one line on stderr: exit code 2 for what
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
        leave(1, f"process {processes.rank()} stops, as another one of this job is gone; --resume goes "
                 "on from the last checkpoint")
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # below the terminal's ^C
        leave(130, "stopped at once; what came after the last checkpoint is lost, --resume goes on "
                   "from there")


def leave(code, why):
    sys.stderr.write(f"train.py: {why}\n")  # one write: print makes two, which processes would mix
    raise SystemExit(code)
