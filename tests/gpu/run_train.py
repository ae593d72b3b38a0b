"""train.main on a pretended GPU, one list of flags after the other; a JSON line for each.

    python tests/gpu/run_train.py '["--algorithm gspo", "--algorithm ppo --beta 0.1"]'

Says {"flags", "exit" (None: it ran to its end), "error", "syncs": per token step and per update}.
The run folder is the current one.
"""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402

import train  # noqa: E402
from plumbing import fast, policy  # noqa: E402
from tiny_run import TINY  # noqa: E402

policy.MUST_PASS, gpu.project = 0.0, str(HERE.parents[1])
FLAGS = [flag for flag in TINY if flag != "--use_cpu"]


def phase(owner, name, label):
    """Counts what happens inside owner.name as a phase."""
    inside = getattr(owner, name)

    def counted(*args, **kwargs):
        with gpu.phase(label):
            return inside(*args, **kwargs)
    setattr(owner, name, counted)


def run(flags):
    gpu.reset()
    error, code, out = None, None, io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            train.main([*FLAGS, *flags.split()])
    except SystemExit as stop:
        code, error = stop.code, out.getvalue().strip().splitlines()[-1]
    except Exception as failure:
        code, error = 1, f"{failure} {traceback.format_exc().splitlines()[-3:]}"
    each = {name: round(gpu.count[name]["syncs"] / max(1, gpu.calls[name]), 3)
            for name in ("token step", "update")}
    return {"flags": flags, "exit": code, "error": error, "syncs": each,
            "where": {name: gpu.sites[name].most_common(6) for name in each}}


if __name__ == "__main__":
    phase(fast.Rows, "step", "token step")
    phase(train, "update", "update")
    torch.set_num_threads(1)
    with gpu:
        for flags in json.loads(sys.argv[1]):
            print(json.dumps(run(flags)), flush=True)
