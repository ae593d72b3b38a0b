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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from scipy import stats                                                              # noqa: E402

import intervals                                                                     # noqa: E402
import pictures                                                                      # noqa: E402
from questions import FIRST, QUESTIONS                                               # noqa: E402


# ------------------------------------------------------------------------------- what is missing

def read(name, folder="experiments/results"):
    """{(arm, cell): {start: run}} of the finished runs of a question. A line that is cut off is
    ignored and its run made again."""
    file = ROOT / folder / f"{name}.jsonl"
    runs = {}
    for text in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            run = json.loads(text)
            runs.setdefault((run["arm"], run["cell"]), {})[run["seed"]] = run
    return runs


def values(runs, arm, cell, starts, figure="after"):
    """{start: run} of the runs of a cell that have this figure."""
    return {seed: run for seed, run in runs.get((arm, cell), {}).items()
            if seed in starts and run.get("figures", {}).get(figure) is not None}


def mean_of(found, figure="after"):
    return intervals.mean(run["figures"][figure] for run in found.values())


def group_of(question, arm, group):
    """The names of the cells of a group: those that it lists, or those that begin with its name."""
    if group in question.groups:
        return list(question.groups[group])
    return [name for name in question.ladder(arm) | question.further if name.startswith(group)]


def best(question, runs, arm, group=""):
    """The cell of a group with the highest mean over the choosing starts, or None before all are
    run."""
    chooser = question.rate_of.get(arm, arm)
    means = {}
    for cell in group_of(question, arm, group):
        found = values(runs, chooser, cell, question.choose, question.by)
        if len(found) >= question.choices:
            means[cell] = mean_of(found, question.by)
        elif cell not in question.further:
            return None
    return max(means, key=means.get) if means else None


def edge(question, runs, arm, group=""):
    """The cell of `further` beside the best one, if that is the first or the last of its ladder."""
    chosen = best(question, runs, arm, group)
    if chosen is None:
        return None
    own = chosen.rpartition(" ")[0]
    ladder, beyond = ([c for c in cells if c.rpartition(" ")[0] == own]
                      for cells in (question.ladder(arm), question.further))
    if beyond and chosen == ladder[0]:
        return beyond[0]
    return beyond[-1] if beyond and chosen == ladder[-1] else None


def survived(question, runs, arm, group=""):
    """The last cell of a group whose mean over the choosing starts ends above its start."""
    above = [cell for cell in group_of(question, arm, group)
             if (found := values(runs, arm, cell, question.choose))
             and mean_of(found) > mean_of(found, "before")]
    return above[-1] if above else None


def cells_of(question, runs, arm, wanted):
    """The cells that a plan's "all μ4", "edge μ4", "best μ4" or name means, as far as known."""
    word, _, group = wanted.partition(" ")
    if word == "all":
        return [c for c in group_of(question, arm, group) if c not in question.further]
    if word not in ("best", "edge"):
        return [wanted]
    cell = (best if word == "best" else edge)(question, runs, arm, group)
    return [cell] if cell else []


def missing(question, runs):
    """The (arm, cell, seed) of the plan without a run, in order, as far as they are known."""
    kind = lambda cell: cell.rpartition(" ")[0]              # "48 layers" of "48 layers 0.0001"
    refused = {(kind(cell), seed) for (_, cell), of in runs.items() for seed, run in of.items()
               if "refused" in run}
    known = cache(lambda arm, wanted: cells_of(question, runs, arm, wanted))
    for part in question.plan:
        places = [(arm, cell) for wanted in part.cells.split(", ")
                  for arm in part.arms or question.arms for cell in known(arm, wanted)]
        kinds = {kind(cell) for _, cell in places}
        usable = [s for s in part.starts if not any((k, s) in refused for k in kinds)]
        for seed in usable[:part.count]:
            for arm, cell in places:
                if seed not in runs.get((arm, cell), ()):
                    yield arm, cell, seed


def choices(question):
    """The (part, arm, "best μ4") of a plan whose cell is chosen."""
    return [(part, arm, wanted) for part in question.plan for arm in part.arms or question.arms
            for wanted in part.cells.split(", ") if wanted.startswith("best")]


