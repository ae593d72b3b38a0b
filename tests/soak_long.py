"""A long run does not grow: the memory of the default run at batch 50 and at its end.

    nice python tests/soak_long.py --steps 300      # the default run; other flags are train.py's
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def megabytes(process):
    """Resident memory of a running process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2 ** 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        lines, sizes, printed = Path(folder, "run", "metrics.jsonl"), {}, 0
        run = subprocess.Popen([sys.executable, str(TRAIN), "--steps", str(args.steps),
                                "--save_steps", "50", "--output_dir", "run", *flags],
                               cwd=folder, stdout=subprocess.DEVNULL)
        while run.poll() is None:
            batch = lines.read_text().count("\n") if lines.exists() else 0
            if batch:
                sizes[batch] = megabytes(run.pid)
                if batch // 50 > printed:
                    printed = batch // 50
                    print(f"batch {batch:4}  {sizes[batch]:7.1f} MiB", flush=True)
            time.sleep(0.2)
        if run.returncode:
            raise SystemExit(f"the run ended with exit code {run.returncode}")
    at_50 = sizes[min(batch for batch in sizes if batch >= min(50, args.steps // 2))]
    end = sizes[max(sizes)]
    print(f"{args.steps} batches: {at_50:.1f} MiB at batch 50, {end:.1f} MiB at the end, "
          f"{end / at_50 - 1:+.1%}")
    raise SystemExit(end > 1.1 * at_50)


if __name__ == "__main__":
    main()
