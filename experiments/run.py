"""Makes the runs of a question that are missing, judges it and draws it.

    python experiments/run.py                    every question and its verdict, what it still
                                                 lacks; results/numbers.json
    python experiments/run.py NAME               make the missing runs; goes on where it stopped
    python experiments/run.py NAME --most 20     at most 20 runs now
    python experiments/run.py NAME --judge       make no runs: the rules and their verdicts
    python experiments/run.py MINE.py            a question of your own: the file has QUESTION =
                                                 Question(...), the runs go to runs/questions
    python experiments/run.py MINE.py --pool FOLDER
                                                 judge what lies below a folder: runs of train.py
                                                 that others made with the question's flags

A run is a command line of train.py and a line of results/NAME.jsonl beside this file: question,
variant (`arm`), setting (`cell`), seed, command, figures, seconds, machine, versions and commit.
Delete a line and its run is made again; the last line counts. A line whose flags are no longer
those of the table counts as not made. A seed whose supervised warm-up has not learned the task has
`refused` in place of figures. The commit is the last one that changed the program or the script of
the run. An interruption loses only the current run. A process uses one core; warm-ups are shared.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import intervals                                                                     # noqa: E402
import judging                                                                       # noqa: E402
import pictures                                                                      # noqa: E402
import rows                                                                          # noqa: E402
from judging import read                                  # noqa: E402
from questions import QUESTIONS                                                 # noqa: E402
from features.sampler_format import find_sampler_format                              # noqa: E402
from plumbing.refusal import Refusal                                                 # noqa: E402
from session.arguments import Settings, parse_flags, resolve, with_defaults           # noqa: E402


# ------------------------------------------------------------------------------- what is missing

def missing(question, runs):
    """The (variant, setting, seed) of the plan without a run, in order; setting None: it waits for
    a choice."""
    refused = {(setting.rpartition(" ")[0], seed)
               for (_, setting, seed), run in runs.items() if "refused" in run}
    for part in question.plan:
        places = [(variant, setting) for words in part.settings.split(", ")
                  for variant in part.variants or question.variants
                  for setting in judging.resolve_settings(question, runs, variant, words)]
        groups = {setting.rpartition(" ")[0] for _, setting in places if setting}
        usable = [s for s in part.seeds if not any((group, s) in refused for group in groups)]
        yield from ((*place, seed) for seed in usable[:part.count] for place in places
                    if (*place, seed) not in runs)


def current(question, runs):
    """Those of the runs whose flags are still those of the table. A run whose variant or setting no
    table has, and one of --pool, stays as it is."""
    def same(key, run):
        variant, setting, _ = key
        if ("command" not in run or variant not in question.variants
                or setting not in question.list_settings(variant)):
            return True
        planned, was = (re.sub(r" ?--seed \d+", "", words)
                        for words in (command(question, *key), run["command"]))
        return planned == was or find_settings(planned) == find_settings(was)
    return {key: run for key, run in runs.items() if same(key, run)}


@cache
def find_settings(words):
    """What a command line sets, however it is spelled; the command line itself if train.py does not
    know all its flags."""
    own, flags = rows.split(words.split())
    try:
        settings = resolve(with_defaults(parse_flags(flags)))
    except SystemExit:
        return words
    return str(own), replace(settings, sampler_dtype=find_sampler_format(settings))


def find_question(name):
    """(name, Question) of a name of the table, or of a file with a QUESTION of one's own."""
    if not name.endswith(".py"):
        if name not in QUESTIONS:
            raise Refusal(f"no question is called {name}; known: {', '.join(QUESTIONS)}, or a file "
                          "of your own")
        return name, QUESTIONS[name]
    if not Path(name).is_file() or Path(name).stem in QUESTIONS:
        raise Refusal(f"{name}: no such file, or called like a question of the table")
    return Path(name).stem, runpy.run_path(name)["QUESTION"]


def judged(question, runs):
    """({rule: dict}, a line about the question)."""
    lacking = len({*missing(question, runs)})
    made = sum("refused" not in run for run in runs.values())
    found = judging.judge(question, runs)
    return found, judging.summarize(question, found, made, lacking)


def forecast(name, question, runs):
    """What a question still lacks, as a sentence."""
    lacking = [setting for _, setting, _ in {*missing(question, runs)}]
    took = [run["seconds"] for run in runs.values() if run["seconds"]]
    each = statistics.median(took or [question.seconds])
    return (f"{name}: {len(runs)} runs made, {len(lacking)} missing ({lacking.count(None)} of them "
            f"wait for a choice), about {len(lacking) * each / 3600:.1f} hours on one core at "
            f"{each:.0f} s a run{' (a guess)' * (not took)}, and half a minute for each new "
            "supervised warm-up")


# -------------------------------------------------------------------------------------- one run

