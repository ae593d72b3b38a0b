"""Errors: one line on what is wrong and what to do, and the exit code of the script."""

import os
import sys
from contextlib import contextmanager

import torch

from plumbing.parallel import processes
from plumbing.refusal import Refusal

OUT_OF_MEMORY = ("out of GPU memory: lower --micro_batch_size, --max_completion_length, "
                 "--prompts_per_step or --eval_prompts, or do what docs/speed.md suggests (If "
                 "memory runs out); --dry_run tries the longest responses")


@contextmanager
def errors_in_one_line(script="train.py"):
    """An error in the block ends the script with one line on stderr. The exit code is 2 for errors
    that the user can correct, 1 if another process of the job has died, 130 after Ctrl-C.
    Other errors, which are bugs, keep their traceback, and so do all with GSPO_TRACEBACK=1 in the
    environment."""
    def exit_with(code, message):
        sys.stderr.write(f"{script}: {message}\n")  # one write; print makes two, which can mix
        raise SystemExit(code)

    try:
        yield
    except Refusal as error:
        if os.environ.get("GSPO_TRACEBACK"):
            raise
        exit_with(2, error)
    except torch.OutOfMemoryError:
        exit_with(2, OUT_OF_MEMORY)
    except RuntimeError as error:
        if not processes.lost_peer(error):
            raise
        exit_with(1, f"process {processes.rank()} stops because another process of this job has "
                  "died; --resume continues from the last checkpoint")
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # below the terminal's ^C
        exit_with(130, "stopped immediately; --resume continues a run from its last checkpoint, if "
                       "there is one")
