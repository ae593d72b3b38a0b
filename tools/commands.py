"""The command line of eval.py: its commands, their flags, and their checks.

Nothing here imports transformers, so that --help and error messages appear immediately.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from plumbing.refusal import Refusal
from session.arguments import (Parser, Settings, flags, format_flags, parse, parse_flags,
                               read_run_config, read_run_layer)
from session.checks import check_conditions
from session.errors import errors_in_one_line

COMMANDS = {
    "ask": "Sample responses of a checkpoint to your prompt, with the settings of its run.",
    "passk": "pass@1 and pass@k of a checkpoint, or of two and their difference.",
    "claims": "The questions and their verdicts, as experiments/run.py prints them.",
    "dashboard": "Draw the curves of one run, or of several in the same panels: a PNG file.",
    "view": "Show which tokens the clip removes, for one run or two side by side: an HTML file.",
}


@contextmanager
def exit_on_broken_pipe():
    """Exit without a traceback if what reads this script's output closes the pipe, as `| head`
    does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # Python flushes at its end
        raise SystemExit(1) from None


def check_output(path):
    """Refuse an output file that cannot be written, before the work for it."""
    if path is None:
        return
    if os.path.isdir(path):
        raise Refusal(f"--output {path} is a folder: give a file")
    file = Path(path).absolute()
    there = next(place for place in (file, *file.parents) if os.path.exists(place))
    if there != file and not there.is_dir() or not os.access(there, os.W_OK):
        raise Refusal(f"--output {path} cannot be written: {there} is a file, or read-only")


