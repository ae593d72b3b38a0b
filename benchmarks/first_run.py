"""The first screen of README.md: gspo.py and train.py from nothing, an answer before and after.

    python benchmarks/first_run.py       # two minutes; five on a busy machine

Each runs on one core. Seconds are those of the processor, which other programs change little,
beside those of the clock.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import command_line, publish

ROOT = Path(__file__).resolve().parent.parent


def measured(script, folder, *flags):
    """{"processor", "clock"}: the seconds of a script in a folder."""
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return {"processor": round(used, 1), "clock": round(time.perf_counter() - began, 1)}


def texts(found):
    """What README.md shows."""
    one = found["example"]
    verdicts = [" (right)" if right else " (wrong)" for right in one["right"]]
    return {"first prompt": f"`{one['prompt']}`",
            "first before": f"`{one['before']}`{verdicts[0]}",
            "first after": f"`{one['after']}`{verdicts[1]}",
            **{f"first {name}": f"{found[name]['processor']:.0f}" for name in ("gspo", "train")}}


def main(argv=None):
    args = command_line(__doc__, "first_run.json", "two steps of the loop").parse_args(argv)
    steps = ["--steps", "2", "--eval_prompts", "8"] if args.quick else []
    with tempfile.TemporaryDirectory() as folder:
        found = {"gspo": measured("gspo.py", folder),
                 "train": measured("train.py", folder, *steps)}
        summary = json.loads(Path(folder, "runs/gspo/summary.json").read_text(encoding="utf-8"))
    publish(args.json, found | {"example": summary["example"]}, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
