"""Evaluation: pass@1 and pass@k of any policy, the papers' claims, and a run in pictures.

    python eval.py passk --model_name_or_path DIR [DIR]   pass@k of one checkpoint, or compare two
    python eval.py ask DIR 'PROMPT' [--answer A]          responses to your prompt
    python eval.py claims [NAME …]                        the verdicts on the papers' claims
    python eval.py dashboard runs/gspo [runs/grpo …]      the curves of one or several runs: a PNG
    python eval.py view runs/gspo [runs/grpo]             the tokens of a run, clipped ones marked

passk and ask use a run's checkpoint with the settings of that run: its task, templates, lengths and
sampling. The flags of train.py that `python eval.py passk --help` lists override them.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # before torch: its threads spin while they wait for each
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")      # other, at the cost of other programs

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    from tools import commands
    commands.check_flags_first(sys.argv[1:], __doc__)   # --help does not wait for the imports below

import json
import math
import subprocess
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from plumbing.data import tasks
from plumbing.data.datafiles import Problem
from plumbing.model.chat import name_ends
from plumbing.model.policy import describe_fit, load_policy
from plumbing.parallel.devices import autocast, find_device_type
from plumbing.engines.samplers import make_sampler
from plumbing.refusal import Refusal, refuse_os_errors
from session.errors import errors_in_one_line
from session.screen import format_interval, print_once
from plumbing.parallel.processes import gather, gathered, share

ROWS = 256      # responses that are sampled at a time


# ------------------------------------------------------------------------------------- estimators

def pass_at_k(n, c, k):
    """Unbiased estimate of the probability that at least one of k responses is right, from n
    samples of which c are right (2107.03374 eq. 1). Integers with 1 <= k <= n."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap(values, draws=2000, seed=0):
    """(low, high): the 95 % percentile bootstrap interval of a mean. values: one number per
    problem."""
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)  # [draws, n]
    means = values[picks].mean(-1)                                                 # [draws]
    return means.quantile(0.025).item(), means.quantile(0.975).item()


def with_interval(values, limits=None):
    """(mean, low, high) of values, one number per problem, with the 95 % percentile bootstrap
    interval over problems.

    If all n values equal c, the bootstrap interval has width 0 (for example [0, 0] if no response
    is right). With limits, the (least, most) possible value, equal values therefore get Clopper and
    Pearson's exact interval: at most a share q = 1 - 0.025^(1/n) of all problems differs from c, so
    the mean is between c - q (c - least) and c + q (most - c). n counts problems, not responses.
    Without limits (of a reward or a length) there is no interval: low and high are None.
    """
    mean = sum(values) / len(values)
    if min(values) == max(values):
        if limits is None:
            return mean, None, None
        least, most = limits
        q = 1 - 0.025 ** (1 / len(values))
        return mean, mean - q * (mean - least), mean + q * (most - mean)
    return (mean, *bootstrap(values))


def pass_at_1(rewards):
    """(mean, low, high) of the share of right responses. rewards [problems][samples]; a response is
    right if its reward is at least 1."""
    return with_interval([sum(r >= 1 for r in row) / len(row) for row in rewards], (0.0, 1.0))


def reward_scores(task, parts):
    """Scores from the reward components, [problems][samples][K]: "reward", (mean, low, high) of
    their weighted sum; "mean_rewards", one per problem; "reward_parts", {component: mean}. The
    overlong penalty is not included: it is used only in training."""
    parts = torch.tensor(parts)                                                    # [n, G, K]
    flat = parts.flatten(0, 1)                                                     # [n·G, K]
    rewards = task.total(flat, parts.shape[1]).view(parts.shape[:2])               # [n, G]
    rewards = rewards.double().mean(-1).tolist()                                   # n
    means = flat.double().nanmean(0).nan_to_num(nan=0.0).tolist()                  # K
    return {"reward": with_interval(rewards), "mean_rewards": rewards,
            "reward_parts": dict(zip(task.component_names, means))}


