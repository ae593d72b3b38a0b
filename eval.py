"""Evaluation: pass@1 and pass@k of any policy, the papers' claims, and a run in pictures.

    python eval.py passk --model_name_or_path DIR [DIR]   pass@k; of two, also the difference
    python eval.py claims [NAME …] [--quick]              measure the papers' claims
    python eval.py dashboard runs/gspo [runs/grpo …]      one page of panels, a PNG
    python eval.py view runs/gspo [runs/grpo]             their tokens, and what a clip removes

passk takes train.py's flags too (--dataset_name, --verifier, --temperature …), with one meaning.
"""

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from plumbing import dashboard as pictures
from plumbing import passk as screen
from plumbing import processes, style
from plumbing.fast import sample
from plumbing.metrics import read_metrics
from plumbing.policy import load_policy
from plumbing.tasks import from_arguments
from plumbing.view import write_page


# ------------------------------------------------------------------------------------- estimators

def pass_at_k(n, c, k):
    """Unbiased chance that one of k answers is right, from c right ones among n samples.

    1 - C(n-c, k) / C(n, k), 2107.03374 eq. 1. Integers; raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}: pass@k needs 1 <= k <= n = {n} samples per problem")
    miss = 1.0
    for i in range(k):
        miss *= max(n - c - i, 0) / (n - i)
    return 1.0 - miss


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


def majority(texts, rewards):
    """1 if the answer that most samples agree on is right, else 0; tied answers share the vote.

    Samples agree if their last \\boxed{…} is the same, or what follows their last ####; without
    either, if they are the same text.
    """
    def vote(text):
        boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
        return (boxed[-1] if boxed else text.rpartition("####")[2]).strip()
    votes = [vote(text) for text in texts]
    counts = Counter(votes)
    first = {v: rewards[i] >= 1 for i, v in reversed(list(enumerate(votes)))}
    winners = [v for v, count in counts.items() if count == max(counts.values())]
    return sum(first[v] for v in winners) / len(winners)


def evaluate(policy, tokenizer, task, problems, samples, max_new_tokens, *, temperature=1.0,
             chat=True, max_prompt_length=1024, batch_rows=256, seed=0, progress=None):
    """Sample `samples` answers per problem (1 greedy one at temperature 0) and verify them.

    Returns {"rewards" (their first part), "texts", "lengths" (tokens), "truncated"}, each
    [problems][samples], and "pass_at_1" as that function gives it. Several processes divide the
    problems. progress: the name of a progress bar, None for no bar.
    """
    G = samples if temperature else 1
    own = list(range(len(problems)))[processes.rank()::processes.world()]
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(problems), G, max_new_tokens, generator=generator)  # [n, G, T]
    width, found = max(1, batch_rows // G), {}
    parts = [own[start:start + width] for start in range(0, len(own), width)]
    for part in tqdm(parts, desc=progress, disable=None if progress else True, leave=False):
        asked = [problems[i] for i in part]
        prompts = task.encode(tokenizer, asked, chat, max_prompt_length)
        rollout = sample(policy, tokenizer, prompts, G, max_new_tokens, temperature=temperature,
                         stop=task.stop, tool=task.tool, uniforms=uniforms[part].flatten(0, 1))
        right = task.judge(rollout.texts, [p for p in asked for _ in range(G)])[:, 0].tolist()
        lengths, truncated = rollout.mask.sum(-1).tolist(), rollout.truncated.tolist()
        for j, i in enumerate(part):
            rows = slice(j * G, (j + 1) * G)
            found[i] = dict(texts=rollout.texts[rows], rewards=right[rows], lengths=lengths[rows],
                            truncated=truncated[rows])
    found = {i: row for part in processes.gather(found) for i, row in part.items()}
    answers = {key: [found[i][key] for i in range(len(problems))]
               for key in ("texts", "rewards", "lengths", "truncated")}
    return answers | {"pass_at_1": pass_at_1(answers["rewards"])}


def held_out(args, actor, tokenizer, task):
    """Answers to held-out queries, {"sampled": ..., "greedy": ...} as evaluate returns them."""
    if not args.eval_samples:
        return None
    halved = torch.autocast(actor.policy.device.type, torch.bfloat16, enabled=actor.halved)
    with processes.gathered(actor) as policy, halved:
        return {kind: evaluate(policy, tokenizer, task, task.test[:args.eval_prompts],
                               args.eval_samples, args.max_completion_length,
                               temperature=temperature, max_prompt_length=args.max_prompt_length,
                               chat=args.chat_template)
                for kind, temperature in (("sampled", args.temperature), ("greedy", 0.0))}


# ------------------------------------------------------------------------------------------ passk

def passk(argv):
    """pass@1, pass@k and majority of one checkpoint, or of two and their difference."""
    own, args = screen.options(passk.__doc__, argv)
    for k in own.k:
        pass_at_k(own.n, 0, k)                               # refuses k > n before loading anything
    logging.disable_progress_bar()
    use_cuda = torch.cuda.is_available() and not args.use_cpu
    task, device = from_arguments(args), torch.device("cuda" if use_cuda else "cpu")
    problems, reports, found = task.test[:own.problems], [], []
    mean = lambda rows: sum(map(sum, rows)) / sum(map(len, rows))    # over all samples
    print(f"{task.name}: {len(problems)} held-out problems, {own.n} samples each "
          f"at temperature {args.temperature:g}")
    for name in own.model_name_or_path:
        began, title = time.perf_counter(), str(name or "cold start")
        policy, tokenizer = load_policy(args, task, device, name)
        answers = evaluate(policy, tokenizer, task, problems, own.n, args.max_completion_length,
                           temperature=args.temperature, chat=args.chat_template,
                           max_prompt_length=args.max_prompt_length, seed=args.seed, progress=title)
        found.append(scores(answers, own.k))
        reports.append({"model": title, **{k: with_interval(v) for k, v in found[-1].items()},
                        "mean_length": mean(answers["lengths"]),
                        "truncated": mean(answers["truncated"]),
                        "seconds": time.perf_counter() - began})
        screen.show(reports[-1], answers, problems, own.examples)
    report = {"dataset": task.name, "problems": len(problems), "n": own.n,
              "temperature": args.temperature, "seed": args.seed, "checkpoints": reports}
    if len(found) == 2:
        gains = {key: [b - a for a, b in zip(found[0][key], found[1][key])] for key in found[0]}
        report["difference"] = {key: with_interval(values) for key, values in gains.items()}
        screen.show_difference(report["difference"])
    screen.save(report, own.output)


def scores(answers, ks):
    """{"pass@k": [problems], …, "majority@n": [problems]}; pass@1 is the mean over n samples."""
    texts, rewards = answers["texts"], answers["rewards"]
    right, n = [sum(r >= 1 for r in row) for row in rewards], len(rewards[0])
    found = {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in dict.fromkeys([1, *ks])}
    return found | {f"majority@{n}": [majority(t, r) for t, r in zip(texts, rewards)]}


# --------------------------------------------------------------------------- the other commands

def claims(argv):
    """Measure the papers' claims: experiments/run_claims.py, in a process of its own."""
    script = Path(__file__).parent / "experiments/run_claims.py"
    raise SystemExit(subprocess.run([sys.executable, str(script), *argv]).returncode)


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
