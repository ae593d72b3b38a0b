"""What a run writes, so that nothing is lost: JSON lines, small files, checkpoints.

A checkpoint is written to a temporary folder, synced to the disk and renamed, so a folder named
step_N is complete even if the run was killed. It is an ordinary Hugging Face checkpoint, and its
file state.pt has the rest: optimizer, schedule, random states, data position, critic. state.pt
contains only tensors, numbers and text, and is read with weights_only=True: a pickled object in it
is refused, not executed.
"""

import errno
import json
import os
import random
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from zipfile import is_zipfile

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

from plumbing.parallel import processes
from plumbing.refusal import Refusal, is_bug, refuse_os_errors

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
NOT_STRICT = replace(GATHERED, strict=False)     # AdamW may have no state yet of some weights

KEEP = 2  # largest number of checkpoints that a run keeps
STATE = "state.pt"
NEEDED = {"step", "optimizer", "critic", "schedule", "stream", "random", "progress"}     # in it
STEP = re.compile(r"step_(0|[1-9][0-9]*)")       # the folder of a checkpoint
RECORDS = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl",      # a line per rollout batch
           "minibatches.jsonl")


# ---------------------------------------------------------------------------------- small files

def write_text(path, text):
    """Write a small file under a temporary name, then rename it."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        with name_file_in_errors(path):
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
    finally:
        with suppress(OSError):                              # it is renamed
            partial.unlink()


def append(path, record):
    """Append one JSON line; it is in the file when this function returns."""
    with name_file_in_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


@refuse_os_errors()
def cut_records(path, step):
    """Drop the lines of a .jsonl file that are later than batch `step`, and a line that a kill has
    cut off, so that a resumed run has every step once."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
    write_text(path, "".join(lines))


