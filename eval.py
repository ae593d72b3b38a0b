"""Evaluation: pass@1 and pass@k of any policy, the papers' claims, and a run in pictures.

    python eval.py passk --model_name_or_path DIR [DIR]   pass@k; of two, also the difference
    python eval.py claims [NAME …] [--quick]              measure the papers' claims
    python eval.py dashboard runs/gspo [runs/grpo …]      one page of panels, a PNG
    python eval.py view runs/gspo [runs/grpo]             their tokens, and what a clip removes

passk takes train.py's flags too (--dataset_name, --verifier, --temperature …), with one meaning.
"""

import math
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from tools import dashboard as pictures
from tools import passk as screen
from tools import style
from plumbing.speed.fast import sample
from plumbing.run.metrics import read_metrics
from plumbing.speed.processes import gather, gathered, share
from tools.view import write_page

ROWS = 256  # answers that are sampled at a time

# ------------------------------------------------------------------------------------- estimators

def pass_at_k(n, c, k):
    """Unbiased chance that one of k answers is right, from c right ones among n samples
    (2107.03374 eq. 1). Integers; raises ValueError unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}: pass@k needs 1 <= k <= n = {n} samples per problem")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap(values, confidence=0.95, draws=2000, seed=0):
    """(low, high): percentile bootstrap interval of a mean; values: one number per problem."""
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)  # [draws, n]
    means = values[picks].mean(-1)                                                 # [draws]
    tail = (1 - confidence) / 2
    return means.quantile(tail).item(), means.quantile(1 - tail).item()


def with_interval(values):
    """(mean, low, high) of one number per problem, with its 95 % bootstrap interval."""
    return (sum(values) / len(values), *bootstrap(values))


def pass_at_1(rewards):
    """(mean, low, high) of the share of right answers. rewards [problems][samples], right: >= 1."""
    return with_interval([sum(r >= 1 for r in row) / len(row) for row in rewards])


def evaluate(args, policy, tokenizer, task, problems, samples, temperature, seed=0, progress=None):
    """Sample `samples` answers per problem (1 greedy one at temperature 0) and verify them.

    Returns {"rewards" (their first part), "texts", "lengths" (tokens), "truncated"}, each
    [problems][samples], and "pass_at_1". Several processes divide the problems. progress: the name
    of a progress bar.
    """
    G, T, own = samples if temperature else 1, args.max_completion_length, share(len(problems))
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(problems), G, T, generator=generator)                # [n, G, T]
    answers = {name: [] for name in ("texts", "rewards", "lengths", "truncated")}
    starts = range(own.start, own.stop, max(1, ROWS // G))
    for start in tqdm(starts, desc=progress, disable=None if progress else True, leave=False):
        part = slice(start, min(start + starts.step, own.stop))
        asked = problems[part]
        prompts = task.encode(tokenizer, asked, args.chat_template, args.max_prompt_length)
        rollout = sample(policy, tokenizer, prompts, G, T, temperature=temperature, stop=task.stop,
                         tool=task.tool, uniforms=uniforms[part].flatten(0, 1))
        right = task.judge(rollout.texts, [p for p in asked for _ in range(G)])[:, 0]       # [B]
        found = (rollout.texts, right.tolist(), rollout.mask.sum(-1).tolist(),
                 rollout.truncated.tolist())
        for rows, values in zip(answers.values(), found):
            rows += [values[i:i + G] for i in range(0, len(values), G)]
    parts = gather(answers)
    answers = {name: sum((part[name] for part in parts), []) for name in answers}
    return answers | {"pass_at_1": pass_at_1(answers["rewards"])}


def held_out(args, actor, tokenizer, task):
    """Answers to held-out queries, {"sampled": ..., "greedy": ...} as evaluate returns them."""
    if not args.eval_samples:
        return None
    halved = torch.autocast(actor.policy.device.type, torch.bfloat16, enabled=actor.halved)
    with gathered(actor) as policy, halved:
        return {kind: evaluate(args, policy, tokenizer, task, task.test[:args.eval_prompts],
                               args.eval_samples, temperature)
                for kind, temperature in (("sampled", args.temperature), ("greedy", 0.0))}


# --------------------------------------------------------------------------------- the commands

def passk(argv):
    """pass@1, pass@k and majority of one checkpoint, or of two and their difference."""
    screen.compare(*screen.options(passk.__doc__, argv), evaluate, pass_at_k, with_interval)


def claims(argv):
    """Measure the papers' claims: experiments/shared/run_claims.py, in a process of its own."""
    script = Path(__file__).parent / "experiments/shared/run_claims.py"
    raise SystemExit(subprocess.run([sys.executable, script, *argv]).returncode)


def dashboard(argv):
    """One page of panels for one run, or for several overlaid: a PNG."""
    args = screen.runs_and_output("dashboard", dashboard.__doc__, argv)
    page = args.output or Path(args.runs[0]) / "dashboard.png"
    style.save(pictures.draw({run: read_metrics(Path(run)) for run in args.runs}), page)
    print(page)


def view(argv):
    """One run under the microscope, or two side by side: an HTML file of its own tokens."""
    args = screen.runs_and_output("view", view.__doc__, argv)
    page = write_page(args.runs, args.output)
    print(f"{page}   ({page.stat().st_size / 1e6:.1f} MB; open it in a browser)")


COMMANDS = {"passk": passk, "claims": claims, "dashboard": dashboard, "view": view}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        return print(__doc__)
    try:
        if argv[0] not in COMMANDS:
            raise ValueError(f"{argv[0]} is not a command; there are {', '.join(COMMANDS)}")
        COMMANDS[argv[0]](argv[1:])
    except (ValueError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
