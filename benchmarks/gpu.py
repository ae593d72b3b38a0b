"""One GPU, measured in at most an hour: one command that leaves its numbers whatever happens.

    python benchmarks/gpu.py                         # -> results/gpu.json; --cpu: a small run
    python benchmarks/gpu.py --only pairs --limit 28800 --run FLAGS OF TRAIN.PY

Every part runs by itself; what fails is written down with its error, what cannot be measured here
as skipped and why, and the next part begins. --run, or recipes/gsm8k-80gb.yaml, which needs the
hub, are the flags of the runs of train.py:

    versus_trl beside TRL, on models with random weights: benchmarks/versus_trl.py
    run        seconds and peak memory of a batch: fast, with --plain, with vLLM where it is
    pairs      GSPO and GRPO from the same seed, start and prompts, as many batches as the time
               allows: held-out pass@1 before and after
"""

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from timing import command_line, spread, write_json  # noqa: E402

RUN = f"--config {ROOT}/recipes/gsm8k-80gb.yaml"
SMALL_RUN = ("--device cpu --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 "
             "--min_terms 1 --max_terms 2 --num_hidden_layers 1 --num_experts 4 --hidden_size 32 "
             "--cold_start_steps 120 --cold_start_learning_rate 0.005")
PEAK = ("import sys, torch, train; train.main(sys.argv[1:]); cuda = torch.cuda; "
        "print('peak', cuda.max_memory_allocated() if cuda.is_available() else 0)")


class Bench:
    """The flags of its runs, and the time that is left."""

    def __init__(self, cpu, run, limit):
        self.cpu = cpu
        self.run_flags = shlex.split(run or (SMALL_RUN if cpu else RUN))
        self.end = time.perf_counter() + limit

    def left(self):
        """Seconds that remain of the limit."""
        return max(1.0, self.end - time.perf_counter())

    def run(self, *command):
        """Run a Python command and return what it printed. Raises RuntimeError with the end of its
        output if it failed."""
        done = subprocess.run([sys.executable, *command], capture_output=True, encoding="utf-8",
                              timeout=self.left(), env=os.environ | {"PYTHONPATH": str(ROOT)})
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
        return done.stdout.strip()

    def train(self, *flags):
        """A run of train.py -> (metrics per rollout batch, summary, peak bytes of its GPU)."""
        with tempfile.TemporaryDirectory() as folder:
            printed = self.run("-c", PEAK, *self.run_flags, *flags, "--output_dir", f"{folder}/run")
            lines = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
            summary = json.loads(Path(folder, "run/summary.json").read_text(encoding="utf-8"))
        return [json.loads(line) for line in lines], summary, int(printed.split("peak")[-1])


def device(bench):
    if bench.cpu:
        return {"name": "CPU", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "bytes": properties.total_memory, "torch": torch.__version__,
            "capability": list(torch.cuda.get_device_capability())}


def versus_trl(bench):
    if bench.cpu:
        return {"skipped": "python benchmarks/versus_trl.py measures it on a CPU"}
    if not importlib.util.find_spec("trl"):
        return {"skipped": "TRL is not installed: pip install trl==1.16.0"}
    return bench.run(ROOT / "benchmarks/versus_trl.py")[-4000:]


def run(bench):
    """Seconds of a batch by phase, after a first one that is not counted."""
    ways = {"fast": [], "--plain": ["--plain"]}
    if importlib.util.find_spec("vllm"):
        ways["--sampler vllm"] = ["--sampler", "vllm"]
    found = {}
    for way, flags in ways.items():
        records, _, peak = bench.train("--steps", "3", "--eval_samples", "0", *flags)
        found[way] = {"peak_bytes": peak} | {
            name: spread(record[name] for record in records[1:])
            for name in ("seconds_rollout", "seconds_logp", "seconds_update", "tokens_per_second")}
    return found


def pairs(bench, seeds=(0, 1)):
    """Held-out pass@1 before and after, as summary.json has it, for each seed and algorithm."""
    began = time.perf_counter()
    bench.train("--steps", "2")                              # with both evaluations
    each = bench.left() / (2 * len(seeds) + 1)
    steps = max(1, min(200, int(2 * each / (time.perf_counter() - began))))
    return {f"{name}, seed {seed}": bench.train("--algorithm", name, "--seed", str(seed), "--steps",
                                                str(steps))[1]
            for seed in seeds for name in ("gspo", "grpo")}


PARTS = {"device": device, "versus_trl": versus_trl, "run": run, "pairs": pairs}


def main(argv=None):
    parser = command_line(__doc__, "gpu.json")
    parser.add_argument("--cpu", action="store_true", help="on a CPU, a small run")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="flags of train.py, at the end")
    args = parser.parse_args(argv)
    bench = Bench(args.cpu, args.run and shlex.join(args.run), args.limit)
    found = {}
    for name in args.only:
        try:
            over = {"skipped": f"{args.limit:g} seconds were over"}
            found[name] = PARTS[name](bench) if bench.left() > 1 else over
        except Exception as error:  # whatever it was: written down, and on with the next
            found[name] = {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
        write_json(args.json, found)
        print(f"{name}: {json.dumps(found[name])[:300]}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
