"""One GPU, measured in at most an hour: one command that leaves its numbers whatever happens.

    python benchmarks/gpu.py            # -> results/gpu.json; --cpu: on a CPU, small shapes
    python benchmarks/gpu.py --only gsm8k --seeds 4 --limit 28800    # a part, with more time

Every part runs by itself; what fails is written down with its error, what cannot be measured here
as skipped and why, and the next part begins. Most parts take random weights in the shape of
Qwen2.5-0.5B, so they download nothing. The last ones are README's first GPU command itself, which
needs the hub or copies of its model and data (--model, --dataset):

    first command   seconds and peak memory of a batch: fast, --plain
    beside TRL      the same by trl.GRPOTrainer, where TRL is installed
    gsm8k           GSPO and GRPO in pairs (--seeds: how many; a pair has the same seed, start and
                    prompts), the held-out questions before and after as many batches as the time
                    allows, greedy: strict (the number stands in \\boxed{}), lenient (it is the
                    last one); beside published results
    samplers        tokens per second of a rollout batch of the first command, by the
                    built-in sampler and --sampler vllm, on
                    the same prompts

Neither `samplers` nor `gsm8k` was ever run on a GPU: --cpu runs both with a tiny model on sums.
"""

import argparse
import importlib.util
import json
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
from statistics import mean, median
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from engines import tokens_per_second  # noqa: E402
from eval import evaluate, with_interval  # noqa: E402
from losses import policy_loss  # noqa: E402
from memory import named, peak_bytes, random_rollout, write_json  # noqa: E402
from plumbing.parallel import devices  # noqa: E402
from plumbing.speed.fast import response_logp, sample  # noqa: E402
from plumbing.data import tasks  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.engines.samplers import evaluation_sampler, make_sampler  # noqa: E402
from plumbing.engines.samplers import sampling_copy  # noqa: E402
from plumbing.engines.vllm import close_engine  # noqa: E402
from plumbing.run.memory import Work, footprint  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402

LIMIT = 3600  # seconds for everything
SIZES = {False: (4, 8, 512, 512), True: (2, 2, 16, 16)}  # prompts, responses, tokens of both; --cpu
SQUARE = {False: 8192, True: 1024}  # width of the matrices that find the limit
EVALUATING = 300  # of them for each of gsm8k's evaluations
SAMPLING = 300  # of them for the samplers, which come after it
PEAK = ("import sys, torch, train; train.main(sys.argv[1:]); cuda = torch.cuda; "
        "print('peak', cuda.max_memory_allocated() if cuda.is_available() else 0)")
SAMPLERS = {"built-in": [], "--sampler vllm": ["--sampler", "vllm"]}
# Published pass rates on GSM8K in percent, before and after training. None: not published. For
# GSPO at this size there are curves, but no table is known.
PUBLISHED = [
    {"model": "Qwen2.5-0.5B-Instruct", "algorithm": "PPO", "before": 49.6, "after": 56.7,
     "source": "verl, docs/algo/baseline.md"},
    {"model": "Qwen2.5-0.5B-Instruct", "algorithm": "GRPO, LoRA of rank 32", "before": 49.6,
     "after": 54.3, "source": "verl, docs/algo/baseline.md"},
    {"model": "Qwen2.5-0.5B-Instruct", "algorithm": "GRPO", "before": 43.6, "after": 50.2,
     "source": "slime#1835"},
    {"model": "Qwen2.5-0.5B", "algorithm": "GRPO, 8k examples", "before": 36.7, "after": 49.5,
     "source": "simpleRL-reason"},
    {"model": "Qwen2.5-1.5B-Instruct", "algorithm": "GRPO, LoRA of rank 32", "before": None,
     "after": 77.9, "source": "verl, docs/algo/baseline.md"},
    {"model": "Qwen2.5-1.5B-Instruct", "algorithm": "GRPO, LoRA, strict", "before": 1.7,
     "after": 48.7, "source": "a blog, quoted second-hand"},
    {"model": "Qwen2.5-1.5B-Instruct", "algorithm": "GRPO, LoRA, lenient", "before": 38.3,
     "after": 55.0, "source": "the same"}]
