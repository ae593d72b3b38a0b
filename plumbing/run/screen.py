"""The screen: what a run prints before its first rollout batch and at its end. The lines between
them are printed by metrics.py.

summary.json contains the numbers that are printed at the end.
"""

import json

from features import FEATURES
from losses import OBJECTIVES
from plumbing.run import checkpoints
from plumbing.run.metrics import collapse
from plumbing.parallel.processes import rank, world


def say(text):
    """Print text in the first process only."""
    if text and rank() == 0:
        print(text)


def plan(args, folder, task, device):
    """A description of what this run will do, in a few lines."""
    model = args.model_name_or_path
    after = ""
    if not model:
        model = (f"a tiny Mixture of Experts ({args.num_hidden_layers} layers, {args.num_experts} "
                 f"experts, top-{args.num_experts_per_tok})")
        after = (f"; its cold start of {args.cold_start_steps} supervised steps is made once and "
                 "kept under runs/cold_start")
    uses = f", each used {args.num_iterations} times" if args.num_iterations > 1 else ""
    clip_range = ""
    if args.epsilon is not None:
        clip_range = f", clip range [1 - {args.epsilon:g}, 1 + {args.epsilon_high:g}]"
    return "\n".join([
        f"training {model} with {args.algorithm}: {task.name} ({len(task.train)} prompts, "
        f"{len(task.test)} held out), on {device}{after}",
        f"{args.steps} rollout batches of {args.prompts_per_step} prompts x {args.num_generations} "
        f"responses, {args.steps_per_generation} mini-batches each{uses}{clip_range}; metrics are "
        f"written to {folder}/metrics.jsonl",
        *uncorrected(args),
        *(note for feature in FEATURES for note in feature.notes(args)), *task.notes])


def without_effect(args, task, tokenizer):
    """Notes on flags without an effect here, which a recipe may carry to another model or machine;
    "" if there are none."""
    notes = []
    if not args.chat_template and not (task.chat and tokenizer.chat_template):
        notes.append("note: --no_chat_template changes nothing: these prompts have no chat "
                     "template")
    if args.shard and world() == 1:
        notes.append("note: --shard changes nothing in one process; torchrun starts several")
    return "\n".join(notes)


def uncorrected(args):
    """A note, if later optimizer steps use samples of an older policy and no ratio corrects for
    that."""
    if OBJECTIVES[args.objective].ratio != "none" or args.updates_per_batch == 1:
        return []
    return [f"note: {args.algorithm} has no importance ratio, so only the first of the "
            f"{args.updates_per_batch} optimizer steps of a rollout batch is on-policy; with "
            "--steps_per_generation 1 --num_iterations 1 every step is"]


# ---------------------------------------------------------------------------- before and after

def with_limits(score, sign=""):
    """The text of (mean, low, high); low and high are None if there is no interval, because all
    problems have the same reward. sign: "+" for a difference."""
    mean, low, high = score
    interval = "all equal" if low is None else f"{low:{sign}.3f}, {high:{sign}.3f}"
    return f"{mean:{sign}.3f} [{interval}]"


def scores(answers):
    """answers: {"sampled": ..., "greedy": ...}, each as eval.evaluate returns it."""
    sampled = answers["sampled"]
    greedy, _, _ = answers["greedy"]["pass_at_1"]
    text = f"held-out pass@1 {with_limits(sampled['pass_at_1'])}, greedy {greedy:.3f}"
    if "reward" in sampled:                                  # older runs did not save it
        text += f", mean reward {with_limits(sampled['reward'])}"
        parts = sampled["reward_parts"]
        named = ", ".join(f"{name} {mean:.3f}" for name, mean in parts.items())
        text += f" ({named})" if len(parts) > 1 else ""
    return text


def first_scores(answers, seconds):
    """The line after the evaluation of the starting policy; "" if it was not evaluated."""
    return f"before: {scores(answers)}   ({seconds:.0f} s)\n" if answers else ""


def summary_of(when, answers):
    """The entries of summary.json for the evaluation "before" or "after" training."""
    sampled = answers["sampled"]
    mean, *interval = sampled["pass_at_1"]
    entries = {f"pass_at_1_{when}": mean, f"interval_{when}": interval,
               f"greedy_{when}": answers["greedy"]["pass_at_1"][0]}
    if "reward" in sampled:
        reward, *limits = sampled["reward"]
        entries |= {f"reward_{when}": reward, f"reward_interval_{when}": limits,
                    f"reward_parts_{when}": sampled["reward_parts"]}
    return entries


def report(args, folder, task, before, after, seconds):
    """Print the scores before and after training, two transcripts, and a sentence if the run
    collapsed; write summary.json."""
    if rank():
        return
    summary = {"seconds": seconds, "steps": args.steps}
    both = {"before": before, "after": after}
    if after:
        for when, answers in both.items():
            summary |= summary_of(when, answers)
        for i, problem in enumerate(task.test[:2]):
            print(f"\nprompt  {problem.prompt.strip()}   (right: {problem.answer})")
            for when, answers in both.items():
                right = answers["sampled"]["rewards"][i][0] >= 1
                text = answers["sampled"]["texts"][i][0]
                print(f"{when:7} {text!r} {'right' if right else 'wrong'}")
        print(f"\nbefore: {scores(before)}\nafter:  {scores(after)}")
    checkpoints.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(f"{seconds:.0f} s; metrics, samples and the checkpoint are in {folder}/")
    reason = records and collapse(records[-1], max(record["pass_rate"] for record in records))
    if reason:
        print(f"the run collapsed ({reason}): try a lower --learning_rate than "
              f"{args.learning_rate:g}")
