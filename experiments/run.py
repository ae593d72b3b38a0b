"""Makes the runs of a question that are missing, judges it and draws it.

    python experiments/run.py                      what each question still lacks, and how long
    python experiments/run.py NAME                 make the missing runs; goes on where it stopped
    python experiments/run.py NAME --most 20       at most 20 runs now
    python experiments/run.py NAME --only 'GRPO@μ1 0.0004' --starts 704 705
                                                   only these runs
    python experiments/run.py NAME --judge         make no runs: the rules and what they say

A run is a command line of train.py and a line of results/NAME.jsonl: question, arm, cell, seed,
command, figures, seconds, machine, versions and commit. Delete a line and its run is made again. A
start that train.py refuses, as its cold start is not usable, has `refused` in place of figures.
An interruption loses only the current run. Runs use one core each and share cold starts.
"""

import argparse
import contextlib
import io
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import intervals                                                                     # noqa: E402
from questions import QUESTIONS                                                      # noqa: E402


# ------------------------------------------------------------------------------- what is missing

def place(run):
    return run["arm"], run["cell"], run["seed"]


def read(name, folder="results"):
    """The finished runs of a question. A line that is cut off is ignored and its run made again."""
    file = ROOT / folder / f"{name}.jsonl"
    runs = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            runs.append(json.loads(line))
    return runs


def values(runs, arm, cell, starts, figure="after"):
    """{start: run} of the runs of a cell that have this figure."""
    return {r["seed"]: r for r in runs if (r["arm"], r["cell"]) == (arm, cell)
            and r["seed"] in starts and r.get("figures", {}).get(figure) is not None}


def beginning(cells, group):
    return [name for name in cells if name == group or name.startswith(group)]


def best(question, runs, arm, group=""):
    """The cell of a group with the highest mean over the choosing starts, or None before all are
    run."""
    means = {}
    for cell in beginning(question.cells | question.further, group):
        found = values(runs, arm, cell, question.choose)
        if len(found) >= question.choices:
            means[cell] = intervals.mean(r["figures"]["after"] for r in found.values())
        elif cell in question.cells:
            return None
    return max(means, key=means.get) if means else None


def edge(question, runs, arm, group=""):
    """The cell of `further` beside the best one, if that is the first or the last of its ladder."""
    chosen = best(question, runs, arm, group)
    if chosen is None:
        return None
    own = chosen.rpartition(" ")[0]
    ladder = [c for c in question.cells if c.rpartition(" ")[0] == own]
    beyond = [c for c in question.further if c.rpartition(" ")[0] == own]
    if beyond and chosen == ladder[0]:
        return beyond[0]
    return beyond[-1] if beyond and chosen == ladder[-1] else None


def cells_of(question, runs, arm, wanted):
    """The cells that a plan's "all μ4", "edge μ4", "best μ4" or name means, as far as known."""
    word, _, group = wanted.partition(" ")
    if word == "all":
        return beginning(question.cells, group)
    found = {"best": best, "edge": edge}.get(word)
    if found is None:
        return [wanted]
    cell = found(question, runs, arm, group)
    return [cell] if cell else []


def missing(question, runs):
    """The places (arm, cell, seed) of the plan without a run, in order, as far as they are
    known."""
    done = set(map(place, runs))
    refused = {r["seed"] for r in runs if "refused" in r}
    means = cache(lambda arm, wanted: cells_of(question, runs, arm, wanted))
    for part in question.plan:
        starts = [s for s in part.starts if s not in refused][:part.count]
        for seed in starts:
            for wanted in part.cells:
                for arm in part.arms:
                    for cell in means(arm, wanted):
                        if (arm, cell, seed) not in done:
                            yield arm, cell, seed


def unknown(question, runs):
    """How many further runs the plan will ask for once its cells are chosen."""
    return sum(part.count or len(part.starts) for part in question.plan for wanted in part.cells
               for arm in part.arms if wanted.startswith("best")
               and not cells_of(question, runs, arm, wanted))


def forecast(name, question, runs):
    known = len(list(missing(question, runs)))
    later = unknown(question, runs)
    took = [r["seconds"] for r in runs if "figures" in r]
    each = statistics.median(took) if took else question.seconds
    return (f"{name}: {len(runs)} runs made, {known + later} missing ({later} of them wait for a "
            f"choice), about {(known + later) * each / 3600:.1f} hours on one core at {each:.0f} s "
            f"a run{'' if took else ' (a guess)'}, and half a minute for each new cold start")


# -------------------------------------------------------------------------------------- one run

