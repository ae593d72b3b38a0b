"""One GPU, tried in at most forty minutes: a report to paste into an issue.

    python benchmarks/gpu.py                     # prints the report, writes gpu.json
    python benchmarks/gpu.py --cpu               # the same steps on a CPU, with tiny models
    python benchmarks/gpu.py --pretend           # on a simulated GPU (tests/gpu; needs g++)

Each step runs by itself, in a process of its own; what fails is reported with its error, what
cannot be tried as skipped and why. Without a hub, models have random weights in the shapes of the
recipes', and prompts are sums: memory and speed do not depend on what the weights are.

    device    the GPU and the versions
    tests     the tests of tests/speed that need a GPU
    peaks     peak memory of an update beside the simulated one, models and flags of docs/speed.md
    recipes   two batches of each recipe: peak memory, tokens/s, seconds
    resume    a run whose last checkpoint is taken away ends in the same weights after --resume
    log_s     error of log s in 16 bits against the length of the response, with this GPU's kernels
    vllm      the 24 GB recipe with --sampler vllm: memory while it samples and while it sleeps
    learns    the default run of train.py: held-out pass@1 before and after, and seconds of sampling
              beside those of a run with --cuda_graphs
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from session.arguments import parse  # noqa: E402
from timing import RESULTS, command_line, publish, table, write_json  # noqa: E402

RECIPES = {"gsm8k-24gb": 24, "gsm8k-80gb": 80, "gsm8k-8gb": 8, "gsm8k-16gb": 16}  # GB they need
SIMULATED = json.loads((RESULTS / "simulated.json").read_text(encoding="utf-8"))
TINY = ("--prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --micro_batch_size 4 "
        "--max_prompt_length 64 --max_completion_length 16 --optim adamw_torch_fused").split()
TINY_MOE = ("--min_terms 1 --max_terms 2 --num_hidden_layers 1 --num_experts 4 --hidden_size 32 "
            "--cold_start_steps 120 --cold_start_learning_rate 0.005 --steps 4").split()
PRETEND = (f"import sys; sys.path.insert(0, {str(ROOT / 'tests/gpu')!r}); "
           "from pretend_device import gpu; gpu.__enter__(); ")
TRAIN = ("import sys, torch, train; train.main(sys.argv[1:]); cuda = torch.cuda; "
         "print('peak', cuda.max_memory_allocated() if cuda.is_available() else 0)")
WATCH = """
import threading, time, torch
def watch():
    while True:
        time.sleep(0.2)
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
used = []
threading.Thread(target=watch, daemon=True).start()
"""
WATCHED = "; print('used', min(used[len(used) // 2:]), max(used))"       # after the model is loaded


class Bench:
    """How commands are run here, and the time that is left."""

    def __init__(self, args):
        self.small = args.cpu or args.pretend
        self.prefix = PRETEND if args.pretend else ""
        self.device = "cpu" if args.cpu else "cuda"
        self.end = time.perf_counter() + 60 * args.minutes
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self.lines = []

    def report(self, text):
        """A line of the report."""
        self.lines.append(text)
        print(text, flush=True)

    def run(self, *command):
        """Run a Python command and return what it printed. Raises RuntimeError with the last line
        of its output if it failed."""
        left = max(1.0, self.end - time.perf_counter())
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True,
                              encoding="utf-8", errors="replace", timeout=left, cwd=self.folder,
                              env=os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"})
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RuntimeError(said[-1][-300:] if said else f"exit code {done.returncode}")
        return done.stdout.strip()

    def train(self, name, *flags):
        """A run of train.py in the folder `name` -> (read_last, peak bytes of the GPU)."""
        printed = self.run("-c", self.prefix + TRAIN, *flags, "--output_dir", name)
        return self.read_last(name), int(printed.split("peak")[-1])

    def read_last(self, name):
        """The metrics of the last batch of a run."""
        text = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8")
        return json.loads(text.splitlines()[-1])

    def make_model(self, name):
        """A checkpoint with random weights in the shape of a recipe's model, whose tokenizer has a
        token per character -> its folder."""
        folder = self.folder / name.replace("/", "--")
        if not folder.exists():
            self.run("-c", MAKE_MODEL, name, folder, int(self.small))
        return folder

    def recipe(self, name):
        """The flags of a recipe, with a model and data that need no hub."""
        data = self.folder / "sums.jsonl"
        if not data.exists():
            rng = random.Random(0)
            sums = [rng.choices(range(1, 10), k=rng.randint(3, 9)) for _ in range(400)]
            rows = [{"question": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}
                    for terms in sums]
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            # rewards that differ within a group: the update skips a group without variance
            (self.folder / "parity.py").write_text(
                "def reward(response, answer):\n    return sum(map(ord, response)) % 2\n",
                encoding="utf-8")
        text = (ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8")
        model = self.make_model(text.split("model_name_or_path: ")[1].split()[0])
        return ["--config", ROOT / f"recipes/{name}.yaml", "--model_name_or_path", model,
                "--dataset_name", data, "--verifier", self.folder / "parity.py:reward",
                "--eval_samples", "0", "--device", self.device, *(TINY if self.small else [])]


MAKE_MODEL = """
import sys
from plumbing.data.running_sum import builtin_tokenizer
sys.path.insert(0, "%s")
from shapes import SHAPES, random_model
name, folder, small = sys.argv[1:]
kind, D, L, H, H_kv, F, V, *d = next(s for n, s in SHAPES.items() if name.startswith(n))
tokenizer = builtin_tokenizer("".join(map(chr, range(32, 127))) + chr(10))
sizes = (kind, 64, 2, 4, 2, 128, 128) if small == "1" else (kind, D, L, H, H_kv, F, V, *d)
model = random_model(*sizes, eos_token_id=tokenizer.eos_token_id,
                     pad_token_id=tokenizer.pad_token_id, initializer_range=0.02)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
