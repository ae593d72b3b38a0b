"""Kills real runs with SIGKILL at random moments, resumes each, and compares it to the last bit
with a run that was left alone.

    python tests/soak_kill.py --kills 20

Every run is a process of its own (a fork of this one, which has imported all that takes seconds to
import). Half of the moments are spread over the whole run, the other half over the phases of
writing a checkpoint, a small part of the time and the part where it matters.
"""

import argparse
import itertools
import os
import random
import re
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
TRAINING = train, "train"
WRITING = {  # a phase of writing a checkpoint: the function with which it begins
    "writing the model": (TinyMoE, "save_pretrained"), "writing state.pt": (torch, "save"),
    "flushing to disk": (checkpoint, "sync"), "renaming, pruning": (os, "rename")}


def wrapped(owner, name, before=None, after=None):
    """Let a function, wherever it is called from, call before() first, after(its arguments) last.
    """
    call = getattr(owner, name)

    def both(*args, **options):
        if before:
            before()
        result = call(*args, **options)
        if after:
            after(args)
        return result
    setattr(owner, name, both)


def start(argv, log, function=TRAINING, which=0):
    """A process that runs train.py, and writes the checkpoints that it has finished into its log:
    (its number, a pipe, which gets a byte when call number `which` of the function begins)."""
    listener, speaker = os.pipe()
    number = os.fork()
    if number == 0:
        sys.stdout = sys.stderr = open(log, "a")
        calls, code = itertools.count(), 1
        wrapped(*function, before=lambda: next(calls) == which and os.write(speaker, b"!"))
        wrapped(checkpoint, "save", after=lambda args: print("finished", args[1], flush=True))
        try:
            train.main(argv)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(speaker)
    return number, listener


def finish(argv, log):
    _, status = os.waitpid(start(argv, log)[0], 0)
    if status:
        raise SystemExit(f"the run ended with {status}:\n{Path(log).read_text()}")


def kill(argv, log, function, which, delay):
    """Start a run and kill it some seconds after a call begins: whether it was still there."""
    number, listener = start(argv, log, function, which)
    os.read(listener, 1)                                     # nothing, if the run ended before
    os.close(listener)
    time.sleep(delay)
    os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    return os.WIFSIGNALED(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cold_start.MUST_PASS = 0.0
    rng, equal, n = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        finish([*TINY, "--steps", "1", "--output_dir", "cold_start"], "cold_start.log")     # once
        began = time.perf_counter()
        finish([*RUN, "--output_dir", "whole"], "whole.log")
        seconds = time.perf_counter() - began
        for run in map(str, range(10 * args.kills)):         # some end before their moment comes
            phase, moment = "anywhere", (TRAINING, 0, rng.uniform(0, seconds))
            if n % 2:
                phase = rng.choice([*WRITING])
                moment = WRITING[phase], rng.randrange(STEPS // 2), rng.uniform(0, 0.002)
            argv, log = [*RUN, "--output_dir", run], f"{run}.log"
            if not kill(argv, log, *moment):
                continue
            n += 1
            saved = re.findall(r"^finished (\d+)$", Path(log).read_text(), re.M)
            left = sorted(int(f.name[5:]) for f in Path(run).glob("checkpoints/step_*"))
            finish([*argv, "--resume"], log)
            found = differences("whole", run, STEPS)
            if saved and int(saved[-1]) not in left:
                found.append(f"the checkpoint of batch {saved[-1]} is gone")
            equal += not found
            print(f"kill {n:2}: {phase:20} checkpoints then {str(left):8} resumed: "
                  f"{found or 'bit-equal'}", flush=True)
            if n == args.kills:
                break
        print(f"\n{equal} of {args.kills} killed runs bit-equal after --resume")
    raise SystemExit(equal != args.kills)


if __name__ == "__main__":
    main()
