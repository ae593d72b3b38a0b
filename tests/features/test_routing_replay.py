"""--routing_replay on several transformers MoEs.
python -m pytest tests/features/test_routing_replay.py

The routes of an independent forward over prompt and response are the reference for what was
recorded while sampling, and the sampler itself for what the trainer then takes.
"""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from features.routing_replay import RecordingSampler, recorded_routes
from plumbing.data.running_sum import builtin_tokenizer
from session import metrics as run_metrics
from plumbing.speed import fast
from plumbing.speed.fast import select_response_routes
from rollout import Sampler, join
from rollout import response_logp as plain_logp
from routes import record_routes
from test_rollout import uniforms
from test_routes import make, moved
from tiny_run import read_json
from session.learner import forced

FAMILIES = ("TinyMoE", "Qwen3-MoE", "OLMoE", "Mixtral")
SHORT = ["3+8+5=", "9+9+1+4="]
SHARED = [f"1+2+3+4+5+6+7+8+9+1={tail}" for tail in SHORT]    # 20 tokens that all begin with
WAYS = {"plain": plain_logp, "fast": fast.fast_response_logp}


def sampled(model, way="fast", prompts=SHORT, group_size=4, checkpointing=False, **options):
    torch.manual_seed(1)
    return recording(model, way, 8, checkpointing).sample(prompts, group_size, **options)


def otherwise(model):
    """A copy with other weights."""
    return moved(copy.deepcopy(model))


def recording(model, way, width, checkpointing=False):
    """A sampler that keeps what the model's routers choose, for scoring in that way."""
    return RecordingSampler(Sampler(model, builtin_tokenizer(), width), SimpleNamespace(
        plain=way == "plain", gradient_checkpointing=checkpointing))


@torch.no_grad()
def chosen(model, rollout):
    """The experts that a model takes for the response tokens, in one plain forward: [L, loss
    tokens, K] in order."""
    with record_routes(model) as routes:
        plain_logp(model, rollout)
    return own(routes, rollout)


def own(routes, rollout):
    indices = select_response_routes(routes, rollout).indices
    return indices[:, rollout.mask].sort(-1).values


@torch.no_grad()
def replayed(model, rollout, way="fast"):
    with forced(model, rollout), record_routes(model) as routes:
        logp = WAYS[way](model, rollout).logp                                    # [B, T]
    return logp, own(routes, rollout)


@pytest.mark.parametrize("family, way, prompts", [
    *((family, "fast", SHORT) for family in FAMILIES), ("Qwen3-MoE", "plain", SHORT),
    ("TinyMoE", "fast", SHARED)])
def test_the_trainer_takes_exactly_the_samplers_experts(family, way, prompts):
    """With a sampler of other weights, which chooses otherwise; and the same routes change nothing
    where sampler and policy are one."""
    model = make(family)
    for sampler in (otherwise(model), model):
        rollout = sampled(sampler, way, prompts)
        logp, taken = replayed(model, rollout, way)
        assert torch.equal(taken, chosen(sampler, rollout))
        assert torch.equal(taken, chosen(model, rollout)) == (sampler is model)
        error = (logp - plain_logp(model, rollout).logp).abs().max()
        assert error < 1e-4 if sampler is model else error > 1e-3


def test_routes_are_cut_and_joined_with_their_rollout():
    sampler, model = otherwise(make()), make()
    whole = sampled(sampler, prompts=SHARED + SHORT)
    taken = ([12, 13, 14, 15, 4, 5, 6, 7], [0, 1, 2, 3], [5, 6], [12, 14, 5, 7])  # groups of four
    parts = [whole.take(torch.tensor(rows)) for rows in taken]
    other = sampled(sampler, prompts=[p + "1+" for p in SHORT])
    parts += [join([whole, other]), join([other, whole]).take(torch.arange(8))]
    for part in parts:
        assert torch.equal(replayed(model, part)[1], chosen(sampler, part))
    joined = join([sampled(sampler, prompts=p) for p in (SHARED, SHARED[::-1])])
    assert torch.equal(replayed(model, joined)[1], chosen(sampler, joined))


@pytest.mark.parametrize("width", [0, 2, 4])                # 4: as wide as the rest of the prompts
def test_routes_of_scoring_serve_every_mini_batch(width):
    """In chunks of whole prompts; a prefix of all of them is recorded once."""
    model, found = make(), []
    prompts = ["1+9+"[:width] + tail for tail in ("3+8=", "7+=", "2=")]
    part = fast.fast_sample(model, builtin_tokenizer(), prompts, 2, 5, uniforms=uniforms(6, 5))
    part = replace(part, prefix=width)           # so short, the sampler does not use it
    for rows in (range(4), range(4, 6)):
        chunk = replace(part.take(torch.tensor(rows)), forced_routes=True)    # a row per response
        with torch.no_grad(), record_routes(model) as routes:
            fast.fast_response_logp(model, chunk)
        found.append(routes)
    routes = join(found)
    assert len(routes.passes) == 2 + bool(width)
    assert torch.equal(own(routes, part), chosen(model, part))
    whole = select_response_routes(routes, part).indices                            # [L, B, T, K]
    mini = replace(part, forced_routes=recorded_routes(routes, part))
    moved(model)
    for rows in ([4, 5, 0, 1], [4, 5], [0, 1], [5]):         # groups, a part of one
        cut = mini.take(torch.tensor(rows))
        want = whole[:, rows][:, cut.mask].sort(-1).values
        assert torch.equal(replayed(model, cut)[1], want)


# ------------------------------------------------------------------------------------- the script

LINE = "--steps 2 --warmup_steps 0 "


@pytest.fixture
def calm(monkeypatch):
    """AdamW's first step moves a weight whose gradient is rounding alone by the whole rate, up or
    down as the CPU's kernels round; with a larger eps it hardly moves it."""
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-3))


def test_passes_of_scoring_and_of_updates_may_differ_in_size(run, calm):
    """A pass of scoring may hold a part of a group where that of an update holds groups, and the
    other way round; one response alone is read with its prompt in one forward."""
    norms = []
    for kind, micro in (("old", 8), ("old", 4), ("old", 1), ("rollout", 2), ("rollout", 8)):
        record, = run(LINE + f"--steps 1 --algorithm grpo --learning_rate 0.05 --routing_replay "
                      f"{kind} --beta 0.01 --micro_batch_size {micro}", folder=f"{kind} {micro}")
        norms.append([mini["grad_norm"] for mini in record["minibatches"]])
    for found in norms:
        assert found == pytest.approx(norms[0], rel=1e-3)


def test_tokens_show_the_routers_own_experts_and_the_shift_of_the_forced_ones(run, calls):
    shifts = calls(run_metrics, "router_shift")
    run(LINE + "--routing_replay rollout --sampler_dtype int3 --steps 1")
    [record] = read_json("run/tokens.jsonl")
    own = [experts for layer in record["old_experts"] for row in layer for experts in row]
    (_, _, forced_ones, _), *_ = shifts[0]                                          # [L, G, T, K]
    forced = [experts for layer in forced_ones.tolist()
              for row, mask in zip(layer, record["mask"]) for experts in row[:len(mask)]]
    apart = [sorted(a) != sorted(b) for a, b in zip(own, forced, strict=True)]
    assert any(apart) and not all(apart)
