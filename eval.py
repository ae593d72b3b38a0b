"""Evaluation: pass@1 and pass@k of any policy, the papers' claims, and a run in pictures.

    python eval.py passk --model_name_or_path runs/gspo/checkpoints/step_40 --n 16 --k 1 4 16     two names: before, after, difference
    python eval.py claims [NAME …] [--quick] [--seeds N]                                           experiments/*.py, one by one
    python eval.py dashboard runs/gspo [runs/grpo …]                                               one page of panels, a PNG

passk takes train.py's flags too (--dataset_name, --verifier, --temperature, --stop, --min_terms …) and means the same by them.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from plumbing import processes as distributed
from rollout import sample
from plumbing.tasks import encode_prompt, from_arguments

# The experiments in the order in which `claims` starts them, the longest first, with the numbers of the claims in their table.
CLAIMS = {"family_rewards": 15, "sampler_numerics": 10, "gradient_noise": 6, "clipped_tokens": 3, "expert_flips": 8, "token_credit": 14,
          "perplexity_identity": 1, "variance_length": 2, "off_policyness": 4, "perplexity_dynamics": 5, "product_ratio": 7, "replay_cost": 11,
          "length_band": 12, "hidden_divergence": 13}
COLUMNS = ("claim", "source", "reported", "measured", "spread", "seeds", "verdict", "figure", "command")      # of results/claims.json
HOURS = {"moe_stability": 9}     # takes hours: run it by itself; `claims` shows its committed result


# ------------------------------------------------------------------------------------------------------------- estimators

def pass_at_k(n, c, k):
    """Unbiased chance that at least one of k answers is right, from c right ones among n: 1 - C(n-c, k) / C(n, k) (2107.03374 eq. 1).

    n, k integers, k <= n; c an integer. Raises ValueError for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}: pass@k needs 1 <= k <= n = {n} samples per problem")
    miss = 1.0
    for i in range(k):
        miss *= max(n - c - i, 0) / (n - i)
    return 1.0 - miss


def bootstrap(values, confidence=0.95, draws=2000, seed=0):
    """Percentile bootstrap interval of a mean over problems: (low, high). values: one number per problem."""
    values = torch.as_tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)        # [draws, problems]
    means = values[picks].mean(-1)                                                       # [draws]
    tail = (1 - confidence) / 2
    return means.quantile(tail).item(), means.quantile(1 - tail).item()


def majority(texts, rewards):
    """1 if the answer that most samples agree on is right, 0 if not; answers that tie share the vote.

    Samples agree if their last \\boxed{…} is the same, or what follows their last ####; without either, if they are the same text.
    """
    def vote(text):
        boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
        return (boxed[-1] if boxed else text.rpartition("####")[2]).strip()
    votes = [vote(text) for text in texts]
    counts = Counter(votes)
    first = {v: rewards[i] >= 1 for i, v in reversed(list(enumerate(votes)))}
    winners = [v for v, count in counts.items() if count == max(counts.values())]
    return sum(first[v] for v in winners) / len(winners)


