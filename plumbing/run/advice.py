"""Advice: what the metrics of a run show, and what is worth trying next.

`next_steps` makes the list at the end of a run. Every line of it follows from metrics.jsonl.
"""

import shlex
from dataclasses import asdict, fields
from statistics import mean

from plumbing.run.arguments import Arguments, parse
from plumbing.run.metrics import collapse

TAIL = 5                 # a run is judged by the means over its last TAIL rollout batches
PLACE = ("algorithm", "output_dir", "overwrite_output_dir", "resume", "print_trl_config",
         "print_verl_config")


def command(args, algorithm=None, **changes):
    """The command line that repeats a run with some flags changed. With another `algorithm`, the
    flags of the section "the algorithm" (clip range, advantage, ...) return to their defaults."""
    base = ["--algorithm", algorithm or args.algorithm]
    if args.model_name_or_path:
        base += ["--model_name_or_path", args.model_name_or_path]
    else:
        base += ["--num_hidden_layers", str(args.num_hidden_layers)]   # other defaults follow it
    usual, words, section = parse(base), ["python train.py"], None
    given = asdict(args) | changes
    for f in fields(Arguments):
        section = f.metadata.get("section", section)
        value = given[f.name]
        skip = f.name in PLACE or algorithm and section == "the algorithm"
        skip = skip or f.name == "epsilon_high" and isinstance(value, str)       # --epsilon auto
        if skip or value in (None, getattr(usual, f.name)) or f.name == "model_name_or_path":
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words.append(" ".join([f"--{f.name}", *(shlex.quote(str(v)) for v in values)]))
    if not args.model_name_or_path and args.num_hidden_layers != Arguments.num_hidden_layers:
        words.insert(1, f"--num_hidden_layers {args.num_hidden_layers}")
    if args.model_name_or_path:
        words.insert(1, f"--model_name_or_path {shlex.quote(args.model_name_or_path)}")
    if algorithm or args.algorithm != "gspo":
        words.insert(1, f"--algorithm {algorithm or args.algorithm}")
    return " ".join(words)


def trouble(args, records):
    """[(command, reason)] for each problem in the last batches of a run, the worst first."""
    last, found = records[-TAIL:], []

    def average(name):
        return mean(record[name] for record in last)

    best = max(record["pass_rate"] for record in records)
    clipped = average("clip_low") + average("clip_high")
    dead, passed = average("dead_groups"), average("pass_rate")
    smaller = command(args, learning_rate=args.learning_rate / 3)
    if word := collapse(records[-1], best):
        found.append((smaller, f"the run collapsed ({word.split('? ')[1]}): try a third of the "
                               "learning rate"))
    if sum(record["skipped"] for record in records):
        found.append((smaller, "updates were skipped because they were not finite: try a third of "
                               "the learning rate"))
    if clipped > 0.9:
        found.append((smaller, f"the clip removed {clipped:.0%} of the tokens: the learning rate "
                               "is too high for the clip range"))
    if dead > 0.9:
        found.append(dead_groups(args, dead, passed))
    if average("truncated") > 0.3 and longer_may_help(last):
        longer = command(args, max_completion_length=2 * args.max_completion_length)
        found.append((longer, f"{average('truncated'):.0%} of the responses were cut off at the "
                              "limit"))
    return found


def longer_may_help(records):
    """Whether a higher length limit could give better rewards: not if the responses that ended
    before the limit had no reward either."""
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


def next_steps(args, folder, records):
    """[(command, reason)] at the end of a run with these metrics records, the most useful first."""
    found = trouble(args, records) if records else []
    if args.save_tokens:
        found.append((f"python eval.py view {folder}", "which tokens does the clip remove?"))
    found.append((f"python eval.py dashboard {folder}", "the run's curves"))
    if found[0][0].startswith("python eval.py"):             # nothing went wrong: compare
        other = "grpo" if args.algorithm.startswith("gspo") else "gspo"
        ratio = "one ratio per token" if other == "grpo" else "one ratio per response"
        found.append((command(args, algorithm=other), f"{other.upper()} from the same start: "
                                                      f"{ratio}"))
        if args.algorithm == "gspo" and args.epsilon == 3e-4:
            found.append((command(args, epsilon=0.2, epsilon_high=0.2),
                          "GSPO with GRPO's clip range: how much does the narrow one matter?"))
    return found
