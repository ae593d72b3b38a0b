"""The run folder: opening, saving and resuming a run exactly and atomically.

    config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  summary.json
    checkpoints/step_N/{config.json, model.safetensors, tokenizer…, state.pt}

A checkpoint is written beside its place and renamed: a folder named step_N is whole, whatever
killed the run. It is an ordinary Hugging Face checkpoint; state.pt holds what a model folder does
not (optimiser, schedule, random states, data position, critic), as tensors, numbers and text only,
and is read with weights_only=True: a pickled object in it is refused, not executed.
"""

import itertools
import json
import os
import platform
import random
import shutil
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy
import torch
import transformers
from safetensors import SafetensorError

from plumbing.speed import processes
from plumbing.model.adapters import save_policy

try:
    import fcntl
except ImportError:                                          # Windows: no run is locked there
    fcntl = None

# Flags that may differ when a run is resumed: they do not change what is computed.
FREE = {"resume", "overwrite_output_dir", "output_dir", "save_steps", "eval_steps", "report_to",
        "save_tokens", "print_trl_config"}
SOURCES = ("model_name_or_path", "dataset_name", "test_dataset_name", "stage2_dataset_name")
LOCK, KEEP = ".lock", 2          # checkpoints that a run has at most


# --------------------------------------------------------------------------------- the folder

@contextmanager
def run_folder(args):
    """The run's folder, locked for the block; a new one is removed if nothing was begun in it."""
    folder, locks = processes.on_first(lambda: open_run(args)), []
    try:
        processes.on_first(lambda: locks.append(lock(folder)))
        yield folder
    finally:
        if locks and not contents(folder):                   # the first process has one
            shutil.rmtree(folder)
        for number in locks:
            os.close(number)


def open_run(args):
    """The run's folder: an old run that may be resumed or replaced, else a new, empty one; a
    ValueError rather than another run's."""
    if args.output_dir is None:
        for n in itertools.count(1):
            folder = Path(f"runs/{args.algorithm}" + (f"-{n}" if n > 1 else ""))
            with suppress(FileExistsError):                  # only one of two runs gets the name
                folder.mkdir(parents=True)
                return folder
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder")
    before, now = arguments_of(folder), asdict(args)
    free = FREE | {"steps"} if may_go_on(args, before.get("steps", args.steps)) else FREE
    differ = [key for key in now if before and key not in free and before.get(key) != now[key]]
    changes = ", ".join(f"{key} was {before.get(key)!r}, now {now[key]!r}" for key in differ)
    if args.resume and not before:
        raise ValueError(f"--resume: nothing to resume in {folder} (no config.json of a run); "
                         "leave out --resume to start a run there")
    if args.resume and differ:
        raise ValueError(f"--resume: {folder} holds a run of another configuration: {changes}")
    if contents(folder) and not args.resume:
        check_replaceable(args, folder, before, differ)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def may_go_on(args, steps):
    """Whether --resume may ask for more than those `steps`: the learning rate does not follow."""
    return args.resume and args.lr_scheduler_type == "constant_with_warmup" and args.steps > steps


def check_replaceable(args, folder, before, differ):
    """ValueError unless --overwrite_output_dir asks for this folder's run, and may have it."""
    if not args.overwrite_output_dir:
        of = f" of another configuration ({', '.join(differ)})" if differ else ""
        what = f"holds a run{of}" if before else "is not empty"
        raise ValueError(f"--output_dir {folder} {what}: use --resume to go on with it, "
                         "--overwrite_output_dir to replace it, or another folder")
    if not before:
        raise ValueError(f"--overwrite_output_dir: {folder} does not look like a run "
                         "(no config.json of one); not deleting it")
    for name in SOURCES:
        source = getattr(args, name)
        if source and Path(source).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--overwrite_output_dir would delete --{name} {source}, which is in "
                             f"{folder}: give another --output_dir")