def command(question, variant, setting, seed):
    """The command line of a run."""
    return " ".join(filter(None, (f"--device cpu --seed {seed}", question.flags,
                                  question.list_settings(variant)[setting],
                                  question.variants[variant])))


def describe_machine(question):
    """Where a run is made: differences are only taken within one machine, version and commit."""
    import torch
    import transformers
    about = Path("/proc/cpuinfo")
    found = about.is_file() and re.search(r"model name\s*: (.*)", about.read_text(encoding="utf-8"))
    cpu = found[1] if found else platform.processor() or platform.machine()
    return dict(machine=f"{cpu}, {torch.get_num_threads()} thread(s)",
                versions=f"Python {platform.python_version()}, torch {torch.__version__}, "
                         f"transformers {transformers.__version__}",
                commit=describe_code(question.script))


@cache
def describe_code(script):
    """The last commit that changed the program or this script of experiments/; if their files have
    changed since, or without git, a digest of them."""
    files = ("*.py", "features/*.py", "plumbing/**/*.py", "session/*.py", "tools/*.py",
             f"experiments/{script}.py")
    git = lambda *words: subprocess.run(
        ["git", *words, "--", *(f":(glob){file}" for file in files)], cwd=ROOT,
        capture_output=True, encoding="utf-8").stdout.strip()
    commit = git("log", "-1", "--format=%H")[:10]
    if commit and not git("status", "-s", "-uno"):
        return commit
    digest = hashlib.sha256()
    for path in sorted(path for file in files for path in ROOT.glob(file)):
        digest.update(path.read_bytes())
    return f"{commit}+{digest.hexdigest()[:8]}"


def make(name, question, variant, setting, seed):
    """Train once -> the line of the run. Raises Refusal if train.py refuses its flags, ValueError
    if it was interrupted or fails before its first batch."""
    words = command(question, variant, setting, seed)
    script = import_module(question.script)
    line = dict(question=name, arm=variant, cell=setting, seed=seed, command=words)
    began = time.process_time()
    folder = Path("runs/questions") / f"{os.getpid()}"
    code, printed, more = quietly(script.main, [*words.split(), "--output_dir", str(folder)])
    spent = dict(seconds=round(time.process_time() - began, 2)) | describe_machine(question)
    records = read_records(folder)
    if code == 2:
        raise Refusal(f"questions.py: {name}: {variant} {setting}: {printed.splitlines()[-1]}")
    if code == 130 or code and not records:
        raise ValueError(f"train.py {words}: {code}\n{printed[-800:]}")
    summary = {} if code else json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    if records[0]["pass_rate"] < question.least_start:
        return line | dict(refused=f"first pass rate {records[0]['pass_rate']:.3f}") | spent
    found = figures(records, summary) | (more or {})
    return line | dict(figures=rounded(found)) | spent


def read_records(folder):
    """The lines of a run's metrics.jsonl; [] without the file."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    return list(map(json.loads, lines))


def pool(question, folder):
    """{(variant, setting, seed): run} of the finished runs of train.py that lie below a folder and
    have the flags of the question. Each laptop makes the runs of its own seed, all variants, so
    that a difference at one seed is one machine's."""
    def same(settings):
        return replace(settings, device="", output_dir=None, config=None, seed=0,
                       sampler_dtype=find_sampler_format(settings))
    planned = [((variant, setting), same(find_settings(command(question, variant, setting, 0))[1]))
               for variant in question.variants for setting in question.list_settings(variant)]
    runs = {}
    for file in sorted(Path(folder).rglob("summary.json")):
        summary, kept = (json.loads(file.with_name(name).read_text(encoding="utf-8"))
                         for name in ("summary.json", "config.json"))
        settings = Settings(**kept)
        place = next((place for place, of in planned if of == same(settings)), None)
        if not place:
            print(f"  left out, as it has the flags of no variant: {file.parent}")
            continue
        found = figures(read_records(file.parent), summary)
        runs[(*place, settings.seed)] = dict(
            figures=found, seconds=found["seconds"], machine="that of the seed",
            versions="not compared", commit="not compared")
    return runs


def figures(records, summary):
    """What is kept of a run. One that train.py stopped, as its updates were not finite, counts with
    its last pass rate. Of mini-batches with a signal, before their steps: clip_signal, the mean,
    and std_log_s, that of log s in the last one of a batch, the median over the batches."""
    pass_rates = [r["pass_rate"] for r in records]
    after = summary.get("pass_at_1_after", pass_rates[-1])
    held_out = [r["pass_at_1"][0] for r in records if r.get("pass_at_1")]    # without its interval
    updates = [[u for u in r["minibatches"] if u["signal_tokens"]] for r in records]
    return {
        "before": summary.get("pass_at_1_before", pass_rates[0]),
        "after": after,
        "speed": intervals.mean([*held_out, after] if held_out else pass_rates[1:]),
        "seconds": summary.get("seconds"), "reward": summary.get("reward_after"),
        "collapsed": collapsed(pass_rates),
        "clip_signal": intervals.mean(u["clip_signal"] for us in updates for u in us)
                       if any(updates) else None,
        "std_log_s": statistics.median([math.sqrt(us[-1]["log_s_var"]) for us in updates if us]
                                       or [None]),
        "pass_rates": pass_rates, "held_out": held_out}


