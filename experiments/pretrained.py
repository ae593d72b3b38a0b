"""SmolLM2 over clip ranges and number formats: what does GSPO's clip act on in 16 bits?

Claim (ours, no paper): in bfloat16 GSPO with the paper's clip range learns less than in float32, as
the clip acts on rounding, and with 100 times the range it does not. Frameworks train in bfloat16
with the paper's range, and so does train.py on a GPU by default; autocast on a CPU computes the
same roundings.

Setting: SmolLM2-135M-Instruct, two tasks: the larger of two numbers (docs/data.md) and
reasoning_gym's chain_sum of two digits, both with worked lines as a prompt; 20 rollout batches of
16 × 8 responses, 4 mini-batches, constant rate. Arms: GSPO with the paper's clip range, 10 and 100
times it, GRPO, and IcePop's symmetric mask. Formats: float32, bfloat16, float16. There is one
pretrained model: a seed changes the order of the prompts and the samples, and intervals say nothing
about other models. Endpoint: held-out pass@1 after the last batch, 128 prompts × 4 responses.

Written down beforehand:

  rates       7.5e-6, 1.5e-5, 3e-5 and 6e-5; every arm's best on each task is chosen in float32 on
              the seeds 0 and 1 and used in all formats
  decision    8 fresh seeds (100 to 107) of the larger-of-two task, paired, 95 % t intervals, with
              loss(arm) = pass@1 in float32 minus that in bfloat16

  confirmed   loss(paper's range) lies above 0, and loss(100 times) below 0.05
  refuted     loss(paper's range) lies below 0.02
  undecided   otherwise, and with fewer than 8 seeds

Reported beside it by the same intervals, without a verdict: the same for float16 and for chain_sum;
the share clipped in 16 bits in excess of float32's; the bands against each other and against GRPO
in each format, each at its best rate.

Order: on larger-of-two first what decides (GSPO with the paper's range and 100 times it, their
choice, then their fresh seeds in float32 and bfloat16), then the other arms and float16, then
chain_sum. A run takes three to four minutes on an idle core in float32, about three times that in
bfloat16.
"""

import math
import subprocess
import sys
from pathlib import Path

from shared import claim, maps
import stability_map
from tools.style import BLUE, GREY, ORANGE, label, panels

ROW = dict(claim="In bfloat16 GSPO with the paper's band learns less than in float32, with 100 "
                 "times the band it does not",
           source="ours, no paper", reported="no figure",
           regime="SmolLM2-135M, 30 layers, answers of 3 tokens, 20 rollout batches of 128 answers")
ARMS = {name: stability_map.ARMS[name] for name in ("gspo", "gspo_x10", "gspo_x100", "grpo")}
ARMS["icepop"] = "--algorithm icepop"
NAMES = stability_map.NAMES | {"icepop": "IcePop"}
SHAPE = ("--model_name_or_path checkpoints/SmolLM2-135M-Instruct --no_chat_template --stop \\n "
         "--max_completion_length 5 --lr_scheduler_type constant_with_warmup --prompts_per_step 16")
MAX = "larger of two"
CHAIN = "chain_sum"
SHOTS = "runs/maps/chain_sum.txt"
POLICIES = {MAX: f"{SHAPE} --dataset_name data/max_of_two_train.jsonl --test_dataset_name "
                 "data/max_of_two_test.jsonl --verifier exact",
            CHAIN: f"{SHAPE} --dataset_name reasoning_gym:chain_sum?max_terms=2&max_digits=1&"
                   f"size=3000 --prompt_template @{SHOTS}"}
FORMATS = {"float32": "--bf16 false --fp16 false", "bfloat16": "--bf16 true",
           "float16": "--fp16 true"}
STAGES = ((MAX, ("gspo", "gspo_x100"), ("float32", "bfloat16")),        # what decides, first
          *((task, tuple(ARMS), tuple(FORMATS)) for task in POLICIES))
RATES = (7.5e-6, 1.5e-5, 3e-5, 6e-5)
CHOOSE = range(2)
FRESH = range(100, 108)
BATCHES = 20
BOUND = .05
NOTHING = .02
FILE = maps.runs_of("pretrained")
number = claim.counted


def grid(full):
    """The cells to run, in the order of the rules."""
    for task, arms, formats in STAGES:
        for seed in CHOOSE:
            for rate in RATES:
                yield from (cell(task, arm, "float32", rate, seed) for arm in arms)
        for seed in FRESH:
            for arm in arms:
                rate = best_rate(maps.read(FILE), task, arm)
                yield from (cell(task, arm, bits, rate, seed) for bits in formats)


def cell(task, arm, bits, rate, seed):
    return maps.cell(arm, seed, policy=task, bits=bits, rate=rate, batches=BATCHES)


