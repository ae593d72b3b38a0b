"""train.main on a pretended GPU, one list of flags after the other; a JSON line for each.

    python tests/gpu/run_train.py '["--algorithm gspo", "hf --beta 0.1", "resume --bf16 true"]'

First words: `hf` trains a random Qwen2 checkpoint (`mixtral`: a random Mixtral) on prompts of
unequal length that begin alike, not the tiny MoE; `resume` takes the last checkpoint away, resumes
and wants the same weights. The run folder is the current one.

Says {"flags", "exit" (None: it ran to its end), "error", "said" on the screen, "precision" of
float32 products at the end, "syncs" per phase, "where" the host waits}. A CUDA graph
is the call again (Again): the attention of the pretended device is in Python, which tape.py cannot
record.
Phases: a rollout without its token steps and looks for ended rows, these, the cutting of a batch,
optimizer steps.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402

import models  # noqa: E402
import train  # noqa: E402
from plumbing.speed import fast  # noqa: E402
from tiny_run import SMALL, TINY, jsonl  # noqa: E402

gpu.project = str(HERE.parents[1])
FAMILY = {"hf": "qwen2", "mixtral": "mixtral"}


def flags_of(kind):
    """Those of the tiny MoE; for another kind, of a random checkpoint and its data, made in the
    folder `kind`."""
    if kind is None:
        return [*TINY, "--device", "auto"]
    if not Path(kind).exists():
        models.saved(kind, FAMILY[kind], vocab_size=64, intermediate_size=64,
                     initializer_range=0.02)
        rng = random.Random(0)
        terms = [rng.choices("123456789", k=rng.randint(1, 6)) for _ in range(60)]
        jsonl(f"{kind}/data.jsonl", [{"prompt": "1+2+3+4+5+6+7+8+" + "+".join(t) + "=",
                                      "answer": str(sum(map(int, t)) % 10)} for t in terms])
    return [*SMALL, "--device", "auto", "--max_completion_length", "12", "--no_chat_template",
            "--model_name_or_path", kind, "--dataset_name", f"{kind}/data.jsonl",
            "--verifier", "exact"]


class Again:
    """In the place of graphs.CudaGraph: the call again, into the memory of its first result."""

    def __init__(self, call):
        self.call = call
        self.result = call().clone()

    def __call__(self):
        return self.result.copy_(self.call())


fast.CudaGraph = Again


def phase(owner, name, label):
    """Counts what happens inside owner.name as a phase."""
    inside = getattr(owner, name)

    def counted(*args, **kwargs):
        with gpu.phase(label):
            return inside(*args, **kwargs)
    setattr(owner, name, counted)


def same_after_resume(flags):
    """Runs without its last step once more -> whether its weights came out the same, to the bit."""
    folder = Path(flags[flags.index("--output_dir") + 1]) / "checkpoints"
    last = max(folder.glob("step_*"), key=lambda f: int(f.name.split("_")[1]))
    before = {f.name: f.read_bytes() for f in last.glob("*.safetensors")}
    shutil.rmtree(last)
    train.main([*flags, "--resume"])
    return before == {f.name: f.read_bytes() for f in last.glob("*.safetensors")}


def run(case):
    gpu.reset()
    error, code, out = None, None, io.StringIO()
    words = case.split()
    resume = "resume" in words[:2]
    kind = next((word for word in words[:2] if word in FAMILY), None)
    flags = [*flags_of(kind), *words[bool(kind) + resume:]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            train.main([*flags, *["--save_steps", "1"] * resume])
            if resume and not same_after_resume([*flags, "--save_steps", "1"]):
                error = "other weights after --resume"
    except SystemExit as stop:
        code, error = stop.code, out.getvalue().strip().splitlines()[-1]
    except Exception as failure:
        code, error = 1, f"{failure} {traceback.format_exc().splitlines()[-3:]}"
    found = {"flags": case, "exit": code, "error": error, "said": out.getvalue(),
             "precision": torch.get_float32_matmul_precision()}
    found["syncs"] = {name: round(gpu.syncs[name] / max(1, gpu.calls[name]), 3) for name in PHASES}
    return found | {"where": {name: gpu.sites[name].most_common(12) for name in PHASES}}


PHASES = {"rollout": (fast, "fast_sample"), "token step": (fast.Rows, "step"),
          "look": (fast.Rows, "drop"), "graph": (fast.Rows, "fix"), "cut": (train.Batch, "take"),
          "update": (train, "update")}

if __name__ == "__main__":
    for label, (owner, name) in PHASES.items():
        phase(owner, name, label)
    torch.set_num_threads(1)
    with gpu:
        for case in json.loads(sys.argv[1]):
            print(json.dumps(run(case)), flush=True)
