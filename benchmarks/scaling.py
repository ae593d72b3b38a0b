"""What each algorithm costs, and what --plain does.

    OMP_NUM_THREADS=2 python benchmarks/scaling.py       # --quick: small batches, two rounds
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --only plain      # the other figures stay

algorithms   seconds of a batch relative to GSPO's on the same tokens
plain        processor seconds of a batch of the default run with --plain, relative to without
"""

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
from session.arguments import parse  # noqa: E402
from timing import command_line, in_turns, publish, quotients, timed, write_json  # noqa: E402
from versus_trl import NEVER, Ours, forced_task, make_model  # noqa: E402

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
    """The function that computes a rollout batch on a fresh tiny MoE and returns its seconds."""
    settings = parse(f"--device cpu --max_completion_length 24 {flags}".split())
    folder = tempfile.mkdtemp()
    make_model("tiny_moe", folder, settings, running_sum.builtin_tokenizer())
    task = forced_task(None, settings.prompts_per_step, settings.max_completion_length)
    ours = Ours(settings, task, folder)
    numbers = list(range(settings.prompts_per_step))
    return lambda turn: ours.seconds(numbers, 1)


def algorithms(quick):
    rollout.end_tokens = lambda model, tokenizer: [NEVER]
    batch = "--prompts_per_step 8 --steps_per_generation 2" if quick else "--prompts_per_step 16"
    seconds = in_turns({name: side(f"{flags} {batch}") for name, flags in ALGORITHMS.items()},
                       2 if quick else 9)
    return {name: {"relative": quotients(each, seconds["gspo"])["median"],
                   "flags": ALGORITHMS[name]} for name, each in seconds.items()}


def plain(quick):
    """From the weights after the warm-up, at a learning rate of practically 0, so that the work
    stays that of the beginning of a run."""
    rounds = 2 if quick else 12
    sides = {}
    for flags in ("", "--plain"):
        settings = parse(f"--device cpu --learning_rate 1e-30 {flags}".split())
        ours = Ours(settings, tasks.prepare_task(settings), None)

        def batch(turn, ours=ours):
            torch.manual_seed(turn)                          # the same mini-batches
            n = ours.settings.prompts_per_step
            ours.seconds(list(range(turn * n, turn * n + n)), turn + 1)
        sides[flags] = timed(batch, time.process_time)
    seconds = in_turns(sides, rounds)
    return quotients(seconds["--plain"], seconds[""]) | {"rounds": rounds}


def texts(found):
    """The figures of docs/speed.md."""
    costs = ", ".join(f"{name} {r['relative']:.2f}" for name, r in found["algorithms"].items()
                      if abs(r["relative"] - 1) > 0.05)
    cost = found["plain"]
    return {"algorithms": costs, "plain": f"{cost['median']:.1f}",
            "plain_range": f"{cost['min']:.1f} to {cost['max']:.1f}"}


PARTS = {"plain": plain, "algorithms": algorithms}  # the first with end tokens


def main(argv=None):
    parser = command_line(__doc__, "scaling.json", "small batches, two rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    found = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else {}
    for name in args.only:
        found[name] = PARTS[name](args.quick)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if set(PARTS) <= set(found):
        publish(args.json, found, texts)
    else:
        write_json(args.json, found)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
