"""Log-probs, the plain way and the fast one: python -m pytest tests/speed/test_logprobs.py

Reference: transformers' own model called on one unpadded sequence at a time (tests/models.py).
"""

import functools
from dataclasses import replace

import pytest
import torch

from models import gradient, own_scores
from plumbing.model.actor import checkpoint_activations
from plumbing.speed import fast
from plumbing.speed.fast import merge_repeats, fast_response_logp, fast_sample, groups_per_row
from rollout import response_logp
from test_rollout import PROMPTS, every_model, make
from test_rollout import rolled as plainly_rolled

rolled = functools.partial(plainly_rolled, draw_with=fast_sample)
SHOTS = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))     # 25 tokens, of all prompts
FEW_SHOT = [SHOTS + prompt for prompt in (*PROMPTS, "7=")]


def repeated(rollout):
    """The rollout with responses that occur twice in their group, but for the last group."""
    rows = torch.tensor([0, 0, 1, 0, 4, 5, 5, 4, 8, 9, 10, 11])
    return replace(rollout, response_ids=rollout.response_ids[rows], mask=rollout.mask[rows],
                   sampler_logp=rollout.sampler_logp[rows])


BATCHES = {  # what is scored, with the temperature
    "several lengths": lambda model: (rolled(model), 1.0),
    "temperature": lambda model: (rolled(model, temperature=0.7), 0.7),
    "a common prefix": lambda model: (rolled(model, T=10, seed=4, prompts=FEW_SHOT), 1.0),
    "equal responses": lambda model: (
        repeated(rolled(model, G=4, seed=15)).take(torch.arange(8)), 1.0)}
WAYS = {  # how: the function, MAX_PACKED, MAX_LOGITS, gradient checkpointing
    "plain": (response_logp, 0, 2**24, False),
    "packed": (fast_response_logp, fast.MAX_PACKED, 2**24, False),
    "shared": (fast_response_logp, 0, 2**24, False),
    "five rows of logits at a time": (fast_response_logp, fast.MAX_PACKED, 17 * 5, False),
    "checkpointing": (fast_response_logp, fast.MAX_PACKED, 2**24, True)}


@functools.cache
def one_at_a_time(kind, batch):
    """(rollout, temperature, weights of the sum, values [2, B, T], gradient), the reference."""
    model = make(kind)
    rollout, temperature = BATCHES[batch](model)
    assert len({int(n) for n in rollout.mask.sum(-1)}) > 2, "rows of several lengths"
    weights = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(2))
    want = torch.stack(own_scores(model, rollout, temperature))
    reference = gradient(model, (want * weights).sum())
    assert torch.allclose(rollout.sampler_logp, want[0], atol=1e-5), "recorded while sampling"
    return rollout, temperature, weights, want.detach(), reference


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@every_model
def test_every_way_gives_the_values_and_the_gradient_of_one_sequence_at_a_time(
        kind, batch, way, monkeypatch):
    rollout, temperature, weights, want, reference = one_at_a_time(kind, batch)
    score, packed, logits, checkpointing = WAYS[way]
    monkeypatch.setattr(fast, "MAX_PACKED", packed)
    monkeypatch.setattr("rollout.MAX_LOGITS", logits)
    model = make(kind)
    if checkpointing:
        checkpoint_activations(model.train())
    scores = score(model, rollout, temperature)
    found = torch.stack([scores.logp, scores.entropy])
    assert torch.allclose(found, want, atol=1e-5)
    difference = gradient(model, (found * weights).sum()) - reference
    assert difference.norm() < 1e-5 * reference.norm()


def test_the_entropy_has_a_gradient_or_is_left_out_as_asked():
    model = make()
    entropy = lambda **asked: fast_response_logp(model, rolled(model), **asked).entropy
    assert entropy(entropy=False) is None and entropy().requires_grad


@every_model
def test_a_common_prefix_computed_once_changes_no_token(kind, monkeypatch):
    drawn = lambda: rolled(make(kind), T=10, seed=4, prompts=FEW_SHOT)
    batch = drawn()                                          # a sliding window would count the
    assert batch.prefix == (0 if kind == "sliding" else len(SHOTS))      # padding behind it
    monkeypatch.setattr(fast, "MIN_PREFIX", 10 ** 9)
    slow = drawn()
    assert slow.prefix == 0 and torch.equal(batch.mask, slow.mask)
    assert torch.equal(batch.response_ids, slow.response_ids)


def test_what_can_be_packed_is():
    """That what cannot be packed is not: tests/model/test_families.py."""
    assert groups_per_row(make().config, rolled(make())) == len(PROMPTS)


def test_merge_repeats_keeps_what_a_group_holds_once():
    part = repeated(rolled(make(), G=4))
    small, where = merge_repeats(part)
    assert small is part and where == slice(None), "the last group has four kinds: nothing to gain"
    part = part.take(torch.arange(8))
    small, where = merge_repeats(part)
    assert small.group_size == 2 and len(small.mask) == 4
    assert [merge_repeats(part.take(torch.arange(n)))[0].group_size for n in (1, 2)] == [1, 2]


@every_model
def test_one_response_per_prompt_pays_nothing_for_the_machinery(kind):
    model, rows = make(kind), []
    rollout = rolled(model, G=1)
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True)
    fast_response_logp(model, rollout)
    width = rollout.prompt_ids.shape[1] + rollout.mask.shape[1]
    assert rows == [(3, width - 1)], "one plain forward"
