"""Measures that are not training runs: train.py's own steps, taken one at a time.

    python experiments/measures.py drift [--seed 0] [--quick] [FLAGS OF TRAIN.PY]
    python experiments/measures.py lengths
    python experiments/measures.py flips
    python experiments/measures.py by_pass_rate --algorithm grpo

    drift     GSPO's training for 12 rollout batches, with GRPO's updates from the same policies on
              the same mini-batches: clipped shares, where ratios go, s against perplexities
    lengths   answers of 7 to 997 tokens before and after three updates on other answers, of a
              policy that knows the form of the task and little of its sums
    flips     how much of Var[log w] goes away with the experts that change
    by_pass_rate
              sizes of ratios and clipped shares of groups, by the group's pass rate

Each returns its figures for one seed; experiments/run.py keeps them like those of a run.
"""

import argparse
import copy
import json
import math
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import linear_regression

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train                                                                         # noqa: E402
from advantages import group_advantages                                              # noqa: E402
from features.routing_replay import recorded_routes                                  # noqa: E402
from intervals import mean                                                           # noqa: E402
from moe import TinyMoE                                                              # noqa: E402
from plumbing.data import running_sum, tasks                                         # noqa: E402
from plumbing.model import cold_start                                                # noqa: E402
from plumbing.model.policy import load_policy                                        # noqa: E402
from session.arguments import parse                                             # noqa: E402
from session.learner import forced, make_learner                                      # noqa: E402
from plumbing.speed.fast import fast_response_logp, fast_sample                      # noqa: E402
from losses import policy_loss                                                       # noqa: E402
from ratios import perplexity, sequence_log_ratio, sequence_ratio                    # noqa: E402

CPU = torch.device("cpu")
S_RANGE = (math.log(1 - 3e-4), math.log(1 + 4e-4))
TERMS = (1, 2, 4, 8, 16, 32, 43)          # of verbose sums: answers of 7, 13, 25, 49, 97, 193, 259
LONGEST = 166                             # never taught: answers of up to 997
LONG = "--min_terms 1 --max_terms 43 --verbose_answers --hidden_size 64 --num_hidden_layers 2"


class Lab:
    """The state of one run of train.py, whose steps can be called one at a time.

    loaded: (task, policy, tokenizer) instead of the built-in ones."""

    def __init__(self, seed, flags, loaded=None):
        self.flags = f"--seed {seed} --device cpu {flags}".split()
        self.args = parse(self.flags)
        self.task = loaded[0] if loaded else tasks.prepare_task(self.args)
        self.policy, self.tokenizer = loaded[1:] if loaded else load_policy(self.args, self.task,
                                                                            CPU)
        self.start()

    def start(self):
        self.learner = make_learner(self.args, self.task, self.policy, self.tokenizer, CPU)

    def twin(self, *flags):
        """A copy of policy, optimizer and schedule, with some flags changed."""
        other = copy.copy(self)
        other.args = parse([*self.flags, *flags])
        other.policy = copy.deepcopy(self.policy)
        other.start()
        for name in ("optimizer", "schedule"):
            state = copy.deepcopy(getattr(self.learner, name).state_dict())
            getattr(other.learner, name).load_state_dict(state)
        return other

    def rollout(self, step, routes=False):
        """One batch, sampled, verified and scored -> train.Batch with advantages."""
        rollout, problems, parts, _ = train.collect(self.args, self.learner, self.task, step)
        old = self.score(rollout, routes)
        advantages = group_advantages(parts[:, 0], self.args.num_generations)          # [B]
        if routes:
            rollout = replace(rollout, forced_routes=recorded_routes(old.passes, rollout))
        return train.Batch(rollout, problems, parts, old.logp, step=step, advantages=advantages,
                           routes=old.routes)

    def minibatches(self, batch):
        return train.mini_batches(self.args, self.task, batch)

    def update(self, mini):
        """One optimizer step -> its stats: clip shares and ratios as they were before it."""
        return train.update(self.args, self.learner, mini)

    def score(self, rollout, routes=False):
        self.learner.actor.routed = routes
        return self.learner.score(rollout)


# ---------------------------------------------------------------------------------------- drift

