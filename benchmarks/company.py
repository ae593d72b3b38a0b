"""gspo.py and train.py alone and beside two busy processes: seconds and processor time of the same
rollout batches with different waiting of torch's threads (GOMP_SPINCOUNT) and numbers of threads.

    python benchmarks/company.py                 # --rounds 1: a quick look

The settings take turns within a round, so that a ratio compares neighbouring measurements even
where the machine does something else as well; its load is written down. Every measurement starts
from the same weights and random numbers. GOMP_SPINCOUNT is the number of rounds for which a thread
of libgomp spins before it sleeps: 300000 unless it is set, 10000 in gspo.py, train.py and eval.py.
"""

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BATCHES = 3
CORES = os.cpu_count()
SETTINGS = {f"spin {count}": {"GOMP_SPINCOUNT": str(count), "OMP_NUM_THREADS": str(CORES)}
            for count in (1000, 10000, 30000, 300000)}
SETTINGS["one thread"] = {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1"}
COMPANY = {"alone": 0, "beside two busy processes": 2}
PROGRAMS = ("gspo.py", "train.py")


def serve(program):
    """Measure BATCHES rollout batches for every line of the standard input, and print seconds and
    processor seconds as JSON."""
    measure = {"gspo.py": gspo_batches, "train.py": train_batches}[program]()
    print("ready", flush=True)
    for _ in sys.stdin:
        clocks = measure()
        print("measured", json.dumps(clocks), flush=True)


def timed(function, *args):
    wall = time.perf_counter()
    processor = time.process_time()
    function(*args)
    return time.perf_counter() - wall, time.process_time() - processor


def gspo_batches():
    """A function that measures BATCHES batches of gspo.py's loop, after a short cold start."""
    import torch

    import gspo
    gspo.STEPS = BATCHES
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = gspo.Characters()
    start = gspo.tiny_policy(tokenizer)
    gspo.cold_start(start, tokenizer, steps=20)
    sums = [gspo.running_sum() for _ in range(BATCHES * gspo.PROMPTS_PER_STEP)]
    problems = [(tokenizer.encode(prompt), answer) for prompt, answer in sums]

    def measure():
        torch.manual_seed(0)
        return timed(gspo.train, copy.deepcopy(start), tokenizer, problems)
    return measure


def train_batches():
    """A function that measures BATCHES batches of train.py's default run, after a short cold
    start."""
    import train
    from plumbing.model import cold_start
    cold_start.MUST_PASS = 0.0                   # of a short cold start nothing is expected
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    flags = (f"--steps {BATCHES} --cold_start_steps 20 --eval_samples 0 --save_steps 0 "
             "--output_dir run --overwrite_output_dir").split()

    def measure():
        clocks = []
        loop = train.train

        def clocked(*args):
            clocks.extend(timed(loop, *args))
            return BATCHES
        with patch.object(train, "train", clocked):
            train.main(flags)
        return clocks
    measure()                                    # makes the cold start
    return measure


class Server:
    """A process that measures a program under one setting of torch's threads."""

    def __init__(self, program, setting):
        plain = {name: value for name, value in os.environ.items()
                 if name not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", program], env=plain | SETTINGS[setting],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wait_for("ready")

    def wait_for(self, word):
        """The rest of the next line that begins with a word. RuntimeError if the process ends."""
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"the measuring process ended with {self.process.wait()}")

    def measure(self):
        """(seconds, processor seconds) of BATCHES rollout batches."""
        self.process.stdin.write("measure\n")
        self.process.stdin.flush()
        return json.loads(self.wait_for("measured"))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(program, rounds):
    """{company: {setting: [[seconds, processor seconds], one per round]}} of a program."""
    servers = {setting: Server(program, setting) for setting in SETTINGS}
    measured = {company: {setting: [] for setting in SETTINGS} for company in COMPANY}
    for turn in range(rounds):
        for company, count in COMPANY.items():
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    for _ in range(count)]
            try:
                for setting in sorted(SETTINGS, reverse=turn % 2 == 1):
                    seconds = servers[setting].measure()
                    measured[company][setting].append([round(x, 3) for x in seconds])
                    print(f"{program:8}  round {turn + 1}  {company:26} {setting:12} "
                          f"{seconds[0]:7.2f} s, processor {seconds[1]:7.2f} s", flush=True)
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    for server in servers.values():
        server.close()
    return measured


def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", default=str(ROOT / "results/company.json"),
                        help="where the numbers go (default: %(default)s)")
    parser.add_argument("--serve", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args.serve)
    before = os.getloadavg()[1]
    programs = {program: compare(program, args.rounds) for program in PROGRAMS}
    load = [round(x, 1) for x in (before, os.getloadavg()[1])]
    result = {"cores": CORES, "batches": BATCHES, "rounds": args.rounds,
              "load_before_and_after": load, "programs": programs}
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
