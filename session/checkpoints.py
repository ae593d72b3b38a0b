"""The run folder and its checkpoints.

    config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  summary.json
    checkpoints/step_N/{config.json, model.safetensors, tokenizer…, state.pt}

A checkpoint is written to a temporary folder and renamed, so a folder named step_N is complete even
if the run was killed. It is an ordinary Hugging Face checkpoint, and its file state.pt has the
rest: optimizer, random states, data position, critic. state.pt contains only tensors, numbers and
text, and is read with weights_only=True: a pickled object in it is refused, not executed.
"""

import itertools
import json
import os
import random
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

from plumbing.parallel import processes
from plumbing.refusal import Refusal, refuse_os_errors

KEEP = 2  # largest number of checkpoints that a run keeps
STATE = "state.pt"
LOCKS = set()    # of the run folders of this process, which holds them until it ends


# ------------------------------------------------------------------------------------- the folder

def choose_folder(settings):
    """The run's folder, which is not made yet: --output_dir, or the first of runs/<algorithm>,
    runs/<algorithm>-2 … that does not exist."""
    if settings.output_dir is None:
        names = (f"runs/{settings.algorithm}" + f"-{n}" * (n > 1) for n in itertools.count(1))
        return next(Path(name) for name in names if not Path(name).exists())
    folder = Path(settings.output_dir)
    refuse_old_run(settings, folder)
    if settings.resume:
        lock(folder)
    return folder


def refuse_old_run(settings, folder):
    """Refuse to begin a run where it would replace a file, of another run or anybody's."""
    names = ("config.json", "summary.json", "checkpoints/*", *records(settings))
    held = [path for name in names for path in folder.glob(name)]
    if held and not settings.resume:
        raise Refusal(f"{held[0]} exists: use --resume to continue a run, or another --output_dir")


def records(settings):
    """The names of the files to which a run appends lines with a step."""
    return ["metrics.jsonl", "samples.jsonl", *["tokens.jsonl"] * settings.save_tokens,
            *[name for feature in settings.features for name in feature.records]]


def lock(folder):
    """Lock the folder until this process ends, even if it is killed."""
    held = FileLock(folder / ".lock", is_singleton=True)     # one per folder in this process
    try:
        held.acquire(blocking=False)
    except Timeout:
        raise Refusal(f"another process is using {folder}: give another --output_dir") from None
    LOCKS.add(held)


@refuse_os_errors()
def begin_run(settings, folder, step):
    """Make and lock the folder, write config.json, and drop the run's records after batch `step`,
    from which a resumed run goes on, and a line that a kill has cut off. Returns the folder: the
    next one if another run has taken a default one in the meantime."""
    try:
        folder.mkdir(parents=True, exist_ok=settings.output_dir is not None)
    except FileExistsError:
        if settings.output_dir:
            raise
        return begin_run(settings, choose_folder(settings), step)
    lock(folder)
    refuse_old_run(settings, folder)     # begun in --output_dir in the meantime
    write_text(folder / "config.json", json.dumps(asdict(settings), indent=1))
    for file in filter(Path.exists, [folder / name for name in records(settings)]):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_text(file, "".join(kept))
    return folder


def write_text(file, text):
    """Write a small file in one step: a kill leaves the old text or the new one."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


# ------------------------------------------------------------------------------------ checkpoints

def save(folder, learner, step):
    """Write checkpoints/step_N of a run. Every process must call this."""
    state = {"step": step, "updates": learner.updates, "optimizer": optimizer_state(learner),
             "critic": critic_weights(learner.actor), "stream": learner.stream.state_dict(),
             "scaler": learner.scaler.state_dict(), "rows": learner.data_digest,
             "random": [random.getstate(), torch.get_rng_state()]}
    with processes.gathered(learner.actor) as policy:
        if processes.rank() == 0:
            write(folder, policy, learner, state)


def optimizer_state(learner):
    """The optimizer's state; of shards that of all processes."""
    if not learner.settings.shard:
        return learner.optimizer.state_dict()
    return get_optimizer_state_dict(learner.actor, learner.optimizer, options=StateDictOptions(
        full_state_dict=True, cpu_offload=True))