def progress(question, runs):
    """(runs made, runs missing, how many of these wait for a choice)."""
    waiting = sum(part.count or len(part.starts) for part, arm, wanted in choices(question)
                  if not cells_of(question, runs, arm, wanted))
    return sum(map(len, runs.values())), len(list(missing(question, runs))) + waiting, waiting


def forecast(name, question, runs):
    """What a question still lacks, as a sentence."""
    made, lacking, waiting = progress(question, runs)
    took = [run["seconds"] for of in runs.values() for run in of.values() if run["seconds"]]
    each = statistics.median(took) if took else question.seconds
    return (f"{name}: {made} runs made, {lacking} missing ({waiting} of them wait for a choice), "
            f"about {lacking * each / 3600:.1f} hours on one core at {each:.0f} s a run"
            f"{'' if took else ' (a guess)'}, and half a minute for each new cold start")


# -------------------------------------------------------------------------------------- one run

def command(question, arm, cell, seed):
    if question.measure:
        return f"python experiments/measures.py {question.measure} --seed {seed}"
    cells = question.ladder(arm) | question.further
    words = (f"--device cpu --seed {seed}", question.flags, cells[cell], question.arms[arm])
    return " ".join(filter(None, words))


@cache
def circumstances():
    """Where a run is made: differences are only taken within one of them."""
    import torch
    import transformers
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True,
                                        text=True).stdout.strip()
    about = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", about.read_text()) if about.is_file() else None
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
        found = rounded(MEASURES[question.measure](seed))
        return line | dict(figures=found, seconds=time.process_time() - began) | circumstances()
    import train
    folder = Path("runs/questions") / f"{os.getpid()}"
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
    its last pass rate."""
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
        "greedy": summary.get("greedy_after"), "seconds": summary.get("seconds"),
        "reward_before": summary.get("reward_before"), "reward": summary.get("reward_after"),
        **{f"at_{r['step']}": r["pass_at_1"][0] for r in records if r.get("pass_at_1")},
        "collapsed": collapsed(each("pass_rate")),
        "pass_rates": each("pass_rate"), "rewards": each("reward"), "lengths": each("length"),
        "clipped": intervals.mean(r["clip_low"] + r["clip_high"] for r in records),
        "batch_samples": [(asked["prompts_per_step"] + r["discarded_groups"])
                          * asked["num_generations"] for r in records],
        "log_s_var": median("log_s_var"),
        "factor_times_length": statistics.median(shares) if shares else None,
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
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


# -------------------------------------------------------------------------------- what was found

def circumstances_of(run):
    return run["machine"], run["versions"], run["commit"]


def series(question, runs, term, starts):
    """{start: (value, its runs)} of a term such as "GRPO@best μ4:clipped"."""
    arm, _, where = term.partition("@")
    cell, _, figure = where.partition(":")
    figure = figure or "after"
    word, _, group = cell.partition(" ")
    if arm[0].isdigit():                                     # "1st": of the league
        members = list(entered(question, runs))
        if int(arm[0]) > len(members):
            return {}
        arm = members[int(arm[0]) - 1]
    cells = (group_of(question, arm, group) if word == "mean"
             else cells_of(question, runs, arm, cell))
    found = [values(runs, arm, one, starts, figure) for one in cells]
    whole = set.intersection(*map(set, found)) if found else ()
    return {s: (intervals.mean(of[s]["figures"][figure] for of in found), [of[s] for of in found])
            for s in whole}


def compared(question, runs, of, starts):
    """{start: (value, runs)} of "A - B + C", over the starts at which all terms were run."""
    words = of.replace(" + ", "\n+").replace(" - ", "\n-").split("\n")
    signs = [-1 if word.startswith("-") else 1 for word in words]
    terms = [series(question, runs, word.lstrip("+-"), starts) for word in words]
    shared = set.intersection(*map(set, terms))
    return {s: (sum(sign * found[s][0] for sign, found in zip(signs, terms)),
                [run for found in terms for run in found[s][1]]) for s in sorted(shared)}


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
    gap = list(contrast(question, runs, rule.of, rule.starts or question.starts).values())
    if rule.less:
        return beyond(gap, list(contrast(question, runs, rule.less, rule.less_starts).values()))
    if not gap:
        return None
    bounds = [rule.held, rule.refuted]
    back = float
    if rule.factor:
        gap = list(map(math.log, gap))
        back = math.exp
        bounds = [b and tuple(math.log(x) if x > 0 else -math.inf for x in b) for b in bounds]
    answer = (intervals.Verdict("reported") if rule.reported else
              intervals.decide(gap, *bounds, rule.nothing, rule.least))
    middle, low, high = map(back, intervals.interval(gap))
    return dict(mean=middle, low=low, high=high, starts=str(len(gap)), verdict=answer, p=answer.p)


def beyond(gap, other):
    """The same for a mean minus that of an independent sample, by Welch's t, above 0 or below."""
    if min(len(gap), len(other)) < 2:
        return None
    low, high = stats.ttest_ind(gap, other, equal_var=False).confidence_interval(.95)
    starts = f"{len(gap)} and {len(other)}"
    answer = (intervals.HELD if low > 0 else intervals.REFUTED if high < 0
              else f"undecided ({starts} starts)")
    return dict(mean=intervals.mean(gap) - intervals.mean(other), low=float(low), high=float(high),
                starts=starts, verdict=answer, p=None)


