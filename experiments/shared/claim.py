"""What every claim shares: rules of evidence, command line, result file, cached training runs.

    python experiments/NAME.py            measure: results/NAME.json and docs/figures/NAME.png
    python experiments/NAME.py --quick    one seed, smaller, into runs/quick/NAME.json and .png
    python experiments/NAME.py --draw     verdict and figure again, from the data in the result file

An experiment is ROW (claim, source, what the source reports) and three functions:
`measure(seeds, quick) -> data`, `judge(data) -> (measured, number, verdict)`, `draw(data) ->
figure`. Training runs and drifted policies are cached under runs/claims/; their names contain all
settings. Claims share them, and an interrupted measurement continues with them.

Rules of evidence, for all of them:
  A verdict is about the source's sentence. The 95 % interval over cold starts must lie on one side
  of the bound that the docstring of the experiment names. Every seed is a separate cold start, with
  other weights and other data.
  held, refuted            the interval lies within the bounds named for this verdict
  depends on X             the sentence holds for some settings of a map and is refuted for others
  undecided (n seeds)      the interval covers a bound, or there are fewer than LEAST seeds
  cannot be tested here    the effect that the sentence is about does not occur in these settings
  Every verdict has a p: the probability of an interval at least as far from the bound, if the true
  value were on the bound. For all rows together, Holm's p is used.
  The unit of a timing is a session on a machine, not a cold start: repetitions within a session
  only show how steady that session was.
  Choices (a rate, a clip range) are made on seeds 0 to 3 and reported on other seeds.
  The endpoint of training is held-out pass@1 after the last rollout batch, EVAL answers.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

from scipy import stats
from transformers.utils import logging

import train
from plumbing.run import checkpoints
from tools import style

from . import ROOT

HELD = "held"
REFUTED = "refuted"
CANNOT = "cannot be tested here"
LEAST = 8                                                    # cold starts a verdict needs
EVAL = "--eval_prompts 128 --eval_samples 4"                 # a standard error of 0.01 to 0.02
FIELDS = ("claim", "source", "reported", "regime", "measured", "number", "seeds", "verdict", "p",
          "takeaway", "figure", "command", "seconds", "data")     # of a result file
REGIME = "1 M parameters, 4 layers, answers of about 20 tokens, 10 rollout batches"
RUNS = Path("runs/claims")
# Student's t, 97.5 %, by degrees of freedom.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
       10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131}


# ------------------------------------------------------------------------------ rules of evidence

class Verdict(str):
    """A verdict that knows its p, None where there is none."""

    def __new__(cls, text, p=None):
        self = super().__new__(cls, text)
        self.p = p
        return self


def verdict(values, held, refuted=None, least=LEAST):
    """HELD, REFUTED or undecided by the 95 % interval of the mean of `values`, one per cold start.

    held, refuted: the bounds (low, high) within which the whole interval must lie; refuted None:
    the interval must lie wholly outside those of `held`.
    """
    values = list(values)
    _, low, high = interval(values)
    if len(values) < least:
        return undecided(len(values))
    yes = p_within(values, held)
    no = p_outside(values, held) if refuted is None else p_within(values, refuted)
    if held[0] <= low and high <= held[1]:
        return Verdict(HELD, yes)
    outside = high < held[0] or low > held[1]
    if outside if refuted is None else refuted[0] <= low and high <= refuted[1]:
        return Verdict(REFUTED, no)
    return Verdict(undecided(len(values)), min(yes, no))


def p_within(values, bounds):
    """The p of "the mean lies within bounds": two-sided, of the nearer finite bound."""
    return max([p_beyond(values, bounds[0], 1)] * math.isfinite(bounds[0])
               + [p_beyond(values, bounds[1], -1)] * math.isfinite(bounds[1]))


def p_outside(values, bounds):
    return min([p_beyond(values, bounds[0], -1)] * math.isfinite(bounds[0])
               + [p_beyond(values, bounds[1], 1)] * math.isfinite(bounds[1]))


def p_beyond(values, bound, side):
    """Twice the one-sided p of "the mean is above (side 1) or below (-1) the bound", at most 1: it
    is below 0.05 where the 95 % interval clears the bound."""
    n = len(values)
    middle = mean(values)
    error = math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
    if error == 0:
        return 0.0 if side * (middle - bound) > 0 else 1.0
    return min(1.0, 2 * t_tail(side * (middle - bound) / error, n - 1))


def t_tail(t, df):
    """P(T > t) of Student's t."""
    return float(stats.t.sf(t, df))


