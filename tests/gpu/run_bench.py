"""benchmarks/gpu.py on the pretended GPU, in small shapes: which of its parts end without an error.

    python tests/gpu/run_bench.py            # a JSON line: {part: what it found}

Parts that start a process of their own are left out: that one would see no GPU.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "benchmarks")]
from pretend_device import gpu  # noqa: E402  before torch

PARTS = ("device", "limits", "update")


def bench():
    """benchmarks/gpu.py as a module; its name is that of the pretended device."""
    file = HERE.parents[1] / "benchmarks/gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SHAPE = module.SMALL
    module.SIZES = {False: (2, 2, 16, 16)}
    measure = module.measure_limit
    module.measure_limit = lambda device, n: measure(device, 256)
    return module


if __name__ == "__main__":
    module = bench()
    with gpu, tempfile.TemporaryDirectory() as folder:
        module.main(["--json", f"{folder}/gpu.json", "--only", *PARTS])
        found = json.loads(Path(folder, "gpu.json").read_text())
        print(json.dumps(found))
