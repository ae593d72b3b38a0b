"""The exception that says whom an error is for."""

from contextlib import contextmanager


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
