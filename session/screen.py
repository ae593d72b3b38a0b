"""The screen: what a run prints before its first rollout batch and at its end. The lines between
them are printed by metrics.py.

summary.json contains the numbers that are printed at the end.
"""

import json
import shlex

from features import FEATURES
from session import checkpoints
from session.arguments import ALGORITHMS, find_code, format_flags
from plumbing.parallel.processes import rank


def print_once(text):
    """Print text in the first process only."""
    if text and rank() == 0:
        print(text)


def plan(settings, folder, task, device):
    """A description of what this run will do, in a few lines."""
    model = settings.model_name_or_path
    after = ""
    if not model:
        model = (f"a tiny Mixture of Experts ({settings.num_hidden_layers} layers, "
                 f"{settings.num_experts} experts, top-{settings.num_experts_per_tok})")
        after = (f"; its supervised warm-up of {settings.cold_start_steps} steps is made once "
                 "and kept under runs/cold_start")
    path = "plain" if settings.plain else "fast"
    uses = f", each used {settings.num_iterations} times" if settings.num_iterations > 1 else ""
    clip_range = ""
    if settings.epsilon is not None:
        clip_range = f", clip range [1 - {settings.epsilon:g}, 1 + {settings.epsilon_high:g}]"
    return "\n".join([
        f"training {model} with {settings.algorithm}: {task.name} ({len(task.train)} prompts, "
        f"{len(task.test)} held out), on {device}, {path} path{after}",
        f"{settings.steps} rollout batches of {settings.prompts_per_step} prompts x "
        f"{settings.num_generations} responses, {settings.steps_per_generation} mini-batches each"
        f"{uses}{clip_range}; metrics are written to {folder}/metrics.jsonl",
        *describe_clip_range(settings), *describe_rounding(settings),
        *(note for feature in FEATURES for note in feature.notes(settings)), *task.notes])


def describe_clip_range(settings):
    """Notes on flags of the clip that have no effect, or another one than is usually meant."""
    given = settings.explicit_flags
    clips = [f"--{name}" for name in ("epsilon", "epsilon_high", "dual_clip", "off_policy_mask")
             if name in given]
    if clips and settings.updates_per_batch == 1 and settings.old_logp != "sampler":
        return [f"note: {' '.join(clips)} has no effect: with one update per rollout batch every "
                "ratio is 1, so nothing is clipped; use --steps_per_generation or --num_iterations "
                "above 1"]
    own = ALGORITHMS[settings.algorithm]
    low, high = settings.row.clip_range(own.get("epsilon"), own.get("epsilon_high"))
    notes = []
    if "epsilon" in given and "epsilon_high" not in given and low != high:
        notes.append(f"note: --epsilon {settings.epsilon:g} sets both ends of the clip range, "
                     f"which are {low:g} and {high:g} in {settings.algorithm}; --epsilon_high sets "
                     "the upper one")
    if settings.row.clips_s and max(settings.epsilon, settings.epsilon_high) >= 0.1:
        notes.append("warning: ends of 0.1 or more are meant for the ratio of a token; "
                     f"{settings.algorithm} clips a geometric mean over the tokens of a response, "
                     f"and its paper has --epsilon {low:g} --epsilon_high {high:g}")
    return notes


# Error of log s in nats over L tokens, times √L: docs/speed.md, measured by benchmarks/bfloat16.py
# and decoding.py. After it: how to compute without.
ROUNDING = {"bfloat16": (0.027, "--bf16 false"), "float16": (0.0033, "--fp16 false"),
            "TF32": (0.0009, "leave out --tf32")}


def describe_rounding(settings):
    """A note where three times the rounding of log s is more than the narrower end of its clip
    range in responses of ten tokens or more, else []."""
    used = "TF32" if settings.tf32 and not settings.autocast_dtype else settings.arithmetic
    if used not in ROUNDING or not settings.row.clips_s:
        return []
    error, without = ROUNDING[used]
    epsilon = min(settings.epsilon, settings.epsilon_high)
    longest = int((3 * error / epsilon) ** 2)
    if longest < 10:
        return []
    return [f"note: {used} rounds log s by about {error}/√L nats over L tokens; three times that "
            f"exceeds the clip range of {epsilon:g} in responses of up to {longest:,} tokens: "
            f"{without}, or a wider --epsilon (docs/speed.md)"]


# ---------------------------------------------------------------------------- before and after

def format_interval(score, sign=""):
    """The text of (mean, low, high); low and high are None if there is no interval, because all
    problems have the same reward. sign: "+" for a difference."""
    mean, low, high = score
    interval = "all equal" if low is None else f"{low:{sign}.3f}, {high:{sign}.3f}"
    return f"{mean:{sign}.3f} [{interval}]"