def contents(folder):
    """What lies in a folder, if there is one, besides its lock."""
    return [file for file in folder.iterdir() if file.name != LOCK] if folder.is_dir() else []


def lock(folder):
    """An open file that keeps other processes out of the folder until this one ends, however it
    ends. Raises ValueError if another process has it."""
    number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        if fcntl:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ValueError(f"another process is at work in {folder}: name another --output_dir")
    return number


def arguments_of(folder):
    """The arguments of the run in a folder, {} if there is none."""
    try:
        return json.loads((folder / "config.json").read_text())["arguments"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def begin_run(args, folder):
    """Make the folder this run's own: nothing can be refused any more, so an old run may go."""
    processes.on_first(lambda: begin_here(args, folder))


def begin_here(args, folder):
    for old in contents(folder) if args.overwrite_output_dir else ():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    config = {"arguments": asdict(args), "versions": {
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__}}
    write_text(folder / "config.json", json.dumps(config, indent=1))


def write_text(path, text):
    """Write a small file beside its place, then rename it there."""
    partial = path.with_name(f".partial-{path.name}")
    with naming(path):
        partial.write_text(text)
        os.replace(partial, path)


def append(path, record):
    """One JSON line, in the file before the next line of code runs."""
    with naming(path), open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


@contextmanager
def naming(path):
    """A full disk, a missing permission: one OSError that names the file, whoever was writing."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(f"{path} could not be written: {' '.join(str(error).split())}") from error


def keep_lines(path, step):
    """Drop lines of a .jsonl file later than `step` or cut off: a resumed run has no step twice."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines():
        try:
            if json.loads(text)["step"] <= step:
                kept.append(text + "\n")
        except ValueError:                                   # it was being written
            break
    write_text(path, "".join(kept))


# -------------------------------------------------------------------------------- checkpoints

class Saver:
    """Checkpoints of a run. As a context manager it also saves when an error ends the block."""

    def __init__(self, args, folder):
        self.folder, self.shard, self.marked = folder, args.shard, None

    def hold(self, actor, tokenizer, optimizer, schedule, stream, progress):
        """What is to be saved, besides the random states: what the rest of the run depends on."""
        self.actor, self.tokenizer, self.optimizer = actor, tokenizer, optimizer
        self.schedule, self.stream, self.progress = schedule, stream, progress

    def mark(self, step):
        """Batch `step` is complete: a checkpoint written from now on goes on after it."""
        self.marked = {"step": step, "stream": self.stream.state_dict(), "random": random_state(),
                       "progress": dict(self.progress), "schedule": self.schedule.state_dict()}

    def save(self):
        """Write the checkpoint of the marked batch. Every process takes part, the first writes."""
        marked, self.marked = self.marked, None              # a write that fails is not tried again
        state = marked | processes.whole_state(self.actor, self.optimizer, self.shard)
        with processes.gathered(self.actor) as policy, self.in_full():
            processes.on_first(lambda: save(self.folder, state["step"], policy, self.tokenizer,
                                            state))

    def restore(self):
        """The state of the newest whole checkpoint; the policy was loaded from it before. Returns
        its step, 0 if there is none; ValueError as load_state."""
        step, folder = newest(self.folder)
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            processes.on_first(lambda: keep_lines(self.folder / name, step))
        if folder:
            state = load_state(folder)
            processes.load_state(self.actor, self.optimizer, state, self.shard)
            self.schedule.load_state_dict(state["schedule"])
            self.stream.load_state_dict(state["stream"])
            self.progress.update(state["progress"])
            self.mark(step)
        return step

    def in_full(self):
        """The weights as precise as the optimiser holds them (offload.py)."""
        return getattr(self.optimizer, "masters_shown", nullcontext)()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.marked and isinstance(error, (Exception, SystemExit)):
            with suppress(Exception):                        # the first error is the one to report
                self.rescue()

    def rescue(self):
        """Save the last complete batch, unless that has been done or the weights are ruined. They
        are those of now, with the updates that the batch of the error has made; a resumed run does
        that batch again. Of other processes' shards nothing can be had any more."""
        step, lost = self.marked["step"], self.shard and processes.world() > 1
        finite = all(weight.isfinite().all() for weight in self.actor.parameters())
        if processes.rank() or lost or not finite or step in dict(whole(self.folder)):
            return
        state = self.marked | processes.whole_state(self.actor, self.optimizer, self.shard)
        half = self.schedule.state_dict() != self.marked["schedule"]
        with self.in_full():
            save(self.folder, step, self.actor.policy, self.tokenizer, state)
        print(f"\nan error in batch {step + 1}: saved {self.folder}/checkpoints/step_{step} first"
              f"{', with the updates this batch had made' * half}; --resume goes on from there")


def stop_on_signals():
    """Ctrl-C and SIGTERM let the rollout batch end, then save; a second one stops at once. Returns
    a function: has a signal come, to any process?"""
    caught = []

    def handle(number, frame):
        if caught and time.monotonic() - caught[0] > 2:      # torchrun repeats one at once
            raise KeyboardInterrupt
        if not caught and processes.rank() == 0:             # not print: it may be at work
            os.write(1, b"\nstopping after this rollout batch (once more: at once, "
                        b"back to the last checkpoint)\n")
        caught.append(time.monotonic())

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: any(processes.gather(bool(caught)))


def save(run, step, policy, tokenizer, state):
    """Write checkpoints/step_N and prune old ones. state: plain data and tensors."""
    folder = run / "checkpoints" / f"step_{step}"
    partial, kept = folder.with_name(f".partial-{folder.name}"), [old for _, old in whole(run)]
    last = kept[-1].name if kept else "none"
    try:
        with naming(f"{folder} (the last whole checkpoint is {last})"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_policy(policy, partial)
            tokenizer.save_pretrained(partial)
            torch.save(state, partial / "state.pt")
            for file in [*run.glob("*.jsonl"), *partial.iterdir(), partial]:
                sync(file)                                   # on the disk before the rename says so
            shutil.rmtree(folder, ignore_errors=True)        # it was not whole, or it would be kept
            os.rename(partial, folder)
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in kept[:max(0, len(kept) + 1 - KEEP)]:
        gone = old.with_name(f".partial-{old.name}")
        os.rename(old, gone)                                 # half of one must not look whole
        shutil.rmtree(gone, ignore_errors=True)


def sync(path):
    """Wait until a file, or a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def whole(run):
    """[(step, folder)] of the run's whole checkpoints, oldest first."""
    folders = [file.parent for file in (run / "checkpoints").glob("step_*/state.pt")]
    return sorted((int(folder.name[5:]), folder) for folder in folders
                  if folder.name[5:].isdigit() and (folder / "config.json").is_file())


def newest(run):
    """(step, folder) of the newest whole checkpoint, or (0, None); removes half-written ones."""
    for partial in (run / "checkpoints").glob(".partial-*"):
        print(f"ignoring an incomplete checkpoint: {partial}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
    return (whole(run) or [(0, None)])[-1]


def newest_of_all(run):
    """The folder of the newest whole checkpoint, the same for all processes; or None."""
    return processes.on_first(lambda: newest(run))[1]


def load_state(folder):
    """state.pt of a checkpoint, its random states restored. ValueError if it is more than data."""
    path = folder / "state.pt"
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(f"{path} cannot be read as plain data ({type(error).__name__}): it is "
                         "damaged or holds pickled code, which is never executed; delete this "
                         "checkpoint to use the one before") from None
    saved = state["random"]
    random.setstate(saved["python"])
    name, keys, *more = saved["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *more))
    torch.set_rng_state(saved["torch"])
    return state


def random_state():
    """Python's, NumPy's and torch's global random states: a user's code may draw from any."""
    name, keys, *rest = numpy.random.get_state()
    states = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}
    return states | {"torch": torch.get_rng_state()}
