"""Advice: what the metrics of a run show, and what is worth trying next.

`next_steps` makes the list at the end of a run. Every line of it follows from metrics.jsonl.
"""

import sys
from pathlib import Path
from statistics import mean

from plumbing.run.arguments import OF_A_CALL, as_words, flags
from plumbing.run.metrics import collapse

ROOT = Path(__file__).resolve().parents[2]
TAIL = 5                 # a run is judged by the means over its last TAIL rollout batches


def command(args, algorithm=None, **changes):
    """The command line that repeats a run with some flags changed: the flags that it was given and
    the changes. With another `algorithm`, those of the section "the algorithm" (clip range,
    advantage, ...) are left out."""
    given = {}
    section = None
    for f in flags():
        section = f.metadata.get("section", section)
        if f.name in args.given and not (algorithm and section == "the algorithm"):
            given[f.name] = args.given[f.name]
    if algorithm:
        given = {"algorithm": algorithm} | given
    words = [as_words(name, value) for name, value in (given | changes).items()
             if name not in OF_A_CALL]
    return " ".join(["python", script(), *words])


def script():
    """The file that the user runs: train.py, or a file of their own that calls train.main."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "train.py")
    own = file.suffix == ".py" and file.resolve().parent in (Path.cwd(), ROOT)
    return file.name if own else "train.py"


def trouble(args, records, limit):
    """[(command, reason)] for each problem in the last batches of a run, the worst first."""
    last = records[-TAIL:]
    ideas = []

    def average(name):
        return mean(record[name] for record in last)

    best = max(record["pass_rate"] for record in records)
    clipped = average("clip_low") + average("clip_high")
    dead = average("dead_groups")
    passed = average("pass_rate")
    smaller = command(args, learning_rate=float(f"{args.learning_rate / 3:.2g}"))
    if word := collapse(records[-1], best):
        ideas.append((smaller, f"the run collapsed ({word.split('? ')[1]}): try a third of the "
                               "learning rate"))
    if sum(record["skipped"] for record in records):
        ideas.append((smaller, "updates were skipped because they were not finite: try a third of "
                               "the learning rate"))
    if clipped > 0.9:
        ideas.append((smaller, f"the clip removed {clipped:.0%} of the tokens: the learning rate "
                               "is too high for the clip range"))
    if dead > 0.9:
        ideas.append(dead_groups(args, dead, passed))
    if average("truncated") > 0.3 and longer_may_help(last):
        longer = command(args, max_completion_length=2 * limit)
        ideas.append((longer, f"{average('truncated'):.0%} of the responses were cut off at the "
                              "limit"))
    return ideas


def longer_may_help(records):
    """Whether a higher length limit could give better rewards: not if nearly all responses are
    right, nor if the responses that ended before the limit had no reward either."""
    if mean(record["pass_rate"] for record in records) > 0.9:
        return False
    rewarded = any(value for record in records for name, value in record["reward_parts"].items()
                   if name != "overlong")
    return rewarded or all(record["truncated"] == 1 for record in records)


def dead_groups(args, dead, passed):
    """What to do if nearly all groups have equal rewards, so that nothing is learned."""
    groups = f"{dead:.0%} of the groups have equal rewards and give no gradient"
    if passed > 0.9:
        harder = "harder problems"
        if not args.dataset_name and not args.model_name_or_path:
            harder = command(args, max_terms=2 * args.max_terms)
        return harder, f"nearly all responses are right: {groups}"
    if passed < 0.05:
        return ("easier problems, or a verifier with partial credit",
                f"hardly any response is right: {groups}")
    if args.dynamic_sampling:
        return ("problems of medium difficulty, or a larger --num_generations",
                f"{groups}, so nearly all of the sampling is discarded")
    return (command(args, dynamic_sampling=True),
            f"{groups}: sample until every group has right and wrong responses")


def next_steps(args, folder, records, limit):
    """[(command, reason)] at the end of a run with these metrics records, the most useful first.
    limit: the longest response in tokens."""
    ideas = trouble(args, records, limit) if records else []
    if args.save_tokens:
        ideas.append((f"python eval.py view {folder}", "which tokens does the clip remove?"))
    ideas.append((f"python eval.py dashboard {folder}", "the run's curves"))
    if ideas[0][0].startswith("python eval.py"):             # nothing went wrong: compare
        other = "grpo" if args.algorithm.startswith("gspo") else "gspo"
        ratio = "one ratio per token" if other == "grpo" else "one ratio per response"
        ideas.append((command(args, algorithm=other), f"{other.upper()} from the same start: "
                                                      f"{ratio}"))
        if args.algorithm == "gspo" and args.epsilon == 3e-4:
            ideas.append((command(args, epsilon=0.2, epsilon_high=0.2),
                          "GSPO with GRPO's clip range: how much does the narrow one matter?"))
    return ideas
