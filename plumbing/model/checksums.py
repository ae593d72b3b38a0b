"""Checksums of a checkpoint: its file SHA256SUMS, written last (run/checkpoints.py), lists the
SHA-256 of every other file, as `sha256sum --check SHA256SUMS` reads it. Here they are compared.

A flipped bit in a weight is still a number, so nothing else would notice it. Checkpoints of other
programs have no SHA256SUMS and are not checked.
"""

import hashlib
import re
import shutil
from pathlib import Path

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f\x7f]+)")

def damaged(folder, optional=()):
    """The names of the files of a checkpoint that are not what was written, or are missing; [] for
    a folder without checksums. optional: names of files that may be missing."""
    sums = Path(folder) / NAME
    if not sums.is_file():
        return []
    *lines, end = sums.read_bytes().decode(errors="replace").split("\n")
    listed = [LINE.fullmatch(line) for line in lines]
    if end or not all(listed):
        return [NAME]
    wrong = []
    for digest, name in (line.groups() for line in listed):
        file = sums.parent / name
        if not file.is_file():
            wrong += [] if name in optional else [name]
        else:
            with open(file, "rb") as data:
                wrong += [] if hashlib.file_digest(data, "sha256").hexdigest() == digest else [name]
    return wrong


def check_sound(folder, flag, optional=()):
    """Raise ValueError if a file of a checkpoint is damaged. flag: the flag that named the
    checkpoint. The message says which other checkpoints of the run are sound."""
    bad = damaged(folder, optional)
    if bad:
        raise ValueError(
            f"{flag} {folder}: {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} damaged or "
            f"missing; {another_one(Path(folder))}. If you changed a file there yourself, delete "
            f"{NAME}")


def another_one(folder):
    """What to do about a damaged checkpoint: which others of the run are sound."""
    others = [other for other in folder.parent.glob("step_*")
              if other.name != folder.name and (other / NAME).is_file() and not damaged(other)]
    if not others:
        return f"no other checkpoint in {folder.parent} is sound, so start a new run"
    newest = max(others, key=lambda other: int(other.name.removeprefix("step_")))
    return (f"{newest} is sound: use that one (--resume continues from it once {folder} is "
            "deleted)")


def usual_modes(folder):
    """Give all files of a checkpoint the permissions of a newly created file: safetensors gives its
    own to their owner alone."""
    for file in folder.iterdir():
        shutil.copymode(folder / "config.json", file)
