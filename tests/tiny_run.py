"""A run small enough for tests, and the comparison of two runs that ought to be the same."""

import json
from pathlib import Path

import torch

TASK = "--min_terms 1 --max_terms 2".split()
POLICY = ("--hidden_size 32 --num_experts 4 --num_hidden_layers 1 --cold_start_steps 120 "
          "--cold_start_learning_rate 0.005").split()
SMALL = ("--prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --eval_samples 0 "
         "--device cpu").split()
TINY = [*TASK, *POLICY, *SMALL]
TINY_MODEL = [*TASK, *SMALL]     # beside --model_name_or_path; beside --dataset_name, too: SMALL
TRAIN = str(Path(__file__).resolve().parent.parent / "train.py")


def flags(*words):
    """The flags of a tiny run with these words: no task's where they name data, no policy's where
    they name a checkpoint, none where they resume a run."""
    if "--resume" in words:
        return [*words]
    task = [] if "--dataset_name" in words else TASK
    policy = [] if "--model_name_or_path" in words else POLICY
    return [*task, *policy, *SMALL, *words]


def jsonl(path, rows):
    """Write rows as JSON lines; their path as str."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def metrics(run):
    """The lines of metrics.jsonl, without what a clock says."""
    clocks = ("seconds_rollout", "seconds_logp", "seconds_update", "tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in clocks} for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def unequal(a, b, where=""):
    """Where two nests of dicts, lists, tensors, numbers and text differ, to the last bit: a list of places."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        return [f"{where}: keys"] if a.keys() != b.keys() else [d for k in a for d in unequal(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return [f"{where}: length"] if len(a) != len(b) else [d for i, (x, y) in enumerate(zip(a, b)) for d in unequal(x, y, f"{where}/{i}")]
    return [] if a == b or a != a and b != b else [f"{where}: {a!r} and {b!r}"]


def differences(one, other, step, weights="model.safetensors"):
    """What differs between two finished runs: weights file, state file, metrics, samples; also a step twice or missing."""
    found, folders = [], [Path(run) / "checkpoints" / f"step_{step}" for run in (one, other)]
    if len({(folder / weights).read_bytes() for folder in folders}) != 1:
        found.append(weights)
    found += unequal(*(torch.load(folder / "state.pt", weights_only=True) for folder in folders), "state.pt")
    found += unequal(metrics(one), metrics(other), "metrics.jsonl")
    if len({(Path(run) / "samples.jsonl").read_bytes() for run in (one, other)}) != 1:
        found.append("samples.jsonl")
    for run in (one, other):
        if [record["step"] for record in metrics(run)] != list(range(1, step + 1)):
            found.append(f"steps of {run}/metrics.jsonl: {[record['step'] for record in metrics(run)]}")
    return found
