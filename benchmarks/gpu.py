"""Memory and speed of one GPU: a report to paste into an issue.

    python benchmarks/gpu.py                     # prints the report, writes results/gpu.json
    python benchmarks/gpu.py --cpu               # the recipes alone, with tiny models

Peak memory of an update beside the simulated one, for the models and flags of docs/speed.md; then
two batches of each recipe. Models have random weights in the shapes of the recipes', and prompts
are sums: memory and speed do not depend on what the weights are.
"""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from session.arguments import parse  # noqa: E402
from shapes import ROWS, WAYS, find_shape, random_model, run_updates  # noqa: E402
from timing import RESULTS, command_line, publish, table  # noqa: E402

RECIPES = {"gsm8k-24gb": 24, "gsm8k-80gb": 80, "gsm8k-8gb": 8, "gsm8k-16gb": 16}  # GB they need
SIMULATED = json.loads((RESULTS / "simulated.json").read_text(encoding="utf-8"))
TINY = ("--prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --micro_batch_size 4 "
        "--max_prompt_length 64 --max_completion_length 16 --optim adamw_torch_fused").split()
TRAIN = ("import sys, torch, train; train.main(sys.argv[1:]); cuda = torch.cuda; "
         "print('peak', cuda.max_memory_allocated() if cuda.is_available() else 0)")
# rewards that differ within a group: the update skips a group without variance
PARITY = "def reward(response, answer):\n    return sum(map(ord, response)) % 2\n"


def measure_peak(name, flags):
    """Bytes of an update of a model on the GPU at their peak, None if they do not fit."""
    settings = parse(f"--model_name_or_path {name} {ROWS} {flags}".split())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        with torch.device("cuda"):
            policy = random_model(*find_shape(name))
        run_updates(settings, policy)
        return torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return None


def make_inputs(folder, name, small):
    """Flags of train.py: a checkpoint with random weights in the shape of a model, whose tokenizer
    has a token per character, and sums as prompts. small: a tiny checkpoint."""
    kind, *shape = find_shape(name)
    tokenizer = builtin_tokenizer("".join(map(chr, range(32, 127))) + chr(10))
    model = random_model(kind, *((64, 2, 4, 2, 128, 128) if small else shape),
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                         initializer_range=0.02)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    rng = random.Random(0)
    sums = [rng.choices(range(1, 10), k=rng.randint(3, 9)) for _ in range(400)]
    rows = [{"question": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}
            for terms in sums]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parity.py").write_text(PARITY)
    return ["--model_name_or_path", folder / "model", "--dataset_name", folder / "sums.jsonl",
            "--verifier", f"{folder / 'parity.py'}:reward", "--eval_samples", "0"]


def try_recipe(name, small):
    """Two batches of a recipe, in a process of their own: its peak and its metrics, or what failed.
    """
    recipe = ROOT / f"recipes/{name}.yaml"
    model = recipe.read_text(encoding="utf-8").split("model_name_or_path: ")[1].split()[0]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--config", recipe, *make_inputs(Path(folder), model, small), "--steps", "2",
                 "--output_dir", f"{folder}/run", *(["--device", "cpu", *TINY] if small else [])]
        done = subprocess.run([sys.executable, "-c", TRAIN, *map(str, flags)], cwd=folder,
                              capture_output=True, encoding="utf-8", errors="replace",
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1][-300:]}
        text = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8")
    last = json.loads(text.splitlines()[-1])
    return {"peak": int(done.stdout.split("peak")[-1])} | {key: last[key] for key in (
        "tokens_per_second", "seconds_rollout", "seconds_logp", "seconds_update")}


def shares_of_simulated(peaks):
    return [peak / SIMULATED["peaks"][name][way]
            for name, ways in peaks.items() for way, peak in ways.items() if peak]


def recipe_row(name, tried):
    """What a run of a recipe takes: as tried, else the simulated peak alone."""
    settings = parse(["--config", str(ROOT / f"recipes/{name}.yaml")])
    simulated = f"{SIMULATED['recipes'][name] / 1e9:.1f} simulated"
    start = (f"`{name}`", f"{RECIPES[name]} GB")
    if "error" in tried:
        return *start, simulated, "yes, by simulation", settings.steps, "–", "–"
    seconds = sum(tried[f"seconds_{part}"] for part in ("rollout", "logp", "update"))
    return (*start, f"{tried['peak'] / 1e9:.1f} ({simulated})", "yes", settings.steps,
            f"{seconds:.0f}", f"{seconds * settings.steps / 60:.0f} min")


def texts(found):
    """The tables and figures of docs/speed.md."""
    rows = [recipe_row(name, found["recipes"].get(name, {"error": "not tried"}))
            for name in sorted(RECIPES, key=RECIPES.get)]
    written = {"gpu": table(("recipe", "GPU memory", "peak GB", "fits", "batches", "s per batch",
                             "total"), *rows)}
    if found["peaks"]:
        shares = shares_of_simulated(found["peaks"])
        peaks = [(name.split("/")[1],
                  *(f"{peak / 1e9:.1f}" if peak else "–" for peak in ways.values()))
                 for name, ways in found["peaks"].items()]
        head = "peak GB of an update", *next(iter(found["peaks"].values()))
        written |= {"gpu-peaks": table(head, *peaks),
                    "gpu-share": f"{min(shares):.2f} to {max(shares):.2f}"}
    return written


def main(argv=None):
    parser = command_line(__doc__, "gpu.json")
    parser.add_argument("--cpu", action="store_true", help="the recipes, on a CPU, tiny models")
    args = parser.parse_args(argv)
    names = () if args.cpu else SIMULATED["peaks"]
    device = "cpu" if args.cpu else torch.cuda.get_device_name()
    found = {"device": f"{device}, torch {torch.__version__}",
             "peaks": {name: {way: measure_peak(name, flags) for way, flags in WAYS.items()}
                       for name in names},
             "recipes": {name: try_recipe(name, args.cpu) for name in RECIPES}}
    print(json.dumps(found, indent=1))
    publish(args.json, found, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
