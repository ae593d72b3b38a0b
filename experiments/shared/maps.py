"""The runner of the maps: many short training runs, each saved as one line of a JSON-lines file.

    python experiments/NAME.py               make the runs that results/NAME_runs.jsonl lacks
    python experiments/NAME.py --full        the whole grid, not only the part that is reported
    python experiments/NAME.py --most 20     at most 20 of these runs now; the next call goes on
    python experiments/NAME.py --part 0/2    every second run, for two processes at the same time
    python experiments/NAME.py --draw        make no runs: result and figure from those in the file

The record of a run has its cell (arm, policy, bits, rate, mini-batches, rollout batches, seed), the
flags of train.py that follow from it, and its outcome. An interruption loses only the current run.
Every result says on how many cold starts it is based.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import time
import zlib
from pathlib import Path

from . import claim
import train

KEY = ("arm", "policy", "bits", "rate", "minibatches", "batches", "seed")
POLICIES = {"moe": "",                                       # dense: equal active size
            "dense": "--num_experts 1 --num_experts_per_tok 1"}
CHOOSE = range(4)                            # cold starts to choose on
REPORT = range(4, 12)                        # and fresh ones to report


def cell(arm, seed, policy="moe", bits="float32", rate=4e-4, minibatches=4, batches=10):
    return dict(arm=arm, policy=policy, bits=bits, rate=rate, minibatches=minibatches,
                batches=batches, seed=seed)


def key(c):
    return tuple(c[name] for name in KEY)


def read(file):
    """The finished runs of a map. An incomplete line is ignored, and its run is made again."""
    runs = []
    for line in Path(file).read_text().splitlines() if Path(file).exists() else []:
        try:
            runs.append(json.loads(line))
        except ValueError:
            claim.say(f"{file}: skipped a line that is cut off")
    return runs


def run_all(file, cells, make, part=(0, 1), most=math.inf):
    """Make the runs of the cells that are not in the file, at most so many. make(cell) -> record.
    Returns how many were made.

    Cells are asked for one by one, as later ones may depend on what earlier ones found.
    """
    made = 0
    for c in cells:
        if made >= most:
            break
        mine = zlib.crc32(repr(key(c)).encode()) % part[1] == part[0]
        if not mine or key(c) in map(key, read(file)):
            continue
        record = make(c)
        with open(file, "a") as f:
            f.write(json.dumps(claim.rounded(record)) + "\n")
        claim.say(f"{' '.join(map(str, key(c)))}: {record['after']:.3f}, {record['seconds']:.0f} s")
        made += 1
    return made


def trained(arms, policies=POLICIES):
    """The function that makes a training run of a cell. arms, policies: {name: flags of
    train.py}."""
    return lambda c: one_run(c, arms[c["arm"]], policies)


class Refused(RuntimeError):
    """train.py refused a run: its flags, or its cold start."""


def one_run(c, flags, policies=POLICIES, curves=()):
    """Train once. curves: names of further metrics, which the record then has of every batch.

    The record has two times: seconds on the clock, and the seconds of a processor core, which do
    not depend on what else the machine does.

    A run that train.py stopped, as its updates were not finite, counts with its last pass rate.
    """
    folder = Path("runs/maps") / f"{os.getpid()}"
    began = time.perf_counter()
    core = time.process_time()
    words = (f"--device cpu --steps {c['batches']} --seed {c['seed']} "
             f"--learning_rate {c['rate']:g} --steps_per_generation {c['minibatches']} "
             f"--sampler_dtype {c['bits']} {claim.EVAL} "
             f"{policies[c['policy']]} {flags}").split()
    place = ["--output_dir", str(folder), "--overwrite_output_dir"]
    code, printed = claim.quietly(train.main, [*words, *place])
    if code == 2:
        raise Refused(f"train.py {' '.join(words)}")         # it said why on the error stream
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if code == 130 or code and not metrics:
        raise SystemExit(f"{' '.join(words)}: {code}\n{printed[-500:]}")
    summary = json.loads((folder / "summary.json").read_text()) if not code else {}
    asked = json.loads((folder / "config.json").read_text())["arguments"]
    shutil.rmtree(folder)

    def median(name):
        found = [m[name] for m in metrics if m.get(name) is not None]
        return statistics.median(found) if found else None

    return c | {"flags": " ".join(words),
                "before": summary.get("pass_at_1_before", metrics[0]["pass_rate"]),
                "after": summary.get("pass_at_1_after", metrics[-1]["pass_rate"]),
                "greedy": summary.get("greedy_after"), "stopped_at": len(metrics) if code else None,
                "pass_rates": [m["pass_rate"] for m in metrics],
                "batch_seconds": [sum(m[f"seconds_{lap}"] for lap in ("rollout", "logp", "update"))
                                  for m in metrics],
                "batch_samples": [(asked["prompts_per_step"] + m["discarded_groups"])
                                  * asked["num_generations"] for m in metrics],
                "clipped": claim.mean(m["clip_low"] + m["clip_high"] for m in metrics),
                "mismatch_kl": metrics[0]["mismatch_kl"], "flips": median("flip_rate"),
                "kl": median("log_w_var") / 2,               # KL(old || new), to second order
                "log_s_var": median("log_s_var"),
                "epsilon_over_std": median("epsilon_over_std"), "entropy": metrics[-1]["entropy"],
                "core_seconds": time.process_time() - core, "seconds": time.perf_counter() - began,
                **{name: [m.get(name) for m in metrics] for name in curves}}


# ------------------------------------------------------------------------------- what was found

def values(runs, name="after", seeds=None, **wanted):
    """{seed: value} of the runs of a cell whose record has this value."""
    chosen = [r for r in runs if name in r and all(r[k] == v for k, v in wanted.items())
              and (seeds is None or r["seed"] in seeds)]
    return {r["seed"]: r[name] for r in chosen}


def main(file, row, grid, make, judge, takeaway, draw, data=lambda runs: {}):
    """A map's command line. grid(full) -> cells; judge(runs) -> (measured, number, verdict, seeds);
    takeaway(runs) -> the one sentence of the figure; data as in write.

    Figure and verdict are made from the file of runs, which the result file does not repeat.
    """
    name = Path(file).stem
    parser = argparse.ArgumentParser(prog=f"experiments/{name}.py", description=row["claim"])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--part", default="0/1", metavar="i/n", help="every n-th run")
    parser.add_argument("--most", type=int, default=math.inf, metavar="N",
                        help="make at most N runs now")
    parser.add_argument("--draw", action="store_true", help="make no runs")
    options = parser.parse_args()
    os.chdir(claim.ROOT)
    runs_file = runs_of(name)
    part = tuple(map(int, options.part.split("/")))
    if not options.draw:
        run_all(runs_file, grid(options.full), make, part, options.most)
    if part[1] > 1:
        return claim.say("this part is made; --draw makes the result when all are")
    write(file, row, judge, takeaway, draw, data)


def write(file, row, judge, takeaway, draw, data=lambda runs: {}):
    """Write the result and the figure of a map from its file of runs. data(runs) -> what the result
    file holds besides the name of that file."""
    name = Path(file).stem
    runs_file = runs_of(name)
    runs = read(runs_file)
    *judged, seeds = judge(runs)
    row = row | {"takeaway": takeaway(runs)}
    seconds = round(sum(r["seconds"] for r in runs))
    claim.write(name, row, judged, seeds, seconds, {"runs": str(runs_file)} | data(runs),
                lambda _: draw(runs))


def runs_of(name):
    return Path(f"results/{name}_runs.jsonl")
