"""benchmarks/gpu.py on the pretended GPU, in small shapes: which of its parts end without an error.

    python tests/gpu/run_bench.py            # a JSON line: {part: what it found}

Parts that start a process of their own are left out: that one would see no GPU. Of gsm8k there is the evaluation (examined).
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "benchmarks")]
from pretend_device import gpu  # noqa: E402  before torch

from transformers import AutoConfig  # noqa: E402

PARTS = ("device", "limits", "decode", "update", "noise", "syncs")


def bench():
    """benchmarks/gpu.py as a module; its name is that of the pretended device."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", HERE.parents[1] / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = AutoConfig.for_model("qwen2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=128, vocab_size=512, tie_word_embeddings=True)
    module.named = lambda name: small
    module.SIZES = {False: (2, 2, 16, 16), True: (2, 2, 16, 16)}
    module.SQUARE = {False: 256, True: 256}
    module.torch.cuda.set_sync_debug_mode = lambda mode: None
    return module


if __name__ == "__main__":
    module = bench()
    with gpu, tempfile.TemporaryDirectory() as folder:
        module.main(["--json", f"{folder}/gpu.json", "--only", *PARTS])
        found = json.loads(Path(folder, "gpu.json").read_text())
        flags = [*module.tiny_command(Path(folder)), "--device", "auto"]
        args = module.parse(flags)
        task = module.tasks.from_arguments(args)
        found["examined"] = module.examined(module.Bench(False), args, task, None)
        print(json.dumps(found))
