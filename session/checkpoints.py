"""What a run writes, so that nothing is lost: JSON lines, small files, checkpoints.

A checkpoint is written to a temporary folder, which is then renamed. A folder named step_N is
therefore always complete, even if the run was killed; checksums of its files, written last, show
later damage. It is an ordinary Hugging Face checkpoint, and its file state.pt has the rest:
optimizer, schedule, random states, data position, critic. state.pt contains only tensors, numbers
and text, and is read with weights_only=True: a pickled object in it is refused, not executed.
"""

import json
import os
import random
import shutil
import signal
import time
from contextlib import contextmanager, suppress

import numpy
import torch
from safetensors import SafetensorError

from plumbing.model import checksums
from plumbing.parallel import processes
from session.arguments import FREE, changed, config_of, flags, spelled

KEEP = 2  # largest number of checkpoints that a run keeps
# Files with a line per rollout batch, and an entry that every line has beside its "step".
RECORDS = {"metrics.jsonl": "pass_rate", "samples.jsonl": "samples", "tokens.jsonl": "tokens"}


def write_text(path, text):
    """Write a small file under a temporary name, then rename it."""
    partial = path.with_name(f".partial-{path.name}")
    with naming(path):
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)


def append(path, record):
    """Append one JSON line; it is in the file when this function returns."""
    with naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


