"""The exception that says whom an error is for."""

import sys
from contextlib import contextmanager


class Refusal(SystemExit):
    """What the user of the command line can correct: a flag, a file, data, a model. It ends the
    script with its text, one line that says what is wrong, where, and what to do.

    Any other exception is for the reader who changes the code, and keeps its traceback."""

    @property
    def code(self):
        """The exit code, that of argparse. Python asks for it when the script ends."""
        sys.stderr.write(f"{self}\n")   # one write; print makes two, which processes can mix
        return 2


@contextmanager
def refuse_os_errors():
    """An OSError in the block, which reads or writes the user's files, becomes a Refusal."""
    try:
        yield
    except OSError as error:
        raise Refusal(error) from error
