"""One GPU, measured in at most an hour: one command that leaves its numbers whatever happens.

    python benchmarks/gpu.py            # -> results/gpu.json; --cpu: on a CPU, small shapes

Every part runs by itself; what fails is written down with its error, what cannot be measured here
as skipped and why, and the next part begins. Most parts take random weights in the shape of
Qwen2.5-0.5B, so they download nothing. The last ones are README's first GPU command itself, which
needs the hub or copies of its model and data (--model, --dataset):

    first command   seconds and peak memory of a batch: fast, --plain, --torch_compile
    beside TRL      the same by trl.GRPOTrainer, where TRL is installed
    gsm8k           the held-out questions before and after as many batches as the hour allows,
                    greedy: strict (the number stands in \\boxed{}), lenient (it is the last one)
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
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
from eval import evaluate  # noqa: E402
from losses import policy_loss  # noqa: E402
from memory import named, peak_bytes, random_rollout, write_json  # noqa: E402
from plumbing.parallel import devices  # noqa: E402
from plumbing.speed import compiled  # noqa: E402
from plumbing.speed.fast import response_logp, sample  # noqa: E402
from plumbing.data import tasks  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.engines.samplers import evaluation_sampler, sampling_copy  # noqa: E402
from plumbing.run.memory import Work, footprint  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402

LIMIT = 3600  # seconds for everything
SIZES = {False: (4, 8, 512, 512), True: (2, 2, 16, 16)}  # prompts, responses, tokens of both; --cpu
SQUARE = {False: 8192, True: 1024}  # width of the matrices that find the limit
EVALUATING = 600  # of them for gsm8k's two evaluations and for what comes after
PEAK = ("import sys, torch, train; train.main(sys.argv[1:]); cuda = torch.cuda; "
        "print('peak', cuda.max_memory_allocated() if cuda.is_available() else 0)")
SMALL = ("--use_cpu --steps 2 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 "
         "--min_terms 1 --max_terms 2 --num_hidden_layers 1 --num_experts 4 --hidden_size 32 "
         "--cold_start_steps 120 --cold_start_learning_rate 0.005")


class Bench:
    """The model and the batch sizes that all parts of the benchmark measure."""

    def __init__(self, cpu, model=None, dataset=None):
        self.own = {"--model_name_or_path": model, "--dataset_name": dataset}
        self.batch_seconds = None                            # of README's first command, once known
        self.device, self.cpu = torch.device("cpu" if cpu else "cuda"), cpu
        self.end = time.perf_counter() + LIMIT
        self.Q, self.G, self.P, self.T = SIZES[cpu]
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
        """Seconds of the quickest of `rounds` runs after a warm-up, each ending when the device has
        finished."""
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
        """Seconds that remain of LIMIT."""
        return max(1.0, self.end - time.perf_counter())

    def run(self, *command):
        """Run a Python command and return what it printed. Raises RuntimeError with the end of its
        output if it failed."""
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                              timeout=self.left(), env=os.environ | {"PYTHONPATH": str(ROOT)})
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
            "capability": list(torch.cuda.get_device_capability()),
            "bfloat16": devices.has_bfloat16()}


def limits(bench):
    """What the device can do at most: bytes per second of a copy, and FLOP per second of a bfloat16
    matrix product."""
    n = SQUARE[bench.cpu]
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    copied = a.clone()
    return {"bytes_per_second": 2 * a.nbytes / bench.seconds(lambda: copied.copy_(a)),
            "flops_per_second": 2 * n**3 / bench.seconds(lambda: a @ a)}


def decode(bench):
    """Tokens per second of sampling, plain and compiled, and the limit that reading all weights at
    every token step sets."""
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
    """Seconds of an update, its share of the device's FLOP limit, and its peak memory beside the
    estimate."""
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
    """How far log-probs and log s deviate from float32's, for each arithmetic. GSPO's clip range is
    3e-4."""
    exact, found = response_logp(bench.model, bench.rollout, entropy=False).logp, {}
    for dtype in (torch.bfloat16, torch.float16):
        with bench.autocast(dtype):
            error = response_logp(bench.model, bench.rollout, entropy=False).logp - exact
        found[str(dtype)[6:]] = {"log_prob": error.std().item(),
                                 "log_s": error.mean(-1).pow(2).mean().sqrt().item()}
    return found


def syncs(bench):
    """How often the host waits for the device in an update and in sampling, and the lines that
    cause it."""
    if bench.cpu:
        return {"skipped": "a CPU never waits; tests/speed/test_gpu.py counts on a pretended GPU"}
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
    """Seconds of train.py with these flags, and the metrics of its last rollout batch."""
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
    """The last line that pytest prints for the tests that need a GPU. Without a GPU none of them
    runs."""
    file = ROOT / "tests" / "speed" / "test_gpu.py"
    return bench.run("-m", "pytest", "-q", "-m", "gpu", file).splitlines()[-1]


# ----------------------------------------------------------------- README's first GPU command

def command(bench, folder):
    """The flags of README's first GPU command; on a CPU those of a tiny random checkpoint, which is
    made in `folder`."""
    if bench.cpu:
        return tiny_command(Path(folder))
    text = (ROOT / "README.md").read_text().split("## I have a GPU")[1]
    flags = shlex.split(text.split("python train.py", 1)[1].splitlines()[0], comments=True)
    for flag, value in bench.own.items():
        if value:
            flags[flags.index(flag) + 1] = value
    return flags


def tiny_command(folder):
    tokenizer = builtin_tokenizer()
    config = AutoConfig.for_model(
        "qwen2", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=32, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10)
            for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"--use_cpu --model_name_or_path {folder}/model --dataset_name {folder}/rows.jsonl "
            "--verifier exact --max_completion_length 8 --prompts_per_step 4 --num_generations 4 "
            "--steps_per_generation 2 --steps 4").split()


def with_steps(flags, steps):
    at = flags.index("--steps")
    return [*flags[:at + 1], str(steps), *flags[at + 2:]]


def first_command(bench):
    """Seconds per batch, by phase, and peak bytes as {way: figures} of three rollout batches. The
    first batch is not counted."""
    found = {}
    for way in ((), ("--plain",), ("--torch_compile",)):
        with tempfile.TemporaryDirectory() as folder:
            flags = [*with_steps(command(bench, folder), 3), *way, "--eval_samples", "0",
                     "--output_dir", f"{folder}/run"]
            name = way[0] if way else "fast"
            try:
                printed = bench.run("-c", PEAK, *flags)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found[name] = {"error": str(error)[-300:]}
                continue
            records = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")][1:]
        laps = {lap: sum(r[f"seconds_{lap}"] for r in records) / len(records)
                for lap in ("rollout", "logp", "update")}
        found[name] = {"seconds": sum(laps.values()), **laps,
                       "peak_bytes": int(printed.split("peak")[-1]),
                       "tokens_per_second": records[-1]["tokens_per_second"]}
    bench.batch_seconds = found["fast"].get("seconds")
    return found


def beside_trl(bench):
    if not importlib.util.find_spec("trl"):
        return {"skipped": "TRL is not installed: pip install trl==1.16.0"}
    with tempfile.TemporaryDirectory() as folder:
        flags = with_steps(command(bench, folder), 3)
        return json.loads(bench.run(ROOT / "benchmarks" / "trl_run.py", *flags).splitlines()[-1])


def numbers(text):
    return [n.replace(",", "").rstrip(".") for n in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def strict(response, answer):
    """Whether the last \\boxed{} holds the answer's number and nothing else."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return bool(boxed) and numbers(boxed[-1])[-1:] == numbers(answer)[-1:] == [
        boxed[-1].strip(" $").replace(",", "").rstrip(".")]


