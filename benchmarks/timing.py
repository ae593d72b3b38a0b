"""What the benchmarks share: one way of timing, peaks of memory, a machine's limit, their files.

Sides take turns within a round, so that other work on the machine meets all of them; round 0 warms
up and is not counted. The minimum and the median of a side are kept, and of two sides the quotient
within each round. A file of results/ holds what was measured and, under "texts", the tables and
figures that the documents show of it, as markdown by name.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's own log
MB = 2 ** 20
RESULTS = Path(__file__).resolve().parent.parent / "experiments/results"


def timed(work, clock=time.perf_counter):
    """The function work(round), made to return its seconds."""
    def seconds(turn):
        began = clock()
        work(turn)
        return clock() - began
    return seconds


def in_turns(sides, rounds):
    """{name: function of the round that returns its seconds} -> {name: seconds of each round}."""
    found = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, seconds in sides.items():
            found[name].append(seconds(turn))
    return {name: seconds[1:] for name, seconds in found.items()}


def rounded(x, digits=4):
    return float(f"{x:.{digits}g}")


def spread(values):
    values = list(values)
    return {"min": rounded(min(values)), "median": rounded(median(values)),
            "max": rounded(max(values))}


def quotients(seconds, others):
    """The spread of seconds / others within each round."""
    return spread(a / b for a, b in zip(seconds, others, strict=True))


def peak_bytes(work):
    """How many bytes work() allocates on the CPU at most, beyond what is allocated before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure_limit(n=1024):
    """FLOP/s of the CPU in products of two float32 matrices of this width."""
    a, b = torch.randn(2, n, n)
    return 2 * n ** 3 / min(in_turns({"": timed(lambda turn: a @ b)}, 20)[""])


def table(head, *rows):
    """A markdown table on lines of its own."""
    line = lambda cells: "| " + " | ".join(str(x).replace("|", r"\|") for x in cells) + " |\n"
    return "\n" + "".join(map(line, [head, ["---"] * len(head), *rows]))


def command_line(doc, file, quick=None):
    """The parser of a benchmark with this docstring that writes this file of results/. quick: what
    --quick does, where there is one."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0], allow_abbrev=False)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, default=RESULTS / file,
                        help="where the numbers go (default: %(default)s)")
    return parser


def write_json(path, found):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def publish(path, found, texts):
    """Write what was measured with its texts, and print these."""
    found["texts"] = texts(found)
    write_json(path, found)
    print(*found["texts"].values(), sep="\n")