@lru_cache(maxsize=1)
def drift(seed, flags="", quick=False):
    """{figure: value}: shares of clipped tokens and of responses whose s is outside its clip range,
    Var[log w] and Var[log s] of mini-batches 1 to 4 before their update, the largest distance of s
    from a quotient of perplexities over the answers of six batches."""
    lab = Lab(seed, f"--steps 12 {flags}")
    stats = {"gspo": [], "grpo": []}
    outside = []
    apart = {"apart32": 0, "apart64": 0}
    for step in range(1, (3 if quick else 12) + 1):
        batch = lab.rollout(step)
        labs = {"grpo": lab.twin("--algorithm", "grpo", "--epsilon_high", "0.27"), "gspo": lab}
        for name, one in labs.items():
            of_batch = []
            for k, mini in enumerate(one.minibatches(batch), 1):
                if k == 4 and name == "gspo":
                    mask = mini.rollout.mask                                         # [B, T]
                    log_w = one.score(mini.rollout).logp - mini.old_logp             # [B, T]
                    log_s = log_w.sum(-1) / mask.sum(-1)                             # [B]
                    outside += [not S_RANGE[0] <= x <= S_RANGE[1] for x in log_s.tolist()]
                of_batch.append(one.update(mini))
            stats[name].append(of_batch)
        if step <= 6:
            pair = lab.score(batch.rollout).logp, batch.old_logp                     # [B, T] each
            for name, dtype in (("apart32", torch.float32), ("apart64", torch.float64)):
                found = distance(*(logp.to(dtype) for logp in pair), batch.rollout.mask)
                apart[name] = max(apart[name], found)
    share = {name: mean(m["clip_low"] + m["clip_high"] for b in of for m in b)
             for name, of in stats.items()}
    spread = {f"log_{x}_var_{k + 1}": mean(b[k][f"log_{x}_var"] for b in stats["gspo"])
              for x in "ws" for k in range(4)}
    return (dict(clipped_gspo=share["gspo"], clipped_grpo=share["grpo"],
                 clipped_factor=share["gspo"] / max(share["grpo"], 1e-9),
                 outside_s=mean(outside))
            | {f"spread_{k}": spread[f"log_w_var_{k}"] / spread[f"log_w_var_{k - 1}"]
               for k in (3, 4)} | spread | apart)


def distance(new, old, mask):
    """The largest distance of s from PPL_old / PPL_new over the answers of a batch."""
    quotient = perplexity(old, mask) / perplexity(new, mask)                         # [B]
    return (sequence_ratio(new, old, mask) - quotient).abs().max().item()


# -------------------------------------------------------------------------------------- lengths

@lru_cache(maxsize=1)
@torch.enable_grad()
def lengths(seed, flags="", quick=False):
    """{figure: value}: the exponent of L in Var[log s] / Var[log w], and how much more often a
    range that clips 15 % of the responses clips the shortest third of the lengths than the longest.
    """
    args = parse(f"--seed {seed} --device cpu --cold_start_steps 150 {LONG}".split())
    task = tasks.prepare_task(args)
    tokenizer = running_sum.builtin_tokenizer()
    by_length = {n: [p for p in task.train if sum(c.isdigit() for c in p.prompt) == n]
                 for n in TERMS}
    task.train = [p for found in by_length.values() for p in (found * 200)[:200]]    # each as often
    task.verify = share_right
    torch.manual_seed(seed)
    cold = TinyMoE(cold_start.make_tiny_config(args, tokenizer))
    before = cold_start.BATCH
    cold_start.BATCH = 8
    cold_start.supervise(cold, tokenizer, task, args)
    cold_start.BATCH = before
    lab = Lab(seed, f"{LONG} --prompts_per_step 16 --steps 40 --lr_scheduler_type "
                    f"constant_with_warmup --max_completion_length 259 {flags}",
              (task, cold.eval(), tokenizer))
    for step in (1, 2, 3):                # two batches warm up the optimizer
        if step == 3:
            old = copy.deepcopy(lab.policy)
        minis = list(lab.minibatches(lab.rollout(step)))
        for mini in minis[:3] if step == 3 else minis:
            lab.update(mini)
    if not quick:
        by_length[LONGEST] = running_sum.running_sum(LONGEST, LONGEST, verbose=True).train
    found = {n: answers(lab, old, (some * 16)[:16], seed) for n, some in by_length.items()}
    points = [(1 / (1 / L).mean().item(), log_s.var(unbiased=False).item() / var)
              for log_s, _, L, var in found.values()]
    short = [found[n][:2] for n in TERMS]
    return dict(variance_slope=slope(points), lengths=[round(x, 2) for x, _ in points],
                factors=[y for _, y in points], short_factor=short_factor(short))


