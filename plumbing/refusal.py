"""The exception that says whom an error is for."""

import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Refusal(ValueError):
    """What the user of the command line can correct: a flag, a file, data, a model, a full disk.
    The script ends with its text, one line that says what is wrong, where, and what to do.

    Any other exception is for the reader who changes the code, and keeps its traceback; a
    ValueError too, of this project, torch or Python."""


@contextmanager
def refuse_os_errors():
    """An OSError in the block, which reads or writes the user's files, becomes a Refusal."""
    try:
        yield
    except OSError as error:
        raise Refusal(error) from error


def in_project(file):
    file = Path(file)
    return (file.is_relative_to(ROOT)
            and not {"tests", "site-packages"}.intersection(file.relative_to(ROOT).parts))


def is_bug(error):
    """Whether a line of this project raised the error, which is no Refusal: it is for the reader
    who changes the code, even where what a library raises is for the user."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    return in_project(file) and not isinstance(error, Refusal)
