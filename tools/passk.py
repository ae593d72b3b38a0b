"""The flags of eval.py's commands, and what `eval.py passk` shows and saves."""

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path

import torch
from transformers.utils import logging

from plumbing.run.arguments import parse
from plumbing.model.policy import load_policy
from plumbing.data.tasks import from_arguments


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
    for k in own.k:
        if not 1 <= k <= own.n:
            raise ValueError(f"k is {k}: pass@k needs 1 <= k <= n = {own.n} samples per problem")
    if len(own.model_name_or_path) > 2:
        raise ValueError(f"--model_name_or_path names {len(own.model_name_or_path)} checkpoints: "
                         "one, or two to compare")
    first = own.model_name_or_path[0]
    return own, parse(rest + (["--model_name_or_path", first] if first else []))


def majority(texts, rewards):
    """1 if the answer that most samples agree on is right, else 0; tied answers share the vote.
    Samples agree if their last \\boxed{…} is the same, else what follows ####, else the text."""
    def vote(text):
        boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
        return (boxed[-1] if boxed else text.rpartition("####")[2]).strip()
    votes = [vote(text) for text in texts]
    counts = Counter(votes)
    winners = [vote for vote, count in counts.items() if count == max(counts.values())]
    return sum(rewards[votes.index(winner)] >= 1 for winner in winners) / len(winners)


def scores(answers, ks, pass_at_k):
    """One number per problem: pass@k for every k, majority@n, and means over its n samples."""
    texts, rewards = answers["texts"], answers["rewards"]
    right, n = [sum(r >= 1 for r in row) for row in rewards], len(rewards[0])
    found = {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in dict.fromkeys([1, *ks])}
    found[f"majority@{n}"] = [majority(t, r) for t, r in zip(texts, rewards)]
    found["mean_length"] = [sum(row) / n for row in answers["lengths"]]
    return found | {"truncated": [sum(row) / n for row in answers["truncated"]]}


def compare(own, args, evaluate, pass_at_k, with_interval):
    """Evaluate each checkpoint, with eval.py's functions of these names; show and save."""
    logging.disable_progress_bar()
    use_cuda = torch.cuda.is_available() and not args.use_cpu
    task, device = from_arguments(args), torch.device("cuda" if use_cuda else "cpu")
    problems, found = task.test[:own.problems], []
    intervals = lambda scores: {name: with_interval(values) for name, values in scores.items()}
    report = {"dataset": task.name, "problems": len(problems), "n": own.n,
              "temperature": args.temperature, "seed": args.seed, "checkpoints": []}
    print(f"{task.name}: {len(problems)} held-out problems, {own.n} samples each "
          f"at temperature {args.temperature:g}")
    for name in own.model_name_or_path:
        began, title = time.perf_counter(), str(name or "cold start")
        policy, tokenizer = load_policy(args, task, device, name)
        answers = evaluate(args, policy, tokenizer, task, problems, own.n, args.temperature,
                           seed=args.seed, progress=title)
        found.append(scores(answers, own.k, pass_at_k))
        one = {"model": title, **intervals(found[-1]), "seconds": time.perf_counter() - began}
        report["checkpoints"].append(one)
        show(one, answers, problems, own.examples)
    if len(found) == 2:
        before, after = found
        gains = {key: [b - a for a, b in zip(before[key], after[key])] for key in before}
        report["difference"] = intervals(gains)
        show_difference(report["difference"])
    Path(own.output).parent.mkdir(parents=True, exist_ok=True)
    Path(own.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{own.output}")


def show(report, answers, problems, examples):
    """One checkpoint's numbers and a few of its answers."""
    print(f"\n{report['model']}   ({report['seconds']:.0f} s)")
    for key, value in report.items():
        if isinstance(value, tuple):
            print(f"  {key:12} {value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]")
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
