"""Log-probs, the plain way and the fast one: python -m pytest tests/speed/test_logprobs.py

Reference: transformers' own model called on one unpadded sequence at a time (tests/models.py).
"""

import functools
from dataclasses import replace

import pytest
import torch

import models
import rollout as plain
from models import gradient, own_logp, own_scores
from plumbing.model.actor import checkpoint_activations
from plumbing.speed import fast
from plumbing.speed.caches import has_plain_cache
from plumbing.speed.fast import (distinct, groups_per_row, packed_hidden, response_logp,
                                 shared_hidden)
from plumbing.speed.rollouts import FastRollout
from rollout import left_pad
from test_rollout import PROMPTS, every_model, make, rolled

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
    "equal responses": lambda model: (repeated(rolled(model, G=4, seed=15)).rows(0, 8), 1.0)}
WAYS = {  # how: the module, MAX_PACKED, options, gradient checkpointing
    "plain": (plain, 0, {}, False),
    "packed": (fast, fast.MAX_PACKED, {}, False),
    "shared": (fast, 0, {}, False),
    "five rows of logits at a time": (fast, fast.MAX_PACKED, dict(max_logits=17 * 5), False),
    "checkpointing": (fast, fast.MAX_PACKED, {}, True)}


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
    module, packed, options, checkpointing = WAYS[way]
    monkeypatch.setattr(fast, "MAX_PACKED", packed)
    model = make(kind)
    if checkpointing:
        checkpoint_activations(model.train())
    scores = module.response_logp(model, rollout, temperature, entropy_grad=True, **options)
    found = torch.stack([scores.logp, scores.entropy])
    assert torch.allclose(found, want, atol=1e-5)
    difference = gradient(model, (found * weights).sum()) - reference
    assert difference.norm() < 1e-5 * reference.norm()


def test_the_entropy_has_a_gradient_or_is_left_out_as_asked():
    model = make()
    entropy = lambda **asked: response_logp(model, rolled(model), **asked).entropy
    assert entropy(entropy=False) is None and not entropy().requires_grad
    assert entropy(entropy_grad=True).requires_grad


@every_model
def test_a_common_prefix_computed_once_changes_no_token(kind, monkeypatch):
    drawn = lambda: rolled(make(kind), T=10, seed=4, prompts=FEW_SHOT)
    batch = drawn()                                          # a sliding window would count the
    assert batch.prefix == (0 if kind == "sliding" else len(SHOTS))      # padding behind it
    monkeypatch.setattr(fast, "MIN_PREFIX", 10 ** 9)
    slow = drawn()
    assert slow.prefix == 0 and torch.equal(batch.mask, slow.mask)
    assert torch.equal(batch.response_ids, slow.response_ids)


FAMILIES = {
    **dict.fromkeys("""llama qwen2 gemma granite cohere stablelm olmo2 gpt_neox gpt2 bloom
        gemma3_text""".split(), {}),
    **dict.fromkeys(["phi3", "starcoder2", "mixtral"], dict(sliding_window=None)),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32), "falcon": dict(alibi=True)}
NOT_PACKED = ("gpt2", "opt", "bloom", "falcon", "gemma3_text")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_paths_give_the_hidden_states_of_one_unpadded_sequence_in_every_family(
        family, attention):
    """Positions by rotation, by learned vectors, by ALiBi; sliding windows; experts: what cannot be
    packed must not be."""
    shape = dict(vocab_size=64, bos_token_id=1, head_dim=None)
    model = models.make(family, **shape | FAMILIES[family])
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        pytest.skip(str(error)[:60])
    generator = torch.Generator().manual_seed(0)
    tokens = lambda *shape: torch.randint(1, 64, shape, generator=generator)
    common, answers = tokens(17).tolist(), tokens(12, 5)
    prompts = [common + tokens(n).tolist() for n in (2, 6, 3, 5)]
    able = has_plain_cache(model.config)
    assert able == (family != "gemma3_text")
    with torch.no_grad():
        alone = [torch.tensor([[*prompts[i // 3], *answer]])
                 for i, answer in enumerate(answers.tolist())]
        want = torch.stack([model.base_model(input_ids=ids).last_hidden_state[0, -6:-1]
                            for ids in alone])                                      # [B, T, D]
        for prefix in {0, 17 * able}:
            rollout = FastRollout(*left_pad(prompts, 0, "cpu"), answers, answers > 0, None, None,
                                  None, 3, prefix=prefix)
            groups = groups_per_row(model.config, rollout)
            assert groups == (0 if family in NOT_PACKED else 4)
            paths = [plain.response_hidden(model, rollout), shared_hidden(model, rollout)]
            paths += [packed_hidden(model, rollout, k) for k in (1, 2, 4) if groups]
            for path in paths:
                assert torch.allclose(path, want, atol=1e-5 * want.abs().max())


def test_distinct_keeps_what_a_group_holds_once():
    part = repeated(rolled(make(), G=4))
    small, where = distinct(part)
    assert small is part and where == slice(None), "the last group has four kinds: nothing to gain"
    part = part.rows(0, 8)
    small, where = distinct(part)
    assert small.group_size == 2 and len(small.mask) == 4
    assert torch.equal(small.prompt_ids, part.prompt_ids)
    assert torch.equal(small.mask[where], part.mask)
    assert torch.equal(small.response_ids[where][part.mask], part.response_ids[part.mask])
    assert [int(w) // 2 for w in where] == [i // 4 for i in range(8)], "in its own group"
    assert [distinct(part.rows(0, n))[0].group_size for n in (1, 2)] == [1, 2]


@torch.no_grad()
def test_micro_batches_of_a_rollout():
    model = make()
    rollout = rolled(model, G=4)
    want = own_logp(model, rollout)
    for size in (1, 2, 4, 8):                                # parts of a group, and whole groups
        parts = [response_logp(model, rollout.rows(i, min(i + size, 12))).logp
                 for i in range(0, 12, size)]
        assert torch.allclose(torch.cat(parts), want, atol=1e-5)
    with pytest.raises(ValueError, match="cut through groups"):
        rollout.rows(2, 6)


@every_model
def test_one_response_per_prompt_pays_nothing_for_the_machinery(kind):
    model, rows = make(kind), []
    rollout = rolled(model, G=1)
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True)
    response_logp(model, rollout)
    width = rollout.prompt_ids.shape[1] + rollout.mask.shape[1]
    assert rows == [(3, width - 1)], "one plain forward"
