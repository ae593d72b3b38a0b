"""What every experiment shares: rules of evidence, command line, result file, runs made once.

    python experiments/NAME.py            measure: results/NAME.json and docs/figures/NAME.png
    python experiments/NAME.py --quick    one seed, smaller, kept apart: runs/quick/NAME.json, .png
    python experiments/NAME.py --draw     verdict and figure anew, from the result file's data

An experiment is ROW (claim, source, what the source reports) and three functions:
`measure(seeds, quick) -> data`, `judge(data) -> (measured, number, verdict)`, `draw(data) ->
figure`. Training runs and drifted policies are kept under runs/claims/, named by all that made
them: claims share them, and a stopped measurement goes on with them.

Rules of evidence, for all of them:
  A verdict is on the source's sentence, and its 95 % interval over cold starts must clear the bar
  that the file's docstring names. A seed is a cold start of its own: other weights, other data.
  held, refuted            the interval lies within the bounds named for it
  depends on X             it holds in one place of a map and is refuted in another
  undecided (n seeds)      the interval covers a bound, or there are fewer than LEAST seeds
  cannot be tested here    only for a limit of size, which is named
  Choices (a rate, a band) are made on seeds 0 to 3; what is reported of them is from fresh seeds.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from transformers.utils import logging                                                  # noqa: E402

import train                                                                            # noqa: E402
from plumbing.run import folder as checkpoint  # noqa: E402
from tools import style                                                              # noqa: E402

HELD, REFUTED, CANNOT = "held", "refuted", "cannot be tested here"
LEAST = 8                                                    # cold starts a verdict needs
EVAL = "--eval_prompts 128 --eval_samples 4"                 # a standard error of 0.01 to 0.02
FIELDS = ("claim", "source", "reported", "measured", "number", "seeds", "verdict", "takeaway",
          "figure", "command", "seconds", "data")            # of a result file; takeaway: of a map
RUNS = Path("runs/claims")
# Student's t, 97.5 %, by degrees of freedom.
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
       10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131}


# ------------------------------------------------------------------------------ rules of evidence

def verdict(values, held, refuted=None, least=LEAST):
    """HELD, REFUTED or undecided by the 95 % interval of the mean of `values`, one per cold start.

    held, refuted: the bounds (low, high) within which the whole interval must lie; refuted None:
    the interval must lie wholly outside those of `held`.
    """
    _, low, high = interval(values)
    if len(values) < least:
        return undecided(len(values))
    if held[0] <= low and high <= held[1]:
        return HELD
    outside = high < held[0] or low > held[1]
    if outside if refuted is None else refuted[0] <= low and high <= refuted[1]:
        return REFUTED
    return undecided(len(values))


def all_of(*verdicts):
    """The verdict on several sentences joined by 'and'."""
    unsure = [v for v in verdicts if v not in (HELD, REFUTED)]
    return REFUTED if REFUTED in verdicts else unsure[0] if unsure else HELD


def undecided(seeds):
    return f"undecided ({seeds} seed{'s' * (seeds != 1)})"


def depends(on):
    return f"depends on {on}"


def is_verdict(text):
    """Whether a result file may say so."""
    return bool(text in (HELD, REFUTED) or re.fullmatch(r"undecided \(\d+ seeds?\)", text)
                or re.fullmatch(rf"depends on .+|{CANNOT}: .+", text))


def interval(values):
    """(mean, low, high): 95 % t interval of a mean; of one value, which has none: that value."""
    values = list(values)
    middle, n = mean(values), len(values)
    if n == 1:
        return middle, middle, middle
    t = T95.get(n - 1, 2.131)                                # beyond the table: a little too wide
    half = t * math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
    return middle, middle - half, middle + half


def number(values, form="{:.3g}", what=""):
    """'0.12 [0.10, 0.14] what': the one number of a row. One value has no interval."""
    middle, low, high = (form.format(x) for x in interval(values))
    shown = f"{middle} [{low}, {high}]" if len(list(values)) > 1 else middle
    return f"{shown} {what}".strip()


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
            data, count, seconds = found["data"], found["seeds"], found["seconds"]
        else:
            count, began = args.seeds or (1 if args.quick else seeds), time.perf_counter()
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
    result = row | dict(measured=measured, number=one, seeds=seeds, verdict=answer,
                        figure=str(figure_file), command=command, seconds=seconds, data=data)
    result = {field: result[field] for field in FIELDS if field in result}
    result_file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(", ", ": "), ensure_ascii=False)
    checkpoint.write_text(result_file, text + "\n")
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
        began, code = time.perf_counter(), None
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


def differences(a, b):
    """Paired differences a - b of {seed: value}, over the seeds that both have, in their order."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def slope(x, y):
    """Least-squares slope of log y against log x: the exponent of a power law."""
    x, y = [math.log(v) for v in x], [math.log(v) for v in y]
    across = sum((a - mean(x)) ** 2 for a in x)
    return sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y)) / across


def rounded(x):
    """Floats to five significant digits: result files are read by people and kept in git."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x
