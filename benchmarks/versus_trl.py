"""TRL's GRPOTrainer and this project on the same work: seconds, memory, share of the limit.

    pip install trl==1.16.0
    OMP_NUM_THREADS=2 python benchmarks/versus_trl.py     # --quick: smaller batches, one minute

Both sides run in this process and take turns (TRL, ours, TRL, ours ...) on the same weights,
prompts, number of completions and new tokens, optimizer steps, loss (GSPO), dtype and threads.
TRL's side is its own generation, log-prob and loss code under the configuration that `python
tools/export.py trl` prints; ours is train.collect, learner.score and train.update. In cases with a
forced length, neither side has an end token and rewards alternate, so both compute every completion
in every update. `default_run` is the built-in task from the same cold start, as users run it:
responses end by themselves, and both sides learn.

A ratio is TRL's seconds divided by ours for the same batch. The limit is the matrix-multiply rate
measured on this machine. The share of the limit counts only the least arithmetic that does the
work: the prefix shared by all prompts once, each prompt once per group, and the LM head only on
response positions.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from plumbing.loop import batches  # noqa: E402
from plumbing.speed import fast  # noqa: E402
import rollout  # noqa: E402
from plumbing.data import running_sum
from plumbing.data.datafiles import Problem  # noqa: E402
from plumbing.data.task import Task  # noqa: E402
from plumbing.data import tasks  # noqa: E402
from plumbing.data.stream import PromptStream  # noqa: E402
import train  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from tools import trl  # noqa: E402
from tools.export import keys_of  # noqa: E402
from limit import decode_bytes, forward_flop, measure_limit  # noqa: E402
from make_max_data import make_max_data  # noqa: E402
from memory import peak_bytes, write_json  # noqa: E402
from plumbing.run.metrics import Clock  # noqa: E402
from moe import TinyMoE  # noqa: E402
from plumbing.model.actor import make_scorer  # noqa: E402
from plumbing.model.cold_start import cold_start, tiny_config  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402

NEVER = 2 ** 31 - 1  # an end token that no model emits, so every completion has its full length
FORCED = "forced length"     # name of the task whose responses all have the largest length
PHASES = ("rollout", "logp", "update", "total")
SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"

#  name: (model, prompts, prompt tokens, G, new tokens, updates, rounds, flags of train.py)
CPU_CASES = {
    "tiny_moe":         ("tiny_moe",   32, None, 8,  24, 4, 10, ""),
    "tiny_moe_sampler": ("tiny_moe",   32, None, 8,  24, 4, 10, "--old_logp sampler"),
    "tiny_moe_long":    ("tiny_moe",   32, None, 8, 128, 4,  4, ""),
    "tiny_dense":       ("tiny_dense", 32, None, 8,  24, 4,  8, ""),
    "default_run":      ("cold_start", 32, None, 8, None, 4, 16, ""),
    "smollm2_max":      ("smollm2",     8, "max", 8,  5, 2,  2, ""),
    "smollm2":          ("smollm2",     4,   64, 8,  64, 2,  2, ""),
}
CUDA_CASES = {
    "tiny_moe":         ("tiny_moe",  256, None, 8,  64, 4, 10, ""),
    "dense_0.5b":       ("0.5b",       64,  512, 8, 512, 4,  3, "--bf16 --micro_batch_size 16"),
    "dense_1.5b":       ("1.5b",       64,  512, 8, 512, 4,  3, "--bf16 --micro_batch_size 8"),
}


# ------------------------------------------------------------------------------------ the two sides

class Ours:
    """One rollout batch of the loop in train.py, computed by train.py's own functions."""

    def __init__(self, args, task, folder, device):
        self.args = args
        self.task = task
        self.device = device
        self.policy, self.tokenizer = load_policy(args, task, device, folder)
        self.learner = learner = train.make_learner(replace(args, beta=0.0), task, self.policy,
                                                    self.tokenizer, device)
        reference = None
        if args.beta:                                        # the reference is in `folder`, too
            policy = load_policy(args, task, device, folder)[0]
            reference = make_scorer(args, policy).requires_grad_(False)
        learner.extras = train.make_extras(args, task, self.policy, reference)
        learner.optimizer = train.make_optimizer(args, learner.actor)
        learner.schedule = SimpleNamespace(step=lambda: None)  # a constant learning rate

    def batch(self, numbers, step):
        """One batch with the problems of these numbers -> (seconds per phase, completion tokens,
        mean reward). Follows the loop of train.train."""
        args = self.args
        learner = self.learner
        clock = Clock(self.device)
        learner.stream = SimpleNamespace(next=lambda *_: numbers, resample=False)
        rollout, problems, parts, _ = train.collect(args, learner, self.task, step)
        clock.lap("rollout")
        old = train.Scores(rollout.sampler_logp, None, None)
        if args.old_logp == "recompute":
            old = learner.score(rollout, replay=True)
        batch = train.Batch(rollout, problems, parts, old.logp, step=step, routes=old.routes)
        inputs = {}
        if learner.extras:
            inputs = learner.extras.before_updates(learner, batch, old)
        clock.lap("logp")
        batch.rewards = self.task.total(batch.parts, args.num_generations)
        batch.advantages = train.estimate_advantages(
            args.advantage, batch.rewards, args.num_generations, args.scale_rewards,
            clip=args.advantage_clip, mask=rollout.mask, old_logp=batch.old_logp, **inputs)
        for mini in train.mini_batches(args, self.task, batch, step):
            train.update(args, learner, mini)
        clock.lap("update")
        if natural(self.task):  # as a run does for its metrics: the last mini-batch again
            learner.score(mini.rollout, entropy=True)
            clock.lap("metrics")
        seconds = clock.laps | {"total": sum(clock.laps.values())}
        return seconds, int(rollout.mask.sum()), parts.mean().item()