def judged(question, runs):
    """({rule: dict}, the verdict of the question). A rule without a number is not run or, where
    the question has runs, not finished: its mean is None."""
    found = {name: judge_rule(question, runs, rule) for name, rule in question.rules.items()}
    if None in found.values():
        made, lacking, _ = progress(question, runs)
        none = f"not finished: {made} of {made + lacking} runs" if made else "not run"
        none = dict(mean=None, starts="0", verdict=intervals.Verdict(none), p=None)
        found = {name: number or none for name, number in found.items()}
    deciding = [found[name] for name in question.decides]
    answers = [number["verdict"] for number in deciding]
    if not answers:
        return found, intervals.Verdict("reported only")
    for number in deciding:
        if number["mean"] is None:
            return found, number["verdict"]
    if question.depends and {intervals.HELD, intervals.REFUTED} <= set(answers):
        return found, intervals.Verdict(f"depends on {question.depends}")
    return found, intervals.all_of(answers)


def entered(question, runs):
    """{member: {start: pass@1}} of the members of the league with all their runs, best first."""
    found = {}
    for name in question.arms:
        if cell := best(question, runs, name):
            of = values(runs, name, cell, question.starts)
            if len(of) == len(question.starts):
                found[name] = {s: of[s]["figures"]["after"] for s in question.starts}
    return dict(sorted(found.items(), key=lambda item: -intervals.mean(item[1].values())))


def league_table(question, runs):
    """A row per member, the best first: rank and mean with intervals, who is not told apart, the
    median of the samples. Members whose runs were made elsewhere than most have no rank."""
    found = entered(question, runs)
    where = {name: frozenset(circumstances_of(run) for run in values(
        runs, name, best(question, runs, name), question.starts).values()) for name in found}
    usual = statistics.mode(where.values())
    ranked = {name: ends for name, ends in found.items() if where[name] == usual}
    places = intervals.ranks(ranked)
    rows = []
    for name, ends in found.items():
        cell = best(question, runs, name)
        near = []
        for other in ranked if name in ranked else ():
            gap = [ends[s] - found[other][s] for s in question.starts]
            _, low, high = intervals.interval(gap)
            if other != name and low <= 0 <= high:
                near.append(places[other][0])
        fresh = values(runs, name, cell, question.starts).values()
        rows.append(dict(member=name, cell=cell, rank=places.get(name), near=sorted(near),
                         flags=f"{question.arms[name]} {question.ladder(name)[cell]}",
                         interval=intervals.interval(ends.values()),
                         samples=statistics.median(sum(r["figures"]["batch_samples"])
                                                   for r in fresh)))
    return rows


