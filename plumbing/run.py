"""The run folder: opening, saving and resuming a run exactly and atomically.

    config.json  metrics.jsonl  samples.jsonl  summary.json  checkpoints/step_N/{config.json, model.safetensors, tokenizer…, state.pt}

A checkpoint is written beside its place and renamed, so a folder named step_N is whole, whatever killed the run. step_N is an ordinary
Hugging Face checkpoint; state.pt holds what a model folder does not: optimiser, schedule, random states, data position, critic.
It holds tensors, numbers and text only, and is read with weights_only=True: a pickled object in it is refused, not executed.
"""

import itertools
import json
import os
import platform
import random
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
import transformers
from safetensors import SafetensorError

from plumbing import processes as distributed

# Flags that may differ between a run and its resumption: they do not change what is computed.
FREE = {"resume", "overwrite_output_dir", "output_dir", "save_steps", "keep", "eval_steps", "print_trl_config"}


def open_run(args):
    """The run's folder: an old run that may be resumed or replaced, else a new, empty one. Raises ValueError rather than touch another run."""
    if args.output_dir is None:
        for n in itertools.count(1):
            run = Path(f"runs/{args.algorithm}" + (f"-{n}" if n > 1 else ""))
            try:
                run.mkdir(parents=True)                      # of two runs started at once only one gets the name
                return run
            except FileExistsError:
                pass
    run = Path(args.output_dir)
    if run.exists() and not run.is_dir():
        raise ValueError(f"--output_dir {run} is a file: name a folder")
    before, now = arguments_of(run), asdict(args)
    differ = [k for k in now if before and k not in FREE and before.get(k) != now[k]]
    if args.resume:
        if not before:
            raise ValueError(f"--resume: nothing to resume in {run} (no config.json of a run); leave out --resume to start a run there")
        if differ:
            raise ValueError(f"--resume: {run} holds a run of another configuration: "
                             + ", ".join(f"{k} was {before.get(k)!r}, now {now[k]!r}" for k in differ))
    elif run.is_dir() and any(run.iterdir()):
        if args.overwrite_output_dir and not before:
            raise ValueError(f"--overwrite_output_dir: {run} does not look like a run (no config.json of one); not deleting it")
        if not args.overwrite_output_dir:
            what = "is not empty" if not before else "holds a run" + (f" of another configuration ({', '.join(differ)})" if differ else "")
            raise ValueError(f"--output_dir {run} {what}: use --resume to go on with it, --overwrite_output_dir to replace it, or another folder")
    run.mkdir(parents=True, exist_ok=True)
    return run


@contextmanager
def run_folder(args):
    """open_run's folder, for the block; a new one is removed again if nothing was begun in it."""
    run = distributed.on_first(lambda: open_run(args))
    try:
        yield run
    finally:
        with suppress(OSError):                              # it holds something
            run.rmdir()


