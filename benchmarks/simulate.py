"""Peak memory of an update on a GPU that is not there (pretend_device.py; needs g++).

    python benchmarks/simulate.py FLAGS OF TRAIN.PY      # one run of a model of shapes.py
    python benchmarks/simulate.py                        # what gpu.py compares: simulated.json

A run's figure is that of its update: prompts of --max_prompt_length tokens, answers of
--max_completion_length, weights and optimizer included, without the allocator's rounding and
cuBLAS's workspaces; leave a tenth of the GPU free. shapes.py has the models and the update. Not
simulated: sampling, which needs less, 4 bit, vLLM.
"""

import gc
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402

from session.arguments import parse  # noqa: E402
from shapes import ROWS, SHAPES, WAYS, find_shape, random_model, run_updates  # noqa: E402
from timing import RESULTS, write_json  # noqa: E402

RECIPES = ("gsm8k-8gb", "gsm8k-16gb", "gsm8k-24gb", "gsm8k-80gb")


def simulated(flags, layers=None):
    """Peak bytes of an update of a run of train.py with these flags, one string. layers: fewer than
    the model has."""
    settings = parse(flags.split())
    kind, D, L, *rest = find_shape(settings.model_name_or_path)
    with torch.device("meta"):
        policy = random_model(kind, D, layers or L, *rest)
    policy.tie_weights()
    gc.collect()                                             # of the model before
    before = gpu.now
    with gpu:
        run_updates(settings, policy, gpu.phase)
    peak = max(gpu.peak[name] for name in ("update", "step", "scoring")) - before
    gpu.reset()
    return peak


def main(argv):
    if argv:
        return print(f"{simulated(' '.join(argv)) / 1e9:.1f} GB at the peak of an update")
    found = {"flags": ROWS, "peaks": {}}
    for name in SHAPES:
        found["peaks"][name] = {
            way: simulated(f"--model_name_or_path {name} {ROWS} {flags}")
            for way, flags in WAYS.items()}
        print(name, found["peaks"][name], flush=True)
    found["recipes"] = {name: simulated(f"--config {ROOT}/recipes/{name}.yaml") for name in RECIPES}
    write_json(RESULTS / "simulated.json", found)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(print(__doc__))
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"simulate.py: {error}")