def lenient(response, answer):
    """Whether the last number of the response is the answer's."""
    return numbers(response)[-1:] == numbers(answer)[-1:]


def examined(bench, args, task, name):
    """Pass rates of greedy answers to the held-out questions, by the strict and by the lenient
    verifier."""
    policy, tokenizer = load_policy(args, task, bench.device, name)
    sampler = evaluation_sampler(args, policy, tokenizer, task)
    texts = evaluate(args, sampler, task, task.test, 1, 0.0)["texts"]
    pairs = [(row[0], problem.answer) for row, problem in zip(texts, task.test)]
    return {judge.__name__: sum(judge(*pair) for pair in pairs) / len(pairs)
            for judge in (strict, lenient)} | {"questions": len(pairs)}


def gsm8k(bench):
    """Pass rates on the held-out questions before and after README's first command, which trains
    for as many batches as the remaining time allows."""
    with tempfile.TemporaryDirectory() as folder:
        flags = command(bench, folder)
        args = parse(flags)
        task = tasks.from_arguments(args)
        before, began = examined(bench, args, task, None), time.perf_counter()
        room = (bench.left() - EVALUATING) / (bench.batch_seconds or math.inf)
        steps = max(1, min(args.steps, int(room)))
        bench.run(ROOT / "train.py", *with_steps(flags, steps), "--eval_samples", "0",
                  "--output_dir", f"{folder}/run")
        seconds = time.perf_counter() - began
        records = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        after = examined(bench, args, task, f"{folder}/run/checkpoints/step_{steps}")
        return {"before": before, "after": after, "batches": steps, "of": args.steps,
                "seconds": seconds, "pass_rate": [r["pass_rate"] for r in records]}


PARTS = {
    "device": device, "limits": limits, "decode": decode, "update": update, "noise": noise,
    "syncs": syncs, "default run": script,
    "routing replay old": lambda bench: script(bench, "--routing_replay", "old"),
    "routing replay rollout": lambda bench: script(bench, "--routing_replay", "rollout"),
    "versus_trl": versus_trl, "tests": tests, "first command": first_command,
    "beside TRL": beside_trl, "gsm8k": gsm8k}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="on a CPU, in small shapes")
    parser.add_argument("--json", default="results/gpu.json", help="where the numbers go")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--model", help="a copy of README's model instead of the hub's")
    parser.add_argument("--dataset", help="a copy of README's data instead of the hub's")
    args = parser.parse_args(argv)
    result, bench = {}, Bench(args.cpu, args.model, args.dataset)
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
