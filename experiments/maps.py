"""The runner of the maps: many short training runs, each one line of a JSON-lines file, made once.

    python experiments/stability_map.py [--full] [--part 0/2]      makes what results/stability_map_runs.jsonl does not hold yet
    python eval.py claims --maps                                   all maps

A run is a cell: what is asked (arm, policy, bits, rate, mini-batches, rollout batches, seed; for `train.py` the flags that follow from
them) and what came of it. Stopping loses only the run under way. `--part i/n` makes every n-th cell, for n processes at once.
"""

import argparse
import json
import os
import shutil
import statistics
import time
import zlib
from pathlib import Path

import claim
import train

KEY = ("arm", "policy", "bits", "rate", "minibatches", "batches", "seed")
POLICIES = {"moe": "", "dense": "--num_experts 1 --num_experts_per_tok 1 --moe_intermediate_size 192"}   # equal active size
EVAL = "--eval_prompts 128 --eval_samples 4"                 # 512 held-out answers: a standard error of 0.01 to 0.02
CHOOSE, REPORT = range(4), range(4, 12)                      # cold starts that choices are made on, and those that are reported


def cell(arm, seed, policy="moe", bits="float32", rate=4e-4, minibatches=4, batches=10):
    return dict(arm=arm, policy=policy, bits=bits, rate=rate, minibatches=minibatches, batches=batches, seed=seed)


def key(c):
    return tuple(c[name] for name in KEY)


def read(file):
    """The finished runs of a map. A last line that was cut off does not count: its run is made again."""
    runs = []
    for line in Path(file).read_text().splitlines() if Path(file).exists() else []:
        try:
            runs.append(json.loads(line))
        except ValueError:
            claim.say(f"{file}: skipped a line that is cut off")
    return runs


def run_all(file, cells, arms, part=(0, 1)):
    """Make the cells that the file does not hold. arms: {arm: train.py's flags}. Cells are asked for one by one, as later ones may
    depend on what earlier ones found."""
    for c in cells:
        if zlib.crc32(repr(key(c)).encode()) % part[1] != part[0] or key(c) in map(key, read(file)):
            continue
        record = one_run(c, arms[c["arm"]])
        with open(file, "a") as f:
            f.write(json.dumps(claim.rounded(record)) + "\n")
        claim.say(f"{' '.join(map(str, key(c)))}: {record['before']:.3f} -> {record['after']:.3f}, clipped {record['clipped']:.1%}, "
                  f"{record['seconds']:.0f} s")


def one_run(c, flags):
    """Train once. A run that train.py stopped, as its updates were not finite, counts with the pass rate of its last batch."""
    folder, began = Path("runs/maps") / f"{os.getpid()}", time.perf_counter()
    words = (f"--use_cpu --steps {c['batches']} --seed {c['seed']} --learning_rate {c['rate']:g} --steps_per_generation "
             f"{c['minibatches']} --sampler_dtype {c['bits']} {EVAL} {POLICIES[c['policy']]} {flags}").split()
    code, printed = claim.quietly(train.main, [*words, "--output_dir", str(folder), "--overwrite_output_dir"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if code == 130 or code and not metrics:
        raise SystemExit(f"{' '.join(words)}: {code}\n{printed[-500:]}")
    summary = json.loads((folder / "summary.json").read_text()) if not code else {}
    shutil.rmtree(folder)
    median = lambda name: statistics.median(m[name] for m in metrics) if metrics[0][name] is not None else None
    return c | {"flags": " ".join(words), "before": summary.get("pass_at_1_before", metrics[0]["pass_rate"]),
                "after": summary.get("pass_at_1_after", metrics[-1]["pass_rate"]), "greedy": summary.get("greedy_after"),
                "stopped_at": len(metrics) if code else None, "pass_rates": [m["pass_rate"] for m in metrics],
                "clipped": claim.mean([m["clip_low"] + m["clip_high"] for m in metrics]), "mismatch_kl": metrics[0]["mismatch_kl"],
                "kl": median("log_w_var") / 2, "log_s_var": median("log_s_var"),      # KL(old || new), to second order, last mini-batch
                "flips": median("flip_rate"), "entropy": metrics[-1]["entropy"], "seconds": time.perf_counter() - began}


def values(runs, name="after", seeds=None, **wanted):
    """{seed: value} of the runs with these coordinates."""
    chosen = [r for r in runs if all(r[k] == v for k, v in wanted.items()) and (seeds is None or r["seed"] in seeds)]
    return {r["seed"]: r[name] for r in chosen}


def paired(a, b):
    """Differences a - b over the seeds that both have, in the order of seeds."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def main(file, arms, grid, summarise, draw, doc):
    """A map's command line. grid(full) -> cells; summarise(runs) -> result row and data; draw(data) -> figure."""
    name = Path(file).stem
    parser = argparse.ArgumentParser(prog=f"experiments/{name}.py", description=doc.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid; without it the part that is reported")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th run, beginning with the i-th, for n processes at once")
    parser.add_argument("--draw", action="store_true", help="make no runs: result and figure from those in the file")
    options = parser.parse_args()
    os.chdir(claim.ROOT)
    runs_file, part = Path(f"results/{name}_runs.jsonl"), tuple(map(int, options.part.split("/")))
    if not options.draw:
        run_all(runs_file, grid(options.full), arms, part)
    if part[1] == 1:
        claim.write_map(name, summarise(read(runs_file)), draw)