def make(c):
    """Make one run, and before it the files of its task."""
    ask = "State the final answer to the following arithmetic problem:"
    Path(SHOTS).parent.mkdir(parents=True, exist_ok=True)
    Path(SHOTS).write_text(f"{ask} 4 + 13 = 17\n{ask} 29 - 6 = 23\n{ask} 12 - 35 = -23\n{{prompt}}")
    if not Path("data/max_of_two_train.jsonl").is_file():
        subprocess.run([sys.executable, "tests/make_max_data.py", "data"], check=True)
    return maps.one_run(c, f"{FORMATS[c['bits']]} {ARMS[c['arm']]}", POLICIES)


# -------------------------------------------------------------------------------- what was found

def ends(runs, task, arm, bits, seeds=FRESH, name="after", **more):
    return maps.values(runs, name, seeds, policy=task, arm=arm, bits=bits, **more)


def best_rate(runs, task, arm):
    """The rate with the highest mean in float32 on the choosing seeds, or None before all are
    run."""
    means = {rate: ends(runs, task, arm, "float32", CHOOSE, rate=rate) for rate in RATES}
    if any(len(found) < len(CHOOSE) for found in means.values()):
        return None
    return max(RATES, key=lambda rate: claim.mean(means[rate].values()))


def loss(runs, arm, bits="bfloat16", task=MAX, name="after"):
    """A figure of the fresh seeds in float32 minus that in another format; pass@1 by default."""
    return claim.differences(ends(runs, task, arm, "float32", name=name),
                             ends(runs, task, arm, bits, name=name))


def decide(paper, wide):
    """The verdict, from the losses with the paper's clip range and with 100 times it."""
    if min(len(paper), len(wide)) < 2:
        return claim.undecided(min(len(paper), len(wide)))
    if claim.verdict(paper, held=(-math.inf, NOTHING)) == claim.HELD:
        return claim.Verdict(claim.REFUTED, claim.p_within(paper, (-math.inf, NOTHING)))
    parts = (claim.verdict(paper, held=(0, math.inf), refuted=(-math.inf, 0)),
             claim.verdict(wide, held=(-math.inf, BOUND)))
    if all(part == claim.HELD for part in parts):
        return claim.all_of(*parts)
    return claim.undecided(min(len(paper), len(wide)))


def judge(runs):
    parts = []
    for task in POLICIES:
        rates = [f"{NAMES[arm]} {rate:g}" for arm in ARMS if (rate := best_rate(runs, task, arm))]
        parts += [f"{task}: best rates {', '.join(rates)}"] if rates else []
        for bits in list(FORMATS)[1:]:
            for arm in ARMS:
                if len(values := loss(runs, arm, bits, task)) > 1:
                    excess = [-x for x in loss(runs, arm, bits, task, "clipped")]
                    parts.append(f"{task}, {bits}: lost by {NAMES[arm]} {number(values)}, clipped "
                                 f"in excess of float32 {number(excess)}")
        for bits in FORMATS:
            for arm in list(ARMS)[1:]:
                values = claim.differences(ends(runs, task, arm, bits),
                                           ends(runs, task, "gspo", bits))
                if len(values) > 1:
                    parts.append(f"{task}, {bits}: {NAMES[arm]} minus GSPO {number(values)}")
    done = len([r for r in runs if r["seed"] in FRESH])
    parts.append(f"{len(runs)} runs made, {done} of them on fresh seeds")
    paper = loss(runs, "gspo")
    wide = loss(runs, "gspo_x100")
    if min(len(paper), len(wide)) < 2:
        return "; ".join(parts), f"{done} runs on fresh seeds", claim.undecided(0), 0
    return ("; ".join(parts), f"bfloat16 costs the paper's band {claim.number(paper, '{:+.3f}')}, "
            f"100 times it {claim.number(wide, '{:+.3f}')} pass@1", decide(paper, wide),
            min(len(paper), len(wide)))


def takeaway(runs):
    told = [f"{NAMES[arm]} {claim.mean(values):+.2f}" for arm in ARMS
            if (values := loss(runs, arm))]
    return f"Lost by training in bfloat16: {', '.join(told) or 'not run'}."


def draw(runs):
    """Held-out pass@1 of the fresh seeds against the clip range, by format, and the clipped
    share."""
    figure, (left, right) = panels(1, 2, height=4, width=9.4)
    arms = [arm for arm in ARMS if any(ends(runs, MAX, arm, bits) for bits in FORMATS)]
    for i, (bits, colour) in enumerate(zip(FORMATS, (BLUE, ORANGE, GREY))):
        for axes, name in ((left, "after"), (right, "clipped")):
            points = [(x + .15 * (i - 1), value) for x, arm in enumerate(arms)
                      for value in ends(runs, MAX, arm, bits, name=name).values()]
            if points:
                axes.plot(*zip(*points), "osD"[i], color=colour, markersize=4, label=bits)
    for axes in (left, right):
        axes.set_xticks(range(len(arms)), [NAMES[arm].replace(", ", ",\n") for arm in arms],
                        fontsize=8)
        axes.set_xlim(-.5, max(1, len(arms)) - .5)
    label(left, f"{MAX}: after {BATCHES} batches, every seed", "", "held-out pass@1")
    label(right, "Clipped", "", "clipped share of tokens")
    if left.get_lines():
        left.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw)