@contextmanager
def name_file_in_errors(path):
    """Turn an error while writing (disk full, no permission) into one Refusal that names the file
    and the free space: of a full disk torch.save says only "unexpected pos"."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and is_bug(error):
            raise
        folder = next(folder for folder in path.parents if folder.exists())
        free = f"{shutil.disk_usage(folder).free / 1e6:,.0f} MB are free there"
        reason = " ".join(str(error).split())
        raise Refusal(f"{path} could not be written: {reason} ({free})") from error


# ---------------------------------------------------------------------------------- checkpoints

@dataclass
class Progress:
    """How far a run has come, besides its weights: metrics.py counts, screen.py prints it."""

    before: dict | None = None       # what eval.held_out returned before training
    best_score: tuple = ()           # (pass@1, reward, -step) of the best evaluation so far
    best_pass_rate: float = 0.0      # of a rollout batch
    collapsed: str = ""              # how the run has collapsed
    bad: int = 0                     # updates in a row that were not finite
    equal: int = 0                   # batches in a row with equal rewards
    verifier_errors: int = 0         # of the reward functions


class Saver:
    """Checkpoints of a run. As a context manager it also saves when an error ends the block.

    step: the last complete rollout batch.
    """

    def __init__(self, folder, learner, progress, task, signals):
        """learner, progress: the objects that are saved. Together with the random states they are
        all that the rest of the run depends on. task: its training prompts, after those that are
        too long were removed, must be the same when the run is resumed. signals: the run's
        StopSignals."""
        self.folder = folder
        self.digests = task.digests()
        self.signals = signals
        self.unless_stopped = signals.unless_stopped
        self.snapshot = None
        self.step = 0
        self.learner = learner
        self.progress = progress

    def stop(self):
        """Whether a signal has asked any process to stop."""
        return any(self.learner.gather([bool(self.signals.caught)]))

    def step_done(self, step):
        """Batch `step` is complete: save, if it is time. Returns whether the run has been asked to
        stop."""
        self.step = step
        self.take_snapshot(step)
        settings = self.learner.settings
        every = settings.save_steps
        stopping = self.stop()
        if stopping or step == settings.steps or every and step % every == 0:
            state = self.snapshot | self.optimizer_state()
            self.snapshot = None                             # a write that fails is not tried again
            with processes.gathered(self.learner.actor) as policy:
                processes.on_first(lambda: save(self.folder, policy, self.learner.tokenizer, state))
        return stopping

    def take_snapshot(self, step):
        """Keep the state after batch `step`: a run resumed from the next checkpoint continues with
        the batch after it."""
        learner = self.learner
        self.snapshot = {"step": step, "stream": learner.stream.state_dict(),
                         "random": get_rng_state(), "progress": dict(vars(self.progress)),
                         "schedule": learner.schedule.state_dict(), **self.digests,
                         "scaler": learner.scaler.state_dict(),
                         "features": learner.features.state_dict() if learner.features.all else {}}

    def optimizer_state(self):
        """{"optimizer": its state, "critic": weights by name, {} without a critic}. With --shard
        the state is gathered from all processes, so every process must call this."""
        actor = self.learner.actor
        optimizer = self.learner.optimizer
        state = (get_optimizer_state_dict(actor, optimizer, options=GATHERED)
                 if self.learner.settings.shard else optimizer.state_dict())
        critic = {name: getattr(weight, "full_tensor", lambda: weight)()
                  for name, weight in actor.state_dict().items() if name.startswith("critic.")}
        return {"optimizer": state, "critic": critic}

    def restore(self, folder):
        """Restore the state of a checkpoint, from which the policy itself was loaded before. Flags
        that --resume may change hold from now on. Returns notes on data that have changed. Raises
        Refusal if the state does not belong to this run."""
        learner = self.learner
        state = load_state_file(folder)
        if state["step"] > learner.settings.steps:
            raise Refusal(f"--resume: --steps {learner.settings.steps}: {folder} has more: give "
                          f"at least {state['step']}")
        changed = [name for name, now in self.digests.items() if state.get(name, now) != now]
        if "prompts" in changed:
            raise Refusal(f"--resume: the training prompts are not those of {folder}: put them "
                          "back, or start a new run")
        own = self.optimizer_state() | {"stream": learner.stream.state_dict()}

        def compare():                       # sharded states are gathered in the first process
            saved = describe_state(state)
            now = describe_state(own)
            return [name for name in now if saved[name] != now[name]]
        if others := processes.on_first(compare):
            raise Refusal(f"--resume: the state of {folder} does not fit these flags (another "
                          f"{' and '.join(others)}); start a new run")
        load_optimizer(learner, state)
        learner.schedule.load_state_dict(state["schedule"])
        learner.stream.load_state_dict(state["stream"])
        if state.get("scaler"):                              # {} without --fp16
            learner.scaler.load_state_dict(state["scaler"])
        learner.features.load_state_dict(state.get("features", {}))
        self.step = state["step"]
        vars(self.progress).update(state["progress"])
        apply_optimizer_flags(learner)
        set_rng_state(state["random"])
        notes = []
        if "answers" in changed:
            notes.append(f"note: answers, or other columns, of the training rows are not those of "
                         f"{folder}: rewards follow the new ones")
        if "test" in changed and self.progress.before:
            self.progress.before = None
            self.progress.best_score = ()
            notes.append(f"note: the test rows are not those of {folder}: earlier scores are left "
                         "out of the summary")
        self.take_snapshot(self.step)
        return "\n".join(notes)

    def __enter__(self):
        self.signals.training = True
        return self

    def __exit__(self, error_type, error, trace):
        self.signals.training = error is not None            # a signal does not disturb its end
        if self.snapshot and isinstance(error, (Exception, SystemExit)):
            with suppress(Exception):                        # the first error is the one to report
                self.save_after_error()

    def save_after_error(self):
        """After an error: save the last complete batch, unless it is saved already or a weight is
        not finite. The weights are the current ones and include the updates of the failed batch; a
        resumed run repeats that batch. With --shard nothing can be saved, because the shards of the
        other processes are out of reach."""
        learner = self.learner
        step = self.snapshot["step"]
        lost = learner.settings.shard and processes.world() > 1
        finite = all(weight.isfinite().all() for weight in learner.actor.parameters())
        if processes.rank() or lost or not finite or step in dict(list_checkpoints(self.folder)):
            return
        updated = learner.schedule.state_dict() != self.snapshot["schedule"]
        state = self.snapshot | self.optimizer_state()
        save(self.folder, learner.actor.policy, learner.tokenizer, state)
        updates = ", with the updates that this batch had made" if updated else ""
        print(f"\nerror in batch {step + 1}; {self.folder}/checkpoints/step_{step} was saved"
              f"{updates}; --resume continues from it")


def describe_state(state):
    """What of a saved state must be as in the run that goes on from it, by names for the user."""
    return {"number of trained weights": [len(group["params"])
                                          for group in state["optimizer"]["param_groups"]],
            "critic": state["critic"].keys(), "order of the prompts": state["stream"].keys()}


def load_optimizer(learner, state):
    """The reverse of Saver.optimizer_state."""
    actor = learner.actor
    optimizer = learner.optimizer
    if learner.settings.shard:
        set_optimizer_state_dict(actor, optimizer, state["optimizer"], options=NOT_STRICT)
        for name, p in actor.named_parameters():             # which torch fills in
            if name not in state["optimizer"]["state"]:
                optimizer.state.pop(p, None)
    else:
        optimizer.load_state_dict(state["optimizer"])
    set_model_state_dict(actor, state["critic"], options=NOT_STRICT)


def apply_optimizer_flags(learner):
    """After the optimizer and its schedule are restored, with the rates of the run so far: set
    those of the flags, as in a run that had these flags from the beginning."""
    settings = learner.settings
    optimizer = learner.optimizer
    schedule = learner.schedule
    schedule.base_lrs = [settings.learning_rate] * len(optimizer.param_groups)
    for group, share in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = settings.learning_rate
        group["lr"] = settings.learning_rate * share(schedule.last_epoch)
        group["weight_decay"] = settings.weight_decay


# ---------------------------------------------------------------------------------- their files

def save(run, policy, tokenizer, state):
    """Write checkpoints/step_N and delete all but the newest KEEP. state: plain data and tensors;
    state["step"] is N."""
    folder = run / "checkpoints" / f"step_{state['step']}"
    partial = folder.with_name(".partial")       # one that a kill has left is written anew
    try:
        with name_file_in_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            torch.save(state, partial / STATE)
            files = [path for path in partial.rglob("*") if path.is_file()]
            for file in files:                               # safetensors: for the owner alone
                with suppress(OSError):                      # a file system without modes
                    shutil.copymode(partial / "config.json", file)
            records = [run / name for name in RECORDS if (run / name).exists()]
            for path in [*records, *files, partial]:
                sync(path)                                   # on the disk before the rename
            os.rename(partial, folder)                       # fails if there is one already
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for _, path in list_checkpoints(run)[:-KEEP]:
        shutil.rmtree(path, ignore_errors=True)


def sync(path):
    """Wait until a file, or a folder, is on the disk, if the file system has a call for that.
    Windows cannot open a folder, and fsync there needs a file that may be written to."""
    folder = path.is_dir()
    if folder and not hasattr(os, "O_DIRECTORY"):
        return
    try:
        number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if not folder and error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def list_checkpoints(run):
    """[(step, folder)] of the run's checkpoints, oldest first. A folder with any other name, for
    example step_2_backup, is none."""
    steps = [(STEP.fullmatch(folder.name), folder)
             for folder in (run / "checkpoints").glob("step_*") if folder.is_dir()]
    return sorted((int(name[1]), folder) for name, folder in steps if name)


@refuse_os_errors()
def find_newest(run):
    """The folder of the newest checkpoint, None if the run has saved none yet. Raises Refusal if
    a file is missing, or if the checkpoint of a run that has ended is gone."""
    *older, newest = [folder for _, folder in list_checkpoints(run)] or [None]
    if newest is None and (run / "summary.json").exists():
        raise Refusal(f"--resume: {run} holds a run that has ended, and its checkpoint in "
                      f"{run}/checkpoints is gone: put it back, or start a new run")
    missing = [name for name in ("config.json", "*.safetensors", "tokenizer_config.json", STATE)
               if newest and not are_complete([*newest.glob(name)])]
    if missing:
        raise Refusal(f"--resume: {newest} is incomplete: it lacks {', '.join(missing)}, or a "
                      "part of it; "
                      + (f"delete it to continue from {older[-1]}" if older else
                         "put that back, or start a new run"))
    return newest


def are_complete(files):
    """Whether there are files, and none of weights or of the state is cut off."""
    try:
        for file in files:
            if file.suffix == ".safetensors":
                safe_open(file, "pt")
            elif file.name == STATE and not is_zipfile(file):
                return False
        return bool(files)
    except SafetensorError:
        return False


def load_state_file(folder):
    """state.pt of a checkpoint. Raises Refusal if it cannot be read, or contains anything but
    data."""
    path = folder / STATE
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise Refusal(f"--resume: {path} cannot be read as plain data ({type(error).__name__}): "
                      "pickled code is never executed; delete this checkpoint to continue from "
                      "the one before") from None
    if not isinstance(state, dict) or not NEEDED <= state.keys():
        raise Refusal(f"--resume: {path} is not the state of a run: delete this checkpoint to "
                      "continue from the one before")
    return state


# ------------------------------------------------------------------------------- random numbers

def seed_all(seed):
    """Seed Python's, NumPy's and torch's generators, as transformers.set_seed does. The import of
    that function would also import the trainer and peft and delay the first output by seconds."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)                                  # for the CPU and every GPU


def get_rng_state():
    """The global random states of Python, NumPy and torch, any of which a user's code may use."""
    name, keys, *rest = numpy.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest],
            "torch": torch.get_rng_state()}


def set_rng_state(states):
    """The reverse of get_rng_state."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
