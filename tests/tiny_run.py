"""A run small enough for tests, and the comparison of two runs that ought to be the same."""

import json
import random
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plumbing.data import tasks
from session.arguments import parse

TASK = "--min_terms 1 --max_terms 2".split()
POLICY = ("--hidden_size 32 --num_experts 4 --num_hidden_layers 1 --cold_start_steps 120 "
          "--cold_start_learning_rate 0.005").split()
SMALL = ("--prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --eval_samples 0 "
         "--device cpu").split()
TINY = [*TASK, *POLICY, *SMALL]
TINY_MODEL = [*TASK, *SMALL]     # beside --model_name_or_path; beside --dataset_name, too: SMALL
SUMS = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10), "largest": max(a, b)}
        for a in range(1, 10) for b in range(1, 10)]
ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "train.py")
# .venv and .ci hold environments of gigabytes, checkpoints a pretrained model
LEFT_OUT = shutil.ignore_patterns(".git", ".ci", ".venv", "venv", "runs", "checkpoints",
                                  "__pycache__", ".pytest_cache", "*.png")


def flags(*words):
    """The flags of a tiny run with these words: no task's where they name data, no policy's where
    they name a checkpoint, none where they resume a run."""
    if "--resume" in words:
        return [*words]
    task = [] if {"--dataset_name", "--environment"} & {*words} else TASK
    policy = [] if "--model_name_or_path" in words else POLICY
    return [*task, *policy, *SMALL, *words]


def slow(*values):
    """A case of a parametrized test that `python -m pytest` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def chance(rule="sum(map(ord, response)) % 3 / 2", n=40):
    """Flags for n sums in rows.jsonl and a reward in mine.py that is a matter of chance."""
    rng = random.Random(0)
    sums = ["+".join(rng.choices("123456789", k=rng.randint(1, 5))) + "=" for _ in range(n)]
    jsonl("rows.jsonl", [{"prompt": prompt, "answer": "1"} for prompt in dict.fromkeys(sums)])
    Path("mine.py").write_text(f"def reward(response, answer):\n    return {rule}\n",
                               encoding="utf-8")
    return "--dataset_name rows.jsonl --verifier mine.py:reward --max_completion_length 8"


def python(*words, cwd=None, processes=1, code=0, encoding="utf-8"):
    """Python with these words, as a process of its own or as several of torchrun's, which must end
    with this exit code (None: with any): a CompletedProcess with what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([sys.executable, *torchrun * (processes > 1), *map(str, words)], cwd=cwd,
                          capture_output=True, encoding=encoding, timeout=900)
    assert code in (None, done.returncode), done.stdout[-2000:] + done.stderr[-2000:]
    return done


def program(place, cold_start):
    """A copy of the project in a new folder, with the cold start under runs/: its path."""
    shutil.copytree(ROOT, place, ignore=LEFT_OUT)
    (place / "runs").mkdir()
    (place / "runs/cold_start").symlink_to(cold_start.parent)
    return place


def documented(title):
    """(the text of a section of CONTRIBUTING.md, its blocks of code)."""
    page = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", section, re.M)
    return section, [textwrap.dedent(block).strip() for block in blocks if block.strip()]


def write(path, text):
    """Write a text file, on any machine in UTF-8."""
    Path(path).write_text(text, encoding="utf-8")


def jsonl(path, rows):
    """Write rows as JSON lines; their path as str."""
    write(path, "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_task(name, test_name=None, verifier="exact", **flags):
    """The task of a data file or a hub id, by a verifier or a list of them, with these flags."""
    kinds = [verifier] if isinstance(verifier, str) else verifier
    return tasks.load_task(replace(parse([]), verifier=kinds, **flags), name, test_name)


def read_json(path):
    """What a file holds: of .jsonl a list of its lines."""
    text = Path(path).read_text(encoding="utf-8")
    if str(path).endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def metrics(run):
    """The lines of metrics.jsonl, without what a clock says."""
    clocks = ("seconds_rollout", "seconds_logp", "seconds_update", "tokens_per_second")
    return [{key: value for key, value in line.items() if key not in clocks}
            for line in read_json(Path(run) / "metrics.jsonl")]


def state(run, step):
    """What the checkpoint of a batch holds besides the weights."""
    return torch.load(Path(run) / f"checkpoints/step_{step}/state.pt", weights_only=True)


def unequal(a, b, where=""):
    """Where two nests of dicts, lists, tensors, numbers and text differ, to the last bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        places = [(key, a[key], b[key]) for key in a.keys() & b.keys()]
        same = a.keys() == b.keys()
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        places = [(i, x, y) for i, (x, y) in enumerate(zip(a, b))]
        same = len(a) == len(b)
    else:
        return [] if a == b or a != a and b != b else [f"{where}: {a!r} and {b!r}"]
    found = [place for key, x, y in places for place in unequal(x, y, f"{where}/{key}")]
    return found if same else [f"{where}: keys or length"]


def differences(one, other, step):
    """What differs between two finished runs: weights, state file, metrics, samples; also a step
    twice or missing."""
    def bytes_of(run, *names):
        return {(file.name, file.read_bytes()) for name in names for file in Path(run).glob(name)}
    found = unequal(state(one, step), state(other, step), "state.pt")
    found += unequal(metrics(one), metrics(other), "metrics.jsonl")
    names = f"checkpoints/step_{step}/*.safetensors", "samples.jsonl"
    kept = bytes_of(one, *names)
    if len(kept) < 2 or kept != bytes_of(other, *names):
        found.append("weights or samples.jsonl")
    for run in (one, other):
        steps = [record["step"] for record in metrics(run)]
        if steps != list(range(1, step + 1)):
            found.append(f"steps of {run}/metrics.jsonl: {steps}")
    return found
