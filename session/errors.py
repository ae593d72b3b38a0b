"""Errors: one line on what is wrong and what to do, and the exit code of the script."""

import os
import sys
from contextlib import contextmanager
from dataclasses import fields

import torch

from plumbing.parallel import processes
from session.arguments import parse
from session.checks import is_met


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
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # below the terminal's ^C
        exit_with(130, "stopped immediately; --resume continues from the last checkpoint, if there "
                       "is one")


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
            + (f", or add {' or '.join(more)}" if more else "")
            + "; --dry_run tries the longest responses")


def exit_with(code, message):
    sys.stderr.write(f"train.py: {message}\n")  # one write; print makes two, which can mix
    raise SystemExit(code)