SMALL = ("--device cpu --steps 2 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 "
         "--min_terms 1 --max_terms 2 --num_hidden_layers 1 --num_experts 4 --hidden_size 32 "
         "--cold_start_steps 120 --cold_start_learning_rate 0.005")


class Bench:
    """The model and the batch sizes that all parts of the benchmark measure."""

    def __init__(self, cpu, model=None, dataset=None, limit=LIMIT, seeds=1):
        self.own = {"--model_name_or_path": model, "--dataset_name": dataset}
        self.batch_seconds = None                            # of README's first command, once known
        self.device = torch.device("cpu" if cpu else "cuda")
        self.cpu = cpu
        self.end = time.perf_counter() + limit
        self.limit = limit
        self.seeds = seeds
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

    def clock(self):
        """Seconds on a clock that is read when the device has finished."""
        self.wait()
        return time.perf_counter()

    def left(self):
        """Seconds that remain of the limit."""
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
    """Tokens per second of sampling, and the limit that reading all weights at every token step
    sets."""
    tokenizer = builtin_tokenizer()
    model = sampling_copy(bench.model, "bfloat16")
    prompts = [[3] * (bench.P - 1) + [i % 10] for i in range(bench.Q)]
    tokens = bench.Q * bench.G * bench.T
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None  # no token ends an answer: every row is T long
    tokenizer.pad_token_id = 0
    bound = limits(bench)["bytes_per_second"] / (2 * bench.parameters) * bench.Q * bench.G
    work = lambda: sample(model, tokenizer, prompts, bench.G, bench.T)
    return {"bound_by_weights": bound, "plain": tokens / bench.seconds(work, rounds=1)}


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
    exact = response_logp(bench.model, bench.rollout, entropy=False).logp
    found = {}
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
    optimizer = torch.optim.SGD(bench.model.parameters(), 0.0)
    tokenizer = builtin_tokenizer()
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
        records = metrics(f"{folder}/run")
        return {"seconds": time.perf_counter() - began, "batch": records[-1]}


def metrics(run):
    """The metrics of a run, one dict per rollout batch."""
    return [json.loads(line) for line in open(f"{run}/metrics.jsonl")]


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
    config = AutoConfig.for_model(       # heads of width 32: on a CPU vLLM has none of 16
        "qwen2", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=128, vocab_size=32, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10)
            for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"--device cpu --model_name_or_path {folder}/model --dataset_name {folder}/rows.jsonl "
            "--verifier exact --max_completion_length 8 --prompts_per_step 4 --num_generations 4 "
            "--steps_per_generation 2 --steps 4").split()


def with_steps(flags, steps):
    at = flags.index("--steps")
    return [*flags[:at + 1], str(steps), *flags[at + 2:]]