def format_scores(answers):
    """answers: {"sampled": ..., "greedy": ...}, each as eval.evaluate returns it."""
    sampled = answers["sampled"]
    greedy, _, _ = answers["greedy"]["pass_at_1"]
    return (f"held-out pass@1 {format_interval(sampled['pass_at_1'])}, greedy {greedy:.3f}, mean "
            f"reward {format_interval(sampled['reward'])}"
            f"{format_components(sampled['reward_parts'])}")


def format_components(parts):
    """The reward's components {name: value} in brackets; "" if there is only one."""
    named = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
    return f" ({named})" if len(parts) > 1 else ""


def summarize(when, answers):
    """The entries of summary.json for the evaluation "before" or "after" training."""
    sampled = answers["sampled"]
    mean, *interval = sampled["pass_at_1"]
    reward, *limits = sampled["reward"]
    return {f"pass_at_1_{when}": mean, f"interval_{when}": interval,
            f"greedy_{when}": answers["greedy"]["pass_at_1"][0],
            f"reward_{when}": reward, f"reward_interval_{when}": limits,
            f"reward_parts_{when}": sampled["reward_parts"]}


def before(progress, seconds):
    """The line of the evaluation before training, "" if there was none."""
    if not progress.before:
        return ""
    return f"before: {format_scores(progress.before)}   ({seconds:.0f} s)\n"


def stopped(settings, folder, step):
    """The line of a run that a signal stopped after batch `step`, with the command that goes on."""
    resume = {"output_dir": str(folder), "resume": True}
    resume |= find_code(settings.explicit_flags)             # which must be typed again
    return (f"stopped after batch {step} and saved; python train.py {format_flags(resume)} "
            "continues")


def report(settings, folder, task, progress, after, seconds):
    """Print a transcript, the scores before and after training, where things are, and the next
    command or, if the run collapsed, what to try: at most nine lines. Write summary.json."""
    if rank():
        return
    summary = {"seconds": seconds, "steps": settings.steps}
    if after:
        both = {"before": progress.before, "after": after}
        if both["before"]:               # not where --eval_samples came with --resume
            summary["example"] = find_example(task, both)
            print("\n".join(format_example(summary["example"], task.played)))
        for when, answers in both.items():
            if answers:
                summary |= summarize(when, answers)
                print(f"{when + ':':7} {format_scores(answers)}")
        if settings.eval_steps:
            pass_at_1, reward, step = progress.best_score
            summary["best"] = {"step": -step, "pass_at_1": pass_at_1, "reward": reward}
            print(f"best:   batch {-step} of {settings.steps}, held-out pass@1 "
                  f"{pass_at_1:.3f}, mean reward {reward:.3f}")
    checkpoints.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    run = shlex.quote(str(folder))
    tokens = f", python eval.py view {run}" if (folder / "tokens.jsonl").exists() else ""
    print(f"{seconds:.0f} s; metrics, samples and the checkpoint are in {folder}/\n"
          f"pictures: python eval.py dashboard {run}{tokens}")
    if progress.collapsed:
        print(f"the run collapsed ({progress.collapsed}): try a lower --learning_rate than "
              f"{settings.learning_rate:g}")
    else:
        print(format_next_command(settings, folder, task))


def find_example(task, both):
    """The first held-out problem that was answered wrong before and right after training, or else
    the first that was not lost: {"prompt", "answer", "before", "after", "right": [before, after]}.
    both: {"before", "after": what held_out returned}."""
    samples = [both[when]["sampled"] for when in ("before", "after")]
    right = [[rewards[0] >= 1 for rewards in answers["rewards"]] for answers in samples]
    gains = [new - old for old, new in zip(*right)]
    i = gains.index(max(gains))
    old, new = (answers.get("games", answers["texts"])[i][0] for answers in samples)
    problem = task.test[i]
    return {"prompt": problem.prompt.strip(), "answer": problem.answer, "before": old,
            "after": new, "right": [row[i] for row in right]}


def format_example(example, played):
    """An example as three lines, long texts cut. played: with an environment; turn by turn then."""
    if played:
        return ["", f"prompt  {example['prompt'][-100:]!r}", f"before\n{example['before']}",
                f"after\n{example['after']}"]
    return ["", f"prompt  {example['prompt'][-100:]!r}   (right: {example['answer'][:100]!r})",
            *(f"{when:7} {example[when][:200]!r} {'right' if right else 'wrong'}"
              for when, right in zip(("before", "after"), example["right"]))]


def format_next_command(settings, folder, task):
    """The last line of a run: how to ask the checkpoint."""
    checkpoint = shlex.quote(f"{folder}/checkpoints/step_{settings.steps}")
    code = format_flags(find_code(settings.explicit_flags))
    prompt = task.test[0].prompt.strip()
    prompt = shlex.quote(prompt) if len(prompt) <= 60 and "\n" not in prompt else "'PROMPT'"
    return f"next: python eval.py ask {checkpoint} {prompt} {code}".rstrip()