@contextmanager
def naming(path, more=""):
    """Turn an error while writing (disk full, no permission) into one OSError that names the file
    and the free space: of a full disk torch.save says only "unexpected pos"."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        there = next(folder for folder in path.parents if folder.exists())
        free = f"{shutil.disk_usage(there).free / 1e6:,.0f} MB are free there"
        told = " ".join(str(error).split())
        raise OSError(f"{path}{more} could not be written: {told} ({free})") from error


def keep_lines(path, step):
    """Drop the lines of a .jsonl file that are later than `step`, so that a resumed run has no step
    twice, and lines that are not whole records. Returns a note about the latter and about batches
    that have no record, "" if there are none."""
    optional = path.name == "tokens.jsonl"
    if optional and not path.exists():
        return ""
    kept = {}
    skipped = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            later = record["step"] > step
            whole = RECORDS[path.name] in record
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if not whole:
            skipped.append(number)
        elif not later:
            kept[record["step"]] = line + b"\n"
    partial = path.with_name(f".partial-{path.name}")
    with naming(path):
        partial.write_bytes(b"".join(kept.values()))
        os.replace(partial, path)
    lost = [] if optional else [n for n in range(1, step + 1) if n not in kept]
    notes = (("left out what is no whole record: line", skipped), ("no record of batch", lost))
    return "; ".join(f"{path}: {what} {', '.join(map(str, numbers[:5]))}"
                     f"{f' and {len(numbers) - 5} more' if len(numbers) > 5 else ''}"
                     for what, numbers in notes if numbers)


class Saver:
    """Checkpoints of a run. As a context manager it also saves when an error ends the block.

    step: the last complete rollout batch. stop(): whether a signal has asked any process to stop.
    """

    def __init__(self, folder, learner, progress, origin):
        """learner, progress: the objects that are saved. Together with the random states they are
        all that the rest of the run depends on. origin: what `origin_of` returns; it is saved so
        that --resume can compare it."""
        self.folder = folder
        self.origin = origin
        self.shard = learner.settings.shard
        self.every = learner.settings.save_steps
        self.last = learner.settings.steps
        self.marked = None
        self.step = 0
        self.learner = learner
        self.progress = progress
        self.stop = stop_on_signals(learner)

    def mark(self, step):
        """Batch `step` is complete: save, if it is time. Returns whether the run has been asked to
        stop."""
        self.note(step)
        stopping = self.stop()
        if stopping or step == self.last or self.every and step % self.every == 0:
            self.save()
        return stopping

    def note(self, step):
        """Note the state after batch `step`: a run resumed from the next checkpoint continues with
        the batch after it."""
        learner = self.learner
        self.marked = {"step": step, "stream": learner.stream.state_dict(),
                       "random": random_state(), "progress": dict(self.progress),
                       "schedule": learner.schedule.state_dict(), "origin": self.origin,
                       "scaler": learner.scaler.state_dict(),
                       "features": learner.features.state_dict() if learner.features.all else {}}

    def save(self):
        """Write the checkpoint of the marked batch. All processes must call this; only the first
        one writes."""
        marked = self.marked
        self.marked = None                                   # a write that fails is not tried again
        state = marked | self.state()
        if self.alone():
            return self.write(state, self.learner.actor.policy)
        with processes.gathered(self.learner.actor) as policy:
            processes.on_first(lambda: self.write(state, policy))

    def write(self, state, policy):
        save(self.folder, state["step"], policy, self.learner.tokenizer, state)

    def alone(self):
        """Whether there is one process, which holds all weights."""
        return self.learner.world == 1 and not self.shard

    def state(self):
        """The optimizer's state, and the critic's weights by name ({} without a critic)."""
        actor = self.learner.actor
        optimizer = self.learner.optimizer
        if not self.alone():
            return processes.whole_state(actor, optimizer, self.shard)
        critic = {name: weight for name, weight in actor.state_dict().items()
                  if name.startswith("critic.")}
        return {"optimizer": optimizer.state_dict(), "critic": critic}

    def restore(self):
        """Restore the state of the newest complete checkpoint, if there is one. The policy itself
        was loaded from it before. Returns notes for the screen, or "". Raises ValueError as
        load_plain does."""
        learner = self.learner
        self.step, folder = newest(self.folder)
        if folder is None:
            return ""
        notes = [processes.on_first(lambda: keep_lines(self.folder / name, self.step))
                 for name in RECORDS]
        state = load_plain(folder / checksums.STATE)
        draw_on(state["random"])
        processes.load_state(learner.actor, learner.optimizer, state, self.shard)
        learner.schedule.load_state_dict(state["schedule"])
        learner.stream.load_state_dict(state["stream"])
        learner.scaler.load_state_dict(state.get("scaler", {}))         # not in old checkpoints
        learner.features.load_state_dict(state.get("features", {}))     # the same
        self.progress.update(state["progress"])
        notes.append(on_schedule(learner.optimizer, learner.schedule, self.last, self.step))
        self.note(self.step)
        return "\n".join(filter(None, notes))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.marked and isinstance(error, (Exception, SystemExit)):
            with suppress(Exception):                        # the first error is the one to report
                self.rescue()

    def rescue(self):
        """After an error: save the last complete batch, unless it is saved already or a weight is
        not finite. The weights are the current ones and include the updates of the failed batch; a
        resumed run repeats that batch. With --shard nothing can be saved, because the shards of the
        other processes are out of reach."""
        step = self.marked["step"]
        lost = self.shard and processes.world() > 1
        finite = all(weight.isfinite().all() for weight in self.learner.actor.parameters())
        if processes.rank() or lost or not finite or step in dict(whole(self.folder)):
            return
        half = self.learner.schedule.state_dict() != self.marked["schedule"]
        self.write(self.marked | self.state(), self.learner.actor.policy)
        print(f"\nerror in batch {step + 1}; {self.folder}/checkpoints/step_{step} was saved"
              f"{', with the updates that this batch had made' * half}; --resume continues from it")


def plan(settings, learner, saved):
    """A line for the screen: when the run saves, and how much. saved: the checkpoint that it goes
    on from, or None. The size is that of the trained weights and AdamW's two moments of each, in
    float32."""
    trained = [p for p in learner.actor.parameters() if p.requires_grad]
    kept = [of for state in learner.features.state_dict().values()
            for of in state.values() if isinstance(of, list)]
    size = 4 * sum(x.numel() for x in [*trained * 3, *sum(kept, [])])
    each = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2g} MB"
    done = checksums.step_of(saved) if saved else 0
    every = settings.save_steps
    first = done + every - done % every if every else settings.steps
    often = f"every {every} rollout batches, " if first < settings.steps else ""
    return (f"checkpoints of about {each}: {often}the first after batch "
            f"{min(first, settings.steps)}")


def on_schedule(optimizer, schedule, steps, step):
    """After a resume with more --steps: the learning rate of the next update is that of a run which
    had these --steps from the beginning. Returns a note about the change, "" if there is none."""
    note = ""
    for group, top, share in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        was = group["lr"]
        group["lr"] = top * share(schedule.last_epoch)
        if group["lr"] != was:
            note = (f"--steps {steps}: from batch {step + 1} on, the learning rate is that of a "
                    f"schedule over {steps} batches: {group['lr']:.2e}, after {was:.2e}")
    return note


def stop_on_signals(learner):
    """After Ctrl-C or SIGTERM the run completes its rollout batch and saves; a second signal stops
    it immediately. Returns a function: whether any process of the run has received a signal."""
    caught = []

    def handle(number, frame):
        if caught and time.monotonic() - caught[0] > 2:      # torchrun repeats a signal immediately
            raise KeyboardInterrupt
        if not caught and processes.rank() == 0:             # print could be interrupted in itself
            os.write(1, b"\nstopping after this rollout batch, which will be saved (press again "
                        b"to stop immediately, without saving it)\n")
        caught.append(time.monotonic())

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: any(learner.gather([bool(caught)]))


def save(run, step, policy, tokenizer, state):
    """Write checkpoints/step_N and delete all but the newest KEEP. state: plain data and
    tensors."""
    folder = run / "checkpoints" / f"step_{step}"
    partial = folder.with_name(f".partial-{folder.name}")
    kept = [old for _, old in whole(run)]
    last = kept[-1].name if kept else "none"
    try:
        with naming(folder, f" (the last complete checkpoint is {last})"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            torch.save(state, partial / checksums.STATE)
            checksums.seal(partial)
            for file in [*run.glob("*.jsonl"), *partial.iterdir(), partial]:
                sync(file)                                   # on the disk before the rename
            os.rename(partial, folder)                       # fails if there is one already
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in kept[:max(0, len(kept) + 1 - KEEP)]:
        gone = old.with_name(f".partial-{old.name}")
        os.rename(old, gone)                                 # it must not look complete
        shutil.rmtree(gone, ignore_errors=True)


def sync(path):
    """Wait until a file, or a folder, is on the disk. Windows cannot open a folder, and fsync there
    needs a file that may be written to."""
    folder = path.is_dir()
    if folder and not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def whole(run):
    """[(step, folder)] of the run's checkpoints, oldest first."""
    return checksums.checkpoints_in(run / "checkpoints")