class Trl:
    """One rollout batch of TRL's GRPOTrainer. Its training_step generates, scores and computes
    gradients; the other calls are those of the trainer's loop."""

    def __init__(self, args, task, folder, device):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        self.task = task
        self.device = device
        self.laps = {}
        self.updates = args.steps_per_generation
        ends = {} if natural(task) else {"generation_kwargs": {"eos_token_id": NEVER}}
        fixed = dict(output_dir=tempfile.mkdtemp(), report_to="none", save_strategy="no",
                     logging_strategy="no", disable_tqdm=True, use_cpu=device.type == "cpu",
                     bf16=bool(args.bf16), router_aux_loss_coef=0.0, gradient_checkpointing=False,
                     **ends)
        fixed |= {"model_init_kwargs": {"dtype": "bfloat16" if args.bf16 else "float32"}}
        recomputed = replace(args, old_logp="recompute")     # TRL always recomputes them
        config = GRPOConfig(**keys_of(trl, recomputed) | fixed)
        self.trainer = GRPOTrainer(
            folder, self.reward, config,
            Dataset.from_list([{"prompt": p.prompt} for p in task.train]),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"))
        if not natural(task):
            self.trainer.eos_token_ids = [NEVER]
        self.trainer.create_optimizer_and_scheduler(10 ** 6)
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._generate = self.timed(self.trainer._generate, "rollout")
        self.trainer._get_per_token_logps_and_entropies = self.timed(
            self.trainer._get_per_token_logps_and_entropies, "logp")

    def timed(self, function, name):
        def call(*args, **kwargs):
            if torch.is_grad_enabled() and name == "logp":   # the update's own forward
                return function(*args, **kwargs)
            clock = Clock(self.device)
            result = function(*args, **kwargs)
            clock.lap(name)
            self.laps[name] = clock.laps[name]
            return result
        return call

    def reward(self, completions, number, **_):
        self.rewards = [self.task.verify(text, self.task.train[i])
                        for text, i in zip(completions, number)]
        return self.rewards

    def batch(self, numbers, step):
        trainer = self.trainer
        clock = Clock(self.device)
        self.laps = {"rollout": 0.0, "logp": 0.0}
        rows = [{"prompt": self.task.train[i].prompt, "number": i} for i in numbers
                for _ in range(trainer.num_generations)]
        for _ in range(self.updates):
            trainer.training_step(trainer.model, rows, None)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(),
                                                trainer.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            trainer.model.zero_grad()
            trainer.state.global_step += 1
        clock.lap("total")
        update = clock.laps["total"] - self.laps["rollout"] - self.laps["logp"]
        self.laps |= clock.laps | {"update": update}
        tokens = sum(int(b["completion_mask"].sum()) for b in trainer._buffered_inputs)
        return self.laps, tokens, sum(self.rewards) / len(self.rewards)


# ------------------------------------------------------------------------------------------- a case

def make_model(kind, folder, args, tokenizer):
    """Write a model with random weights to `folder`, as an ordinary checkpoint."""
    torch.manual_seed(0)
    if kind == "tiny_moe":
        model = TinyMoE(tiny_config(args, tokenizer))
    elif kind == "tiny_dense":                               # transformers' own code on both sides
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=4, head_dim=24,
                        intermediate_size=192, tie_word_embeddings=False, bos_token_id=None,
                        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    else:                                                    # the shapes of Qwen2.5 0.5B and 1.5B
        shape = {"0.5b": (896, 24, 14, 4864), "1.5b": (1536, 28, 12, 8960)}[kind]
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id, **dict(zip(names, shape))))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def digit_prompt(i, tokens):
    """A prompt of `tokens` digits, for tokenizers that make one token of each digit."""
    return "".join(str((i * 7919 + k * k * 31) % 97 % 10) for k in range(tokens))