def command(question, arm, cell, seed):
    cells = question.cells | question.further
    words = (f"--device cpu --seed {seed}", question.flags, cells[cell], question.arms[arm])
    return " ".join(filter(None, words))


@cache
def circumstances():
    """Where a run is made: differences are only taken within one of them."""
    import torch
    import transformers
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True,
                                        text=True).stdout.strip()
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")] if Path("/proc/cpuinfo").is_file() else []
    return dict(machine=f"{cpu[0] if cpu else platform.processor()}, "
                        f"{torch.get_num_threads()} thread(s)",
                versions=f"Python {platform.python_version()}, torch {torch.__version__}, "
                         f"transformers {transformers.__version__}",
                commit=git("rev-parse", "--short=10", "HEAD")
                + "+" * bool(git("status", "--porcelain", "--untracked-files=no", "*.py")))


def make(name, question, arm, cell, seed):
    """Train once -> the line of the run. Raises ValueError if train.py refuses it for another
    reason than its cold start, SystemExit if it was interrupted."""
    import train
    folder = Path("runs/questions") / f"{os.getpid()}"
    words = command(question, arm, cell, seed)
    line = dict(question=name, arm=arm, cell=cell, seed=seed, command=words)
    began = time.process_time()
    code, printed = quietly(train.main, [*words.split(), "--output_dir", str(folder),
                                         "--overwrite_output_dir"])
    spent = dict(seconds=round(time.process_time() - began, 2)) | circumstances()
    if code == 2 and "cold start" in printed:
        return line | dict(refused=printed.strip().splitlines()[-1]) | spent
    metrics = folder / "metrics.jsonl"
    records = list(map(json.loads, metrics.read_text().splitlines())) if metrics.is_file() else []
    if code in (2, 130) or code and not records:
        raise ValueError(f"train.py {words}: {code}\n{printed[-800:]}")
    summary = {} if code else json.loads((folder / "summary.json").read_text())
    asked = json.loads((folder / "config.json").read_text())["arguments"]
    shutil.rmtree(folder)
    return line | dict(figures=rounded(figures(records, summary, asked))) | spent


def figures(records, summary, asked):
    """What is kept of a run. One that train.py stopped, as its updates were not finite, counts with
    its last pass rate. kl: of old and new policy, to second order."""
    def each(name):
        return [r.get(name) for r in records]

    def median(name):
        found = [x for x in each(name) if x is not None]
        return statistics.median(found) if found else None

    shares = [r["variance_factor"] / r["inverse_length"] for r in records
              if r.get("variance_factor") and r.get("inverse_length")]
    return {
        "before": summary.get("pass_at_1_before", records[0]["pass_rate"]),
        "after": summary.get("pass_at_1_after", records[-1]["pass_rate"]),
        "greedy": summary.get("greedy_after"),
        "reward_before": summary.get("reward_before"), "reward": summary.get("reward_after"),
        **{f"at_{r['step']}": r["pass_at_1"][0] for r in records if r.get("pass_at_1")},
        "stopped_at": None if summary else len(records),
        "pass_rates": each("pass_rate"), "rewards": each("reward"), "lengths": each("length"),
        "clipped": intervals.mean(r["clip_low"] + r["clip_high"] for r in records),
        "batch_samples": [(asked["prompts_per_step"] + r["discarded_groups"])
                          * asked["num_generations"] for r in records],
        "batch_seconds": [sum(r[f"seconds_{lap}"] for lap in ("rollout", "logp", "update"))
                          for r in records],
        "kl": median("log_w_var") / 2, "log_s_var": median("log_s_var"),
        "factor_times_length": statistics.median(shares) if shares else None,
        "inverse_length": median("inverse_length"),
        "mismatch_kl": records[0]["mismatch_kl"], "flips": median("flip_rate"),
        "epsilon_over_std": median("epsilon_over_std"), "entropy": records[-1]["entropy"]}


def quietly(main, argv):
    """(exit code or None, what it printed) of a script's main; signal handlers stay as before."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    printed = io.StringIO()
    code = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(argv)
        except SystemExit as stop:
            code = stop.code
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    return code, printed.getvalue()


def rounded(x):
    """Floats to five significant digits: the lines are read by people and kept in git."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


# -------------------------------------------------------------------------------- what was found

def circumstances_of(run):
    return run["machine"], run["versions"], run["commit"]


