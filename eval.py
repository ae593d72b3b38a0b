"""Evaluation: pass@1 and pass@k of any policy, and a run in pictures.

    python eval.py passk DIR [DIR]                        pass@k of one or several checkpoints
    python eval.py ask DIR "PROMPT" [--answer A]          responses to your prompt
    python eval.py dashboard runs/gspo [runs/grpo ...]    the curves of one or several runs: a PNG
    python eval.py view runs/gspo [runs/grpo]             the tokens of a run, clipped ones marked

passk and ask use a checkpoint in a run's folder with the settings of that run: its task, templates,
lengths and sampling. Any other flag of theirs is one of train.py and overrides them.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # before torch: its threads spin while they wait for each
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")      # other, at the cost of other programs

import argparse
import math
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from plumbing.data import tasks
from plumbing.data.datafiles import Problem
from plumbing.engines.samplers import make_sampler
from plumbing.model.policy import load_policy
from plumbing.parallel.devices import autocast, find_device_type
from plumbing.parallel.processes import gather, gathered, share
from plumbing.refusal import Refusal
from session.arguments import (Parser, Settings, parse_flags, read_run, refuse_code, resolve,
                               with_defaults)
from session.checks import check_settings
from session.screen import format_interval

ROWS = 256      # responses that are sampled at a time
FEWEST = 8      # problems that have an interval


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


def with_interval(values):
    """(mean, low, high) of values, one number per problem, with the 95 % percentile bootstrap
    interval over problems; (mean,) of fewer than FEWEST."""
    interval = bootstrap(values) if len(values) >= FEWEST else ()
    return (sum(values) / len(values), *interval)


def reward_scores(task, parts, group_size):
    """Scores from the reward components of the responses to n problems, n·G lists of K: "rewards",
    their weighted sums, and "right", which responses are right, both [n][G]; "reward" and
    "pass_at_1", the means of the two over problems, as with_interval gives them; "reward_parts",
    {component: mean}. The overlong penalty is not included: it is used only in training."""
    parts = torch.tensor(parts, dtype=torch.float64)                               # [n·G, K]
    rewards = task.total(parts).view(-1, group_size)                               # [n, G]
    right = task.right(parts, group_size).view(-1, group_size)                     # [n, G]
    each = rewards.nanmean(-1).nan_to_num(nan=0.0).tolist()                        # n
    means = parts.nanmean(0).nan_to_num(nan=0.0).tolist()                          # K
    return {"rewards": rewards.tolist(), "right": right.tolist(), "reward": with_interval(each),
            "pass_at_1": with_interval(right.double().mean(-1).tolist()),
            "reward_parts": dict(zip(task.component_names, means))}


def evaluate(sampler, task, problems, samples, temperature, seed=0, progress=None):
    """Sample `samples` responses per problem (at temperature 0 one greedy response) and score
    them. sampler: a rollout.Sampler.

    Returns a dict with "texts" [problems][samples] and the entries of reward_scores. Several
    processes share the problems.
    progress: the label of the progress bar; None: no bar.
    """
    G = samples if temperature else 1
    indices = share(len(problems))
    generator = torch.Generator().manual_seed(seed)
    uniforms = task.draw_uniforms(generator, len(problems), G)                     # [n, G, T]
    texts = []
    parts = []
    starts = range(indices.start, indices.stop, max(1, ROWS // G))
    for start in tqdm(starts, desc=progress, disable=None if progress else True, leave=False):
        rows = slice(start, min(start + starts.step, indices.stop))
        rollout, each = task.sample(sampler, problems[rows], G, uniforms[rows].flatten(0, 1),
                                    temperature=temperature)
        texts += rollout.texts
        parts += task.reward_components(rollout.texts, each, rollout.token_lists(),
                                        rollout.games).tolist()                        # [B, K]
    texts, parts = (sum(shares, []) for shares in zip(*gather((texts, parts))))
    texts = [texts[i:i + G] for i in range(0, len(texts), G)]
    return {"texts": texts, **reward_scores(task, parts, G)}


def held_out(learner):
    """Evaluate the trained policy on held-out prompts: {"sampled": ..., "greedy": ...}, each as
    evaluate returns it; None without --eval_samples."""
    settings, task, actor = learner.settings, learner.task, learner.actor
    if not settings.eval_samples:
        return None
    frozen = not all(p.requires_grad for p in actor.policy.parameters())     # held in 16 bits
    dtype = settings.autocast_dtype if frozen else None
    with gathered(actor) as policy, autocast(actor.policy.device, dtype):
        sampler = make_sampler(settings, policy, learner.tokenizer, task)
        return {kind: evaluate(sampler, task, task.test[:settings.eval_prompts],
                               settings.eval_samples, temperature, settings.seed)
                for kind, temperature in (("sampled", settings.temperature), ("greedy", 0.0))}


# --------------------------------------------------------------------------------- the commands

def load(checkpoint, typed):
    """(settings, task, sampler) of a checkpoint: the settings of its run, or the defaults, with
    `typed`, {flag of train.py: value}, in place of theirs."""
    typed = typed | {"model_name_or_path": checkpoint}
    runs = [folder for folder in Path(checkpoint).absolute().parents
            if (folder / "metrics.jsonl").exists()]
    settings = with_defaults(typed)
    if runs:
        kept = read_run(runs[0])
        refuse_code(kept, typed)
        if "dataset_name" in typed:                          # has columns and tests of its own
            kept |= {"columns": [], "test_dataset_name": None}
        settings = Settings(**kept | typed)
    check_settings(settings)
    settings = resolve(settings)
    task = tasks.prepare_task(settings)
    if not runs:
        print(f"{checkpoint} is not in the folder of a run: the task is {task.name}")
    device = torch.device(find_device_type(settings))
    policy, tokenizer = load_policy(settings, task, device, checkpoint)
    return settings, task, make_sampler(settings, policy, tokenizer, task)


def passk(options, typed):
    """Print pass@k and the mean reward of each checkpoint."""
    if options.k and max(options.k) > options.n:
        raise Refusal(f"--k {max(options.k)} is above --n {options.n}, the responses per problem")
    for checkpoint in options.checkpoints:
        settings, task, sampler = load(checkpoint, typed)
        task.filter_prompts(sampler.tokenizer)
        answers = evaluate(sampler, task, task.test[:options.problems], options.n,
                           settings.temperature, settings.seed, progress=checkpoint)
        rights = list(map(sum, answers["right"]))
        print(f"\n{checkpoint}: {task.name}, {len(rights)} problems, {options.n} responses each")
        for k in sorted({1, *(options.k or (k for k in (4, 16) if k <= options.n))}):
            score = with_interval([pass_at_k(options.n, right, k) for right in rights])
            print(f"  {f'pass@{k}':12} {format_interval(score)}")
        print(f"  {'reward':12} {format_interval(answers['reward'])}")


def ask(options, typed):
    """Print the greedy response of a checkpoint to a prompt, then sampled ones, with their rewards
    if the right answer is given."""
    settings, task, sampler = load(options.checkpoint, typed)
    if task.played:
        raise Refusal("ask: a run with an environment begins with a row of it, not with a prompt")
    prompt = options.prompt.replace("\\n", "\n")
    if task.one_width:                                       # the built-in task's fixed width
        prompt = prompt.ljust(len(task.test[0].prompt))
    rows = [problem.row for problem in task.test if problem.prompt == prompt]
    if options.answer is None:
        task.verify = lambda response, problem: 0.0
        task.reward_functions = task.reward_weights = ()
    elif not rows and any(f.batched or "problem" in f.inputs for f in task.reward_functions):
        raise Refusal("ask --answer: the reward function reads the row of the prompt, which the "
                      "test data do not have: leave --answer out")
    problem = Problem(prompt, options.answer or "", row=[*rows, {}][0])
    for temperature in (0.0, settings.temperature):
        answers = evaluate(sampler, task, [problem], options.n, temperature, settings.seed)
        for text, reward in zip(answers["texts"][0], answers["rewards"][0]):
            score = "" if options.answer is None else f"   reward {reward:g}"
            print(f"\ntemperature {temperature:g}{score}\n{text}")


def dashboard(options, typed):
    from tools import dashboard as pictures
    pictures.write_picture(options.runs, options.output)


def view(options, typed):
    from tools.view import write_page
    write_page(options.runs, options.output)


def at_least_1(text):
    """The number of a flag."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def make_parser():
    """The commands and their own flags."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    parsers = {}
    for command in (passk, ask, dashboard, view):
        parsers[command] = commands.add_parser(command.__name__, allow_abbrev=False)
        parsers[command].set_defaults(command=command)
    parsers[passk].add_argument("checkpoints", nargs="+", metavar="DIR_OR_HUB")
    parsers[passk].add_argument("--n", type=at_least_1, default=16, help="responses per problem")
    parsers[passk].add_argument("--k", type=at_least_1, nargs="+",
                                help="of pass@k, at most --n (default: 1 4 16)")
    parsers[passk].add_argument("--problems", type=at_least_1, default=256, help="at most")
    parsers[ask].add_argument("checkpoint", metavar="DIR_OR_HUB")
    parsers[ask].add_argument("prompt", help="the prompt, without the run's template")
    parsers[ask].add_argument("--n", type=at_least_1, default=4, help="sampled responses")
    parsers[ask].add_argument("--answer", help="the right answer, by which they are scored")
    for command in (dashboard, view):
        parsers[command].add_argument("runs", nargs="+", metavar="RUN", help="run folders")
        parsers[command].add_argument("--output", help="the file (default: in the first folder)")
    return parser


def main(argv=None):
    logging.disable_progress_bar()
    options, words = make_parser().parse_known_args(argv)
    options.command(options, parse_flags(words))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
