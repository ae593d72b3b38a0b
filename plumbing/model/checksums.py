"""The checkpoints of a run, and whether their files are what was written.

A checkpoint is a folder named exactly step_N. Its file SHA256SUMS, written last, lists the SHA-256
of every other file, as `sha256sum --check SHA256SUMS` reads it: a flipped bit in a weight is still
a number, so nothing else would notice it. Checkpoints of other programs have no SHA256SUMS and are
not checked.
"""

import hashlib
import re
import shutil
from pathlib import Path

NAME = "SHA256SUMS"
STATE = "state.pt"
STEP = re.compile(r"step_(0|[1-9][0-9]*)")
LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f\x7f]+)")


def step_of(folder):
    """N of a folder step_N; None for a folder with any other name."""
    name = STEP.fullmatch(folder.name)
    return name and int(name[1])


def checkpoints_in(folder):
    """[(N, step_N)] of the checkpoints in the folder checkpoints/ of a run, in the order of N. A
    folder with any other name, for example step_2_backup, is none."""
    steps = [(step_of(step), step) for step in folder.glob("step_*") if step.is_dir()]
    return sorted((number, step) for number, step in steps if number is not None)


def damaged(folder, need_state=False):
    """What is wrong with the files of a checkpoint, for example ["state.pt is missing"]; [] if each
    is listed in SHA256SUMS and is what was written, and for a checkpoint of another program.

    A checkpoint that a run wrote is known by its SHA256SUMS, its state.pt or its place
    (checkpoints/step_N). need_state: --resume needs state.pt; a policy can do without.
    """
    folder = Path(folder)
    sums = folder / NAME
    in_place = step_of(folder) is not None and folder.absolute().parent.name == "checkpoints"
    if not sums.is_file():
        written = need_state or in_place or (folder / STATE).exists()
        return [f"{NAME} is missing"] if written and folder.is_dir() else []
    *lines, end = sums.read_bytes().decode(errors="replace").split("\n")
    listed = [LINE.fullmatch(line) for line in lines]
    if end or not lines or not all(listed):
        return [f"{NAME} is damaged"]
    digests = {name: digest for digest, name in (line.groups() for line in listed)}
    wrong = []
    for name, digest in digests.items():
        file = folder / name
        if file.is_file():
            wrong += [] if digest_of(file) == digest else [f"{name} is damaged"]
        elif name != STATE or need_state:
            wrong.append(f"{name} is missing")
    needed = {"config.json", STATE} if need_state else {"config.json"}
    there = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    visible = {path.as_posix() for path in there if not path.parts[0].startswith(".")}
    unlisted = (visible | needed) - digests.keys() - {NAME}
    return wrong + [f"{name} is not listed in {NAME}" for name in sorted(unlisted)]


def seal(folder):
    """Write SHA256SUMS, the checksums of all other files of a folder, and give all files the
    permissions of a newly created one: safetensors gives its own to their owner alone."""
    sums = folder / NAME
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != sums]
    sums.write_text("".join(f"{digest_of(file)}  {file.relative_to(folder).as_posix()}\n"
                            for file in files), encoding="utf-8")
    for file in files:
        shutil.copymode(sums, file)


def digest_of(file):
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while part := data.read(2 ** 20):
            digest.update(part)
    return digest.hexdigest()


def check_sound(folder, flag, need_state=False):
    """Raise ValueError if a file of a checkpoint is damaged, missing or not listed. flag: the flag
    that named the checkpoint. The message says which other checkpoints of the run are sound."""
    wrong = damaged(folder, need_state)
    if wrong:
        raise ValueError(
            f"{flag} {folder}: {', '.join(wrong)}; {another_one(Path(folder))}. To use files that "
            f"you changed yourself, copy them to another place, without {NAME} and {STATE}")


def another_one(folder):
    """What to do about a damaged checkpoint: which others of the run are sound."""
    others = [other for _, other in checkpoints_in(folder.parent)
              if other.name != folder.name and not damaged(other, need_state=True)]
    if not others:
        return f"no other checkpoint in {folder.parent} is sound, so start a new run"
    return (f"{others[-1]} is sound: use that one (--resume continues from it once {folder} is "
            "deleted)")


def usual_modes(folder):
    """Give all files of a checkpoint the permissions of a newly created file: safetensors gives its
    own to their owner alone."""
    for file in folder.iterdir():
        shutil.copymode(folder / "config.json", file)
