"""Do deeper mixtures flip more experts, and are flips most of the ratios' noise anywhere?

Claim: about 10 % of the activated experts change with each update in a model of 48 layers, more in
deeper ones, and that invalidates token ratios (GSPO 2507.18071, §5.3). expert_flips.py asks at the
default policy's 4 layers. Here it is asked where flips have a better chance: 4, 16 and 24 layers of
width 64 with 16 experts, 2 of them used, at three learning rates. The policies know the form of
the default task and little of its sums (120 supervised steps), the reward is the share of right
characters: ratios do not need a policy that is good. Six rollout batches of 16 × 8 answers, four
updates each, without replay; medians over the batches of

  flips    the share of chosen experts that a rollout batch's four updates changed, mean of layers
  share    the part of Var[log w] that goes away when the new policy follows the old one's routes

Written down beforehand: the grid is run on cold starts 0 and 1, and the cell with the largest share
among those whose flips reach 5 % (of all cells, if none does) is run on the fresh cold starts 2 to
9, which decide. (Changed while it ran, for want of time: 16 and 24 layers on cold start 0 alone.)

  confirmed   the interval of flips lies above 5 % and that of the share above a half
  refuted     the interval of flips lies below 5 %, or that of the share below a half: even where
              experts matter most, most of the noise is of another origin
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from shared import claim, drift, maps
import expert_flips
from moe import TinyMoE
from plumbing.data import running_sum
from plumbing.data import tasks
from plumbing.model import cold_start
from plumbing.run.arguments import parse
from tools.style import LINES, label, panels

ROW = dict(claim="Deeper mixtures flip more experts, and flips make their token ratios noisy",
           source="GSPO §5.3",
           reported="about 10 % of experts per update in 48 layers, more in deeper models",
           regime="width 64, 4 to 24 layers of 16 experts, about 20 tokens, 6 rollout batches "
                  "of 128 answers")
LAYERS = (4, 16, 24)
RATES = (1e-4, 3e-4, 6e-4)
GATE = range(2)
FRESH = range(2, 10)
OFTEN = .05
MOST = .5
BATCHES = 6
TAUGHT = 120
SHAPE = ("--hidden_size 64 --num_experts 16 --prompts_per_step 16 "
         "--min_terms 8 --max_terms 12 --max_completion_length 32 "
         "--lr_scheduler_type constant_with_warmup --steps 6").split()
FILE = maps.runs_of("flip_depth")


def one(layers, rate, seed):
    return maps.cell(f"{layers} layers", seed, rate=rate, batches=BATCHES)


def grid(full):
    yield from (one(layers, rate, seed) for seed in GATE for layers in LAYERS for rate in RATES
                if layers == LAYERS[0] or seed == GATE[0])   # 24 layers: ten minutes a cold start
    layers, rate = chosen(maps.read(FILE))
    yield from (one(layers, rate, seed) for seed in FRESH)


def make(c):
    began = time.perf_counter()
    layers = c["arm"].split()[0]
    flags = [*SHAPE, "--num_hidden_layers", layers, "--learning_rate", f"{c['rate']:g}"]
    args = parse(["--seed", str(c["seed"]), *flags])
    task = tasks.from_arguments(args)
    tokenizer = running_sum.builtin_tokenizer()
    task.verify = drift.share_right
    lab = drift.Lab(c["seed"], *flags, loaded=(task, taught(args, task, tokenizer), tokenizer))
    found = expert_flips.follow(lab, BATCHES)
    share = [1 - b / a for a, b in zip(found["native"], found["replayed"])]
    once, often = (statistics.median(map(claim.mean, found[name])) for name in ("first", "flips"))
    return c | {"first": once, "flips": often, "share": statistics.median(share),
                "shares": share, "log_w_var": statistics.median(found["native"]),
                "after": statistics.median(share), "seconds": time.perf_counter() - began}


def taught(args, task, tokenizer):
    """The policy that a run begins with. There is one per depth and seed; it is kept under
    runs/claims/."""
    folder = Path(claim.RUNS) / f"depth-{args.num_hidden_layers}-{args.seed}"
    if not folder.is_dir():
        torch.manual_seed(args.seed)
        model = TinyMoE(cold_start.tiny_config(args, tokenizer))
        taught = replace(args, cold_start_steps=TAUGHT, cold_start_learning_rate=1e-3)
        cold_start.supervise(model, tokenizer, task, taught)
        model.save_pretrained(folder)
    return TinyMoE.from_pretrained(folder).eval()


# -------------------------------------------------------------------------------- what was found

def found(runs, name, layers, rate, seeds):
    return list(maps.values(runs, name, seeds, arm=f"{layers} layers", rate=rate).values())


def chosen(runs):
    """The (layers, rate) at which flips matter most, chosen on the cold starts of the gate."""
    cells = {}
    for layers in LAYERS:
        for rate in RATES:
            flips, share = (found(runs, name, layers, rate, GATE) for name in ("flips", "share"))
            if share:
                cells[layers, rate] = (claim.mean(flips) >= OFTEN, claim.mean(share))
    return max(cells, key=cells.get)


def judge(runs):
    rows = []
    for layers in LAYERS:
        for rate in RATES:
            flips, share = (found(runs, name, layers, rate, GATE) for name in ("flips", "share"))
            if share:
                rows.append(f"{layers} layers at {rate:g}: {claim.mean(flips):.1%} and "
                            f"{claim.mean(share):.0%}")
    place = chosen(runs)
    once, flips, share = (found(runs, name, *place, FRESH) for name in ("first", "flips", "share"))
    measured = ("experts changed by a batch's updates, and the part of Var[log w] that replaying "
                f"the routes removes, gate: {'; '.join(rows)}")
    if not share:
        return measured, "fresh cold starts not run", claim.undecided(0), 0
    measured += (f"; fresh cold starts, {place[0]} layers at {place[1]:g}: "
                 f"{claim.number(once, '{:.1%}')} with one update, "
                 f"{claim.number(flips, '{:.1%}')} with four; {claim.number(share, '{:.0%}')}")
    number = claim.number(share, "{:.0%}", f"of Var[log w] is flips, {place[0]} layers")
    return measured, number, decide(flips, share), len(share)


def decide(flips, share):
    """The verdict, from one value of each kind per fresh cold start."""
    answers = [claim.verdict(values, held=(bar, 1.), refuted=(-10., bar))
               for values, bar in ((flips, OFTEN), (share, MOST))]
    return claim.all_of(*answers)


def takeaway(runs):
    flips = {layers: claim.mean(found(runs, "first", layers, RATES[1], GATE)) for layers in LAYERS}
    layers, rate = chosen(runs)
    share = found(runs, "share", layers, rate, FRESH)
    return (f"One update at {RATES[1]:g} changes "
            + ", ".join(f"{x:.1%}" for x in flips.values())
            + f" of the experts with {', '.join(map(str, flips))} layers; at {layers} layers and "
            f"{rate:g} that is {claim.number(share, '{:.0%}')} of Var[log w].")


def draw(runs):
    figure, (left, right) = panels(1, 2, width=8.6)
    for place, name, bar in ((left, "flips", OFTEN), (right, "share", MOST)):
        for i, (rate, colour) in enumerate(zip(RATES, (".7", ".4", "0"))):
            points = [(layers, 100 * x) for layers in LAYERS
                      for x in found(runs, name, layers, rate, None)]
            means = [(layers, 100 * claim.mean(found(runs, name, layers, rate, GATE)))
                     for layers in LAYERS if found(runs, name, layers, rate, GATE)]
            place.plot(*zip(*means), LINES[i], color=colour, label=f"rate {rate:g}")
            place.plot(*zip(*points), "osD"[i], color=colour, markersize=4, alpha=.6)
        place.axhline(100 * bar, color="black", linestyle=":", linewidth=1)
        place.set_xticks(LAYERS)
    label(left, "Experts changed by a batch's four updates", "layers", "per cent")
    label(right, "Part of Var[log w] that replayed routes remove", "layers", "per cent")
    left.set_ylim(bottom=0)
    left.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw)