def collapsed(pass_rates, patience=4):
    """1 if so many successive batches have a pass rate below half of the best so far, else 0."""
    best_so_far = running = 0
    for rate in pass_rates:
        best_so_far = max(best_so_far, rate)
        running = running + 1 if rate < best_so_far / 2 else 0
        if running == patience:
            return 1
    return 0


def quietly(main, argv):
    """(exit code or None, what it printed, what it returned) of a script's main; signal handlers
    stay as before."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    printed = io.StringIO()
    code = found = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            found = main(argv)
        except SystemExit as stop:
            code = stop.code
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    return code, printed.getvalue(), found


def rounded(x):
    """Floats to five significant digits: the lines are read by people and kept in git."""
    return json.loads(json.dumps(x), parse_float=lambda digits: float(f"{float(digits):.5g}"))


# -------------------------------------------------------------------------------- what was found

def summary():
    """What fill.py puts into pages: {"lines": {question: how far it is, and its verdicts},
    "numbers": {"question: rule": …}, "chosen": {"question: setting, variant": its best setting}}.
    """
    found = dict(lines={}, numbers={}, chosen={})
    for name, question in QUESTIONS.items():
        runs = current(question, read(name))
        numbers, found["lines"][name] = judged(question, runs)
        found["numbers"] |= {f"{name}: {rule}": number for rule, number in numbers.items()}
        for part in question.plan:
            for words in part.settings.split(", "):
                for variant in part.variants or question.variants if words[:4] == "best" else ():
                    found["chosen"][f"{name}: {words}, {variant}"], = judging.resolve_settings(
                        question, runs, variant, words)
    return rounded(found)


# ------------------------------------------------------------------------------ the command line

def main(argv=None):
    parser = argparse.ArgumentParser(prog="experiments/run.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}; or "
                        "MINE.py, a question of your own")
    parser.add_argument("--most", type=int, default=math.inf, help="at most so many runs now")
    parser.add_argument("--seeds", metavar="FIRST:END", default=f"0:{2**32}", help="only runs of "
                        "these seeds: a question on several cores, each with a --folder of its own")
    parser.add_argument("--folder", help="where NAME.jsonl is (default: experiments/results; "
                        "runs/questions for a question of your own)")
    parser.add_argument("--judge", action="store_true", help="make no runs")
    parser.add_argument("--pool", metavar="FOLDER", help="make no runs: judge the finished runs of "
                        "train.py below this folder, whatever machine made them")
    options = parser.parse_args(argv)
    asked = dict(map(find_question, options.names)) or QUESTIONS
    own = [name for name in asked if name not in QUESTIONS]
    options.folder = options.folder or ("runs/questions" if own else "experiments/results")
    given = options.pool and Path(options.pool).resolve()
    os.chdir(ROOT)
    for name, question in asked.items():
        try:
            judging.check_names(question)
        except ValueError as error:
            raise Refusal(f"{name}: {error}")
        found = pool(question, given) if given else read(name, options.folder)
        runs = current(question, found)
        left_out = len(found) - len(runs)
        changed = f"; {left_out} more are left out: their flags have changed" * bool(left_out)
        print(forecast(name, question, runs) + changed, flush=True)
        if options.names and not (options.judge or given):
            make_all(name, question, options)
            runs = current(question, read(name, options.folder))
        found, line = judged(question, runs)
        if options.names:
            judging.print_verdict(question, runs, found, line)
        else:
            print(f"    {question.claim}: {line}")
        if options.names and not options.judge:
            figure = pictures.forest(name, question, found, line)
            print(f"    figure: {figure or 'none, as no rule has a number'}")
    if options.folder == "experiments/results" and not (options.judge or given):
        text = json.dumps(summary(), indent=1, ensure_ascii=False)
        (ROOT / "experiments/results/numbers.json").write_text(text + "\n", encoding="utf-8")


def make_all(name, question, options):
    """Make what is missing, one run after the other, as later ones depend on earlier ones."""
    file = ROOT / options.folder / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, words in question.before:
        if not Path(path).exists():
            subprocess.run([sys.executable, *words.split()], check=True)
    made = 0
    first, end = map(int, options.seeds.split(":"))
    while made < options.most:
        runs = current(question, read(name, options.folder))
        waiting = (key for key in missing(question, runs) if key[1] and first <= key[2] < end)
        key = next(waiting, None)
        if key is None:
            break
        line = make(name, question, *key)
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        made += 1
        result = line.get("refused") or line["figures"].get("after", "measured")
        print(f"  {' '.join(map(str, key))}: {result}, {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
