"""The run folder: create, resume or overwrite it, and refuse a folder that must not be used.

    config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  summary.json
    checkpoints/step_N/{config.json, model.safetensors, tokenizer…, state.pt}
"""

import itertools
import json
import platform
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from plumbing.model.adapters import find_base_model, is_adapter
from plumbing.model.policy import explain_missing
from session.checkpoints import RECORDS, cut_records, write_text
from session.arguments import (CALL_FLAGS, find_code, flags, format_flags, format_value,
                               read_run_config)
from plumbing.parallel import processes

LOCK = ".lock"


# --------------------------------------------------------------------------------- the folder

@contextmanager
def run_folder(settings):
    """The run's folder, locked inside the block. The folder of a new run is removed again if the
    block ends before the first rollout batch is complete, so that the next run gets its name; one
    that existed before is left empty."""
    existed = settings.output_dir is not None and Path(settings.output_dir).exists()
    folder = processes.on_first(lambda: open_run(settings))
    locks = []
    try:
        processes.on_first(lambda: locks.append(lock(folder)))
        yield folder
    finally:
        begun = {file.name for file in list_files(folder)} - {"config.json"}
        if locks and not begun and not settings.resume:          # only the first process has a lock
            for file in folder.iterdir():
                file.unlink()
            if not existed:
                folder.rmdir()
        for one in locks:
            one.release()


def format_resume(explicit_flags, folder):
    """The flags that continue the run in a folder; a FILE.py:NAME must be typed again."""
    call = {"output_dir": str(folder), "resume": True}
    return format_flags(call | find_code(explicit_flags))


def open_run(settings):
    """The run's folder: that of an old run which may be resumed or replaced, or else a new one.
    Raises ValueError as check_folder does."""
    folder = check_folder(settings)
    while settings.output_dir is None:
        with suppress(FileExistsError):                  # another run may take the name first
            folder.mkdir(parents=True)
            return folder
        folder = find_free_name(settings.algorithm)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be made: {error.strerror}") from None
    return folder


def find_free_name(algorithm):
    """The first of runs/<algorithm>, runs/<algorithm>-2 … that does not exist."""
    names = (f"runs/{algorithm}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
    return next(folder for folder in map(Path, names) if not folder.exists())


def check_folder(settings):
    """The name of the run's folder; nothing is made. Raises ValueError if the folder holds anything
    that must not be replaced, or if a checkpoint to start from does not exist."""
    for name in [f.name for f in flags() if "checkpoint" in f.metadata and not settings.resume]:
        source = getattr(settings, name)
        if source and (reason := explain_missing(source)):
            raise ValueError(f"--{name} {source}: {reason}")
    if settings.output_dir is None:
        return find_free_name(settings.algorithm)
    folder = Path(settings.output_dir)
    is_run = bool(read_run_config(folder))
    if settings.resume and not is_run:
        raise ValueError(f"--resume: {folder} has no readable config.json of a run: put it back, "
                         "or start from one of its checkpoints (--model_name_or_path)")
    if list_files(folder) and not settings.resume:
        check_replaceable(settings, folder, is_run)
    return folder


def check_replaceable(settings, folder, is_run):
    """Raise ValueError unless the folder holds a run, --overwrite_output_dir is given, and nothing
    that the new run reads is in the folder."""
    if not is_run:
        raise ValueError(f"--output_dir {folder} is not empty, and it has no readable config.json "
                         "of a run, so nothing in it is replaced: give another folder")
    if not settings.overwrite_output_dir:
        raise ValueError(f"--output_dir {folder} holds a run: use --resume to continue that run, "
                         "--overwrite_output_dir to replace it, or another folder")
    for name, text, path in list_paths_read(settings):
        if path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--overwrite_output_dir would delete {path} in {folder}, which "
                             f"--{name} {text} needs: give another --output_dir")


def list_paths_read(settings):
    """(name of a flag, its text, path) of all that a run with these flags may read: checkpoints
    and their bases, data, FILE.py:NAME, @FILE. Flags whose text never names a file (`text`,
    `choices`) are left out."""
    for f in flags():
        value = getattr(settings, f.name)
        texts = [] if f.metadata.keys() & {"text", "choices"} else value
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str):
                yield f.name, text, Path(text.removeprefix("@"))
                if is_adapter(text):
                    yield f.name, text, Path(find_base_model(text))


def list_files(folder):
    """The files of a folder without its lock; [] if the folder does not exist."""
    return [file for file in folder.iterdir() if file.name != LOCK] if folder.is_dir() else []


def lock(folder):
    """Lock the folder until release() of the lock that is returned, or until this process ends,
    even if it is killed. Raises ValueError if another process has locked the folder."""
    held = FileLock(folder / LOCK)
    try:
        held.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"another process is using {folder}: give another --output_dir") from None
    return held


def begin_run(settings, folder, task, step):
    """Delete an old run from the folder if asked to, drop the records after batch `step`, from
    which a resumed run goes on (0: a new run), and write config.json. This is called only after
    every check has passed.

    config.json: "settings", the flags that were set, which --resume reads and which may be edited;
    "resolved", all flags with the values that follow, the length limit that the task decided among
    them; "changes", what was changed between batches. Returns a note for the screen, or "".
    """
    return processes.on_first(lambda: write_config(settings, folder, task, step))


def write_config(settings, folder, task, step):
    for old in list_files(folder) if settings.overwrite_output_dir else ():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    run = read_run_config(folder) if settings.resume else {}
    for path in [folder / name for name in RECORDS if (folder / name).exists()]:
        cut_records(path, step)
    resolved = {f.name: getattr(settings, f.name) for f in flags() if f.name not in CALL_FLAGS}
    resolved["max_completion_length"] = task.max_completion_length
    before = run.get("resolved", {})
    changes = {name: [before[name], value] for name, value in resolved.items()
               if name in before and before[name] != value}
    config = {
        "settings": {name: value for name, value in settings.explicit_flags.items()
                     if name not in CALL_FLAGS},
        "resolved": resolved,
        "changes": run.get("changes", []) + [{"from_batch": step + 1} | changes] * bool(changes),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__}}
    write_text(folder / "config.json", json.dumps(config, indent=1))
    notes = [f"{name} {format_value(was)} -> {format_value(now)} from batch {step + 1}"
             for name, (was, now) in changes.items()]
    if run and not step:
        notes.append("no checkpoint yet: starts again at batch 1")
    return "\n".join(notes)