def critic_weights(actor):
    """The critic's weights by name; {} without a critic."""
    return {name: getattr(weight, "full_tensor", lambda: weight)()
            for name, weight in actor.state_dict().items() if name.startswith("critic.")}


def write(folder, policy, learner, state):
    """Write checkpoints/step_N, in full before it has its name, and delete all before it but the
    newest KEEP - 1."""
    target = folder / "checkpoints" / f"step_{state['step']}"
    partial = target.with_name(".partial")       # one that a kill has left is written anew
    shutil.rmtree(partial, ignore_errors=True)
    try:
        policy.save_pretrained(partial)
        learner.tokenizer.save_pretrained(partial)
        state["features"] = {type(f).__name__: f.state_dict(partial) for f in learner.features}
        torch.save(state, partial / STATE)
        for path in [*partial.rglob("*"), partial]:
            sync(path)                           # before a power cut can find it under its name
    except Exception as error:                   # torch and safetensors raise no OSError
        if shutil.disk_usage(folder).free > 2 ** 20:
            raise
        raise Refusal(f"the disk is full, and {target} is not saved: make room; --resume continues "
                      "from the checkpoint before it") from error
    partial.rename(target)
    sync(target.parent)
    saved = list_checkpoints(folder)
    for old in saved[:saved.index(target) + 1][:-KEEP]:
        shutil.rmtree(old)


def sync(path):
    """Wait until a file, or the names in a folder, are on the disk. Windows has this for files
    alone."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    os.fsync(number)
    os.close(number)


def list_checkpoints(folder):
    """The folders of the run's checkpoints, oldest first: step_N that have a state of ours."""
    saved = [state.parent for state in folder.glob(f"checkpoints/step_*/{STATE}")]
    return sorted((path for path in saved if path.name[5:].isdecimal()),
                  key=lambda path: int(path.name[5:]))


def restore(checkpoint, learner):
    """Go on from a checkpoint, from which the policy itself was loaded before. Returns the number
    of its batch."""
    state = torch.load(checkpoint / STATE, weights_only=True, map_location="cpu")
    if state["rows"] != learner.data_digest:
        raise Refusal(f"--resume: the training rows are not those of {checkpoint}; begin another "
                      "run")
    whole = StateDictOptions(full_state_dict=True, strict=False)
    if learner.settings.shard:
        set_optimizer_state_dict(learner.actor, learner.optimizer, state["optimizer"],
                                 options=whole)
        for name, p in learner.actor.named_parameters():     # torch fills in what had no gradient
            if name not in state["optimizer"]["state"]:
                learner.optimizer.state.pop(p, None)
    else:
        learner.optimizer.load_state_dict(state["optimizer"])
    set_model_state_dict(learner.actor, state["critic"], options=whole)
    learner.set_updates(state["updates"])
    learner.stream.load_state_dict(state["stream"])
    learner.scaler.load_state_dict(state["scaler"])
    for feature in learner.features:
        feature.load_state_dict(state["features"].get(type(feature).__name__), checkpoint)
    python, torchs = state["random"]
    random.setstate(python)
    torch.set_rng_state(torchs)
    return state["step"]


# ---------------------------------------------------------------------------------------- Ctrl-C

class Stop:
    """`with Stop() as stop:` lets Ctrl-C, or SIGTERM, complete a run's rollout batch and save it. A
    second one, more than two seconds later, stops it at once: torchrun repeats a signal
    immediately."""

    def __enter__(self):
        self.since = None        # when the first signal came
        self.before = [(number, signal.signal(number, self.handle))
                       for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *error):
        for number, handler in self.before:
            signal.signal(number, handler)

    def handle(self, number, frame):
        now = time.monotonic()
        if self.since is None:
            self.since = now
            print("\nstopping after this rollout batch, which will be saved; again: at once")
        elif now > self.since + 2:
            raise KeyboardInterrupt