def natural(task):
    """Whether responses end where the policy ends them; else all have the largest length."""
    return task.name != FORCED


def make_task(prompt_tokens, count, length):
    """A task whose rewards alternate, so that every group has right and wrong responses, all of
    this length."""
    if prompt_tokens is None:
        problems = running_sum.running_sum().train
    elif prompt_tokens == "max":
        # four worked lines, the same for all prompts, and a fifth to complete
        rows = make_max_data(tempfile.mkdtemp())[0].read_text().splitlines()
        problems = [Problem(json.loads(row)["prompt"], "") for row in rows]
    else:
        problems = [Problem(digit_prompt(i, prompt_tokens), "") for i in range(count * 8)]
    coin = cycle([1.0, 0.0])
    return Task(FORCED, problems, problems[:1], lambda text, problem: next(coin),
                sizes=(len(problems),), max_completion_length=length)


def prepare(name, case, device, quick, path):
    """-> (args of train.py, task, checkpoint folder, rounds) of a case."""
    kind, prompts, prompt_tokens, G, T, updates, rounds, flags = case
    if quick:
        prompts = max(updates, prompts // 4)
        T = T and min(T, 24)
        rounds = min(rounds, 3)
    builtin = kind in ("tiny_moe", "tiny_dense", "cold_start")
    flags = (f"--prompts_per_step {prompts} --num_generations {G} "
             f"--steps_per_generation {updates} {flags}").split()
    flags += ["--max_completion_length", str(T)] if T else []
    flags += ["--device", "cpu"] if device.type == "cpu" else []
    folder = path or {"smollm2": SMOLLM2}.get(kind) or tempfile.mkdtemp()
    flags += [] if builtin else ["--model_name_or_path", str(folder), "--no_chat_template"]
    flags += [] if builtin else ["--learning_rate", "1e-5"]
    args = parse(flags)
    task = make_task(prompt_tokens, prompts, T) if T else tasks.from_arguments(args)
    if kind == "cold_start":
        policy, tokenizer = cold_start(args, task, device)
        policy.save_pretrained(folder), tokenizer.save_pretrained(folder)
    elif not path and kind != "smollm2":
        make_model(kind, folder, args, running_sum.builtin_tokenizer())
    return args, task, folder, rounds


def run_case(name, case, device, quick, limit, path=None):
    """Measure both sides in turn -> (the record of the case for the JSON file, sides, task)."""
    rollout.end_tokens = ends_of                             # preparing evaluates a cold start
    args, task, folder, rounds = prepare(name, case, device, quick, path)
    if not natural(task):
        rollout.end_tokens = lambda model, tokenizer: [NEVER]
    G, sides = args.num_generations, {"trl": Trl(args, task, folder, device),
                                      "ours": Ours(args, task, folder, device)}
    stream = PromptStream(task.sizes)
    records = {"trl": [], "ours": []}
    record = {}
    for round in range(rounds + 1):                          # round 0: warm-up and peak memory
        numbers = stream.next(args.prompts_per_step)
        for side in sides:
            if round == 0:
                peak = peak_bytes(lambda: sides[side].batch(numbers, 0), device)
                record[side] = {"peak_mb": round_to(peak / 2 ** 20)}
            else:
                began = time.process_time()
                result = sides[side].batch(numbers, round)
                records[side].append((*result, time.process_time() - began))
    if not natural(task):
        wanted = args.prompts_per_step * G * task.max_completion_length
        made = {tokens for side in records.values() for _, tokens, *_ in side}
        assert made == {wanted}, "both sides generate exactly the same number of tokens"
    for side, results in records.items():
        for phase in PHASES:
            seconds = [r[0][phase] for r in results]
            record[side][phase] = {"min": round_to(min(seconds)),
                                   "median": round_to(median(seconds))}
        record[side] |= {"tokens": median(r[1] for r in results),
                         "reward_first_last": [results[0][2], results[-1][2]]}
    for phase in PHASES:
        if min(o[0][phase] for o in records["ours"]) < 1e-3:  # --old_logp sampler: no such phase
            continue
        ratios = sorted(t[0][phase] / o[0][phase] for t, o in zip(records["trl"], records["ours"]))
        record["ratio" if phase == "total" else f"ratio_{phase}"] = {
            "median": round_to(median(ratios)), "min": round_to(ratios[0]),
            "max": round_to(ratios[-1])}
    record["ratio_median"] = record["ratio"]["median"]
    record["ratio_cpu_seconds"] = round_to(
        median(t[3] / o[3] for t, o in zip(records["trl"], records["ours"])))  # on a busy machine
    record["work"] = {
        "prompts": args.prompts_per_step, "group": G, "new_tokens": task.max_completion_length,
        "updates": args.steps_per_generation, "rounds": rounds, "old_logp": args.old_logp,
        "natural_end": natural(task), "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%d %H:%M"), "quick": quick}
    if not natural(task):
        texts = [p.prompt for p in task.train[:args.prompts_per_step]]
        prompts = sides["ours"].tokenizer(texts)["input_ids"]
        P = max(map(len, prompts))
        prefix = fast.common_prefix(prompts)
        passes = 1 + (args.old_logp == "recompute") + 3      # a backward is two forwards
        flop = passes * forward_flop(sides["ours"].policy.config, args.prompts_per_step, P, G,
                                     task.max_completion_length, prefix)
        record["gflop"] = round_to(flop / 1e9)
        record["work"]["prompt_tokens"] = P
        for side in sides:
            seconds = record[side]["total"]["median"]
            record[side]["share_of_limit"] = round_to(flop / seconds / limit["flops"])
        if "bandwidth" in limit:
            moved = decode_bytes(sides["ours"].policy, args.prompts_per_step * G, P,
                                 task.max_completion_length, 2 if args.bf16 else 4)
            for side in sides:
                share = moved / record[side]["rollout"]["median"] / limit["bandwidth"]
                record[side]["decode_share_of_bandwidth"] = round_to(share)
    return record, sides, task


