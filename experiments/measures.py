"""Measures that are not training runs: train.py's own steps, taken one at a time.

    python experiments/measures.py drift [--seed 0] [--quick] [FLAGS OF TRAIN.PY]
    python experiments/measures.py lengths
    python experiments/measures.py neighbours [--seed 1000]

    drift       GSPO's training for 12 rollout batches, with GRPO's updates from the same policies
                on the same mini-batches: clipped shares, where ratios go, s against perplexities
    lengths     answers of 7 to 997 tokens before and after three updates on other answers, of a
                policy that knows the form of the task and little of its sums
    neighbours  whom GSPO's clip drops, in a run of ten rollout batches

Each returns its figures for one seed; experiments/run.py keeps them like those of a run.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import linear_regression

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train                                                                         # noqa: E402
from advantages import group_advantages                                              # noqa: E402
from intervals import mean                                                           # noqa: E402
from moe import TinyMoE                                                              # noqa: E402
from plumbing.data import running_sum, tasks                                         # noqa: E402
from plumbing.model import cold_start                                                # noqa: E402
from plumbing.model.policy import load_policy                                        # noqa: E402
from session.arguments import parse                                             # noqa: E402
from session.learner import Learner                                          # noqa: E402
from plumbing.speed.fast import fast_response_logp, fast_sample                      # noqa: E402
from ratios import perplexity, sequence_ratio                    # noqa: E402

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
        self.learner = Learner(self.args, self.task, self.policy, self.tokenizer, CPU)

    def twin(self, *flags):
        """A copy of policy, optimizer and schedule, with some flags changed."""
        other = copy.copy(self)
        other.args = parse([*self.flags, *flags])
        other.policy = copy.deepcopy(self.policy)
        other.start()
        state = copy.deepcopy(self.learner.optimizer.state_dict())
        other.learner.optimizer.load_state_dict(state)
        other.learner.updates = self.learner.updates
        return other

    def rollout(self, step):
        """One batch, sampled, verified and scored -> train.Batch with advantages."""
        rollout, problems, parts, _ = train.collect(self.learner, step)
        advantages = group_advantages(parts[:, 0], self.args.num_generations)          # [B]
        old_logp = self.learner.score(rollout).logp                                    # [B, T]
        return train.Batch(rollout, problems, parts, old_logp, self.task, (None, None), step=step,
                           advantages=advantages)

    def minibatches(self, batch):
        clip_range = (self.args.epsilon, self.args.epsilon_high)
        return train.mini_batches(self.learner, replace(batch, clip_range=clip_range))

    def update(self, mini):
        """One optimizer step -> its stats: clip shares and ratios as they were before it."""
        return train.update(self.learner, mini)


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
                    log_w = one.learner.score(mini.rollout).logp - mini.old_logp     # [B, T]
                    log_s = log_w.sum(-1) / mask.sum(-1)                             # [B]
                    outside += [not S_RANGE[0] <= x <= S_RANGE[1] for x in log_s.tolist()]
                of_batch.append(one.update(mini))
            stats[name].append(of_batch)
        if step <= 6:
            pair = lab.learner.score(batch.rollout).logp, batch.old_logp         # [B, T] each
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


# ------------------------------------------------------------------------------------ neighbours

def neighbours(seed, flags="", quick=False):
    """{figure: value} of the responses with Â ≠ 0 that are outside the paper's range before their
    mini-batch's step. own: the share that has moved in the direction of its own advantage;
    own_distinct: that of distinct responses of a batch. Its expectation if advantages were
    permuted: permuted, among those of the mini-batch; permuted_likelihood, among those of the batch
    in the same tenth of the mean old_logp. outside: their number."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train.main(f"--seed {seed} --device cpu --steps {3 if quick else 10} --eval_samples 0 "
                   f"--save_minibatches --output_dir {folder}/run {flags}".split())
        lines = Path(folder, "run/minibatches.jsonl").read_text(encoding="utf-8").splitlines()
    own, distinct, permuted, alike = [], {}, [], []
    for number, line in enumerate(lines):
        minis = [[one for one in mini if one["advantage"]]
                 for mini in json.loads(line)["minibatches"]]
        ranked = sorted(sum(minis, []), key=lambda one: mean(one["old_logp"]))
        for rank, one in enumerate(ranked):
            one["tenth"] = 10 * rank // len(ranked)
        right = {tenth: share_positive(one for one in ranked if one["tenth"] == tenth)
                 for tenth in {one["tenth"] for one in ranked}}
        for mini in minis:
            for one in mini:
                log_s = mean(one["logp"]) - mean(one["old_logp"])
                if not S_RANGE[0] <= log_s <= S_RANGE[1]:
                    up = log_s > 0
                    own.append(up == (one["advantage"] > 0))
                    distinct[(number, *one["old_logp"])] = own[-1]
                    for of, share in ((permuted, share_positive(mini)),
                                      (alike, right[one["tenth"]])):
                        of.append(share if up else 1 - share)
    return dict(own=mean(own), own_distinct=mean(distinct.values()), permuted=mean(permuted),
                permuted_likelihood=mean(alike), outside=len(own))


def share_positive(responses):
    return mean(one["advantage"] > 0 for one in responses)


MEASURES = {"drift": drift, "lengths": lengths, "neighbours": neighbours}


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three rollout batches")
    options, flags = parser.parse_known_args()
    print(json.dumps(MEASURES[options.name](options.seed, " ".join(flags), options.quick),
                     indent=1))
