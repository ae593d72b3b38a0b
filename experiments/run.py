"""Makes the runs of a question that are missing, judges it and draws it.

    python experiments/run.py                    every question and its verdict, what it still
                                                 lacks; results/numbers.json and the pictures
    python experiments/run.py NAME               make the missing runs; goes on where it stopped
    python experiments/run.py NAME --most 20     at most 20 runs now
    python experiments/run.py league --only ARM  only runs of this arm: your own row of
                                                 losses.OBJECTIVES or preset enters the league so
    python experiments/run.py NAME --judge       make no runs: the rules and what they say

A run is a command line of train.py and a line of results/NAME.jsonl beside this file: question,
arm, cell, seed, command, figures, seconds, machine, versions and commit. Delete a line and its run
is made again, and, if that is elsewhere than the runs it is compared with, these too; the last line
counts. A start that train.py refuses, as its cold start is not usable, has `refused` in place of
figures; a run whose flags are gone has `not_repeatable` and the last commit that had them. An
interruption loses only the current run. A process uses one core, and cold starts are shared.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

import intervals                                                                     # noqa: E402
import pictures                                                                      # noqa: E402
from questions import FIRST, QUESTIONS                                               # noqa: E402
from tools.commands import until_the_reader_leaves                                    # noqa: E402


# ------------------------------------------------------------------------------- what is missing

def read(name, folder="experiments/results"):
    """{(arm, cell, start): run} of a question. A line that is cut off is ignored and its run made
    again."""
    file = ROOT / folder / f"{name}.jsonl"
    runs = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            run = json.loads(text.replace("plumbing/engines/stale.py", "experiments/stale.py"))
            runs[run["arm"], run["cell"], run["seed"]] = run
    return runs


def values(runs, arm, cell, starts, figure="after"):
    """{start: figure} of the runs of a cell that have it."""
    found = {s: runs.get((arm, cell, s), {}).get("figures", {}).get(figure) for s in starts}
    return {s: value for s, value in found.items() if value is not None}


def group_of(question, arm, group):
    """The names of the cells of a group: those that it lists, or those that begin with its name."""
    if group in question.groups:
        return list(question.groups[group])
    return [name for name in question.ladder(arm) | question.further if name.startswith(group)]


def kind(cell):
    """"48 layers" of "48 layers 0.0001"."""
    return cell.rpartition(" ")[0]


def best(question, runs, arm, group=""):
    """The cell of a group with the highest mean over the choosing starts, or None before all are
    run."""
    chooser = question.rate_of.get(arm, arm)
    means = {}
    for cell in group_of(question, arm, group):
        found = values(runs, chooser, cell, question.choose, question.by)
        if len(found) >= question.choices:
            means[cell] = intervals.mean(found.values())
        elif cell not in question.further:
            return None
    return max(means, key=means.get, default=None)


def edge(question, arm, chosen):
    """[the cell of `further` beside the chosen one], if that is the first or the last of its
    ladder."""
    ladder, further = ([c for c in cells if kind(c) == kind(chosen)]
                       for cells in (question.ladder(arm), question.further))
    beside = dict(zip((ladder[0], ladder[-1]), further)) if ladder else {}
    return [beside[chosen]] if chosen in beside else []


def cells_of(question, runs, arm, wanted):
    """The cells that a plan's "all μ4", "edge μ4", "best μ4" or name means; [None] for the best of
    cells that are not all run."""
    word, _, group = wanted.partition(" ")
    if word == "all":
        return [c for c in group_of(question, arm, group) if c not in question.further]
    if word not in ("best", "edge"):
        return [wanted]
    chosen = best(question, runs, arm, group)
    if word == "best":
        return [chosen]
    return edge(question, arm, chosen) if chosen else []


def missing(question, runs):
    """The (arm, cell, seed) of the plan without a run, in order; cell None: it waits for a
    choice."""
    refused = {(kind(cell), seed) for (_, cell, seed), run in runs.items() if "refused" in run}
    for part in question.plan:
        places = [(arm, cell) for wanted in part.cells.split(", ")
                  for arm in part.arms or question.arms
                  for cell in cells_of(question, runs, arm, wanted)]
        kinds = {kind(cell) for _, cell in places if cell}
        usable = [s for s in part.starts if not any((k, s) in refused for k in kinds)]
        yield from ((*place, seed) for seed in usable[:part.count] for place in places
                    if (*place, seed) not in runs)


def chosen_by(question):
    """The (arm, group) whose cell a question chooses."""
    return dict.fromkeys(
        (arm, wanted.partition(" ")[2]) for part in question.plan
        for arm in part.arms or question.arms
        for wanted in part.cells.split(", ") if wanted.startswith("best"))


def forecast(name, question, runs):
    """What a question still lacks, as a sentence."""
    lacking = [cell for _, cell, _ in missing(question, runs)]
    took = [run["seconds"] for run in runs.values() if run["seconds"]]
    each = statistics.median(took or [question.seconds])
    return (f"{name}: {len(runs)} runs made, {len(lacking)} missing ({lacking.count(None)} of them "
            f"wait for a choice), about {len(lacking) * each / 3600:.1f} hours on one core at "
            f"{each:.0f} s a run{' (a guess)' * (not took)}, and half a minute for each new cold "
            "start")


# -------------------------------------------------------------------------------------- one run

def command(question, arm, cell, seed):
    if question.measure:
        words = (f"python experiments/measures.py {question.measure} --seed {seed}",
                 question.arms[arm])
        return " ".join(filter(None, words))
    cells = question.ladder(arm) | question.further
    words = (f"--device cpu --seed {seed}", question.flags, cells[cell], question.arms[arm])
    return " ".join(filter(None, words))


@cache
def circumstances():
    """Where a run is made: differences are only taken within one of them."""
    import torch
    import transformers
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True,
                                        encoding="utf-8").stdout.strip()
    about = Path("/proc/cpuinfo")
    about = about.read_text(encoding="utf-8") if about.is_file() else ""
    cpu = re.search(r"model name\s*: (.*)", about)
    return dict(machine=f"{cpu[1] if cpu else platform.processor()}, "
                        f"{torch.get_num_threads()} thread(s)",
                versions=f"Python {platform.python_version()}, torch {torch.__version__}, "
                         f"transformers {transformers.__version__}",
                commit=git("rev-parse", "HEAD")[:10]
                + "+" * bool(git("status", "-s", "-uno", "*.py")))


def make(name, question, arm, cell, seed):
    """Train once -> the line of the run. Raises ValueError if train.py refuses it for another
    reason than its cold start, SystemExit if it was interrupted."""
    words = command(question, arm, cell, seed)
    line = dict(question=name, arm=arm, cell=cell, seed=seed, command=words)
    began = time.process_time()
    if question.measure:
        from measures import MEASURES
        found = rounded(MEASURES[question.measure](seed, question.arms[arm]))
        return line | dict(figures=found, seconds=time.process_time() - began) | circumstances()
    script = import_module(question.script)
    folder = Path("runs/questions") / f"{os.getpid()}"
    code, printed = quietly(script.main, [*words.split(), "--output_dir", str(folder),
                                         "--overwrite_output_dir"])
    spent = dict(seconds=round(time.process_time() - began, 2)) | circumstances()
    if code == 2 and "cold start" in printed:
        return line | dict(refused=printed.strip().splitlines()[-1]) | spent
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    records = list(map(json.loads, lines))
    if code in (2, 130) or code and not records:
        raise ValueError(f"train.py {words}: {code}\n{printed[-800:]}")
    summary = {} if code else json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    asked = json.loads((folder / "config.json").read_text(encoding="utf-8"))["arguments"]
    shutil.rmtree(folder)
    return line | dict(figures=rounded(figures(records, summary, asked))) | spent


def figures(records, summary, asked):
    """What is kept of a run. One that train.py stopped, as its updates were not finite, counts with
    its last pass rate."""
    def each(name):
        return [r.get(name) for r in records]

    def median(name):
        return statistics.median([x for x in each(name) if x is not None] or [None])

    shares = [r["variance_factor"] / r["inverse_length"] for r in records
              if r.get("variance_factor") and r.get("inverse_length")]
    return {
        "before": summary.get("pass_at_1_before", records[0]["pass_rate"]),
        "after": summary.get("pass_at_1_after", records[-1]["pass_rate"]),
        "greedy": summary.get("greedy_after"), "seconds": summary.get("seconds"),
        "reward_before": summary.get("reward_before"), "reward": summary.get("reward_after"),
        **{f"at_{r['step']}": r["pass_at_1"][0] for r in records if r.get("pass_at_1")},
        "collapsed": collapsed(each("pass_rate")),
        "first_length": records[0]["length"],
        "length": intervals.mean(r["length"] for r in records[-10:]),
        "pass_rates": each("pass_rate"), "rewards": each("reward"), "lengths": each("length"),
        "clipped": intervals.mean(r["clip_low"] + r["clip_high"] for r in records),
        "batch_samples": [(asked["prompts_per_step"] + r["discarded_groups"])
                          * asked["num_generations"] for r in records],
        "log_s_var": median("log_s_var"),
        "factor_times_length": statistics.median(shares or [None]),
        "inverse_length": median("inverse_length"),
        "flips": median("flip_rate"),
        "epsilon_over_std": median("epsilon_over_std"), "entropy": records[-1]["entropy"]}


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
    return json.loads(json.dumps(x), parse_float=lambda digits: float(f"{float(digits):.5g}"))


# -------------------------------------------------------------------------------- what was found

def circumstances_of(run):
    return run["machine"], run["versions"], run["commit"]


def series(question, runs, term, starts):
    """{start: (value, its runs)} of a term such as "GRPO@best μ4:clipped"."""
    arm, _, where = term.partition("@")
    cell, _, figure = where.partition(":")
    word, _, group = cell.partition(" ")
    if arm[0].isdigit():                                     # "1st": of the league
        arm = dict(enumerate(entered(question, runs), 1)).get(int(arm[0]))
    cells = (group_of(question, arm, group) if word == "mean"
             else cells_of(question, runs, arm, cell))
    found = [values(runs, arm, one, starts, figure or "after") for one in cells]
    return {s: (intervals.mean(of[s] for of in found), [runs[arm, one, s] for one in cells])
            for s in set.intersection(*map(set, found))}


def compared(question, runs, of, starts):
    """{start: (value, runs)} of "A - B + C", over the starts at which all terms were run."""
    found = {s: (0, []) for s in starts}
    for sign, term in re.findall(r"(- |\+ |^)(.+?)(?: (?=[-+] )|$)", of):
        more = series(question, runs, term, starts)
        found = {s: (value - more[s][0] if sign == "- " else value + more[s][0], used + more[s][1])
                 for s, (value, used) in found.items() if s in more}
    return found


def contrast(question, runs, of, starts):
    """{start: value} of "A - B + C", over the starts whose runs were all made under the same
    circumstances."""
    return {s: value for s, (value, of_start) in compared(question, runs, of, starts).items()
            if len(set(map(circumstances_of, of_start))) == 1}


def mixed(question, runs):
    """The (arm, cell, seed) of runs that a rule compares with one made under other circumstances,
    but for those made here: a start is made again as a whole."""
    here = circumstances_of(circumstances())
    for rule in question.rules.values():
        found = compared(question, runs, rule.of, rule.starts or question.starts)
        for _, of_start in found.values():
            if len(set(map(circumstances_of, of_start))) > 1:
                yield from ((run["arm"], run["cell"], run["seed"]) for run in of_start
                            if circumstances_of(run) != here)


def judge_rule(question, runs, rule):
    """dict(mean, low, high, starts, verdict, p) of a rule, or None without a run."""
    to = (lambda x: math.log(x) if x > 0 else -math.inf) if rule.factor else float
    back = math.exp if rule.factor else float
    found = contrast(question, runs, rule.of, rule.starts or question.starts)
    if not found:
        return None
    gap = list(map(to, found.values()))
    bounds = [b and tuple(map(to, b)) for b in (rule.held, rule.refuted)]
    answer = (intervals.Verdict("reported") if rule.reported else
              intervals.decide(gap, *bounds, rule.nothing, rule.least))
    middle, low, high = map(back, intervals.interval(gap))
    return dict(mean=middle, low=low, high=high, starts=str(len(gap)), verdict=answer, p=answer.p)


def judged(question, runs):
    """({rule: dict}, the verdict of the question). A rule without a number is not run or, where
    the question has runs, not finished: its mean is None."""
    lacking = len(list(missing(question, runs)))
    none = f"not finished: {len(runs)} of {len(runs) + lacking} runs" if runs else "not run"
    none = dict(mean=None, starts="0", verdict=intervals.Verdict(none), p=None)
    found = {name: judge_rule(question, runs, rule) or none
             for name, rule in question.rules.items()}
    deciding = [found[name] for name in question.decides]
    answers = [number["verdict"] for number in deciding]
    if not answers:
        return found, intervals.Verdict("reported only")
    if none in deciding:
        return found, none["verdict"]
    if question.depends and {intervals.HELD, intervals.REFUTED} <= set(answers):
        return found, intervals.Verdict(f"depends on {question.depends}")
    return found, intervals.all_of(answers)


def entered(question, runs):
    """{member: {start: pass@1}} of the members of the league with all their runs, best first."""
    found = {name: values(runs, name, best(question, runs, name), question.starts)
             for name in question.arms}
    whole = [item for item in found.items() if len(item[1]) == len(question.starts)]
    return dict(sorted(whole, key=lambda item: -intervals.mean(item[1].values())))


def league_table(question, runs):
    """A row per member, the best first: rank and mean with intervals, whether it is near the first,
    that is not told apart, the median of the samples. Members whose runs were made elsewhere than
    most have no rank."""
    found = entered(question, runs)
    cells = {name: best(question, runs, name) for name in found}
    where = {name: {circumstances_of(runs[name, cell, s]) for s in question.starts}
             for name, cell in cells.items()}
    usual = statistics.mode(map(frozenset, where.values()))
    places = intervals.ranks({name: found[name] for name in found if where[name] == usual})
    rows = []
    for name, cell in cells.items():
        first = found[next(iter(places))]
        _, low, high = intervals.interval(found[name][s] - first[s] for s in question.starts)
        samples = values(runs, name, cell, question.starts, "batch_samples").values()
        rows.append(dict(member=name, cell=cell, rank=places.get(name),
                         near=name in places and low <= 0 <= high,
                         flags=f"{question.arms[name]} {question.ladder(name)[cell]}",
                         interval=intervals.interval(found[name].values()),
                         samples=statistics.median(map(sum, samples))))
    return rows


def summary():
    """What fill.py puts into pages: {"verdicts": {question: …}, "numbers": {"question: rule": …},
    "chosen": {"question: arm, group": cell}, "league": rows}."""
    found = dict(verdicts={}, numbers={}, chosen={})
    for name, question in QUESTIONS.items():
        runs = read(name)
        numbers, verdict = judged(question, runs)
        found["verdicts"][name] = dict(verdict=verdict, p=verdict.p)
        found["numbers"] |= {f"{name}: {rule}": number for rule, number in numbers.items()}
        for arm, group in chosen_by(question):
            if cell := best(question, runs, arm, group):
                found["chosen"][f"{name}: {arm}, {group}".rstrip(", ")] = cell
        if name == "league":
            found["league"] = league_table(question, runs)
    corrected = intervals.holm([v["p"] for v in found["verdicts"].values()])
    for row, p in zip(found["verdicts"].values(), corrected):
        row["holm"] = p
    return rounded(found)


def words_of(rule):
    """A rule as a sentence, from its bounds."""
    if rule.reported:
        return f"{rule.of}: reported beside the rules, without a verdict"
    no = (within(rule.refuted) if rule.refuted
          else f"wholly outside {rule.held[0]:g} to {rule.held[1]:g}")
    equal = f", or within ±{rule.nothing:g}: equal" if rule.nothing else ""
    return (f"{rule.of}: held if the interval lies {within(rule.held)}; refuted if {no}{equal}; "
            f"else, and below {rule.least} starts, undecided")


def within(bounds):
    low, high = bounds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"within {low:g} and {high:g}"


def report(question, runs):
    found, verdict = judged(question, runs)
    print(f"{question.claim}   ({question.source})\n  {verdict.upper()}\n  regime    "
          f"{question.regime}\n  reported  {question.reported}\n  "
          f"{' '.join(question.notes.split())}")
    for arm, group in chosen_by(question):
        print(f"  chosen    {arm}: {best(question, runs, arm, group) or 'not yet'}")
    for rule, number in found.items():
        form = question.rules[rule].form
        shown = ("" if number["mean"] is None else ": {} [{}, {}] ({})".format(
            *(form.format(number[key]) for key in ("mean", "low", "high")), number["starts"]))
        print(f"  {rule}: {number['verdict']}{shown}\n      {words_of(question.rules[rule])}")


def draw(name, question, runs):
    """The pictures of a question."""
    if name in pictures.SHOWN:
        pictures.forest(name, question, judged(question, runs)[0])
    if name == "reuse":
        pictures.reuse(curves(question, runs))
    if name == "variance":
        pictures.variance(factors())


def curves(question, runs):
    """{(arm, group): mean pass rates of the batches} of the fresh starts at the chosen cells, of
    the three arms that a picture can show."""
    found = {(arm, group): values(runs, arm, best(question, runs, arm, group), question.starts,
                                  "pass_rates").values()
             for arm, group in chosen_by(question) if arm in FIRST}
    return {place: list(map(intervals.mean, zip(*rates))) for place, rates in found.items()}


def factors():
    """{model: [(1/L, Var[log s] / Var[log w])]}: of a model taught little at each length, of runs
    of the default task and of the pretrained model."""
    figures_of = lambda name: [run["figures"] for run in read(name).values()]
    return {"width 64, by length": [point for of in figures_of("variance")
                                    for point in zip((1 / L for L in of["lengths"]),
                                                     of["factors"])]} | {
        model: [(of["inverse_length"], of["inverse_length"] * of["factor_times_length"])
                for of in figures_of(name)]
        for name, model in (("reuse", "default task, a run"), ("counting", "SmolLM2 counts, a run"))
        if figures_of(name)}


# ------------------------------------------------------------------------------ the command line

def main(argv=None):
    parser = argparse.ArgumentParser(prog="experiments/run.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--most", type=int, default=math.inf, help="at most so many runs now")
    parser.add_argument("--only", metavar="ARM[@CELL]", help="only runs of this arm (and cell)")
    parser.add_argument("--folder", default="experiments/results", help="where NAME.jsonl is")
    parser.add_argument("--judge", action="store_true", help="make no runs")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    for name in options.names or QUESTIONS:
        if name not in QUESTIONS:
            parser.error(f"no question is called {name}; known: {', '.join(QUESTIONS)}")
        question = QUESTIONS[name]
        if options.only and options.only.partition("@")[0] not in question.arms:
            parser.error(f"{name} has no arm {options.only}; it has {', '.join(question.arms)}")
        print(forecast(name, question, read(name, options.folder)), flush=True)
        if options.names and not options.judge:
            make_all(name, question, options)
        runs = read(name, options.folder)
        if options.names:
            report(question, runs)
        else:
            print(f"    {question.claim}: {judged(question, runs)[1]}")
        if not options.judge:
            draw(name, question, runs)
    if options.folder == "experiments/results" and not options.judge:
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
    while made < options.most:
        runs = read(name, options.folder)
        wanted = (one for one in itertools.chain(missing(question, runs), mixed(question, runs))
                  if one[1] and options.only in (None, one[0], f"{one[0]}@{one[1]}"))
        one = next(wanted, None)
        if one is None:
            break
        line = make(name, question, *one)
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        made += 1
        told = line.get("refused") or line["figures"].get("after", "measured")
        print(f"  {' '.join(map(str, one))}: {told}, {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    with until_the_reader_leaves():
        main()