def parse_command(argv, description):
    """(command, its parsed flags). For ask and passk these are their own and train.py's Settings,
    for claims the list of words, else the run folders and the output file. Prints the description
    and exits for --help.

    Raises Refusal with one line.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(description)
        raise SystemExit
    command, *words = argv
    if command not in COMMANDS:
        raise Refusal(f"{command} is not a command; the commands are {', '.join(COMMANDS)}")
    parsers = {"ask": parse_ask, "passk": parse_passk, "claims": list}
    return command, parsers[command](words) if command in parsers else parse_runs(command, words)


def check_flags_first(argv, description):
    """Before the slow imports of eval.py: print --help, refuse wrong flags (exit code 2), or print
    a first line."""
    with errors_in_one_line("eval.py"):
        parse_command(argv, description)
    print("loading transformers ...", flush=True)


def parse_runs(command, argv):
    """The parsed flags of the commands that draw runs: run folders and --output."""
    parser = Parser(f"eval.py {command}", description=COMMANDS[command], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", help="output file (default: a file in the first run folder)")
    if command == "view":
        parser.add_argument("--kilobytes", type=int, help="size of the page: of "
                            "longer runs, evenly spaced batches are shown (default: 3000)")
    options = parser.parse_args(argv)
    check_output(options.output)
    return options


def make_sampling_parser(command):
    """The parser of a command that samples from checkpoints."""
    shared = [f"--{f.name}" for f in flags() if f.metadata.get("evaluation")]
    parser = Parser(f"eval.py {command}", description=COMMANDS[command], allow_abbrev=False,
                    epilog="The checkpoint of a run is used with the settings of that run; flags "
                           "override them. Flags of train.py that also apply here: "
                           f"{', '.join(shared)}.")
    parser.add_argument("--trust_run_code", action="store_true",
                        help="import every FILE.py:NAME that the run's config.json names")
    return parser


def parse_ask(argv):
    """(ask's own flags, Settings), as parse_passk returns them."""
    parser = make_sampling_parser("ask")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or hub id")
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt, without the run's template")
    parser.add_argument("--n", type=int, help="responses, besides the greedy one (default: 4; with "
                        "an environment, which you play, none)")
    parser.add_argument("--answer", help="the right answer: the run's reward function then "
                        "scores the responses")
    options, rest = parser.parse_known_args(argv)
    if options.n is not None and options.n < 1:
        raise Refusal(f"ask: --n {options.n}: it must be at least 1")
    options.model_name_or_path = [options.checkpoint]
    settings = parse_settings(options, rest, "ask")
    options.n = options.n or (0 if settings.played else 4)
    return options, settings


def parse_passk(argv):
    """(passk's own flags, train.py's Settings for the rest). options.line describes the settings.
    Raises Refusal with one line."""
    parser = make_sampling_parser("passk")
    parser.add_argument("--model_name_or_path", nargs="+", default=[None], metavar="DIR_OR_HUB",
                        help="one checkpoint, or two to compare (default: the built-in model "
                             "after its supervised warm-up)")
    parser.add_argument("--n", "--num_generations", "--eval_samples", type=int, default=16,
                        help="responses sampled per problem (default: 16)")
    parser.add_argument("--k", type=int, nargs="+",
                        help="values of k for pass@k, at most n (default: 1, 4 and 16, up to n)")
    parser.add_argument("--problems", "--eval_prompts", type=int, default=256,
                        help="largest number of held-out problems (default: 256)")
    parser.add_argument("--output", default="runs/passk.json",
                        help="file for the numbers (default: runs/passk.json)")
    options, rest = parser.parse_known_args(argv)
    options.k = options.k or [k for k in (1, 4, 16) if k <= options.n]
    if options.n < 1 or options.problems < 1:
        raise Refusal(f"--n {options.n}, --problems {options.problems}: they must be at least 1")
    for k in options.k:
        if not 1 <= k <= options.n:
            raise Refusal(f"k is {k}: pass@k needs 1 <= k <= n = {options.n} samples per "
                          "problem")
    if (count := len(options.model_name_or_path)) > 2:
        raise Refusal(f"--model_name_or_path names {count} checkpoints: give one, or two to "
                      "compare")
    check_output(options.output)
    return options, parse_settings(options, rest, "passk")


def parse_settings(options, rest, command):
    """The Settings for sampling from the checkpoints options.model_name_or_path: those of their
    run, and the flags `rest` of train.py. Sets options.line. Raises Refusal."""
    first = options.model_name_or_path[0]
    rest += ["--model_name_or_path", first] if first else []
    typed = parse_flags(rest)
    for f in flags():
        if f.name in typed and not f.metadata.get("evaluation"):
            raise Refusal(f"{command}: --{f.name} affects training only, not an evaluation")
    run, kept = read_run_settings(options.model_name_or_path, typed, options.trust_run_code)
    options.line = describe_settings(run, kept, typed)
    settings = parse(rest, kept)
    check_conditions(settings, "evaluation_needs")
    return settings


def read_run_settings(names, typed, trusted):
    """(run folder, {flag: value}) of the run that made the checkpoints `names`: what decides how
    it is evaluated, without the flags `typed` on the command line; (None, {}) if no run made them.
    Raises Refusal if two runs differ, and as read_run_layer does."""
    found = {}
    for name in filter(None, names):
        run = Path(name).parent.parent
        if Path(name).absolute().parent.name == "checkpoints" and (config := read_run_config(run)):
            found[run] = select_for_evaluation(config["resolved"], typed)
    if not found:
        return None, {}
    (run, kept), *others = found.items()
    for other, theirs in others:
        differ = [name for name in kept | theirs if kept.get(name) != theirs.get(name)]
        if differ:
            raise Refusal(f"{run} and {other} were evaluated with other settings: give --"
                          f"{', --'.join(differ)}")
    return run, read_run_layer(kept, typed | {"trust_run_code": trusted}, run)


def select_for_evaluation(resolved, typed):
    """The part {flag: value} of a run's settings that decides how it is evaluated: what differs
    from the defaults and is not typed. Another data set takes over prompts, not problems."""
    dataset = resolved.get("dataset_name")
    same = typed.get("dataset_name", dataset) == dataset
    kinds = ("kept", "problems") if same else ("kept",)
    names = {f.name for f in flags() if f.metadata.get("evaluation") in kinds}
    defaults = vars(Settings())
    return {name: resolved[name] for name in defaults if name in names and name not in typed
            and resolved.get(name, defaults[name]) != defaults[name]}


def describe_settings(run, kept, typed):
    """The line with the settings that checkpoints are evaluated with."""
    others = {name: value for name, value in typed.items() if name != "model_name_or_path"}
    source = "default settings, not those of a run"
    if run:
        source = f"settings of {run}: {format_flags(kept) or 'none'}"
    return f"{source}; command line: {format_flags(others) or 'none'}"
