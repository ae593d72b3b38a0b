"""How seconds and memory of a rollout batch grow, what each algorithm costs, and what --plain does.

    OMP_NUM_THREADS=2 python benchmarks/scaling.py       # --quick: small sizes, two rounds
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --only plain      # the other figures stay

growth       on a tiny MoE: slopes of log seconds and log memory against log size
algorithms   seconds relative to GSPO's on the same tokens
plain        processor seconds of a batch of the default run with --plain, relative to without
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rollout  # noqa: E402
from plumbing.data import running_sum, tasks  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from timing import (MB, RESULTS, in_turns, peak_bytes, quotients, rounded,  # noqa: E402
                    spread, timed, write_json)
from versus_trl import NEVER, Ours, forced_task, make_model  # noqa: E402

CPU = torch.device("cpu")
#  what grows: (flags of one size, sizes, sizes for --quick)
GROWTH = {
    "completions": (lambda n: f"--prompts_per_step {n // 8}", (64, 128, 256, 512), (32, 64)),
    "response length": (lambda n: f"--max_completion_length {n} --prompts_per_step 8",
                        (16, 32, 64, 128, 256), (8, 16)),
    "experts": (lambda n: f"--num_experts {n} --prompts_per_step 8", (2, 4, 8, 16, 32), (2, 4)),
    "parameters": (lambda n: f"--hidden_size {n} --prompts_per_step 8", (48, 96, 192, 384),
                   (48, 96)),
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
    """(function that computes a rollout batch on a fresh tiny MoE and returns its seconds, number
    of parameters)."""
    settings = parse(f"--device cpu --max_completion_length 24 {flags}".split())
    folder = tempfile.mkdtemp()
    make_model("tiny_moe", folder, settings, running_sum.builtin_tokenizer())
    task = forced_task(None, settings.prompts_per_step, settings.max_completion_length)
    ours = Ours(settings, task, folder, CPU)
    numbers = list(range(settings.prompts_per_step))
    parameters = sum(p.numel() for p in ours.learner.policy.parameters())
    return (lambda turn: ours.seconds(numbers, 1)), parameters


def slope(xs, ys):
    xs = torch.tensor(xs, dtype=torch.float64).log()
    ys = torch.tensor(ys, dtype=torch.float64).log()
    return rounded(torch.cov(torch.stack([xs, ys]))[0, 1].item() / xs.var().item(), 3)


def growth(quick):
    rollout.end_tokens = lambda model, tokenizer: [NEVER]
    found = {}
    for name, (flags, sizes, small) in GROWTH.items():
        made = {n: side(flags(n)) for n in (small if quick else sizes)}
        seconds = in_turns({n: work for n, (work, _) in made.items()}, 2 if quick else 3)
        seconds = [spread(s)["median"] for s in seconds.values()]
        memory = [rounded(peak_bytes(lambda: work(1)) / MB) for work, _ in made.values()]
        xs = [parameters if name == "parameters" else n for n, (_, parameters) in made.items()]
        found[name] = {"sizes": xs, "seconds": seconds, "peak_mb": memory,
                       "slope_seconds": slope(xs, seconds),
                       "slope_last": slope(xs[-2:], seconds[-2:]),
                       "slope_memory": slope(xs, memory)}
    return found


def algorithms(quick):
    rollout.end_tokens = lambda model, tokenizer: [NEVER]
    batch = "--prompts_per_step 8 --steps_per_generation 2" if quick else "--prompts_per_step 16"
    seconds = in_turns({name: side(f"{flags} {batch}")[0] for name, flags in ALGORITHMS.items()},
                       2 if quick else 9)
    return {name: {"relative": quotients(each, seconds["gspo"])["median"],
                   "flags": ALGORITHMS[name]} for name, each in seconds.items()}


def plain(quick):
    """From the weights of the cold start at a learning rate of practically 0, so that the work
    stays that of the beginning of a run."""
    rounds = 2 if quick else 12
    sides = {}
    for flags in ("", "--plain"):
        settings = parse(f"--device cpu --learning_rate 1e-30 {flags}".split())
        ours = Ours(settings, tasks.from_arguments(settings), None, CPU)

        def batch(turn, ours=ours):
            torch.manual_seed(turn)                          # the same mini-batches
            n = ours.settings.prompts_per_step
            ours.seconds(list(range(turn * n, turn * n + n)), turn + 1)
        sides[flags] = timed(batch, time.process_time)
    seconds = in_turns(sides, rounds)
    return quotients(seconds["--plain"], seconds[""]) | {"rounds": rounds}


def texts(found):
    """The sentences of docs/speed.md, and the cost of --plain."""
    slopes = ", ".join(f"{name} to the power of {r['slope_last']:.2f} and {r['slope_memory']:.2f}"
                       for name, r in found["growth"].items())
    costs = ", ".join(f"{name} {r['relative']:.2f}" for name, r in found["algorithms"].items()
                      if abs(r["relative"] - 1) > 0.02)
    cost = found["plain"]
    return {"scaling": slopes, "algorithms": costs, "plain": f"{cost['median']:.1f}",
            "plain_range": f"{cost['min']:.1f} to {cost['max']:.1f}"}


PARTS = {"plain": plain, "growth": growth, "algorithms": algorithms}  # the first with end tokens


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", default=RESULTS / "scaling.json",
                        help="where the numbers go (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    file = Path(args.json)
    found = json.loads(file.read_text()) if file.is_file() else {}
    for name in args.only:
        found[name] = PARTS[name](args.quick)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if set(PARTS) <= set(found):
        found["texts"] = texts(found)
    write_json(file, found)


if __name__ == "__main__":
    main()
