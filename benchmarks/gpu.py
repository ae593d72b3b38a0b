"""One GPU, measured in at most ten minutes: one command that leaves its numbers whatever happens.

    python benchmarks/gpu.py            # -> results/gpu.json; --cpu: on a CPU, small shapes

Every part runs by itself; what fails is written down with its error, what cannot be measured here
as skipped and why, and the next part begins. The model has the shape of Qwen2.5-0.5B and random
weights, so nothing is downloaded.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from losses import policy_loss  # noqa: E402
from memory import named, peak_bytes, random_rollout, write_json  # noqa: E402
from plumbing.speed import compiled  # noqa: E402
from plumbing.model.actor import sampling_copy  # noqa: E402
from plumbing.speed.fast import response_logp, sample  # noqa: E402
from plumbing.speed.memory import Work, footprint  # noqa: E402
from plumbing.data.tasks import builtin_tokenizer  # noqa: E402

LIMIT = 600  # seconds for everything
SMALL = ("--use_cpu --steps 2 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 "
         "--min_terms 1 --max_terms 2 --num_hidden_layers 1 --num_experts 4 --hidden_size 32 "
         "--cold_start_steps 120 --cold_start_learning_rate 0.005")


class Bench:
    """The model and the sizes that all parts measure."""

    def __init__(self, cpu):
        self.device, self.cpu = torch.device("cpu" if cpu else "cuda"), cpu
        self.end = time.perf_counter() + LIMIT
        self.Q, self.G, self.P, self.T = (2, 2, 16, 16) if cpu else (4, 8, 512, 512)
        config = named("Qwen 0.5B")
        if cpu:
            config = AutoConfig.for_model("qwen2", hidden_size=64, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2,
                                          intermediate_size=128, vocab_size=512,
                                          tie_word_embeddings=True)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config).float().to(self.device).eval()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.rollout = random_rollout(config.vocab_size, self.Q, self.G, self.P, self.T)
        for name, value in vars(self.rollout).items():
            if isinstance(value, torch.Tensor):
                setattr(self.rollout, name, value.to(self.device))

    def seconds(self, work, rounds=3):
        """The quickest of some rounds after a warm-up, the device waited for."""
        work()
        found = []
        for _ in range(rounds):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - began)
        return min(found)

    def wait(self):
        if not self.cpu:
            torch.cuda.synchronize()

    def left(self):
        """Seconds that are left of LIMIT."""
        return max(1.0, self.end - time.perf_counter())

    def run(self, *command):
        """What a Python process printed. RuntimeError with its last words if it failed."""
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                              timeout=self.left())
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
        return done.stdout.strip()

    def autocast(self, dtype=torch.bfloat16):
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


def device(bench):
    if bench.cpu:
        return {"name": "CPU", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "bytes": properties.total_memory, "torch": torch.__version__,
            "capability": list(torch.cuda.get_device_capability())}


def limits(bench):
    """Bytes per second of a copy, and FLOP per second of a matrix product in bfloat16."""
    n = 1024 if bench.cpu else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    copied = a.clone()
    return {"bytes_per_second": 2 * a.nbytes / bench.seconds(lambda: copied.copy_(a)),
            "flops_per_second": 2 * n**3 / bench.seconds(lambda: a @ a)}


def decode(bench):
    """Tokens per second of sampling, plain and compiled, beside weight bytes over bandwidth."""
    tokenizer, model = builtin_tokenizer(), sampling_copy(bench.model, "bfloat16")
    prompts = [[3] * (bench.P - 1) + [i % 10] for i in range(bench.Q)]
    tokens = bench.Q * bench.G * bench.T
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None  # no token ends an answer: every row is T long
    tokenizer.pad_token_id = 0
    bound = limits(bench)["bytes_per_second"] / (2 * bench.parameters) * bench.Q * bench.G
    found = {"bound_by_weights": bound}
    for name in ("plain", "compiled"):
        if name == "compiled" and not compiled.can_compile(bench.device.type):
            continue
        more = {"decoder": compiled.decoder(model)} if name == "compiled" else {}
        work = lambda: sample(model, tokenizer, prompts, bench.G, bench.T, **more)
        found[name] = tokens / bench.seconds(work, rounds=1)
    return found


def one_update(bench, optimizer):
    with bench.autocast():
        logp = response_logp(bench.model, bench.rollout, entropy=False).logp
    advantages = torch.ones(len(logp), device=bench.device)
    policy_loss("gspo", logp, logp.detach(), advantages, bench.rollout.mask)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def update(bench):
    """Seconds of an update, its share of the limit of products, its peak beside the estimate."""
    optimizer = torch.optim.AdamW(bench.model.parameters(), lr=1e-9, fused=True)
    seconds = bench.seconds(lambda: one_update(bench, optimizer))
    tokens = bench.Q * bench.P + bench.Q * bench.G * bench.T
    flops = 6 * bench.parameters * tokens
    peak = peak_bytes(lambda: one_update(bench, optimizer), bench.device)
    work = Work(bench.Q, bench.G, bench.P, bench.T, bench.Q * bench.G, bf16=True, padded=False)
    estimate = footprint(bench.model.config, bench.parameters, work)
    return {"seconds": seconds, "tokens": tokens, "peak_bytes": 12 * bench.parameters + peak,
            "estimated_bytes": estimate["state"] + estimate["updating"],
            "share_of_limit": flops / seconds / limits(bench)["flops_per_second"]}


@torch.no_grad()
def noise(bench):
    """Deviation of log-probs and of log s from float32's, by arithmetic: GSPO's band is 3e-4."""
    exact, found = response_logp(bench.model, bench.rollout, entropy=False).logp, {}
    for dtype in (torch.bfloat16, torch.float16):
        with bench.autocast(dtype):
            error = response_logp(bench.model, bench.rollout, entropy=False).logp - exact
        found[str(dtype)[6:]] = {"log_prob": error.std().item(),
                                 "log_s": error.mean(-1).pow(2).mean().sqrt().item()}
    return found


def syncs(bench):
    """How often the host waits in an update and in sampling, with the lines that make it wait."""
    if bench.cpu:
        return {"skipped": "a CPU waits for nothing; tests/speed/test_gpu.py counts on a pretended GPU"}
    optimizer, tokenizer = torch.optim.SGD(bench.model.parameters(), 0.0), builtin_tokenizer()
    work = {"update": lambda: one_update(bench, optimizer),
            "sampling": lambda: sample(bench.model, tokenizer, [[3] * bench.P] * bench.Q, bench.G,
                                       bench.T)}
    found = {}
    for name, once in work.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            once()
            torch.cuda.set_sync_debug_mode("default")
        lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen)
        found[name] = {"times": lines.total(), "lines": dict(lines.most_common(8))}
    return found


def script(bench, *flags):
    """Seconds of train.py with these flags, and what its last rollout batch says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        size = SMALL if bench.cpu else "--steps 10"
        bench.run(ROOT / "train.py", *size.split(), "--eval_samples", "0",
                  "--output_dir", f"{folder}/run", *flags)
        records = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        return {"seconds": time.perf_counter() - began, "batch": records[-1]}


