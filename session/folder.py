"""The run folder: create, resume or overwrite it, and refuse a folder that must not be used.

    config.json  metrics.jsonl  samples.jsonl  tokens.jsonl  summary.json
    checkpoints/step_N/{config.json, model.safetensors, tokenizer…, state.pt}
"""

import itertools
import json
import os
import platform
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from plumbing.model.adapters import find_base_model, is_adapter
from plumbing.model.policy import explain_missing
from plumbing.refusal import Refusal, refuse_os_errors
from session.checkpoints import RECORDS, append, cut_records, list_checkpoints, write_text
from session.arguments import CALL_FLAGS, flags, format_value, read_run_config
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
        processes.on_first(lambda: try_folder(folder))
        yield folder
    finally:
        begun = {file.name for file in list_files(folder)} - {"config.json"}
        for one in locks:                                    # only the first process has one
            if one:
                one.release()                                # Windows deletes no open file
            if not begun and not settings.resume:
                for file in folder.iterdir():
                    file.unlink()
                if not existed:
                    folder.rmdir()


@refuse_os_errors()
def open_run(settings):
    """The run's folder: that of an old run which may be resumed or replaced, or else a new one.
    Raises Refusal as check_folder does."""
    check_folder(settings)
    if settings.output_dir is None:
        return make_new_folder(settings.algorithm)
    folder = Path(settings.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--output_dir {folder} cannot be made: {error.strerror}") from None
    return folder


def make_new_folder(algorithm):
    """Make the first of runs/<algorithm>, runs/<algorithm>-2 … that does not exist."""
    for n in itertools.count(1):
        folder = Path(f"runs/{algorithm}" + (f"-{n}" if n > 1 else ""))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def check_folder(settings):
    """Raise Refusal if the run's folder holds anything that must not be replaced, or if a
    checkpoint to start from does not exist. Nothing is made."""
    for name, source in () if settings.resume else list_sources(settings):
        if reason := explain_missing(source):
            raise Refusal(f"--{name} {source}: {reason}")
    if settings.output_dir is None:
        return
    folder = Path(settings.output_dir)
    if settings.resume or not list_files(folder):
        return
    if not read_run_config(folder):
        raise Refusal(f"--output_dir {folder} is not empty, and it has no readable config.json "
                      "of a run, so nothing in it is replaced: give another folder")
    if not settings.overwrite_output_dir:
        raise Refusal(f"--output_dir {folder} holds a run: use --resume to continue that run, "
                      "--overwrite_output_dir to replace it, or another folder")
    deleted = [path.resolve() for path in list_results(folder)]
    for name, value in (*list_sources(settings), *settings.explicit_flags.items()):
        for source in value if isinstance(value, list) else [value]:
            path = Path(str(source).removeprefix("@")).resolve()
            if any(map(path.is_relative_to, deleted)):
                raise Refusal(f"--overwrite_output_dir would delete {source}, which --{name} "
                              "needs: give another --output_dir")


def list_results(folder):
    """What a run has written into its folder, which --overwrite_output_dir deletes."""
    saved = [path for _, path in list_checkpoints(folder)]
    return [*saved, *(folder / name for name in ("summary.json", *RECORDS))]


def list_sources(settings):
    """(name of a flag, folder or hub id) of every checkpoint that a new run starts from, and of the
    base model of one that is an adapter."""
    for name in [f.name for f in flags() if "checkpoint" in f.metadata]:
        source = getattr(settings, name)
        if source:
            yield name, source
        if is_adapter(source):
            yield name, find_base_model(source)


def list_files(folder):
    """The files of a folder without its lock; [] if the folder does not exist."""
    return [file for file in folder.iterdir() if file.name != LOCK] if folder.is_dir() else []


@refuse_os_errors()
def lock(folder):
    """Lock the folder until release() of the lock that is returned, or until this process ends,
    even if it is killed. None, with a note, where a file system has no locks. Raises Refusal if
    another process has locked the folder."""
    held = FileLock(folder / LOCK)
    try:
        held.acquire(blocking=False)
    except Timeout:
        raise Refusal(f"another process is using {folder}: give another --output_dir") from None
    except (OSError, NotImplementedError) as error:
        print(f"note: {folder} cannot be locked ({error}): start no second run in it")
        return None
    return held


def try_folder(folder):
    """Try, before anything is trained, what records and checkpoints need of the file system: to
    append to a file, to replace it, to rename a folder. Raises Refusal."""
    trial = folder / ".trial"
    try:
        (trial / "partial").mkdir(parents=True, exist_ok=True)
        append(trial / "partial/file", {})
        append(trial / "partial/file", {})
        write_text(trial / "partial/file", "")
        os.rename(trial / "partial", trial / "renamed")
    except (OSError, Refusal) as error:
        raise Refusal(f"--output_dir {folder}: {error}; give another folder") from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)


@refuse_os_errors()
def begin_run(settings, folder, task, step):
    """Delete an old run from the folder if asked to, drop the records after batch `step`, from
    which a resumed run goes on (0: a new run), and write config.json. This is called only after
    every check has passed, and in the first process.

    config.json: "settings", the flags that were set, which --resume reads and which may be edited;
    "resolved", all flags with the values that follow, the length limit that the task decided among
    them; "changes", what was changed between batches. Returns a note for the screen, or "".
    """
    for old in list_results(folder) if settings.overwrite_output_dir else ():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
    run = read_run_config(folder) if settings.resume else {}
    if step and not (folder / "metrics.jsonl").exists():
        raise Refusal(f"--resume: {folder}/metrics.jsonl is gone: put it back, or start a new run "
                      "from a checkpoint (--model_name_or_path)")
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
