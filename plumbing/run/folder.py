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
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from plumbing.run.checkpoints import write_text
from plumbing.parallel import processes

try:
    import fcntl
except ImportError:                                          # on Windows runs are not locked
    fcntl = None

# Flags that may differ when a run is resumed, because they do not change what is computed.
FREE = {"resume", "overwrite_output_dir", "output_dir", "save_steps", "eval_steps", "report_to",
        "save_tokens", "print_trl_config", "print_verl_config"}
SOURCES = ("model_name_or_path", "dataset_name", "test_dataset_name", "stage2_dataset_name")
LOCK = ".lock"


# --------------------------------------------------------------------------------- the folder

@contextmanager
def run_folder(args):
    """The run's folder, locked inside the block. A new folder is removed if the block wrote nothing
    into it."""
    folder, locks = processes.on_first(lambda: open_run(args)), []
    try:
        processes.on_first(lambda: locks.append(lock(folder)))
        yield folder
    finally:
        if locks and not contents(folder):                   # only the first process has a lock
            shutil.rmtree(folder)
        for number in locks:
            os.close(number)


def open_run(args):
    """The run's folder: that of an old run which may be resumed or replaced, or else a new one.
    Raises ValueError if the folder holds anything that must not be replaced."""
    if args.output_dir is None:
        for n in itertools.count(1):
            folder = Path(f"runs/{args.algorithm}" + (f"-{n}" if n > 1 else ""))
            with suppress(FileExistsError):                  # another run may take the name first
                folder.mkdir(parents=True)
                return folder
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: give the name of a folder")
    before, now = arguments_of(folder), asdict(args)
    free = FREE | {"steps"} if may_go_on(args, before.get("steps", args.steps)) else FREE
    differ = [key for key in now if before and key not in free and before.get(key) != now[key]]
    changes = ", ".join(f"{key} was {before.get(key)!r}, now {now[key]!r}" for key in differ)
    if args.resume and not before:
        raise ValueError(f"--resume: nothing to resume in {folder} (no config.json of a run); "
                         "leave out --resume to start a run there")
    if args.resume and differ == ["steps"] and args.steps > before["steps"]:
        raise ValueError(f"--resume: {changes}. The {args.lr_scheduler_type} learning-rate "
                         f"schedule depends on --steps, so a run of {before['steps']} steps cannot "
                         f"be extended to {args.steps}; only a run with --lr_scheduler_type "
                         "constant_with_warmup can. Start a new run from the last checkpoint, with "
                         f"--model_name_or_path {folder}/checkpoints/step_N")
    if args.resume and differ:
        raise ValueError(f"--resume: {folder} holds a run with other flags: {changes}")
    if contents(folder) and not args.resume:
        check_replaceable(args, folder, before, differ)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def may_go_on(args, steps):
    """Whether --resume may extend a run of `steps` batches: only if its learning-rate schedule does
    not depend on the number of batches."""
    return args.resume and args.lr_scheduler_type == "constant_with_warmup" and args.steps > steps


def check_replaceable(args, folder, before, differ):
    """Raise ValueError unless --overwrite_output_dir is given and may delete what is in the
    folder."""
    if not args.overwrite_output_dir:
        of = f" with other flags ({', '.join(differ)})" if differ else ""
        what = f"holds a run{of}" if before else "is not empty"
        raise ValueError(f"--output_dir {folder} {what}: use --resume to continue that run, "
                         "--overwrite_output_dir to replace it, or another folder")
    if not before:
        raise ValueError(f"--overwrite_output_dir: {folder} does not look like the folder "
                         "of a run (it has no config.json of a run); it is not deleted")
    for name in SOURCES:
        source = getattr(args, name)
        if source and Path(source).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--overwrite_output_dir would delete --{name} {source}, which is in "
                             f"{folder}: give another --output_dir")


def contents(folder):
    """The files of a folder without its lock; [] if the folder does not exist."""
    return [file for file in folder.iterdir() if file.name != LOCK] if folder.is_dir() else []


def lock(folder):
    """Lock the folder until this process ends, even if it is killed. Returns the open lock file.
    Raises ValueError if another process has locked the folder."""
    number = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        if fcntl:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ValueError(f"another process is using {folder}: give another --output_dir")
    return number


def arguments_of(folder):
    """The arguments of the run in a folder; {} if it holds no run."""
    try:
        return json.loads((folder / "config.json").read_text())["arguments"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def begin_run(args, folder):
    """Delete an old run from the folder if asked to, and write config.json. This is called only
    after every check has passed."""
    processes.on_first(lambda: begin_here(args, folder))


def begin_here(args, folder):
    for old in contents(folder) if args.overwrite_output_dir else ():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    config = {"arguments": asdict(args), "versions": {
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__}}
    write_text(folder / "config.json", json.dumps(config, indent=1))
