"""Runs the experiments that are not measured yet, each in its own process, and tabulates them.

    python eval.py claims                    all claims; after Ctrl-C the same command continues
    python eval.py claims --quick            one seed, smaller measurements, under runs/quick/
    python eval.py claims --maps             also the maps, which take hours
    python eval.py claims --table            no measurement: only the table and results/claims.json

The rules of the verdicts are in experiments/shared/claim.py and in each experiment's docstring.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

# The experiments in the order in which they are started, the longest first. The maps take hours:
# without --maps the table shows their committed result.
CLAIMS = ["family_rewards", "gradient_noise", "clipped_tokens", "expert_flips", "token_credit",
          "perplexity_identity", "variance_length", "off_policyness", "perplexity_dynamics",
          "product_ratio", "replay_cost", "length_band", "hidden_divergence", "irreversible"]
MAPS = ["sampler_noise", "band_dose", "stale_sampler", "stability_map", "band_law", "flip_depth",
        "moe_stability", "depth", "league", "pretrained", "length_duration", "family_flags"]

# family_rewards is a table, no claim: stability_map judges it, on some of the same cold starts.
# The table of claims: six groups, each with its question and its claims, the leading one first.
GROUPS = {
    "identity": ("Is GSPO's s a ratio of perplexities?",
                 ["perplexity_identity", "perplexity_dynamics"]),
    "clipping": ("Does GSPO clip a hundred times more tokens?",
                 ["clipped_tokens", "product_ratio", "off_policyness"]),
    "noise and length": ("Does GRPO's noise grow with length, and GSPO's not?",
                         ["gradient_noise", "variance_length", "length_band", "length_duration",
                          "hidden_divergence"]),
    "mixtures of experts": ("Does GRPO collapse on a MoE, as experts flip?",
                            ["moe_stability", "depth", "irreversible", "expert_flips",
                             "flip_depth"]),
    "infrastructure": ("May GSPO trust the sampler's log-probs?",
                       ["sampler_noise", "band_dose", "pretrained", "stale_sampler",
                        "replay_cost"]),
    "speed of learning": ("Does GSPO learn faster than GRPO?",
                          ["stability_map", "band_law", "league", "token_credit", "distillation",
                           "family_flags"]),
}
COLUMNS = ("claim", "source", "reported", "regime", "measured", "number", "seeds", "verdict", "p",
           "figure", "command")


def parse(argv):
    """The command line, checked. Raises ValueError with one line."""
    parser = argparse.ArgumentParser(prog="eval.py claims", allow_abbrev=False,
                                     description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"claims to measure: {', '.join(CLAIMS)}")
    parser.add_argument("--quick", action="store_true", help="one seed, smaller; in runs/quick/")
    parser.add_argument("--maps", action="store_true", help=f"also {', '.join(MAPS)} (hours)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the experiment's own)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--again", action="store_true", help="also repeat what was measured before")
    parser.add_argument("--table", action="store_true", help="only tabulate, measure nothing")

    def refuse(message):
        raise ValueError(message)
    parser.error = refuse
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in CLAIMS + MAPS:
            close = difflib.get_close_matches(name, CLAIMS + MAPS, n=1)
            guess = f", did you mean {close[0]}?" if close else ""
            raise ValueError(f"no claim is called {name}{guess}; known: {', '.join(CLAIMS + MAPS)}")
        if name in MAPS and not args.maps:
            raise ValueError(f"{name} takes hours: say --maps too")
    if args.maps and args.quick:
        raise ValueError("--maps takes hours and knows no --quick")
    if args.jobs < 1 or args.seeds is not None and args.seeds < 1:
        raise ValueError(f"--jobs {args.jobs}, --seeds {args.seeds}: both at least 1")
    return args


def measure(args, folder):
    """Run what is wanted and not done yet. Returns the names that failed."""
    marks = Path("runs/claims/done.json")
    done = [] if args.again or not marks.is_file() else json.loads(marks.read_text())
    key = lambda name: f"{name} quick={args.quick} seeds={args.seeds}"
    wanted = args.names or CLAIMS + MAPS * args.maps
    fresh = lambda name: key(name) in done and (folder / f"{name}.json").is_file()
    pending = [name for name in wanted if not fresh(name)]
    if len(pending) < len(wanted):
        print(f"{len(wanted) - len(pending)} of {len(wanted)} were measured before on this machine "
              "(--again measures them anew)")

    def finished(name):
        done.append(key(name))
        write(marks, done)
    return run_experiments(pending, args, finished)


def run_experiments(pending, args, finished):
    """Up to --jobs at once; finished(name) after each that succeeded. Returns those that failed.

    Ctrl-C stops them and keeps what is done.
    """
    Path("runs/claims").mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    flags = ["--quick"] * args.quick + (["--seeds", str(args.seeds)] if args.seeds else [])
    pending = list(pending)
    running = {}
    failed = []
    bar = tqdm(total=len(pending), disable=None, unit="claim")
    try:
        while pending or running:
            while pending and len(running) < args.jobs:
                name = pending.pop(0)
                options = [] if name in MAPS else flags
                command = [sys.executable, f"experiments/{name}.py", *options]
                with open(f"runs/claims/{name}.log", "w") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                running[name] = process, time.perf_counter()
            time.sleep(0.2)
            now = ", ".join(f"{name} ({last_line(name)})" for name in running)
            bar.set_postfix_str(now[:100], refresh=True)
            for name, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                bar.update()
                what = "FAILED" if process.returncode else "measured"
                bar.write(f"{name:20} {what} in {time.perf_counter() - began:.0f} s")
                failed.append(name) if process.returncode else finished(name)
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command continues from here")
    finally:
        for process, _ in running.values():
            process.terminate()
        bar.close()
    return failed


def last_line(name):
    """What an experiment last said."""
    lines = Path(f"runs/claims/{name}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:40] if lines else "starting"


def write(file, data):
    """JSON, in its place at once or not at all."""
    partial = Path(file).with_name(f".partial-{Path(file).name}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    os.replace(partial, file)


def holm(ps):
    """Holm's p of each of several tests, None where there is none: how likely a p as small as this
    is for any of the rows that are not smaller, if nothing were there."""
    places = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    found = [None] * len(ps)
    worst = 0.0
    for rank, i in enumerate(places):
        worst = max(worst, min(1.0, (len(places) - rank) * ps[i]))
        found[i] = worst
    return found


def tabulate(folder):
    """Print each claim and its verdict; returns the rows of claims.json, in the table's order."""
    rows = []
    missing = []
    for name in (name for _, names in GROUPS.values() for name in names):
        file = (Path("results") if name in MAPS else folder) / f"{name}.json"
        if file.is_file():
            found = json.loads(file.read_text())
            rows.append({column: found[column] for column in COLUMNS})
        else:
            missing.append(name)
    for row, corrected in zip(rows, holm([row["p"] for row in rows])):
        chance = "" if corrected is None else f", p {row['p']:.2g}, by Holm {corrected:.2g}"
        print(f"\n{row['claim']}   ({row['source']})\n"
              f"  {row['verdict'].upper()}, {row['seeds']} cold start(s){chance}\n"
              f"  regime    {row['regime']}\n"
              f"  reported  {row['reported']}\n  measured  {row['measured']}\n"
              f"  number    {row['number']}")
    counts = Counter(row["verdict"].split(":")[0] for row in rows).most_common()
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts)
          + (f"; not measured here: {', '.join(missing)}" if missing else ""))
    return rows


def main(argv=None):
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        raise SystemExit(2)
    folder = Path("runs/quick" if args.quick else "results")
    failed = [] if args.table else measure(args, folder)
    rows = tabulate(folder)
    for name in failed:
        print(f"{name} failed: see runs/claims/{name}.log", file=sys.stderr)
    write(folder / "claims.json", rows)
    print(f"{folder / 'claims.json'}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