def evaluate(sampler, task, problems, samples, temperature, seed=0, progress=None):
    """Sample `samples` responses per problem (at temperature 0 one greedy response) and score
    them. sampler: a rollout.Sampler.

    Returns plain data, which checkpoints keep: a dict with "rewards" (the first component of each),
    "texts", "lengths" (in tokens), "truncated" and, with an environment, "games" (as they are
    printed), each [problems][samples], with "pass_at_1" and with the entries of reward_scores.
    Several processes share the problems.
    progress: the label of the progress bar; None: no bar.
    """
    G = samples if temperature else 1
    indices = share(len(problems))
    generator = torch.Generator().manual_seed(seed)
    uniforms = task.draw_uniforms(generator, len(problems), G)                     # [n, G, T]
    names = ["texts", "rewards", "parts", "lengths", "truncated"]
    if task.played:
        names.append("games")
    answers = {name: [] for name in names}
    starts = range(indices.start, indices.stop, max(1, ROWS // G))
    for start in tqdm(starts, desc=progress, disable=None if progress else True, leave=False):
        rows = slice(start, min(start + starts.step, indices.stop))
        chunk = problems[rows]
        prompts = task.encode(sampler.tokenizer, chunk)
        played = {"problems": chunk, "task": task} if task.played else {}
        rollout = sampler.sample(prompts, G, uniforms=uniforms[rows].flatten(0, 1),
                                 temperature=temperature, **played)
        each = [problem for problem in chunk for _ in range(G)]                        # B
        if task.played:
            each = [problem.opened(game) for problem, game in zip(each, rollout.games)]
        scores = task.reward_components(rollout.texts, each, rollout.token_lists(), rollout.games)
        columns = (rollout.texts, scores[:, 0].tolist(), scores.tolist(),              # [B, K]
                   rollout.mask.sum(-1).tolist(), rollout.truncated.tolist(),
                   list(map(str, rollout.games)))
        for answer, values in zip(answers.values(), columns):
            answer += [values[i:i + G] for i in range(0, len(values), G)]
    gathered_answers = gather(answers)
    answers = {name: sum((part[name] for part in gathered_answers), []) for name in answers}
    rewards = reward_scores(task, answers.pop("parts"))
    return answers | {"pass_at_1": pass_at_1(answers["rewards"]), **rewards}


def held_out(settings, learner, task):
    """Evaluate the trained policy on held-out prompts: {"sampled": ..., "greedy": ...}, each as
    evaluate returns it; None without --eval_samples."""
    if not settings.eval_samples:
        return None
    actor = learner.actor
    frozen = not all(p.requires_grad for p in actor.policy.parameters())     # held in 16 bits
    dtype = settings.autocast_dtype if frozen else None
    with gathered(actor) as policy, autocast(actor.policy.device, dtype):
        sampler = make_sampler(settings, policy, learner.tokenizer, task)
        return {kind: evaluate(sampler, task, task.test[:settings.eval_prompts],
                               settings.eval_samples, temperature, settings.seed)
                for kind, temperature in (("sampled", settings.temperature), ("greedy", 0.0))}


# --------------------------------------------------------------------------------- the commands

def passk(parsed):
    """Print and save pass@1, pass@k and the mean reward of one checkpoint, or of two and of their
    difference, problem by problem. parsed: (passk's own flags, Settings)."""
    options, settings = parsed
    logging.disable_progress_bar()
    print(options.line)
    task = tasks.prepare_task(settings)
    device = torch.device(find_device_type(settings))
    report = {"dataset": task.name, "settings": options.line, "n": options.n,
              "temperature": settings.temperature, "seed": settings.seed, "checkpoints": []}
    results = []                                             # {problem: {score: number}}
    for name in options.model_name_or_path:
        policy, tokenizer = load_policy(settings, task, device, name)
        print_once(name_ends(policy, tokenizer))
        print_once(task.filter_prompts(tokenizer))
        print_once(describe_fit(policy, tokenizer, task))
        problems = task.test[:options.problems]
        sampler = make_sampler(settings, policy, tokenizer, task)
        answers = evaluate(sampler, task, problems, options.n, settings.temperature,
                           settings.seed, progress=str(name))
        rows = score_problems(answers, options.k)
        results.append(dict(zip(problems, rows)))
        scores = add_intervals(rows)
        report["checkpoints"].append({"model": str(name), "problems": len(problems), **scores,
                                      "reward_parts": answers["reward_parts"]})
        print_scores(name or "built-in model after its supervised warm-up", scores)
    if len(results) == 2:
        before, after = results                              # the second may have fewer problems
        gains = [{key: after[p][key] - before[p][key] for key in after[p]} for p in after]
        report["difference"] = add_intervals(gains, (-1.0, 1.0))
        print_scores("after minus before, problem by problem", report["difference"], "+")
    with refuse_os_errors():
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{options.output}")


def ask(parsed):
    """Print the greedy response of a checkpoint to a prompt, then sampled ones, with their rewards
    if the right answer is given. With an environment, play games with the person at the terminal:
    a greedy one, then sampled ones. parsed: (ask's own flags, Settings)."""
    options, settings = parsed
    logging.disable_progress_bar()
    print(options.line)
    task = tasks.prepare_task(settings)
    prompt = options.prompt.replace("\\n", "\n")
    if task.one_width:                                       # the built-in task's fixed width
        prompt = prompt.ljust(len(task.test[0].prompt))
    problem = Problem(prompt, options.answer or "")
    if task.played and not sys.stdin.isatty():
        raise Refusal("ask: with an environment you play its part, which needs a terminal")
    device = torch.device(find_device_type(settings))
    policy, tokenizer = load_policy(settings, task, device, options.checkpoint)
    print_once(name_ends(policy, tokenizer))
    sampler = make_sampler(settings, policy, tokenizer, task)
    sampled = [(settings.temperature, options.n, settings.seed)]
    if task.played:                                          # one game after the other
        sampler.environment.kind = Person
        sampler.environment.seeded = False
        sampled = [(settings.temperature, 1, settings.seed + i) for i in range(options.n)]
    for temperature, n, seed in [(0.0, 1, settings.seed), *sampled]:
        answers = evaluate(sampler, task, [problem], n, temperature, seed)
        for text, reward in zip(answers["texts"][0], answers["rewards"][0]):
            score = "" if options.answer is None else f"   reward {reward:g}"
            print(f"\ntemperature {temperature:g}{score}\n{text}")


class Person:
    """An environment that is a person at the terminal (features/turns.py)."""

    def __init__(self, row):
        pass

    def step(self, text):
        print(f"policy: {text}")
        try:
            observation = input("you, or an empty line to end: ")
        except EOFError:
            observation = ""
        return observation, 0.0, not observation


def score_problems(answers, ks):
    """[{score: number}], one per problem: pass@k for every k, and means over the n samples."""
    rows = []
    for i, rewards in enumerate(answers["rewards"]):
        n = len(rewards)
        right = sum(r >= 1 for r in rewards)
        shares = {f"pass@{k}": pass_at_k(n, right, k) for k in sorted({1, *ks})}
        rows.append(shares | {"reward": answers["mean_rewards"][i],
                              "mean_length": sum(answers["lengths"][i]) / n,
                              "truncated": sum(answers["truncated"][i]) / n})
    return rows


def add_intervals(rows, limits=(0.0, 1.0)):
    """{score: (mean, low, high)} of rows, {score: number} each. limits: of the scores that are
    shares."""
    return {key: with_interval([row[key] for row in rows],
                               None if key in ("reward", "mean_length") else limits)
            for key in rows[0]}


def print_scores(title, scores, sign=""):
    """Print scores {score: (mean, low, high)}; sign: "+" for a difference."""
    print(f"\n{title}")
    for key, value in scores.items():
        print(f"  {key:12} {format_interval(value, sign)}")


def claims(words):
    script = Path(__file__).parent / "experiments/run.py"
    raise SystemExit(subprocess.run([sys.executable, script, "--judge", *words]).returncode)


def dashboard(options):
    from tools import dashboard as pictures, style
    file = options.output or Path(options.runs[0]) / "dashboard.png"
    runs = {run: pictures.read_metrics(Path(run)) + pictures.read_summary(Path(run))
            for run in options.runs}
    style.save(pictures.draw(runs), file)
    print(file)


def view(options):
    from tools.view import write_page
    page = write_page(options.runs, options.output,
                      options.kilobytes and 1000 * options.kilobytes)
    print(f"{page}   ({page.stat().st_size / 1e6:.1f} MB; open it in a browser)")


COMMANDS = {"ask": ask, "passk": passk, "claims": claims, "dashboard": dashboard, "view": view}


def main(argv=None):
    from tools import commands                           # here: training does not need tools/
    with errors_in_one_line("eval.py"), commands.exit_on_broken_pipe():
        argv = sys.argv[1:] if argv is None else argv
        command, parsed = commands.parse_command(argv, __doc__)
        COMMANDS[command](parsed)


if __name__ == "__main__":
    main()