def arguments_of(run):
    """The arguments of the run in a folder, {} if there is none."""
    try:
        return json.loads((run / "config.json").read_text())["arguments"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def begin_run(args, run):
    """Make the folder this run's own: all that could be refused has been by now, so an old run in it may go."""
    if args.overwrite_output_dir and run.exists():
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    write_text(run / "config.json", json.dumps({"arguments": asdict(args), "versions": {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}}, indent=1))


def write_text(path, text):
    """Write a small file beside its place, then rename it there."""
    partial = path.with_name(f".partial-{path.name}")
    with naming(path):
        partial.write_text(text)
        os.replace(partial, path)


def append(path, record):
    """One JSON line, in the file before the next line of code runs."""
    with naming(path), open(path, "a") as f:
        f.write(json.dumps(record) + "\n")


@contextmanager
def naming(path):
    """A full disk, a missing permission: one OSError that names what could not be written, whichever library was writing."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"{path} could not be written: {' '.join(str(error).split())}") from error


def keep_lines(path, step):
    """Drop the lines of a .jsonl file that are later than `step` or cut off, so that a resumed run has no step twice."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except ValueError:                                   # the line that was being written when the run was killed
            break
    write_text(path, "".join(lines))


# ------------------------------------------------------------------------------------------------------------- checkpoints

def snapshot(args, run, step, actor, tokenizer, optimizer, schedule, stream, progress):
    """Save all that the rest of the run depends on. Every process takes part, the first one writes."""
    state = {"optimizer": distributed.whole_optimizer(actor, optimizer, args.shard), "schedule": schedule.state_dict(),
             "stream": stream.state_dict(), "progress": progress, "critic": distributed.whole_critic(actor)}
    with distributed.gathered(actor) as policy:
        distributed.on_first(lambda: save(run, step, policy, tokenizer, state, args.keep))


def restore(args, run, actor, optimizer, schedule, stream, progress):
    """The state of the newest whole checkpoint; the policy itself was loaded from it before. Returns its step."""
    step, folder = newest(run)
    for name in ("metrics.jsonl", "samples.jsonl"):
        distributed.on_first(lambda: keep_lines(run / name, step))
    if folder:
        state = load_state(folder)
        distributed.load_optimizer(actor, optimizer, state["optimizer"], args.shard)
        schedule.load_state_dict(state["schedule"])
        stream.load_state_dict(state["stream"])
        progress.update(state["progress"])
        distributed.load_critic(actor, state["critic"])
    return step


def count_bad(args, run, step, skipped, bad, rollout, batch):
    """Non-finite updates in a row; keeps the offending mini-batch for a look, and stops the run when there are too many."""
    if not skipped:
        return 0
    kept = run / f"bad_batch_step_{step}.pt"
    if distributed.rank() == 0:
        torch.save({"step": step, **vars(rollout), **batch}, kept)
    if bad + 1 >= args.max_bad_steps:
        raise SystemExit(f"train.py: {bad + 1} updates in a row had a loss or gradient that is not finite; stopped in batch {step}. The last "
                         f"mini-batch is in {kept}, the last checkpoint (--save_steps) is intact; try a lower --learning_rate or --max_grad_norm")
    return bad + 1


def stop_on_signals():
    """Ctrl-C and SIGTERM let the rollout batch end, then save. The list returned is not empty once one came; a second Ctrl-C stops at once."""
    caught = []

    def handle(number, frame):
        if caught and time.monotonic() - caught[0] > 2:      # torchrun passes on at once what the terminal has sent already
            raise KeyboardInterrupt
        if not caught and distributed.rank() == 0:           # not print: the signal may have come while something is printed
            os.write(1, b"\nstopping after this rollout batch (once more: at once, back to the last checkpoint)\n")
        caught.append(time.monotonic())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return caught


def save(run, step, policy, tokenizer, state, keep):
    """Write checkpoints/step_N and prune old ones. `state` holds only tensors, numbers, text, lists and dicts."""
    folder, partial = run / "checkpoints" / f"step_{step}", run / "checkpoints" / f".partial-step_{step}"
    kept = [old for _, old in whole(run)]
    try:
        with naming(f"{folder} (the last whole checkpoint is {kept[-1].name if kept else 'none'})"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            torch.save({**state, "step": step, "random": random_state()}, partial / "state.pt")
            for file in [*run.glob("*.jsonl"), *partial.iterdir(), partial]:     # on disk before the rename says so
                sync(file)
            shutil.rmtree(folder, ignore_errors=True)        # a whole one would have been resumed from: this is the rest of one
            os.rename(partial, folder)
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in kept[:max(0, len(kept) + 1 - keep)]:
        gone = old.with_name(f".partial-{old.name}")
        os.rename(old, gone)                                 # a kill while deleting must not leave half a checkpoint that looks whole
        shutil.rmtree(gone, ignore_errors=True)


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def whole(run):
    """[(step, folder)] of the run's whole checkpoints, oldest first."""
    folders = (run / "checkpoints").glob("step_*") if (run / "checkpoints").is_dir() else ()
    return sorted((int(f.name[5:]), f) for f in folders if f.name[5:].isdigit() and (f / "state.pt").is_file() and (f / "config.json").is_file())


def newest(run):
    """(step, folder) of the newest whole checkpoint, or (0, None); half-written or half-deleted ones are removed, with a message."""
    for partial in (run / "checkpoints").glob(".partial-*"):
        print(f"ignoring an incomplete checkpoint: {partial}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
    found = whole(run)
    return found[-1] if found else (0, None)


def load_state(folder):
    """state.pt of a checkpoint, its random states restored. Raises ValueError if it holds anything but data."""
    try:
        state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(f"{folder / 'state.pt'} cannot be read as plain data ({type(error).__name__}): "
                         "it is damaged or holds pickled code, which is never executed; delete this checkpoint to use the one before") from None
    saved = state["random"]
    random.setstate((saved["python"][0], tuple(saved["python"][1]), saved["python"][2]))
    name, keys, *rest = saved["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    return state


def random_state():
    """Python's, NumPy's and torch's global random states as plain data (a user's verifier may draw from them)."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = numpy.random.get_state()
    return {"python": [version, list(numbers), gauss], "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}
