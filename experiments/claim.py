"""What every experiment shares: its command line, its result file, and training runs that are made once.

    python experiments/NAME.py            measure with three seeds: results/NAME.json and docs/figures/NAME.png
    python experiments/NAME.py --quick    a smaller measurement, kept apart: runs/quick/NAME.json and .png
    python experiments/NAME.py --draw     only the figure, from the result file

An experiment is `measure(seeds, quick) -> (measured, spread, verdict, data)` and `draw(data) -> figure`. Training runs and drifted
policies are kept under runs/claims/, named by all that made them: claims share them, and a stopped measurement goes on with them.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plumbing import run as checkpoint                                                  # noqa: E402
import train                                                                            # noqa: E402
from transformers.utils import logging                                                  # noqa: E402

from plumbing import style                                                             # noqa: E402

HELD, NOT_HELD, CANNOT = "held", "did not hold", "cannot be tested at this size"
RUNS = Path("runs/claims")
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201}


def main(file, claim, source, reported, measure, draw):
    """Run one experiment from its command line."""
    name = Path(file).stem
    parser = argparse.ArgumentParser(prog=f"experiments/{name}.py", description=claim)
    parser.add_argument("--quick", action="store_true", help="one seed and a smaller measurement, written under runs/quick/")
    parser.add_argument("--seeds", type=int, help="how many seeds (default 3, quick 1)")
    parser.add_argument("--draw", action="store_true", help="only draw the figure from the result file")
    args = parser.parse_args()
    os.chdir(ROOT)                                           # caches and results have one place
    logging.disable_progress_bar()
    result_file, figure_file = places(name, args.quick)
    try:
        if args.draw:
            result = read_result(result_file)
        else:
            seeds, began = list(range(args.seeds or (1 if args.quick else 3))), time.perf_counter()
            measured, spread, verdict, data = measure(seeds, args.quick)
            result = dict(claim=claim, source=source, reported=reported, measured=measured, spread=spread, seeds=len(seeds), verdict=verdict,
                          figure=str(figure_file), command=f"python experiments/{name}.py" + " --quick" * args.quick,
                          seconds=round(time.perf_counter() - began), data=rounded(data))
            result_file.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_text(result_file, json.dumps(result, indent=None, separators=(", ", ": ")) + "\n")
        style.save(draw(result["data"]), figure_file)
    except (ValueError, OSError) as error:
        print(f"experiments/{name}.py: {error}", file=sys.stderr)
        raise SystemExit(2)
    print(f"{claim}\n  reported  {reported}\n  measured  {result['measured']}\n  spread    {result['spread']}\n"
          f"  verdict   {result['verdict']}   ({result_file}, {figure_file})")


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


def trained(flags, seed, steps):
    """(records, summary) of `train.py FLAGS` with that seed and number of rollout batches, trained now unless it was before."""
    words = " ".join(["--steps", str(steps), "--seed", str(seed), "--eval_prompts", "128", *flags])
    run = RUNS / re.sub(r"[^\w.]+", "_", words).strip("_")
    if not (run / "summary.json").is_file():
        began, code = time.perf_counter(), None
        for mode in (["--resume"], ["--overwrite_output_dir"]) if (run / "config.json").is_file() else ([],):
            code, printed = quietly(train.main, [*words.split(), "--output_dir", str(run), *mode])
            if code != 2:                                    # 2: train.py refused, as it does to resume a run of an older version
                break
        if code is not None:
            raise SystemExit(f"{run}: {code}\n{printed[-500:]}")
        say(f"{' '.join(flags)} seed {seed}: {time.perf_counter() - began:.0f} s")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return records, json.loads((run / "summary.json").read_text())


def quietly(main, argv):
    """(exit code or None, what it printed) of a script's main; signal handlers are as before afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main(argv)
            code = None
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return code, printed.getvalue()


def say(text):
    """Progress, on the error stream: `eval.py claims` shows the last line."""
    print(f"  {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------- small sums

def mean(values):
    return sum(values) / len(values)


def interval(values):
    """(mean, low, high): 95 % t interval of a mean over seeds; one seed has none, and gives its value thrice."""
    values = list(values)
    middle, n = mean(values), len(values)
    if n == 1:
        return middle, middle, middle
    half = T95.get(n - 1, 1.96) * math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n)
    return middle, middle - half, middle + half


def span(values, form="{:.3g}"):
    """'0.12 to 0.15 over 3 seeds'"""
    values = list(values)
    if len(values) == 1:
        return "one seed"
    return f"{form.format(min(values))} to {form.format(max(values))} over {len(values)} seeds"


def slope(x, y):
    """Least-squares slope of log y against log x: the exponent of a power law."""
    x, y = [math.log(v) for v in x], [math.log(v) for v in y]
    return sum((a - mean(x)) * (b - mean(y)) for a, b in zip(x, y)) / sum((a - mean(x)) ** 2 for a in x)


def rounded(x):
    """Floats to five significant digits: result files are read by people and kept in git."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x
