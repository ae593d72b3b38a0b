"""The settings of a run in TRL's words.

    python tools/export.py trl FLAGS OF TRAIN.PY      prints a trl.GRPOConfig for TRL 1.16

Comments name what TRL computes differently under these settings, and what is left to you. Where
TRL has no equivalent, one comment names what it lacks. For verl and slime see docs/speed.md.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    sys.path[0] = str(Path(__file__).resolve().parent.parent)    # tools/ has a file named trl.py

from plumbing.refusal import Refusal
from session.arguments import parse
from session.errors import errors_in_one_line
from tools.commands import exit_on_broken_pipe
from tools.trl import config_text


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit
    with errors_in_one_line("export.py"), exit_on_broken_pipe():
        if argv[0] == "verl":
            raise Refusal('verl\'s keys are a table in docs/speed.md, "One run in other words"')
        if argv[0] != "trl":
            raise Refusal(f"{argv[0]} is not a program; write trl and the flags of train.py")
        print(config_text(parse(argv[1:])))


if __name__ == "__main__":
    main()