def newest(run):
    """(step, folder) of the newest checkpoint, or (0, None); removes incomplete ones."""
    for partial in (run / "checkpoints").glob(".partial-*"):
        print(f"ignoring an incomplete checkpoint: {partial}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
    return (whole(run) or [(0, None)])[-1]


def newest_of_all(run, origin):
    """The folder of the newest checkpoint, the same for all processes; None if the run has saved
    none yet. Raises ValueError if one of its files is damaged, if it was made with other settings
    or data than `origin`, or if the checkpoints of a run that had some are gone."""
    return processes.on_first(lambda: newest_sound(run, origin))


def newest_sound(run, origin):
    folder = newest(run)[1]
    if folder:
        checksums.check_sound(folder, "--resume", need_state=True)
        check_origin(run, folder, origin)
    elif (run / "summary.json").exists():
        raise ValueError(f"--resume: {run} holds a run that has ended, and its checkpoint in "
                         f"{run}/checkpoints is gone: put it back, or start a new run")
    return folder


def origin_of(settings, task):
    """What a run is made of, as a checkpoint keeps it: {"settings": {flag: value} of all that
    change what is computed, "data": {part of the task: digest}}."""
    return {"settings": {f.name: getattr(settings, f.name) for f in flags() if f.name not in FREE},
            "data": task.digests()}


def check_origin(run, folder, origin):
    """Raise ValueError if the checkpoint was made with other settings, or other data, than those of
    the run that is to go on from it, or with others than its config.json names: whoever edited them
    there wants what --resume cannot do."""
    saved = load_plain(folder / checksums.STATE, mmap=True).get("origin", {})
    made = saved.get("settings", {})
    written = config_of(run)["arguments"]
    written.pop("max_completion_length", None)               # there, it is the task's
    differ = changed(made, origin["settings"]) or changed(made, written)
    if differ:
        raise ValueError(f"--resume: {folder} was made with other settings than those of now: "
                         f"{spelled(differ)}; give its values as flags, change {run}/config.json "
                         "back, or start a new run")
    data = saved.get("data", {})
    parts = [name for name in data if data[name] != origin["data"].get(name)]
    if parts:
        raise ValueError(f"--resume: the {' and the '.join(parts)} are not those that {folder} was "
                         "made with: put them back, or start a new run")


def load_plain(path, mmap=False):
    """state.pt of a checkpoint. Raises ValueError if it is damaged or contains anything but data.
    mmap: tensors are read only when they are used."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as plain data ({type(error).__name__}): it is "
                         "damaged or holds pickled code, which is never executed; delete this "
                         "checkpoint to use the previous one") from None


def seed_all(seed):
    """Seed Python's, NumPy's and torch's generators, as transformers.set_seed does. The import of
    that function would also import the trainer and peft and delay the first output by seconds."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)                                  # for the CPU and every GPU


def random_state():
    """The global random states of Python, NumPy and torch, any of which a user's code may use."""
    name, keys, *rest = numpy.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest],
            "torch": torch.get_rng_state()}


def draw_on(states):
    """The reverse of random_state."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
