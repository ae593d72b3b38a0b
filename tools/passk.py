"""`eval.py passk`: evaluate checkpoints, print and save their scores."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import torch
from transformers.utils import logging

from plumbing.model.policy import load_policy
from plumbing.parallel.devices import kind_of
from plumbing.engines.samplers import evaluation_sampler
from plumbing.data.tasks import from_arguments


def majority(texts, rewards):
    """1 if the most frequent answer of the samples is right, else 0; tied answers share the vote.
    The answer of a sample is its last \\boxed{…}, else the text after ####, else the whole text."""
    def vote(text):
        boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
        return (boxed[-1] if boxed else text.rpartition("####")[2]).strip()
    votes = [vote(text) for text in texts]
    counts = Counter(votes)
    winners = [vote for vote, count in counts.items() if count == max(counts.values())]
    return sum(rewards[votes.index(winner)] >= 1 for winner in winners) / len(winners)


def scores(answers, ks, pass_at_k):
    """{score: one number per problem}: pass@k for every k, majority@n, and means over the n
    samples."""
    texts, rewards = answers["texts"], answers["rewards"]
    right, n = [sum(r >= 1 for r in row) for row in rewards], len(rewards[0])
    found = {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in dict.fromkeys([1, *ks])}
    found[f"majority@{n}"] = [majority(t, r) for t, r in zip(texts, rewards)]
    found["mean_length"] = [sum(row) / n for row in answers["lengths"]]
    return found | {"truncated": [sum(row) / n for row in answers["truncated"]]}


def compare(own, args, evaluate, pass_at_k, with_interval):
    """Evaluate each checkpoint, print the scores and save them. evaluate, pass_at_k, with_interval:
    the functions of eval.py."""
    logging.disable_progress_bar()
    task, device = from_arguments(args), torch.device(kind_of(args))
    problems, found = task.test[:own.problems], []

    def intervals(scores, least=0.0):
        """{score: (mean, low, high)}. All but the length are shares, or differences of shares."""
        return {name: with_interval(values, None if name == "mean_length" else (least, 1.0))
                for name, values in scores.items()}
    report = {"dataset": task.name, "problems": len(problems), "n": own.n,
              "temperature": args.temperature, "seed": args.seed, "checkpoints": []}
    print(f"{task.name}: {len(problems)} held-out problems, {own.n} samples each "
          f"at temperature {args.temperature:g}")
    for name in own.model_name_or_path:
        began, title = time.perf_counter(), str(name or "cold start")
        policy, tokenizer = load_policy(args, task, device, name)
        sampler = evaluation_sampler(args, policy, tokenizer, task)
        answers = evaluate(args, sampler, task, problems, own.n, args.temperature, seed=args.seed,
                           progress=title)
        found.append(scores(answers, own.k, pass_at_k))
        one = {"model": title, **intervals(found[-1]), "seconds": time.perf_counter() - began}
        report["checkpoints"].append(one)
        show(one, answers, problems, own.examples)
    if len(found) == 2:
        before, after = found
        gains = {key: [b - a for a, b in zip(before[key], after[key])] for key in before}
        report["difference"] = intervals(gains, least=-1.0)
        show_difference(report["difference"])
    Path(own.output).parent.mkdir(parents=True, exist_ok=True)
    Path(own.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{own.output}")


def show(report, answers, problems, examples):
    """Print the scores of one checkpoint and a few of its responses."""
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
        sure = "" if low <= 0 <= high else "  the interval excludes 0"
        print(f"  {key:12} {value:+.3f} [{low:+.3f}, {high:+.3f}]{sure}")