def batch_of(bench, way):
    """Seconds per batch, by phase, and peak bytes of three rollout batches of the first command
    with the flags `way`. The first batch is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*with_steps(command(bench, folder), 3), *way, "--eval_samples", "0",
                 "--output_dir", f"{folder}/run"]
        printed = bench.run("-c", PEAK, *flags)
        records = metrics(f"{folder}/run")[1:]
    laps = {lap: mean(r[f"seconds_{lap}"] for r in records)
            for lap in ("rollout", "logp", "update")}
    return {"seconds": sum(laps.values()), **laps, "peak_bytes": int(printed.split("peak")[-1]),
            "tokens_per_second": records[-1]["tokens_per_second"]}


def first_command(bench):
    """{way: figures of batch_of, or the error}."""
    found = {}
    for way in ((), ("--plain",)):
        try:
            found[way[0] if way else "fast"] = batch_of(bench, way)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found[way[0] if way else "fast"] = {"error": str(error)[-300:]}
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
    """Greedy answers to the held-out questions: {"strict": [right or not], "lenient": [...]}."""
    policy, tokenizer = load_policy(args, task, bench.device, name)
    sampler = evaluation_sampler(args, policy, tokenizer, task)
    texts = evaluate(args, sampler, task, task.test, 1, 0.0)["texts"]
    pairs = [(row[0], problem.answer) for row, problem in zip(texts, task.test)]
    return {judge.__name__: [judge(*pair) for pair in pairs] for judge in (strict, lenient)}


def pass_rates(marks):
    return {judge: mean(right) for judge, right in marks.items()}


def trained(bench, flags, steps):
    """(answers as `examined` has them, what the run recorded) after train.py with these flags."""
    args = parse(flags)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        bench.run(ROOT / "train.py", *with_steps(flags, steps), "--eval_samples", "0",
                  "--output_dir", f"{folder}/run")
        seconds = time.perf_counter() - began
        records = metrics(f"{folder}/run")
        marks = examined(bench, args, tasks.from_arguments(args),
                         f"{folder}/run/checkpoints/step_{steps}")
    return marks, {"seconds": seconds, "pass_rate": [r["pass_rate"] for r in records]}


def difference(gspo, grpo):
    """GSPO minus GRPO in pass rate: {judge: (mean, low, high)}, with the 95 % interval over the
    questions. gspo, grpo: answers of one run per seed, in the order of the seeds. The interval does
    not contain the spread over seeds; see "runs"."""
    result = {}
    for judge in ("strict", "lenient"):
        runs = [[a - b for a, b in zip(ours[judge], theirs[judge], strict=True)]
                for ours, theirs in zip(gspo, grpo, strict=True)]                  # [seeds][n]
        result[judge] = with_interval([mean(question) for question in zip(*runs)], (-1.0, 1.0))
    return result


def gsm8k(bench):
    """Pass rates on the held-out questions before and after README's first command by GSPO and by
    GRPO, for each seed, with as many batches in each run as the remaining time allows."""
    with tempfile.TemporaryDirectory() as folder:
        flags = command(bench, folder)
        args = parse(flags)
        task = tasks.from_arguments(args)
        before = examined(bench, args, task, None)
        batch_seconds = bench.batch_seconds or batch_of(bench, ())["seconds"]
        room = (bench.left() - SAMPLING) / (2 * bench.seeds) - EVALUATING
        steps = max(1, min(args.steps, int(room / batch_seconds)))
        result = {"before": pass_rates(before), "questions": len(task.test), "batches": steps,
                  "of": args.steps, "published": PUBLISHED, "runs": []}
        answers = {"gspo": [], "grpo": []}
        for seed in range(bench.seeds):
            pair = {}
            for name in answers:
                try:
                    pair[name], seen = trained(
                        bench, [*flags, "--algorithm", name, "--seed", str(seed)], steps)
                    seen["after"] = pass_rates(pair[name])
                except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                    seen = {"error": str(error)[-300:]}
                result["runs"].append({"algorithm": name, "seed": seed, **seen})
            if len(pair) == 2:                               # a pair that ended
                for name in answers:
                    answers[name].append(pair[name])
    result["pairs"] = len(answers["gspo"])
    if result["pairs"]:
        result["gspo_minus_grpo"] = difference(**answers)
    print(table(result), flush=True)
    return result


def table(result):
    """The pass rates that gsm8k measured, in percent, and the published ones."""
    shown = lambda rate: "-" if rate is None else f"{rate:.1f}"
    lines = [f"GSM8K, {result['questions']} questions, {result['batches']} batches"]
    for run in result["runs"]:
        for judge in ("strict", "lenient"):
            after = run["after"][judge] * 100 if "after" in run else None
            lines.append(f"  {run['algorithm']}, seed {run['seed']}, {judge}: "
                         f"{shown(result['before'][judge] * 100)} -> {shown(after)}")
    for judge, (middle, low, high) in result.get("gspo_minus_grpo", {}).items():
        lines.append(f"  GSPO - GRPO, {judge}: {100 * middle:+.1f} [{100 * low:+.1f}, "
                     f"{100 * high:+.1f}]")
    lines.append("published, GSM8K:")
    lines += [f"  {row['model']}, {row['algorithm']}: {shown(row['before'])} -> "
              f"{shown(row['after'])} ({row['source']})" for row in result["published"]]
    return "\n".join(lines)


def samplers(bench):
    """{sampler: tokens per second, their ratio to the built-in one, mean length} of a rollout batch
    of README's first command: the median of three batches after a warm-up. Before each batch the
    weights change, as by an update, so that rounding or transferring them is counted."""
    with tempfile.TemporaryDirectory() as folder:
        flags = command(bench, folder)
        args = parse(flags)
        task = tasks.from_arguments(args)
        policy, tokenizer = load_policy(args, task, bench.device)
        problems = task.train[:args.prompts_per_step]
        prompts = task.encode(tokenizer, problems, args.chat_template, args.max_prompt_length)
        result = {}
        for name, way in SAMPLERS.items():
            result[name] = sampler_speed(bench, [*flags, *way], policy, tokenizer, task, prompts)
        close_engine()
    for found in result.values():
        if "tokens_per_second" in found and "tokens_per_second" in result["built-in"]:
            built_in = result["built-in"]["tokens_per_second"]
            found["times_built_in"] = found["tokens_per_second"] / built_in
    return result | {"prompts": len(prompts), "group_size": args.num_generations,
                     "longest": task.max_completion_length}


def sampler_speed(bench, flags, policy, tokenizer, task, prompts):
    """Tokens per second of the sampler of a run with these flags, or why there are none."""
    if "vllm" in flags and not importlib.util.find_spec("vllm"):
        return {"skipped": "vLLM is not installed: see tests/requirements-vllm.txt"}
    try:
        args = parse(flags)
        sampler = Measured(make_sampler(args, SimpleNamespace(policy=policy), tokenizer, task))
        rates = []
        for turn in range(4):                                # the first one warms up
            as_updated(policy)
            rates.append(tokens_per_second(sampler, prompts, args.num_generations,
                                           task.max_completion_length, turn, bench.clock))
    except Exception as error:                               # whatever an engine raises
        return {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
    return {"tokens_per_second": median(rates[1:]), "mean_length": mean(sampler.lengths[1:])}


class Measured:
    """A sampler that keeps the mean length of the responses of each call."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.lengths = []

    def sample(self, *inputs, **options):
        rollout = self.sampler.sample(*inputs, **options)
        self.lengths.append(rollout.mask.sum(-1).float().mean().item())
        return rollout