@torch.no_grad()
def answers(lab, old, problems, seed):
    """Eight responses of the old policy to each problem -> (log s, advantages, lengths, all [B],
    Var[log w])."""
    width = 1 + len(problems[0].answer)
    uniforms = torch.rand(len(problems) * 8, width, generator=torch.Generator().manual_seed(seed))
    rollout = fast_sample(old, lab.tokenizer, [p.prompt for p in problems], 8, width,
                          uniforms=uniforms)
    rewards = torch.tensor([share_right(text, problems[i // 8])
                            for i, text in enumerate(rollout.texts)])                # [B]
    now, before = (fast_response_logp(policy, rollout).logp for policy in (lab.policy, old))
    log_w = now - before                                                            # [B, T]
    L = rollout.mask.sum(-1).float()                                                 # [B]
    var = log_w[rollout.mask].var(unbiased=False).item()
    return log_w.sum(-1) / L, group_advantages(rewards, 8), L, var


def share_right(response, problem):
    """The share of the characters of a response that are right, at most 1."""
    right = sum(a == b for a, b in zip(response, problem.answer))
    return right / max(len(problem.answer), len(response))


def slope(points):
    """Least-squares slope of log y against log x: the exponent of a power law."""
    return linear_regression(*([math.log(v) for v in values] for values in zip(*points))).slope


def short_factor(by_length):
    """How much more often the shortest two lengths are clipped than the longest two, by the clip
    range [-3 width, 4 width] of log s that clips 15 % of all answers with A ≠ 0."""
    widths = [torch.where(A > 0, log_s / 4, -log_s / 3)[A != 0] for log_s, A in by_length]
    widest = torch.cat(widths).sort(descending=True)[0]      # an answer is clipped by narrower ones
    width = widest[int(.15 * len(widest))]
    share = [(needed > width).float().mean().item() for needed in widths]
    return (share[0] + share[1]) / max(share[-2] + share[-1], 1 / 256)       # none is not 0


# ---------------------------------------------------------------------------------------- flips

def flips(seed, flags="", quick=False):
    """{figure: value}: the share of Var[log w], summed over batches, that goes away when the new
    policy follows the old one's routes."""
    lab = Lab(seed, f"--steps 12 {flags}")
    native = replayed = 0
    for step in range(1, (3 if quick else 12) + 1):
        minis = list(lab.minibatches(lab.rollout(step, routes=True)))
        for mini in minis:
            free = replace(mini.rollout, forced_routes=None)
            lab.update(replace(mini, rollout=free))
        mask = mini.rollout.mask                                                     # [B, T]
        new = lab.score(free, routes=True)
        with torch.no_grad(), forced(lab.policy, mini.rollout):
            replay = fast_response_logp(lab.policy, mini.rollout, lab.args.temperature,
                                        entropy=False)
        native += (new.logp - mini.old_logp)[mask].var(unbiased=False).item()
        replayed += (replay.logp - mini.old_logp)[mask].var(unbiased=False).item()
    return dict(share=1 - replayed / native)


# --------------------------------------------------------------------------------- by pass rate

LOW, HIGH = (1, 2, 3), (5, 6, 7)                      # eighths of the responses of a group


def by_pass_rate(seed, flags="", quick=False):
    """{figure: value} of 50 rollout batches, mini-batches 2 to 4 before their update, groups as
    units. A list has the mean over the groups of each pass rate, 0, 1/8, … 1. A factor divides the
    groups of low pass rate by those of high, over the mini-batches that have both: the learning
    rate falls while pass rates rise."""
    lab = Lab(seed, f"--steps 50 {flags}")
    minis = []                                        # a list of groups each
    for step in range(1, (3 if quick else 50) + 1):
        for k, mini in enumerate(lab.minibatches(lab.rollout(step)), 1):
            if k > 1:                                 # on the first all ratios are 1
                minis.append(group_figures(lab, mini))
            lab.update(mini)
    every = [group for mini in minis for group in mini]
    lists = {name: [mean_or_none(group[name] for group in every if group["eighths"] == n)
                    for n in range(9)] for name in every[0] if name != "eighths"}
    counts = [sum(group["eighths"] == n for group in every) for n in range(9)]
    return lists | {"groups": counts} | {
        f"{name}_factor": factor(minis, name)
        for name in ("log_s", "log_w", "log_w_rms", "clipped", "length")}


def group_figures(lab, mini):
    """The figures of each group of a mini-batch, under the policy before its update: medians of
    |log s| over responses and of |log w| over tokens, the root mean square of log w, and shares of
    the loss tokens whose gradient the clip removes."""
    G = mini.group_size
    new_logp = lab.score(mini.rollout).logp                                          # [b, T]
    rows = []
    for start in range(0, len(new_logp), G):
        own = slice(start, start + G)
        new, old, mask = new_logp[own], mini.old_logp[own], mini.rollout.mask[own]   # [G, T] each
        right = mini.parts[own, 0] > .5                                              # [G]
        A = mini.advantages[own]                                                     # [G]
        log_w = (new - old)[mask]                                                    # [tokens]
        _, stats = policy_loss(lab.args.row, new, old, A, mask, epsilon=lab.args.epsilon,
                               epsilon_high=lab.args.epsilon_high, weights=mini.weights[own])
        rows.append(dict(
            eighths=round(8 * right.float().mean().item()),
            log_s=sequence_log_ratio(new, old, mask).abs().median().item(),
            log_w=log_w.abs().median().item(), log_w_rms=log_w.square().mean().sqrt().item(),
            length=mask.sum().item() / G,
            clipped=stats["clip_signal"].item() if (A != 0).any() else None))
    return rows


def factor(minis, name):
    """The mean over mini-batches of groups of low pass rate, divided by that of high."""
    pairs = [[mean_or_none(group[name] for group in mini if group["eighths"] in some)
              for some in (LOW, HIGH)] for mini in minis]
    low, high = zip(*(pair for pair in pairs if None not in pair))
    return mean(low) / max(mean(high), 1e-6)


def mean_or_none(values):
    values = [value for value in values if value is not None]
    return mean(values) if values else None


MEASURES = {"drift": drift, "lengths": lengths, "flips": flips, "by_pass_rate": by_pass_rate}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three rollout batches")
    options, flags = parser.parse_known_args()
    print(json.dumps(MEASURES[options.name](options.seed, " ".join(flags), options.quick),
                     indent=1))
