"""How cost grows: seconds and memory of a rollout batch against its size, and the seconds of every
algorithm relative to GSPO's.

    OMP_NUM_THREADS=2 python benchmarks/scaling.py            # --quick: small sizes

Each measurement is one rollout batch (rollout, log-probs, update) of the tiny MoE with forced
response lengths, computed by train.py's own functions. A slope is that of log seconds (or log
memory) over log size, by least squares: 1 means proportional. The sizes take turns, and the median
over the rounds is reported. The algorithms compute the same batch with `train.py --algorithm NAME`
or with the flags shown; their seconds are relative to GSPO in the same round.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rollout  # noqa: E402
from plumbing.data import running_sum
from plumbing.data import tasks  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from memory import MB, peak_bytes, write_json  # noqa: E402
from moe import TinyMoE  # noqa: E402
from plumbing.model.cold_start import tiny_config  # noqa: E402
from versus_trl import NEVER, Ours, make_task, round_to  # noqa: E402

#  what grows: (sizes, flags of one size, sizes for --quick, why)
GROWTH = {
    "completions": (
        (64, 128, 256, 512), lambda n: f"--prompts_per_step {n // 8}", (32, 64, 128),
        "every part is proportional to rows; small batches pay the fixed cost of a token step "
        "(kernel launches, Python)"),
    "response length": (
        (16, 32, 64, 128, 256), lambda n: f"--max_completion_length {n} --prompts_per_step 8",
        (8, 16, 32),
        "token steps are proportional; attention to all earlier tokens adds a quadratic part, "
        "small at this width"),
    "experts": (
        (2, 4, 8, 16, 32), lambda n: f"--num_experts {n} --prompts_per_step 8", (2, 4, 8),
        "arithmetic does not grow (top-2 of any number); one small matrix multiply per expert and "
        "AdamW's pass over all weights do"),
    "parameters": (
        (48, 96, 192, 384), lambda n: f"--hidden_size {n} --prompts_per_step 8", (48, 96),
        "below 1: wider matrices use the machine better; towards 1 once arithmetic dominates "
        "(memory: rows keep width, weights width squared)"),
}
ALGORITHMS = {
    **{name: f"--algorithm {name}" for name in (
        "gspo", "grpo", "gspo_token", "gmpo", "cispo", "sapo", "luspo", "vespo", "dr_grpo")},
    "ppo (critic)": "--algorithm ppo",
    "rspo (router logits)": "--algorithm rspo",
    "gspo + routing replay": "--routing_replay old",
    "gspo + KL to a reference": "--beta 0.01",
    "gspo + entropy bonus": "--entropy_coef 0.01",
    "gspo + load balancing": "--router_aux_loss_coef 0.01",
    "gspo, sampler's log-probs": "--old_logp sampler",
    "gspo, gradient checkpointing": "--gradient_checkpointing",
}


def side(flags):
    """Our side of versus_trl.py on a fresh tiny MoE: (a function that computes one rollout batch
    and returns its seconds, the number of parameters)."""
    args = parse(f"--device cpu --max_completion_length 24 {flags}".split())
    folder = tempfile.mkdtemp()
    tokenizer = running_sum.builtin_tokenizer()
    torch.manual_seed(0)
    TinyMoE(tiny_config(args, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ours = Ours(args, make_task(None, args.prompts_per_step, 24), folder, torch.device("cpu"))
    numbers = list(range(args.prompts_per_step))
    parameters = sum(p.numel() for p in ours.policy.parameters())
    return (lambda: ours.batch(numbers, 1)[0]["total"]), parameters


def cost_of_plain(rounds):
    """CPU seconds of a batch of the default run with --plain, divided by those without it:
    {"median", "min", "max", "rounds"}.

    Both compute each batch in turn, from the weights of the cold start. The learning rate is
    practically 0, so the work stays that of the beginning of a run."""
    def default_run(flags):
        args = parse(f"--device cpu --learning_rate 1e-30 {flags}".split())
        return Ours(args, tasks.from_arguments(args), None, torch.device("cpu"))
    ratios = []
    sides = [default_run(flags) for flags in ("", "--plain")]
    for step in range(rounds + 1):                           # the first one warms up
        spent = []
        for ours in sides:
            torch.manual_seed(step)                          # the same mini-batches
            began = time.process_time()
            n = ours.args.prompts_per_step
            ours.batch(list(range(step * n, step * n + n)), step)
            spent.append(time.process_time() - began)
        ratios.append(spent[1] / spent[0])
        print(f"--plain, round {step}: {spent[1]:.2f} and {spent[0]:.2f} CPU seconds, "
              f"ratio {ratios[-1]:.2f}", flush=True)
    ratios = ratios[1:]
    return {"median": round_to(median(ratios), 3), "min": round_to(min(ratios), 3),
            "max": round_to(max(ratios), 3), "rounds": rounds}


def slope(xs, ys):
    xs = [math.log(x) for x in xs]
    ys = [math.log(y) for y in ys]
    x = sum(xs) / len(xs)
    y = sum(ys) / len(ys)
    covariance = sum((a - x) * (b - y) for a, b in zip(xs, ys))
    return round_to(covariance / sum((a - x) ** 2 for a in xs), 3)


def in_turns(sides, rounds):
    """Time every work() in turn, {name: work} -> {name: seconds of every round}, after one warm-up
    each."""
    seconds = {name: [] for name in sides}
    for work in sides.values():
        work()
    for _ in range(rounds):
        for name, work in sides.items():
            seconds[name].append(work())
    return seconds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument(
        "--only_plain", action="store_true",
        help="only what --plain costs the default run; the other numbers stay as they are")
    parser.add_argument("--json", default="results/scaling.json",
                        help="where the numbers go (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    rounds = 2 if args.quick else 3
    result = {"growth": {}, "algorithms": {}}
    plain = cost_of_plain(2 if args.quick else 12)
    if args.only_plain:
        return write_json(args.json, json.loads(Path(args.json).read_text()) | {"plain": plain})
    result["plain"] = plain
    rollout.end_tokens = lambda model, tokenizer: [NEVER]
    print(f"tiny MoE on the CPU, {torch.get_num_threads()} thread(s); seconds of a rollout batch "
          "and its peak memory\n")
    for name, (sizes, flags, small, why) in GROWTH.items():
        sizes = small if args.quick else sizes
        made = {n: side(flags(n)) for n in sizes}
        seconds = in_turns({n: work for n, (work, _) in made.items()}, rounds)
        seconds = {n: median(s) for n, s in seconds.items()}
        memory = {n: peak_bytes(work) / MB for n, (work, _) in made.items()}
        xs = [made[n][1] for n in sizes] if name == "parameters" else sizes
        result["growth"][name] = {
            "sizes": list(xs), "seconds": [round_to(seconds[n]) for n in sizes],
            "peak_mb": [round_to(memory[n]) for n in sizes],
            "slope_seconds": slope(xs, seconds.values()),
            "slope_last": slope(xs[-2:], [seconds[n] for n in sizes[-2:]]),
            "slope_memory": slope(xs, memory.values()), "why": why}
        r = result["growth"][name]
        print(f"{name:16} slope of seconds {r['slope_seconds']:.2f} (between the last two "
              f"{r['slope_last']:.2f}), of memory {r['slope_memory']:.2f}\n    {why}")
        points = (f"{x:,}: {seconds[n]:.2f} s, {memory[n]:.0f} MB" for x, n in zip(xs, sizes))
        print("    " + "   ".join(points) + "\n", flush=True)
    quick = "--prompts_per_step 8 --steps_per_generation 2"
    batch = quick if args.quick else "--prompts_per_step 16"
    sides = {name: side(f"{flags} {batch}")[0] for name, flags in ALGORITHMS.items()}
    seconds = in_turns(sides, 3 * rounds)
    print("seconds of a rollout batch relative to GSPO's in the same round")
    for name, flags in ALGORITHMS.items():
        ratio = round_to(median(a / b for a, b in zip(seconds[name], seconds["gspo"])), 3)
        result["algorithms"][name] = {"relative": ratio, "flags": flags}
        print(f"  {name:30} {ratio:.2f}   {flags}")
    write_json(args.json, result)
    print(f"\nnumbers: {args.json}")


if __name__ == "__main__":
    main()