ends_of = rollout.end_tokens


# ------------------------------------------------------------- what each technique of ours is worth

def contributions(ours, rounds):
    """{technique: ratio}: the total seconds of our batch without this technique, divided by those
    with all techniques, on fixed weights."""
    args = ours.args
    learner = ours.learner
    never = 10 ** 9
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0
    twice = (fast, "distinct", lambda rollout: (rollout, slice(None)))
    sampler = train.make_sampler(replace(args, plain=True), learner.actor, ours.tokenizer,
                                 ours.task)
    plain = [(learner, "sampler", sampler), (ours, "args", replace(args, plain=True)),
             (learner.actor, "plain", True)]
    rows = lambda every: (fast, "sample", partial(fast.sample, drop_every=every))
    off = {
        "none": [],
        "all of them (--plain)": plain,
        "what all prompts begin with": [(fast, "MIN_PREFIX", never)],
        "packed rows": [(fast, "MAX_PACKED", 0)],
        "equal responses once": [rows(2), twice],
        "the same, and ended rows dropped": [rows(never), twice],
        "skipping dead groups": [(batches, "with_gradient", lambda args, batch: batch)],
        "the sampler's log-probs reused (off by default)": [
            (ours, "args", replace(args, old_logp="sampler")), (learner, "has_routes", False)]}
    seconds = {name: [] for name in off}
    stream = PromptStream(ours.task.sizes, seed=1)
    for step in range(rounds):
        numbers = stream.next(args.prompts_per_step)
        for name, changes in off.items():
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(patch.object(*change))
                seconds[name].append(ours.batch(numbers, step)[0]["total"])
    base = seconds.pop("none")
    return {name: round_to(median(a / b for a, b in zip(times, base)))
            for name, times in seconds.items()}


