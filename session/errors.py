"""Errors: one line on what is wrong and what to do, and the exit code of the script."""

import os
import sys
from contextlib import contextmanager

import torch

from plumbing.parallel import processes
from session.arguments import parse
from session.memory import out_of_memory


@contextmanager
def errors_in_one_line(argv):
    """An error in the block ends the script with one line on stderr. The exit code is 2 for errors
    that the user can correct, 1 if another process of the job has died, 130 after Ctrl-C.
    Other errors, which are bugs, keep their traceback, and so do all with GSPO_TRACEBACK=1 in the
    environment."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("GSPO_TRACEBACK"):
            raise
        exit_with(2, error)
    except torch.OutOfMemoryError:
        exit_with(2, out_of_memory(parse(argv)))
    except RuntimeError as error:
        if not processes.lost_peer(error):
            raise
        exit_with(1, f"process {processes.rank()} stops because another process of this job has "
                  "died; --resume continues from the last checkpoint")
    except KeyboardInterrupt as error:
        sys.stderr.write("\n")  # below the terminal's ^C
        exit_with(130, str(error) or "stopped before the run began; nothing was saved")


def exit_with(code, message):
    sys.stderr.write(f"train.py: {message}\n")  # one write; print makes two, which can mix
    raise SystemExit(code)
