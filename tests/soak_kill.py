"""Kills real runs with SIGKILL at random moments, resumes each, and compares it to the last bit
with a run that was left alone.

    python tests/soak_kill.py --kills 20

Every run is a process of its own (a fork of this one, which has imported all that takes seconds to
import). Half of the moments are spread over the whole run, the other half over the phases of
writing a checkpoint, a small part of the time and the part where it matters.
"""

import argparse
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402

from plumbing.run import checkpoints as checkpoint  # noqa: E402
from plumbing.model import cold_start  # noqa: E402
import train  # noqa: E402
from moe import TinyMoE  # noqa: E402
from tiny_run import TINY, differences  # noqa: E402

STEPS = 8
RUN = [*TINY, "--steps", str(STEPS), "--save_steps", "2"]
PHASES = {  # what a run does: the function that does it
    "starting": None, "training": (train, "train"),
    "writing the model": (TinyMoE, "save_pretrained"), "writing state.pt": (torch, "save"),
    "flushing to disk": (checkpoint, "sync"), "renaming, pruning": (checkpoint, "save")}
NAMES = [*PHASES]
WRITING = range(NAMES.index("writing the model"), len(NAMES))
# the phase that the child is in, and the last batch whose checkpoint it has finished writing
shared = mmap.mmap(-1, 2)


def marked(phase, owner, name):
    """Let a function say that it runs, wherever it is called from."""
    call = getattr(owner, name)

    def marking(*args, **options):
        before, shared[0] = shared[0], NAMES.index(phase)
        result = call(*args, **options)
        shared[0] = before
        if (owner, name) == (checkpoint, "save"):
            shared[1] = args[1]
        return result
    setattr(owner, name, marking)


def start(argv, log):
    """A process that runs train.py; its number."""
    shared[:] = bytes(2)
    number = os.fork()
    if number == 0:
        sys.stdout = sys.stderr = open(log, "a")
        code = 1
        try:
            train.main(argv)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return number


def finish(argv, log):
    _, status = os.waitpid(start(argv, log), 0)
    if status:
        raise SystemExit(f"the run ended with {status}:\n{Path(log).read_text()}")


def kill(argv, log, rng, seconds, while_writing):
    """Start a run and kill it at a random moment: (phase, last batch whose checkpoint was
    finished), or None if it was faster."""
    number, began = start(argv, log), None
    which, phase = rng.randrange(STEPS // 2), rng.choice(WRITING)
    delay = rng.uniform(0, 0.002 if while_writing else seconds)
    while os.waitpid(number, os.WNOHANG) == (0, 0):
        written = shared[0] == phase and shared[1] >= 2 * which
        due = written if while_writing else shared[0] != 0
        began = began or (due and time.perf_counter())
        if began and time.perf_counter() - began >= delay:
            os.kill(number, signal.SIGKILL)
            _, status = os.waitpid(number, 0)
            return (NAMES[shared[0]], shared[1]) if os.WIFSIGNALED(status) else None
        time.sleep(0.0001)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cold_start.MUST_PASS = 0.0
    for phase, function in PHASES.items():
        if function:
            marked(phase, *function)
    rng, equal, n = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        finish([*TINY, "--steps", "1", "--output_dir", "cold_start"], "cold_start.log")     # once
        began = time.perf_counter()
        finish([*RUN, "--output_dir", "whole"], "whole.log")
        seconds = time.perf_counter() - began
        for run in map(str, range(10 * args.kills)):         # some end before their moment comes
            argv, log = [*RUN, "--output_dir", run], f"{run}.log"
            killed = kill(argv, log, rng, seconds, while_writing=n % 2 == 1)
            if killed is None:
                continue
            n, (phase, saved) = n + 1, killed
            left = sorted(int(f.name[5:]) for f in Path(run).glob("checkpoints/step_*"))
            finish([*argv, "--resume"], log)
            found = differences("whole", run, STEPS)
            if max(left, default=0) < saved:
                found.append(f"the checkpoint of batch {saved} is gone")
            equal += not found
            print(f"kill {n:2}: {phase:20} checkpoints then {str(left):8} resumed: "
                  f"{found or 'bit-equal'}", flush=True)
            if n == args.kills:
                break
        print(f"\n{equal} of {args.kills} killed runs bit-equal after --resume")
    raise SystemExit(equal != args.kills)


if __name__ == "__main__":
    main()
