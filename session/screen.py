"""The screen: what a run prints before its first rollout batch and at its end. The lines between
them are printed by metrics.py. summary.json contains the numbers that are printed at the end."""

import json

from plumbing.parallel.processes import rank


def print_once(text):
    """Print text in the first process only, at once, also through a pipe."""
    if text and rank() == 0:
        print(text, flush=True)


def plan(settings, task, device):
    """A description of what this run will do, in a few lines."""
    clip_range = ""
    if settings.epsilon is not None:
        clip_range = f", clip range [1 - {settings.epsilon:g}, 1 + {settings.epsilon_high:g}]"
    notes = []
    if settings.row.clips_s and max(settings.epsilon, settings.epsilon_high) >= 0.1:
        notes.append("warning: ends of 0.1 or more are meant for the ratio of a token; "
                     f"{settings.algorithm} clips a mean over the tokens of a response, and its "
                     f"paper has {settings.row.epsilon:g} and {settings.row.epsilon_high:g}")
    return "\n".join([
        f"training {settings.model_name_or_path or 'a tiny mixture of experts'} with "
        f"{settings.algorithm}: {task.name} ({len(task.train)} prompts, {len(task.test)} held "
        f"out), on {device}",
        f"{settings.steps} rollout batches of {settings.prompts_per_step} prompts x "
        f"{settings.num_generations} responses, {settings.steps_per_generation} mini-batches each"
        f"{clip_range}", *notes, *task.notes])


def format_interval(score):
    """The text of (mean, low, high), or of (mean,)."""
    mean, *interval = (f"{x:.3f}" for x in score)
    return f"{mean} [{', '.join(interval)}]" if interval else mean


def report(folder, task, when, answers, **more):
    """Print the scores of an evaluation (eval.held_out), "before" or "after" training, and the
    greedy response to the first held-out prompt. Keep them, and `more`, in summary.json."""
    if rank() or not answers:
        return
    sampled = answers["sampled"]
    greedy = answers["greedy"]
    print(f"{when + ':':7} held-out pass@1 {format_interval(sampled['pass_at_1'])}, greedy "
          f"{greedy['pass_at_1'][0]:.3f}, mean reward {format_interval(sampled['reward'])}\n"
          f"        {task.test[0].prompt.strip()[-100:]!r} -> {greedy['texts'][0][0][:200]!r}")
    file = folder / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    mean, *interval = sampled["pass_at_1"]
    summary |= more | {
        f"pass_at_1_{when}": mean, f"interval_{when}": interval,
        f"greedy_{when}": greedy["pass_at_1"][0], f"reward_{when}": sampled["reward"][0],
        f"reward_parts_{when}": sampled["reward_parts"]}
    file.write_text(json.dumps(summary, indent=1), encoding="utf-8")
