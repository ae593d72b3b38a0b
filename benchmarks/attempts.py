"""Ways to compute the tiny MoE with fewer operations, each measured beside the code as it is.

    python benchmarks/attempts.py                # --rounds 3 --cases default_run: a quick look

Every attempt takes the place of a part of moe.py, computes the same numbers up to rounding (checked
before it is measured), and takes its turn within a round: one rollout batch with the same prompts
and random numbers, sampled, scored and trained on by train.py's functions. What did not pay is not
in moe.py; docs/speed.md has the figures.
"""

import argparse
import copy
import json
import os
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("GOMP_SPINCOUNT", "10000")             # before torch, as in train.py

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import moe  # noqa: E402
import rollout  # noqa: E402
import versus_trl  # noqa: E402
from plumbing.data.stream import PromptStream  # noqa: E402
from plumbing.speed import experts  # noqa: E402

CASES = {"tiny_moe": "256 × 24 tokens", "default_run": "the default run"}
SAME = 2e-3  # nats: the largest change of a log-prob that rounding explains after four layers


# ------------------------------------------------------------------------------------ the attempts

@contextmanager
def as_it_is(policy):
    yield


@contextmanager
def all_experts(policy):
    """All experts for all tokens in one batched product, without sorting, as on a GPU."""
    layers = [layer.mlp for layer in policy.model.layers]
    before = [layer.experts for layer in layers]
    with patch.object(experts, "MOST_AT_ONCE", 2**62):
        for layer in layers:
            layer.experts = experts.AllExperts(layer.experts)
        yield
    for layer, one in zip(layers, before):
        layer.experts = one


@contextmanager
def linear_per_expert(policy):
    """A loop over the experts in place of torch's grouped product."""
    with patch.object(moe, "has_grouped_product", lambda device: False):
        yield


@contextmanager
def rows_put_back_by_index(policy):
    """Add the K outputs of a token by an index and a sum, in place of index_add."""
    def forward(self, x, gates, indices):
        expert, order = indices.flatten().sort(stable=True)                         # [N·K]
        numbers = torch.arange(len(self.down_proj))                                 # [E]
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)      # [E]
        rows = x.index_select(0, order // indices.shape[1])                         # [N·K, D]
        gate, up = moe.expert_product(rows, self.gate_up_proj, ends).chunk(2, -1)   # [N·K, M]
        y = moe.expert_product(F.silu(gate) * up, self.down_proj, ends)             # [N·K, D]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))                                      # [N·K]
        y = y.index_select(0, back).view(*gates.shape, -1)                          # [N, K, D]
        return (y * gates[..., None]).sum(1)                                        # [N, D]
    with patch.object(moe.Experts, "forward", forward):
        yield


@contextmanager
def top_k_before_softmax(policy):
    """The softmax over the K chosen experts only: the same gates where they are normalized."""
    def forward(self, x):
        logits = F.linear(x, self.weight)                                           # [N, E]
        top, indices = logits.topk(self.top_k, -1)                                  # [N, K]
        return logits, top.softmax(-1), indices
    with patch.object(moe.TopKRouter, "forward", forward):
        yield


@contextmanager
def norm_in_one_reduction(policy):
    """RMSNorm from one vector norm, in place of a square and a mean."""
    def forward(self, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)                    # [..., 1]
        return x * (self.weight * (norm * norm / x.shape[-1] + self.eps).rsqrt())
    with patch.object(torch.nn.RMSNorm, "forward", forward):
        yield


def attention(together=False, explicit=False, compiled=False):
    """An attempt at another Attention.forward. together: rotate queries and keys in one tensor;
    explicit: scores and softmax in place of torch's attention; compiled: everything before the
    cache under torch.compile."""
    def inputs(self, x, cos, sin):
        heads = (*x.shape[:2], -1, self.width)
        q = self.q_norm(self.q_proj(x).view(heads))
        k = self.k_norm(self.k_proj(x).view(heads))
        if together:
            H = q.shape[2]
            q, k = moe.rotate(torch.cat([q, k], 2), cos, sin).tensor_split([H], 2)
        else:
            q = moe.rotate(q, cos, sin)
            k = moe.rotate(k, cos, sin)
        v = self.v_proj(x).view(heads)
        return [t.transpose(1, 2) for t in (q, k, v)]                               # [B, H, S, d]
    prepared = torch.compile(inputs, dynamic=True) if compiled else inputs

    def forward(self, x, cos, sin, mask, causal, cache):
        q, k, v = prepared(self, x, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)                                   # [B, H, C, d]
        if not causal and (explicit or mask is None):
            scores = q @ k.transpose(-1, -2) * self.width**-0.5                     # [B, H, S, C]
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            elif mask is not None:
                scores = scores + mask
            y = scores.softmax(-1) @ v                                              # [B, H, S, d]
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)     # [B, H, S, d]
        return self.o_proj(y.transpose(1, 2).flatten(2))                            # [B, S, D]

    @contextmanager
    def attempt(policy):
        with patch.object(moe.Attention, "forward", forward):
            yield
    return attempt