def evaluate(policy, tokenizer, task, problems, samples, max_new_tokens, *, temperature=1.0, chat=True, max_prompt_length=1024, batch_rows=256,
             seed=0, progress=None):
    """Sample `samples` answers per problem (1 greedy one at temperature 0) and verify them.

    -> dict: rewards [problems][samples], texts, lengths (tokens) and truncated (bool) likewise. Processes divide the problems.
    progress: what a progress bar is called (on a terminal), None: no bar.
    """
    G = samples if temperature else 1
    own = list(range(len(problems)))[distributed.rank()::distributed.world()]
    uniforms = torch.rand(len(problems), G, max_new_tokens, generator=torch.Generator().manual_seed(seed))
    found, width = {}, max(1, batch_rows // G)
    for start in tqdm(range(0, len(own), width), desc=progress, disable=None if progress else True, leave=False):
        part = own[start:start + width]
        prompts = [encode_prompt(tokenizer, problems[i], chat, max_prompt_length) for i in part]
        rollout = sample(policy, tokenizer, prompts, G, max_new_tokens, temperature=temperature, stop=task.stop,
                         uniforms=uniforms[part].flatten(0, 1))
        lengths, truncated = rollout.mask.sum(-1).tolist(), rollout.truncated.tolist()
        for j, i in enumerate(part):
            rows = slice(j * G, (j + 1) * G)
            texts = rollout.texts[rows]
            found[i] = dict(texts=texts, rewards=[task.verify(t, problems[i]) for t in texts], lengths=lengths[rows], truncated=truncated[rows])
    found = {i: row for part in distributed.gather(found) for i, row in part.items()}
    rows = [found[i] for i in range(len(problems))]
    return {key: [row[key] for row in rows] for key in ("texts", "rewards", "lengths", "truncated")}


def pass_at_1(rewards):
    """(mean, low, high): share of right answers, averaged over samples, with a 95 % bootstrap interval over problems."""
    per_problem = [sum(r >= 1 for r in row) / len(row) for row in rewards]
    return (sum(per_problem) / len(per_problem), *bootstrap(per_problem))


# ------------------------------------------------------------------------------------------------------------------ passk

def passk(argv):
    """One checkpoint's pass@1, pass@k and majority with intervals, or two checkpoints' and their difference, problem by problem."""
    from plumbing.arguments import parse                              # these import this file
    from plumbing.policy import load_policy
    parser = quiet_parser("passk")
    parser.add_argument("--model_name_or_path", nargs="+", default=[None], metavar="DIR_OR_HUB",
                        help="one, or two: before and after; none: the built-in cold start")
    parser.add_argument("--n", type=int, default=16, help="samples per problem")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 16], help="which pass@k; each at most n")
    parser.add_argument("--problems", type=int, default=256, help="how many held-out problems, at most")
    parser.add_argument("--examples", type=int, default=2, help="transcripts to show, so many right and so many wrong")
    parser.add_argument("--output", default="runs/passk.json", help="where the numbers go")
    own, rest = parser.parse_known_args(argv)
    if own.n < 1 or own.problems < 1 or own.examples < 0:
        raise ValueError(f"--n {own.n}, --problems {own.problems}, --examples {own.examples}: at least 1, 1 and 0")
    for k in own.k:
        pass_at_k(own.n, 0, k)                               # refuses k > n before anything is loaded
    if len(own.model_name_or_path) > 2:
        raise ValueError(f"--model_name_or_path names {len(own.model_name_or_path)} checkpoints: one, or two to compare")
    logging.disable_progress_bar()
    first = own.model_name_or_path[0]
    args = parse(rest + (["--model_name_or_path", first] if first else []))
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    task = from_arguments(args)
    problems, reports, raw = task.test[:own.problems], [], []
    print(f"{task.name}: {len(problems)} held-out problems, {own.n} samples each at temperature {args.temperature:g}")
    for name in own.model_name_or_path:
        began = time.perf_counter()
        policy, tokenizer = load_policy(args, task, device, name)
        check_vocabulary(policy, tokenizer, name)
        answers = evaluate(policy, tokenizer, task, problems, own.n, args.max_completion_length, temperature=args.temperature,
                           chat=args.chat_template, max_prompt_length=args.max_prompt_length, seed=args.seed, progress=str(name or "cold start"))
        raw.append(scores(answers, own.n, own.k))
        reports.append({"model": str(name or "cold start"), **{key: with_interval(values) for key, values in raw[-1].items()},
                        "mean_length": mean(flat(answers["lengths"])), "truncated": mean(flat(answers["truncated"])),
                        "seconds": time.perf_counter() - began})
        show(reports[-1], answers, problems, own.examples)
    report = {"dataset": task.name, "problems": len(problems), "n": own.n, "temperature": args.temperature, "seed": args.seed, "checkpoints": reports}
    if len(raw) == 2:
        report["difference"] = {key: with_interval([b - a for a, b in zip(raw[0][key], raw[1][key])]) for key in raw[0]}
        print("\nafter minus before, problem by problem")
        for key, (value, low, high) in report["difference"].items():
            print(f"  {key:12} {value:+.3f} [{low:+.3f}, {high:+.3f}]" + ("" if low <= 0 <= high else "  more than chance"))
    Path(own.output).parent.mkdir(parents=True, exist_ok=True)
    Path(own.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{own.output}")


def check_vocabulary(policy, tokenizer, name):
    """ValueError if the tokenizer has tokens the model does not know: a checkpoint put together from two."""
    known, largest = policy.get_output_embeddings().weight.shape[0], max(tokenizer.get_vocab().values())
    if largest >= known:
        raise ValueError(f"--model_name_or_path {name}: its tokenizer has token {largest}, its model has {known} tokens: they do not belong together")


def scores(answers, n, ks):
    """Per problem: {"pass@k": [problems], ..., f"majority@n": [problems]}; pass@1 over n samples is the mean over samples (avg@n)."""
    right = [sum(r >= 1 for r in row) for row in answers["rewards"]]
    n = len(answers["rewards"][0])                           # 1 at temperature 0
    found = {f"pass@{k}": [pass_at_k(n, c, k) for c in right] for k in dict.fromkeys([1, *ks])}
    return found | {f"majority@{n}": [majority(texts, rewards) for texts, rewards in zip(answers["texts"], answers["rewards"])]}


def with_interval(values):
    return (mean(values), *bootstrap(values))


def mean(values):
    return sum(values) / len(values)


def flat(rows):
    return [x for row in rows for x in row]


def show(report, answers, problems, examples):
    print(f"\n{report['model']}   ({report['seconds']:.0f} s)")
    for key, value in report.items():
        if isinstance(value, tuple):
            print(f"  {key:12} {value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]")
    print(f"  {'length':12} {report['mean_length']:.1f} tokens, {report['truncated']:.1%} truncated")
    every = [(p, texts[0], rewards[0] >= 1) for p, texts, rewards in zip(problems, answers["texts"], answers["rewards"])]
    for wanted in (True, False):
        for problem, text, _ in [e for e in every if e[2] == wanted][:examples]:
            print(f"  {'right' if wanted else 'wrong'}   {problem.prompt.strip()[-60:]!r} -> {text[-160:]!r}"
                  + ("" if wanted else f"   (right: {problem.answer})"))


# ------------------------------------------------------------------------------------------------------------------ claims

def claims(argv):
    """Run the experiments that are not done yet, each in a process of its own, and tabulate what held."""
    parser = quiet_parser("claims")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; all without a name: {', '.join(CLAIMS)}")
    parser.add_argument("--quick", action="store_true", help="one seed, smaller measurements, a minute or two; results go to runs/quick/")
    parser.add_argument("--seeds", type=int, help="how many seeds (default 3, quick 1)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many at once")
    parser.add_argument("--again", action="store_true", help="measure also what this machine has measured before (its training runs are kept)")
    parser.add_argument("--table", action="store_true", help="measure nothing, only print the table and write claims.json")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in CLAIMS:
            close = difflib.get_close_matches(name, list(CLAIMS), n=1)
            raise ValueError(f"no claim is called {name}{f', did you mean {close[0]}?' if close else ''}; known: {', '.join(CLAIMS)}"
                             + (f"; {name} takes hours: python experiments/{name}.py" if name in HOURS else ""))
    if args.jobs < 1 or args.seeds is not None and args.seeds < 1:
        raise ValueError(f"--jobs {args.jobs}, --seeds {args.seeds}: both at least 1")
    folder, marks = Path("runs/quick" if args.quick else "results"), Path("runs/claims/done.json")
    key = lambda name: f"{name} quick={args.quick} seeds={args.seeds}"
    done = [] if args.again or not marks.is_file() else json.loads(marks.read_text())
    wanted = [] if args.table else args.names or list(CLAIMS)
    pending = [name for name in wanted if key(name) not in done or not (folder / f"{name}.json").is_file()]
    if len(pending) < len(wanted):
        print(f"{len(wanted) - len(pending)} of {len(wanted)} were measured before on this machine (--again measures them anew)")
    failed = run_experiments(pending, args, lambda name: done.append(key(name)) or write(marks, done))
    rows = tabulate(folder)
    for name in failed:
        print(f"{name} failed: see runs/claims/{name}.log", file=sys.stderr)
    write(folder / "claims.json", rows)
    print(f"{folder / 'claims.json'}")
    if failed:
        raise SystemExit(1)


def run_experiments(pending, args, finished):
    """Up to --jobs at once; finished(name) after each that succeeded. Returns the names that failed. Ctrl-C stops them, and keeps what is done."""
    Path("runs/claims").mkdir(parents=True, exist_ok=True)
    threads, pending, running, failed = max(1, (os.cpu_count() or 1) // args.jobs), list(pending), {}, []
    flags = ["--quick"] * args.quick + (["--seeds", str(args.seeds)] if args.seeds else [])
    bar = tqdm(total=len(pending), disable=None, unit="claim")
    try:
        while pending or running:
            while pending and len(running) < args.jobs:
                name = pending.pop(0)
                log = open(f"runs/claims/{name}.log", "w")
                running[name] = subprocess.Popen([sys.executable, f"experiments/{name}.py", *flags], stdout=log, stderr=subprocess.STDOUT,
                                                 env=os.environ | {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"})
                running[name].began = time.perf_counter()
            time.sleep(0.2)
            bar.set_postfix_str(", ".join(f"{name} ({last_line(name)})" for name in running)[:100], refresh=True)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    bar.update()
                    bar.write(f"{name:20} {'measured' if process.returncode == 0 else 'FAILED'} in {time.perf_counter() - process.began:.0f} s")
                    failed.append(name) if process.returncode else finished(name)
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command goes on from here")
    finally:
        for process in running.values():
            process.terminate()
        bar.close()
    return failed


def last_line(name):
    lines = Path(f"runs/claims/{name}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:40] if lines else "starting"


def write(file, data):
    from plumbing.run import write_text
    write_text(Path(file), json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def tabulate(folder):
    """Print what held and what did not; -> the rows of claims.json, in the order of the claims' numbers."""
    rows, missing, numbers = [], [], CLAIMS | HOURS
    for name in sorted(numbers, key=numbers.get):
        file = (Path("results") if name in HOURS else folder) / f"{name}.json"
        if file.is_file():
            result = json.loads(file.read_text())
            spread = result["spread"]
            result["spread"] = spread if isinstance(spread, str) else ", ".join(f"{key} {value}" for key, value in spread.items())
            rows.append({key: result[key] for key in COLUMNS})
        else:
            missing.append(name)
    for row in rows:
        verdict = row["verdict"].upper() if len(row["verdict"]) < 40 else row["verdict"]
        print(f"\n{row['claim']}   ({row['source']})\n  {verdict}, {row['seeds']} seed(s)\n"
              f"  reported  {row['reported']}\n  measured  {row['measured']}\n  spread    {row['spread']}")
    counts = Counter(row["verdict"] if len(row["verdict"]) < 40 else "several answers" for row in rows)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
          + (f"; not measured here: {', '.join(missing)}" if missing else ""))
    return rows


# --------------------------------------------------------------------------------------------------------------- dashboard

def dashboard(argv):
    """One page of panels for one run, or for several overlaid."""
    from experiments import figures
    from plumbing.metrics import read_metrics
    parser = quiet_parser("dashboard")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--output", help="the PNG (default: dashboard.png in the first run's folder)")
    args = parser.parse_args(argv)
    records = {run: read_metrics(Path(run)) for run in args.runs}
    output = args.output or Path(args.runs[0]) / "dashboard.png"
    figures.save(figures.dashboard({Path(run).name if len(args.runs) > 1 else run: r for run, r in records.items()}), output)
    print(output)


# --------------------------------------------------------------------------------------------------------------- the script

COMMANDS = {"passk": passk, "claims": claims, "dashboard": dashboard}


def quiet_parser(command):
    """An argument parser whose complaint is one line, and a ValueError."""
    parser = argparse.ArgumentParser(prog=f"eval.py {command}", description=COMMANDS[command].__doc__, allow_abbrev=False)

    def refuse(message):
        raise ValueError(f"{command}: {message}")
    parser.error = refuse
    return parser


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