def versus_trl(bench):
    if bench.cpu:
        return {"skipped": "python benchmarks/versus_trl.py measures it on a CPU"}
    if not importlib.util.find_spec("trl"):
        return {"skipped": "TRL is not installed: pip install trl==1.16.0"}
    return bench.run(ROOT / "benchmarks" / "versus_trl.py", "--quick")[-4000:]


def tests(bench):
    """The last line of the tests that need a GPU; none of them runs without one."""
    file = ROOT / "tests" / "test_gpu.py"
    return bench.run("-m", "pytest", "-q", "-m", "gpu", file).splitlines()[-1]


PARTS = {
    "device": device, "limits": limits, "decode": decode, "update": update, "noise": noise,
    "syncs": syncs, "default run": script,
    "routing replay old": lambda bench: script(bench, "--routing_replay", "old"),
    "routing replay rollout": lambda bench: script(bench, "--routing_replay", "rollout"),
    "versus_trl": versus_trl, "tests": tests}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="on a CPU, in small shapes")
    parser.add_argument("--json", default="results/gpu.json", help="where the numbers go")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="these parts")
    args = parser.parse_args(argv)
    result, bench = {}, Bench(args.cpu)
    for name in args.only:
        try:
            over = {"skipped": f"{LIMIT} seconds were over"}
            result[name] = PARTS[name](bench) if bench.left() > 1 else over
        except Exception as error:  # whatever it was: written down, and on with the next
            result[name] = {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
        write_json(args.json, result)
        print(f"{name}: {json.dumps(result[name])[:300]}", flush=True)


if __name__ == "__main__":
    main()
