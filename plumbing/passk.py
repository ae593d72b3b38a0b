"""The flags of eval.py's commands, and what `eval.py passk` shows on the screen."""

import argparse
import json
from pathlib import Path

from plumbing.arguments import parse


def quiet_parser(command, description):
    """An argument parser whose complaint is one line, and a ValueError."""
    parser = argparse.ArgumentParser(prog=f"eval.py {command}", allow_abbrev=False,
                                     description=description)

    def refuse(message):
        raise ValueError(f"{command}: {message}")
    parser.error = refuse
    return parser


def runs_and_output(command, description, argv):
    """Run folders and --output, of the commands that draw them."""
    parser = quiet_parser(command, description)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", help="the file (default: one in the first folder)")
    return parser.parse_args(argv)


def options(description, argv):
    """(passk's own flags, train.py's arguments for the rest). Raises ValueError with one line."""
    parser = quiet_parser("passk", description)
    parser.add_argument("--model_name_or_path", nargs="+", default=[None], metavar="DIR_OR_HUB",
                        help="one, or two: before and after; none: the built-in cold start")
    parser.add_argument("--n", type=int, default=16, help="samples per problem")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 16], help="each at most n")
    parser.add_argument("--problems", type=int, default=256, help="at most so many held-out ones")
    parser.add_argument("--examples", type=int, default=2, help="right and wrong answers to show")
    parser.add_argument("--output", default="runs/passk.json", help="where the numbers go")
    own, rest = parser.parse_known_args(argv)
    if own.n < 1 or own.problems < 1 or own.examples < 0:
        raise ValueError(f"--n {own.n}, --problems {own.problems}, --examples {own.examples}: "
                         "at least 1, 1 and 0")
    if len(own.model_name_or_path) > 2:
        raise ValueError(f"--model_name_or_path names {len(own.model_name_or_path)} checkpoints: "
                         "one, or two to compare")
    first = own.model_name_or_path[0]
    return own, parse(rest + (["--model_name_or_path", first] if first else []))


def show(report, answers, problems, examples):
    """One checkpoint's numbers and a few of its answers."""
    print(f"\n{report['model']}   ({report['seconds']:.0f} s)")
    for key, value in report.items():
        if isinstance(value, tuple):
            print(f"  {key:12} {value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]")
    length = f"{report['mean_length']:.1f} tokens, {report['truncated']:.1%} truncated"
    print(f"  {'length':12} {length}")
    first = [(rewards[0] >= 1, problem, texts[0]) for problem, texts, rewards
             in zip(problems, answers["texts"], answers["rewards"])]
    for wanted, word in ((True, "right"), (False, "wrong")):
        for _, problem, text in [answer for answer in first if answer[0] == wanted][:examples]:
            correction = "" if wanted else f"   (right: {problem.answer})"
            print(f"  {word}   {problem.prompt.strip()[-60:]!r} -> {text[-160:]!r}{correction}")


def show_difference(difference):
    """Of two checkpoints: {what: (mean, low, high)} of the second minus the first."""
    print("\nafter minus before, problem by problem")
    for key, (value, low, high) in difference.items():
        sure = "" if low <= 0 <= high else "  more than chance"
        print(f"  {key:12} {value:+.3f} [{low:+.3f}, {high:+.3f}]{sure}")


def save(report, file):
    """The numbers as JSON."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{file}")