# --------------------------------------------------------------------------------------- the report

def round_to(x, digits=4):
    return float(f"{x:.{digits}g}")


def table_line(name, record):
    t = record["trl"]
    o = record["ours"]
    phases = "  ".join(f"{t[p]['median']:7.3f} {o[p]['median']:7.3f}" for p in PHASES)
    share = "   -    -"
    if "share_of_limit" in t:
        share = f"{t['share_of_limit']:4.0%} {o['share_of_limit']:4.0%}"
    ratio = record["ratio"]
    return (f"{name:17} {phases}  {ratio['median']:6.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}] "
            f"{record['ratio_cpu_seconds']:6.2f}  {t['peak_mb']:6.0f} {o['peak_mb']:6.0f}  {share}")


def save(path, device, records, limit, quick):
    """Add the cases measured so far to the file; other cases in it stay."""
    known = json.loads(path.read_text()) if path.is_file() else {"cpu": {}, "cuda": None}
    machine = {"threads": torch.get_num_threads(), "limit_gflops": round_to(limit["flops"] / 1e9),
               "processor": platform.processor() or platform.machine(),
               "torch": torch.__version__, "quick": quick, "time": time.strftime("%Y-%m-%d %H:%M")}
    known[device.type] = (known[device.type] or {}) | records | {"machine": machine}
    write_json(path, known)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true",
                        help="smaller batches and three rounds: a look, not a measurement")
    parser.add_argument("--model", help="folder or hub id of a causal LM: measure only this model, "
                                        "with 64 prompt tokens and 64 new ones")
    parser.add_argument("--cases", nargs="+", help="only these cases")
    parser.add_argument("--use_cpu", action="store_true",
                        help="stay on the CPU even if there is a GPU")
    parser.add_argument("--json", default="results/versus_trl.json",
                        help="where the numbers go (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        import trl
    except ImportError:
        print("versus_trl.py: TRL is not installed: pip install trl==1.16.0", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    cases = CPU_CASES if device.type == "cpu" else CUDA_CASES
    if args.model:
        cases = {Path(args.model).name: (args.model, *CPU_CASES["smollm2"][1:])}
    unknown = set(args.cases or ()) - set(cases)
    if unknown:
        parser.exit(2, f"versus_trl.py: --cases {', '.join(sorted(unknown))} unknown here; "
                       f"known: {', '.join(cases)}\n")
    limit = measure_limit(device)
    records = {}
    print(f"TRL {trl.__version__} and ours, {device}, {torch.get_num_threads()} thread(s), limit "
          f"{limit['flops'] / 1e9:.0f} GFLOP/s; seconds per rollout batch, medians\n")
    print(f"{'':17} {'rollout':^15}  {'log-probs':^15}  {'update':^15}  {'total':^15}  "
          f"{'TRL / ours':^26}  {'peak MB':^13}  {'of limit':^9}")
    print(f"{'':17} " + "  ".join(["    TRL    ours"] * 4) +
          "  median [min, max]    CPU     TRL   ours   TRL ours")
    for name, case in cases.items():
        if args.cases and name not in args.cases:
            continue
        if case[0] == "smollm2" and not Path(SMOLLM2).is_dir():
            print(f"{name:17} left out: python tests/make_smollm2.py makes its checkpoint")
            continue
        records[name], sides, _ = run_case(name, case, device, args.quick, limit, args.model)
        print(table_line(name, records[name]), flush=True)
        if name in ("default_run", "smollm2_max"):
            records[name]["one_off"] = contributions(
                sides["ours"], 2 if args.quick or name == "smollm2_max" else 6)
        save(Path(args.json), device, records, limit, args.quick)
    switched = {name: record["one_off"] for name, record in records.items() if "one_off" in record}
    if switched:
        print(f"\n{'one technique off, total seconds of ours relative to all on':60}" +
              "".join(f"{name:>14}" for name in switched))
        for technique in next(iter(switched.values())):
            values = "".join(f"{ratios[technique]:14.2f}" for ratios in switched.values())
            print(f"  {technique:58}{values}")
    print(f"\nnumbers: {args.json}")


if __name__ == "__main__":
    main()