def summary():
    """What fill.py puts into pages: {"verdicts": {question: …}, "numbers": {"question: rule": …},
    "chosen": {"question: arm, group": cell}, "survived": …, "league": rows}."""
    found = dict(verdicts={}, numbers={}, chosen={}, survived={}, made={})
    for name, question in QUESTIONS.items():
        runs = read(name)
        numbers, verdict = judged(question, runs)
        found["verdicts"][name] = dict(verdict=verdict, p=verdict.p)
        found["numbers"] |= {f"{name}: {rule}": number for rule, number in numbers.items()}
        found["made"][name] = sum(map(len, runs.values()))
        for arm, group in chosen_by(question):
            for kind, of in (("chosen", best), ("survived", survived)):
                if cell := of(question, runs, arm, group):
                    found[kind][f"{name}: {arm}, {group}".rstrip(", ")] = cell
        if name == "league":
            found["league"] = league_table(question, runs)
    corrected = intervals.holm([v["p"] for v in found["verdicts"].values()])
    for row, p in zip(found["verdicts"].values(), corrected):
        row["holm"] = p
    return rounded(found)


def chosen_by(question):
    """The (arm, group) whose cell a question chooses."""
    return dict.fromkeys((arm, wanted.partition(" ")[2]) for _, arm, wanted in choices(question))


def words_of(rule):
    """A rule as a sentence, from its bounds."""
    if rule.reported:
        return f"{rule.of}: reported beside the rules, without a verdict"
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
    print(f"{question.claim}   ({question.source})\n  {verdict.upper()}\n  regime    "
          f"{question.regime}\n  reported  {question.reported}\n  "
          f"{' '.join(question.notes.split())}")
    for arm, group in chosen_by(question):
        if cell := best(question, runs, arm, group):
            print(f"  chosen    {arm}: {cell}")
    for rule, number in found.items():
        print(f"  {rule}: {number['verdict']}{shown(number, question.rules[rule].form)}\n"
              f"      {words_of(question.rules[rule])}")


def curves(question, runs):
    """{(arm, group): mean pass rates of the batches} of the fresh starts at the chosen cells, of
    the three arms that a picture can show."""
    found = {}
    for arm, group in chosen_by(question):
        if arm not in FIRST:
            continue
        cell = best(question, runs, arm, group)
        if fresh := values(runs, arm, cell, question.starts).values():
            columns = zip(*(run["figures"]["pass_rates"] for run in fresh))
            found[arm, group] = list(map(intervals.mean, columns))
    return found


def factors():
    """{model: [(1/L, Var[log s] / Var[log w])]}: of a model taught little at each length, of runs
    of the default task and of the pretrained model."""
    figures_of = lambda name: [run["figures"] for of in read(name).values() for run in of.values()]
    found = {"width 64, by length": [(1 / length, factor) for of in figures_of("variance")
                                     for length, factor in zip(of["lengths"], of["factors"])]}
    for name, model in (("reuse", "default task, a run"), ("counting", "SmolLM2 counts, a run")):
        found[model] = [(of["inverse_length"], of["inverse_length"] * of["factor_times_length"])
                        for of in figures_of(name)]
    return {model: points for model, points in found.items() if points}


def draw(name, question, runs):
    if name in pictures.SHOWN:
        pictures.forest(name, question, judged(question, runs)[0])
    if name == "reuse" and (of_batches := curves(question, runs)):
        pictures.reuse(of_batches)
    if name == "variance":
        pictures.variance(factors())


def shown(number, form):
    if number["mean"] is None:
        return ""
    middle, low, high = (form.format(number[key]) for key in ("mean", "low", "high"))
    return f": {middle} [{low}, {high}] ({number['starts']})"


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
        print(forecast(name, question, read(name, options.folder)), flush=True)
        if options.names and not options.judge:
            make_all(name, question, options)
        runs = read(name, options.folder)
        if options.names:
            report(name, question, runs)
        else:
            print(f"    {question.claim}: {judged(question, runs)[1]}")
        if not options.judge:
            draw(name, question, runs)
    if options.folder == "experiments/results" and not options.judge:
        text = json.dumps(summary(), indent=1, ensure_ascii=False)
        (ROOT / "experiments/results/numbers.json").write_text(text + "\n")


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
                  if options.only in (None, one[0], f"{one[0]}@{one[1]}"))
        one = next(wanted, None)
        if one is None:
            break
        line = make(name, question, *one)
        with open(file, "a") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        made += 1
        told = line.get("refused") or line["figures"].get("after", "measured")
        print(f"  {' '.join(map(str, one))}: {told}, {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
