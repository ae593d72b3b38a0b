"""The settings of a run in another program's words.

    python tools/export.py trl FLAGS OF TRAIN.PY      a trl.GRPOConfig for TRL 1.16
    python tools/export.py verl FLAGS OF TRAIN.PY     the command and the overrides of verl 0.9.1

Comments say what the program does otherwise under these settings, and what is left to you. Where
it has no equivalent, one comment says what it lacks.
"""

import sys
from dataclasses import fields, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)    # tools/ has a file named trl.py

from features.feature import Feature
from plumbing.data.task import Task
from plumbing.data.tasks import from_arguments
from session.arguments import as_words, parse
from tools import trl, verl
from tools.commands import until_the_reader_leaves

PROGRAMS = {"trl": trl, "verl": verl}


def of_features(program, settings):
    """{the function of a feature that the run has: its flags}, where it says itself what the
    program calls them."""
    hook = program.__name__.rpartition(".")[2]               # trl or verl
    return {getattr(feature, hook): " ".join(f.name for f in fields(feature.flags))
            for feature in settings.features
            if getattr(feature, hook).__func__ is not getattr(Feature, hook).__func__}


def with_length_limit(settings):
    """The Settings with the length limit of their task in max_completion_length. No data are
    read."""
    limit = settings.max_completion_length or Task.max_completion_length
    if settings.dataset_name is None:
        limit = from_arguments(settings).max_completion_length
    return replace(settings, max_completion_length=limit)


def joined(program, settings):
    """(keys, lacks, notes) of a run in a program's words: {key: value}, a list of what the program
    does not have, a list of what it does otherwise. Its SUBJECTS, and the run's features, are
    functions that return {key: value}, or ({key: value}, note, ...), or the words for what is
    missing there."""
    keys = {}
    lacks = []
    notes = []
    for subject in [*program.SUBJECTS, *of_features(program, settings)]:
        found = subject(settings)
        if isinstance(found, str):
            lacks.append(found)
            continue
        more, *said = found if isinstance(found, tuple) else (found,)
        keys |= more
        notes += said
    return keys, lacks, notes


def keys_of(program, settings):
    """{key: value} of a run. Raises ValueError with one line if the program has no equivalent."""
    keys, lacks, _ = joined(program, with_length_limit(settings))
    if lacks:
        raise ValueError(f"no equivalent in {program.NAME}: it has no {', no '.join(lacks)}")
    return {key: value for key, value in keys.items() if value is not None}


def exported(program, settings):
    """The text of a run: comments, then the settings; or one comment that says what is missing."""
    settings = with_length_limit(settings)
    keys, lacks, notes = joined(program, settings)
    if lacks:
        return f"# no equivalent in {program.NAME}: it has no {', no '.join(lacks)}"
    subjects = program.SUBJECTS | of_features(program, settings)
    known = {flag for flags in subjects.values() for flag in flags.split()}
    others = [as_words(flag, value) for flag, value in settings.given.items() if flag not in known]
    if others:
        notes.append(f"{program.ELSEWHERE}: {' '.join(others)}")
    comments = [f"# {note}" for note in (f"{settings.algorithm} by {program.NAME}", *notes)]
    return "\n".join([*comments, program.text(settings, keys)])


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit
    try:
        if argv[0] not in PROGRAMS:
            raise ValueError(f"{argv[0]} is not a program; the programs are {', '.join(PROGRAMS)}")
        print(exported(PROGRAMS[argv[0]], parse(argv[1:])))
    except ValueError as error:
        print(f"export.py: {error}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    with until_the_reader_leaves():
        main()