""" % (ROOT / "benchmarks")


def find_device(bench):
    text = bench.run("-c", bench.prefix + """
import torch, transformers
line = f"torch {torch.__version__}, transformers {transformers.__version__}"
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    line = f"{p.name}, {p.total_memory / 1e9:.0f} GB, compute {p.major}.{p.minor}, " + line
print(line)
""").splitlines()[-1]
    bench.report(f"device    {text}{', simulated' if bench.prefix else ''}")
    return text


def try_tests(bench):
    if bench.small:
        return skip(bench, "tests", "needs a real GPU")
    if not find_spec("pytest"):
        return skip(bench, "tests", "pytest is not installed")
    printed = bench.run("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider",
                        ROOT / "tests/speed")
    bench.report(f"tests     {printed.splitlines()[-1]}")
    return printed.splitlines()[-1]


PEAKS = """
import gc, json, sys
import torch
sys.path.insert(0, "%s")
from session.arguments import parse
from shapes import ROWS, WAYS, find_shape, random_model, run_updates
for name in sys.argv[1:]:
    for way, flags in WAYS.items():
        settings = parse(f"--model_name_or_path {name} {ROWS} {flags}".split())
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            with torch.device("cuda"):
                policy = random_model(*find_shape(name))
            run_updates(settings, policy)
            peak = torch.cuda.max_memory_allocated() - before
        except torch.OutOfMemoryError:
            peak = None
        policy = None
        print(json.dumps([name, way, peak]), flush=True)