def all_of(*verdicts):
    """The verdict on several sentences joined by 'and'. Its p: held, the largest of theirs;
    refuted, the smallest times their number, as any of them would do."""
    unsure = [v for v in verdicts if v not in (HELD, REFUTED)]
    ps = [p for v in verdicts if (p := getattr(v, "p", None)) is not None]
    if REFUTED in verdicts:
        no = [v.p for v in verdicts if v == REFUTED and getattr(v, "p", None) is not None]
        return Verdict(REFUTED, min(1.0, min(no) * len(verdicts)) if no else None)
    return Verdict(unsure[0] if unsure else HELD, max(ps, default=None))


def undecided(seeds):
    return f"undecided ({seeds} seed{'s' * (seeds != 1)})"


def depends(on):
    return f"depends on {on}"


def is_verdict(text):
    """Whether a result file may say so."""
    return bool(text in (HELD, REFUTED)
                or re.fullmatch(r"undecided \(\d+ (seed|session)s?\)", text)
                or re.fullmatch(rf"depends on .+|{CANNOT}: .+", text))


def interval(values):
    """(mean, low, high): 95 % t interval of a mean; of one value, which has none: that value."""
    values = list(values)
    middle = mean(values)
    n = len(values)
    if n == 1:
        return middle, middle, middle
    t = T95.get(n - 1) or stats.t.ppf(.975, n - 1)
    half = t * math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
    return middle, middle - half, middle + half


def number(values, form="{:.3g}", what=""):
    """'0.12 [0.10, 0.14] what': the one number of a row. One value has no interval."""
    middle, low, high = (form.format(x) for x in interval(values))
    shown = f"{middle} [{low}, {high}]" if len(list(values)) > 1 else middle
    return f"{shown} {what}".strip()


def counted(values, form="{:+.3f}"):
    """'+0.12 [+0.10, +0.14] (8)': a mean, its interval and how many values it is of."""
    return f"{number(values, form)} ({len(list(values))})"


def log_number(values, form="{:.3g}", what=""):
    """The same for factors: geometric mean and interval, computed on logarithms."""
    middle, low, high = (form.format(math.exp(x)) for x in interval(map(math.log, values)))
    shown = f"{middle} [{low}, {high}]" if len(list(values)) > 1 else middle
    return f"{shown} {what}".strip()


# ---------------------------------------------------------------------------------- command line

def main(file, row, measure, judge, draw, seeds=LEAST):
    """Run one experiment from its command line."""
    name = Path(file).stem
    parser = argparse.ArgumentParser(prog=f"experiments/{name}.py", description=row["claim"])
    parser.add_argument("--quick", action="store_true", help="one seed, smaller, in runs/quick/")
    parser.add_argument("--seeds", type=int, help=f"how many (default {seeds}, quick 1)")
    parser.add_argument("--draw", action="store_true", help="verdict and figure, from the data")
    args = parser.parse_args()
    os.chdir(ROOT)                                           # caches and results have one place
    logging.disable_progress_bar()
    result_file, _ = places(name, args.quick)
    try:
        if args.draw:
            found = read_result(result_file)
            data = found["data"]
            count = found["seeds"]
            seconds = found["seconds"]
        else:
            count = args.seeds or (1 if args.quick else seeds)
            began = time.perf_counter()
            data = rounded(measure(list(range(count)), args.quick))
            seconds = round(time.perf_counter() - began)
        write(name, row, judge(data), count, seconds, data, draw, args.quick)
    except (ValueError, OSError) as error:
        print(f"experiments/{name}.py: {error}", file=sys.stderr)
        raise SystemExit(2)