def series(question, runs, term):
    """({start: value}, {start: circumstances}) of a term such as "GRPO@best μ4:clipped"."""
    arm, _, where = term.partition("@")
    cell, _, figure = where.partition(":")
    figure = figure or "after"
    word, _, group = cell.partition(" ")
    if word == "mean":
        of = [values(runs, arm, c, question.starts, figure)
              for c in beginning(question.cells, group)]
        whole = set.intersection(*map(set, of))
        return ({s: intervals.mean(found[s]["figures"][figure] for found in of) for s in whole},
                {s: circumstances_of(of[0][s]) for s in whole})
    chosen = cells_of(question, runs, arm, cell)
    found = values(runs, arm, chosen[0], question.starts, figure) if chosen else {}
    return ({s: r["figures"][figure] for s, r in found.items()},
            {s: circumstances_of(r) for s, r in found.items()})


def contrast(question, runs, of):
    """{start: value} of "A - B + C", over the starts at which all terms were run, each of them
    under the same circumstances."""
    words = of.replace(" + ", "\n+").replace(" - ", "\n-").split("\n")
    signs = [-1 if word.startswith("-") else 1 for word in words]
    terms = [series(question, runs, word.lstrip("+-")) for word in words]
    shared = set.intersection(*(set(found) for found, _ in terms))
    same = [s for s in sorted(shared) if len({where[s] for _, where in terms}) == 1]
    return {s: sum(sign * found[s] for sign, (found, _) in zip(signs, terms)) for s in same}


def judged(question, runs):
    """({rule: (values, verdict)}, the verdict of the question)."""
    found = {}
    for name, rule in question.rules.items():
        gap = list(contrast(question, runs, rule.of).values())
        found[name] = gap, intervals.decide(gap, rule.held, rule.refuted, rule.nothing, rule.least)
    return found, intervals.all_of([found[name][1] for name in question.decides])


def words_of(rule):
    """A rule as a sentence, from its bounds."""
    if rule.refuted is None:
        no = f"wholly {outside(rule.held)}"
    else:
        no = within(rule.refuted)
    equal = f", or within ±{rule.nothing:g}: equal" if rule.nothing else ""
    return (f"{rule.of}: held if the interval lies {within(rule.held)}; refuted if {no}{equal}; "
            f"else, and below {rule.least} starts, undecided")


def within(bounds):
    low, high = bounds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"within {low:g} and {high:g}"


def outside(bounds):
    return f"outside {bounds[0]:g} to {bounds[1]:g}"


def report(name, question, runs):
    found, verdict = judged(question, runs)
    print(f"{question.claim}\n  {verdict}\n\n{question.notes}\n")
    for arm in question.arms:
        groups = {wanted.partition(" ")[2] for part in question.plan if arm in part.arms
                  for wanted in part.cells if wanted.startswith("best")}
        for group in sorted(groups):
            if chosen := best(question, runs, arm, group):
                print(f"  chosen: {arm} {chosen}")
    for rule, (gap, answer) in found.items():
        told = f"{answer}: {intervals.number(gap)} ({len(gap)})" if gap else "not run"
        print(f"  {rule}: {told}\n      {words_of(question.rules[rule])}")


# ------------------------------------------------------------------------------ the command line

def main(argv=None):
    parser = argparse.ArgumentParser(prog="experiments/run.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--most", type=int, default=math.inf, help="at most so many runs now")
    parser.add_argument("--only", metavar="ARM@CELL", help="only runs of this arm and cell")
    parser.add_argument("--starts", type=int, nargs="*", help="only runs of these cold starts")
    parser.add_argument("--folder", default="results", help="where NAME.jsonl is")
    parser.add_argument("--judge", action="store_true", help="make no runs")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    for name in options.names or QUESTIONS:
        if name not in QUESTIONS:
            parser.error(f"no question is called {name}; known: {', '.join(QUESTIONS)}")
        question = QUESTIONS[name]
        print(forecast(name, question, read(name, options.folder)), flush=True)
        if options.names and not options.judge:
            make_all(name, question, options)
        if options.names:
            report(name, question, read(name, options.folder))


def make_all(name, question, options):
    """Make what is missing, one run after the other, as later ones depend on earlier ones."""
    file = ROOT / options.folder / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    made = 0
    while made < options.most:
        wanted = (one for one in missing(question, read(name, options.folder))
                  if options.only in (None, f"{one[0]}@{one[1]}")
                  and (not options.starts or one[2] in options.starts))
        one = next(wanted, None)
        if one is None:
            break
        line = make(name, question, *one)
        with open(file, "a") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        made += 1
        told = line["refused"] if "refused" in line else f"{line['figures']['after']:.3f}"
        print(f"  {' '.join(map(str, one))}: {told}, {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