""" % (ROOT / "benchmarks")


def try_peaks(bench):
    if bench.small:
        return skip(bench, "peaks", "needs a real GPU")
    found = {name: {} for name in SIMULATED["peaks"]}
    for line in bench.run("-c", PEAKS, *found).splitlines():
        name, way, peak = json.loads(line)
        found[name][way] = peak
    shares = shares_of_simulated(found)
    bench.report(f"peaks     {len(shares)} of {sum(map(len, found.values()))} fit; measured / "
                 f"simulated {min(shares):.3f} to {max(shares):.3f}")
    return found


def shares_of_simulated(peaks):
    return [peak / SIMULATED["peaks"][name][way]
            for name, ways in peaks.items() for way, peak in ways.items() if peak]


def try_recipes(bench):
    found = {}
    for name, needed in RECIPES.items():
        try:
            last, peak = bench.train(name, *bench.recipe(name), "--steps", "2")
        except Exception as error:                              # the next recipe may run
            found[name] = failed(bench, "recipes", error)
            continue
        found[name] = dict(peak=peak, **{key: last[key] for key in (
            "tokens_per_second", "seconds_rollout", "seconds_logp", "seconds_update")})
        bench.report(f"recipes   {name}: peak {peak / 1e9:.1f} GB (an update, simulated: "
                     f"{SIMULATED['recipes'][name] / 1e9:.1f}; needs a card of {needed} GB), "
                     f"{last['tokens_per_second']:.0f} tokens/s, seconds "
                     f"{last['seconds_rollout']:.1f} + {last['seconds_logp']:.1f} + "
                     f"{last['seconds_update']:.1f}")
    return found


def try_resume(bench):
    flags = [*bench.recipe("gsm8k-8gb"), "--steps", "2", "--save_steps", "1",
             "--max_completion_length", "16"]
    bench.train("resumed", *flags)
    last = bench.folder / "resumed/checkpoints/step_2"
    before = {f.name: f.read_bytes() for f in last.glob("*.safetensors")}
    shutil.rmtree(last)
    bench.train("resumed", *flags, "--resume")
    same = before == {f.name: f.read_bytes() for f in last.glob("*.safetensors")}
    bench.report(f"resume    {'the same weights' if same else 'OTHER WEIGHTS'} after --resume")
    return same


def try_log_s(bench):
    model = bench.make_model("HuggingFaceTB/SmolLM2-135M")
    file = bench.folder / "log_s.json"
    small = ["--quick"] if bench.small else []
    code = (f"{bench.prefix}import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
            "import bfloat16; bfloat16.main(sys.argv[1:])")
    bench.run("-c", code, *small, "--device", bench.device, "--json", file,
              "--model_name_or_path", model)
    found = json.loads(file.read_text(encoding="utf-8"))["weights"]["grid"]
    for L, of in found.items():
        parts = of["formats"]["bfloat16"]
        bench.report(f"log_s     L {L}: true {of['true']:.1e}, bfloat16's arithmetic "
                     f"{parts['arithmetic']:.1e}, lost update {parts['lost']:.1e}")
    return found


def try_vllm(bench):
    if bench.prefix or bench.device == "cpu":
        return skip(bench, "vllm", "needs a real GPU")
    if not find_spec("vllm"):
        return skip(bench, "vllm", "vllm is not installed")
    flags = bench.recipe("gsm8k-24gb")
    printed = bench.run("-c", WATCH + TRAIN + WATCHED, *flags, "--steps", "2", "--sampler", "vllm",
                        "--output_dir", "vllm")
    asleep, awake = (int(x) / 1e9 for x in printed.split("used")[-1].split())
    last = bench.read_last("vllm")
    bench.report(f"vllm      memory of the device {asleep:.1f} GB asleep, {awake:.1f} GB at most; "
                 f"rollout {last['seconds_rollout']:.1f} s, update {last['seconds_update']:.1f} s, "
                 f"mismatch_kl {last['mismatch_kl']:.1e}")
    return dict(asleep=asleep, awake=awake, mismatch_kl=last["mismatch_kl"])


def try_learning(bench):
    small = TINY_MOE if bench.small else []
    for name, *flags in (("graphs", "--cuda_graphs"), ("learns",)):
        last, _ = bench.train(name, "--device", bench.device, *flags, *small)
        bench.report(f"{name:9} the last batch is sampled in {last['seconds_rollout']:.3f} s")
    text = (bench.folder / "learns/summary.json").read_text(encoding="utf-8")
    summary = json.loads(text)
    bench.report(f"learns    pass@1 {summary['pass_at_1_before']:.3f} -> "
                 f"{summary['pass_at_1_after']:.3f} in {summary['seconds']:.0f} s")
    return summary


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
    shares = shares_of_simulated(found["peaks"])
    peaks = [(name.split("/")[1], *(f"{peak / 1e9:.1f}" if peak else "–" for peak in ways.values()))
             for name, ways in found["peaks"].items()]
    after = found["learns"]
    return {
        "gpu-peaks": table(("peak GB of an update", *next(iter(found["peaks"].values()))), *peaks),
        "gpu": table(("recipe", "GPU memory", "peak GB", "fits", "batches", "s per batch",
                      "total"), *rows),
        "gpu-share": f"{min(shares):.2f} to {max(shares):.2f}",
        "gpu-learns": f"{after['pass_at_1_before']:.3f} to {after['pass_at_1_after']:.3f} in "
                      f"{after['seconds']:.0f} s"}


def skip(bench, name, why):
    bench.report(f"{name:9} skipped: {why}")
    return {"skipped": why}


def failed(bench, name, error):
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    bench.report(f"{name:9} FAILED: {text}")
    return {"error": text}


STEPS = {"device": find_device, "tests": try_tests, "peaks": try_peaks,
         "recipes": try_recipes, "resume": try_resume, "log_s": try_log_s, "vllm": try_vllm,
         "learns": try_learning}


def main(argv=None):
    parser = command_line(__doc__, "gpu.json")
    parser.set_defaults(json=Path("gpu.json"))
    parser.epilog = __doc__.split("\n\n", 2)[2]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="on a CPU, with tiny models")
    kind.add_argument("--pretend", action="store_true", help="on a simulated GPU; tiny models")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS), help="these steps")
    parser.add_argument("--minutes", type=float, default=40, help="for everything (default: 40)")
    args = parser.parse_args(argv)
    bench = Bench(args)
    found = {}
    for name in args.only:
        print(f"# {name}: " + __doc__.split(f"    {name}")[1].split("\n")[0].strip(), flush=True)
        began = time.perf_counter()
        try:
            found[name] = STEPS[name](bench)
        except Exception as error:           # whatever it was: reported, and on with the next step
            found[name] = failed(bench, name, error)
        found[f"{name} seconds"] = round(time.perf_counter() - began, 1)
        write_json(args.json, found)
    if not bench.small and {"peaks", "recipes", "learns"} <= set(found):
        publish(args.json, found, texts)
    shutil.rmtree(bench.folder)
    print("\nPaste this into an issue, whatever it says:\n\n```", *bench.lines, "```", sep="\n")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