def write(name, row, judged, seeds, seconds, data, draw, quick=False):
    """The result file and the figure of an experiment, and what it found on the screen."""
    result_file, figure_file = places(name, quick)
    measured, one, answer = judged
    command = f"python experiments/{name}.py" + " --quick" * quick
    p = getattr(answer, "p", None)
    result = dict(regime=REGIME) | row | dict(
                        measured=measured, number=one, seeds=seeds, verdict=str(answer),
                        p=None if p is None else float(f"{p:.3g}"),
                        figure=str(figure_file), command=command, seconds=seconds, data=data)
    result = {field: result[field] for field in FIELDS if field in result}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(", ", ": "), ensure_ascii=False)
    checkpoints.write_text(result_file, text + "\n")
    style.save(draw(data), figure_file)
    print(f"{row['claim']}\n  reported  {row['reported']}\n  measured  {measured}\n"
          f"  number    {one}\n  verdict   {answer}   ({result_file}, {figure_file})")


def places(name, quick):
    """(result file, figure file): a quick measurement never replaces a full one."""
    if quick:
        return Path(f"runs/quick/{name}.json"), Path(f"runs/quick/{name}.png")
    return Path(f"results/{name}.json"), Path(f"docs/figures/{name}.png")


def read_result(file):
    """A result file's dict. Raises ValueError if it is not there or not whole."""
    if not file.is_file():
        raise ValueError(f"{file}: there is no such result; measure it first, without --draw")
    try:
        return json.loads(file.read_text())
    except ValueError:
        raise ValueError(f"{file}: not whole JSON; measure it again, without --draw") from None


# ---------------------------------------------------------------------------------- training runs

def trained(flags, seed, steps, folder=None):
    """(records, summary) of `train.py FLAGS` with that seed and number of rollout batches.

    Trained now unless it was before. folder: where, else runs/claims/ and all that made it.
    """
    words = " ".join(["--steps", str(steps), "--seed", str(seed), *EVAL.split(), *flags])
    run = folder or RUNS / re.sub(r"[^\w.]+", "_", words).strip("_")
    if not (run / "summary.json").is_file():
        began = time.perf_counter()
        code = None
        begun = (run / "config.json").is_file()
        for mode in (["--resume"], ["--overwrite_output_dir"]) if begun else ([],):
            code, printed = quietly(train.main, [*words.split(), "--output_dir", str(run), *mode])
            if code != 2:                                    # 2: refused, as a run of older code is
                break
        if code is not None:
            raise SystemExit(f"{run}: {code}\n{printed[-500:]}")
        say(f"{' '.join(flags)} seed {seed}: {time.perf_counter() - began:.0f} s")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return records, json.loads((run / "summary.json").read_text())


def quietly(main, argv):
    """(exit code or None, what it printed) of a script's main; signal handlers stay as before."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main(argv)
            code = None
        except SystemExit as stop:
            code = stop.code
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    return code, printed.getvalue()


def say(text):
    """Progress, on the error stream: `eval.py claims` shows the last line."""
    print(f"  {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------- small sums

def mean(values):
    values = list(values)
    return sum(values) / len(values)


def median(values):
    """The middle value, the upper one of two."""
    values = sorted(values)
    return values[len(values) // 2]


def paired(a, b):
    """{seed: a - b} of {seed: value}, over the seeds that both have, in their order."""
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


def differences(a, b):
    """Paired differences a - b of {seed: value}, over the seeds that both have, in their order."""
    return list(paired(a, b).values())


def slope(x, y):
    """Least-squares slope of log y against log x: the exponent of a power law."""
    x = [math.log(v) for v in x]
    y = [math.log(v) for v in y]
    across = sum((a - mean(x)) ** 2 for a in x)
    return sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y)) / across


def rounded(x):
    """Floats to five significant digits: result files are read by people and kept in git."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x