@torch.no_grad()
def as_updated(policy):
    for weight in policy.parameters():
        weight.mul_(1 - 1e-6)


PARTS = {
    "device": device, "limits": limits, "decode": decode, "update": update, "noise": noise,
    "syncs": syncs, "default run": script,
    "routing replay old": lambda bench: script(bench, "--routing_replay", "old"),
    "routing replay rollout": lambda bench: script(bench, "--routing_replay", "rollout"),
    "versus_trl": versus_trl, "tests": tests, "first command": first_command,
    "beside TRL": beside_trl, "gsm8k": gsm8k,
    "samplers": samplers}  # last: vLLM may keep memory of the device


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="on a CPU, in small shapes")
    parser.add_argument("--json", default="results/gpu.json", help="where the numbers go")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="these parts")
    parser.add_argument("--model", help="a copy of README's model instead of the hub's")
    parser.add_argument("--dataset", help="a copy of README's data instead of the hub's")
    parser.add_argument("--seeds", type=int, default=1, help="pairs of runs that gsm8k makes")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    result = {}
    bench = Bench(args.cpu, args.model, args.dataset, args.limit, args.seeds)
    for name in args.only:
        try:
            over = {"skipped": f"{args.limit:g} seconds were over"}
            result[name] = PARTS[name](bench) if bench.left() > 1 else over
        except Exception as error:  # whatever it was: written down, and on with the next
            result[name] = {"error": f"{type(error).__name__}: {str(error)[-500:]}"}
        write_json(args.json, result)
        print(f"{name}: {json.dumps(result[name])[:300]}", flush=True)


if __name__ == "__main__":
    main()
