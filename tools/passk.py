"""`eval.py passk`: evaluate checkpoints, print and save their scores."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import torch
from transformers.utils import logging

from plumbing.model.policy import load_policy
from plumbing.run.screen import with_limits
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
    texts = answers["texts"]
    rewards = answers["rewards"]
    right = [sum(r >= 1 for r in row) for row in rewards]
    n = len(rewards[0])
    columns = {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in dict.fromkeys([1, *ks])}
    columns[f"majority@{n}"] = [majority(t, r) for t, r in zip(texts, rewards)]
    columns["reward"] = answers["mean_rewards"]
    columns["mean_length"] = [sum(row) / n for row in answers["lengths"]]
    return columns | {"truncated": [sum(row) / n for row in answers["truncated"]]}


def that_fit(args, task, tokenizer, problems, most):
    """(the first `most` problems whose prompts encode_prompt accepts, a note about those that it
    refused, ""). Raises ValueError if no prompt is left."""
    kept = []
    refused = []
    for problem in problems:
        if len(kept) == most:
            break
        try:
            task.encode(tokenizer, [problem], args.chat_template, args.max_prompt_length)
            kept.append(problem)
        except ValueError as error:
            refused.append(str(error))
    if not kept:
        raise ValueError(f"none of the {len(problems)} held-out prompts fits; {refused[-1]}")
    if task.trial:
        task.trial(tokenizer)
    note = f"left out {len(refused)} held-out prompt(s): {refused[0]}" if refused else ""
    return kept, note


def compare(own, args, evaluate, pass_at_k, with_interval):
    """Evaluate each checkpoint, print the scores and save them. evaluate, pass_at_k, with_interval:
    the functions of eval.py."""
    logging.disable_progress_bar()
    task = from_arguments(args)
    device = torch.device(kind_of(args))
    problems = task.test
    most = own.problems
    rated = []
    report = {"dataset": task.name, "n": own.n, "temperature": args.temperature,
              "seed": args.seed, "checkpoints": []}
    print(f"{task.name}: {own.n} samples for each held-out problem at temperature "
          f"{args.temperature:g}")
    for name in own.model_name_or_path:
        began = time.perf_counter()
        title = str(name or "cold start")
        policy, tokenizer = load_policy(args, task, device, name)
        problems, note = that_fit(args, task, tokenizer, problems, most)
        if note:
            print(note)
        sampler = evaluation_sampler(args, policy, tokenizer, task)
        answers = evaluate(args, sampler, task, problems, own.n, args.temperature, seed=args.seed,
                           progress=title)
        limits = {"mean_length": (0, task.max_completion_length),
                  "reward": answers["reward_limits"]}
        rated.append(dict(zip(problems, by_problem(scores(answers, own.k, pass_at_k)))))
        one = {"model": title, "problems": len(problems),
               **intervals(rated[-1].values(), limits, with_interval),
               "reward_parts": answers["reward_parts"], "seconds": time.perf_counter() - began}
        report["checkpoints"].append(one)
        show(one, answers, problems, own.examples)
    report["problems"] = len(problems)
    if len(rated) == 2:
        before, after = rated                                # the second may have fewer problems
        gains = [{key: after[p][key] - before[p][key] for key in after[p]} for p in problems]
        widths = {key: pair and (pair[0] - pair[1], pair[1] - pair[0])
                  for key, pair in limits.items()}
        report["difference"] = intervals(gains, widths, with_interval, (-1.0, 1.0))
        first, last = (one["reward_parts"] for one in report["checkpoints"])
        report["difference"]["reward_parts"] = {part: last[part] - first[part] for part in last}
        show_difference(report["difference"])
    Path(own.output).parent.mkdir(parents=True, exist_ok=True)
    Path(own.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{own.output}")


def by_problem(columns):
    """{score: one number per problem} -> for each problem {score: number}."""
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def intervals(rows, limits, with_interval, shares=(0.0, 1.0)):
    """{score: (mean, low, high)} of rows, {score: number} each. limits: {score: the (least, most)
    that it can be, or None}; other scores are shares, which `shares` limits."""
    rows = list(rows)
    return {key: with_interval([row[key] for row in rows], limits.get(key, shares))
            for key in rows[0]}


def show(report, answers, problems, examples):
    """Print the scores of one checkpoint and a few of its responses."""
    print(f"\n{report['model']}   ({report['seconds']:.0f} s)")
    for key, value in report.items():
        if isinstance(value, tuple):
            print(f"  {key:12} {with_limits(value)}")
    show_parts(report["reward_parts"], ".3f")
    first = [(rewards[0] >= 1, problem, texts[0]) for problem, texts, rewards
             in zip(problems, answers["texts"], answers["rewards"])]
    for wanted, word in ((True, "right"), (False, "wrong")):
        for _, problem, text in [answer for answer in first if answer[0] == wanted][:examples]:
            correction = "" if wanted else f"   (right: {problem.answer})"
            print(f"  {word}   {problem.prompt.strip()[-60:]!r} -> {text[-160:]!r}{correction}")


def show_parts(parts, form):
    """A line with the means {name: number} of the parts of the reward, if there are several."""
    if len(parts) > 1:
        named = ", ".join(f"{name} {mean:{form}}" for name, mean in parts.items())
        print(f"  {'parts':12} {named}")


def show_difference(difference):
    """Of two checkpoints: {what: (mean, low, high)} of the second minus the first, and their
    "reward_parts", {name: mean}."""
    print("\nafter minus before, problem by problem")
    for key, value in difference.items():
        if isinstance(value, tuple):
            _, low, high = value
            sure = "" if low is None or low <= 0 <= high else "  the interval excludes 0"
            print(f"  {key:12} {with_limits(value, '+')}{sure}")
    show_parts(difference["reward_parts"], "+.3f")