@contextmanager
def one_thread(policy):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


AS_IT_IS = "as it is"
ATTEMPTS = {
    AS_IT_IS: as_it_is,
    "all experts for all tokens, one batched product": all_experts,
    "a loop over the experts, no grouped product": linear_per_expert,
    "the experts' rows put back by an index and a sum": rows_put_back_by_index,
    "the router's top-k before its softmax": top_k_before_softmax,
    "RMSNorm from one vector norm": norm_in_one_reduction,
    "queries and keys rotated together": attention(together=True),
    "scores and softmax in place of torch's attention": attention(explicit=True),
    "everything before the attention compiled": attention(compiled=True),
    "one thread": one_thread,
}


# ------------------------------------------------------------------------------------- measurement

def ready(name):
    """versus_trl's Ours for a case, and its stream of prompts."""
    device = torch.device("cpu")
    args, task, folder, _ = versus_trl.prepare(name, versus_trl.CPU_CASES[name], device, False,
                                               None)
    forced = not versus_trl.natural(task)
    rollout.end_tokens = (lambda *_: [versus_trl.NEVER]) if forced else versus_trl.ends_of
    return versus_trl.Ours(args, task, folder, device), PromptStream(task.sizes)


def check(side, names):
    """Raises AssertionError if an attempt computes other log-probs than the code as it is."""
    torch.manual_seed(0)
    sampled = side.learner.sampler.sample([side.task.train[0].prompt] * 4, 4)
    before = side.learner.score(sampled).logp                                       # [B, T]
    for name in names:
        with ATTEMPTS[name](side.policy):
            change = (side.learner.score(sampled).logp - before).abs().max().item()
        assert change < SAME, f"{name}: log-probs change by {change}"


def measure(case, names, rounds):
    """{attempt: seconds of a rollout batch, one per round}; round 0 warms up."""
    side, stream = ready(case)
    check(side, names)
    start = copy.deepcopy(side.policy.state_dict())
    seconds = {name: [] for name in names}
    for turn in range(rounds + 1):
        numbers = stream.next(side.args.prompts_per_step)
        for name in random.Random(turn).sample(names, len(names)):    # no place is better
            torch.manual_seed(turn)
            side.policy.load_state_dict(start)
            with ATTEMPTS[name](side.policy):
                clocks = side.batch(numbers, turn)[0]
            if turn:
                seconds[name].append(clocks["total"])
    return seconds


def main(argv=None):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", default=str(ROOT / "results/attempts.json"),
                        help="where the numbers go (default: %(default)s)")
    args = parser.parse_args(argv)
    result = {"threads": torch.get_num_threads(), "rounds": args.rounds, "cases": {}}
    for case in args.cases:
        seconds = measure(case, list(ATTEMPTS), args.rounds)
        result["cases"][case] = {name: {"min": min(s), "median": median(s), "as_it_is_over_this":
                                        median(a / b for a, b in zip(seconds[AS_IT_IS], s))}
                                 for name, s in seconds.items()}
        for name, r in result["cases"][case].items():
            print(f"{CASES[case]:16} {name:50} min {r['min']:.3f} s, median {r['median']:.3f} s, "
                  f"as it is / this {r['as_it_is_over_this']:.2f}", flush=True)
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
