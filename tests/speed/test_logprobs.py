"""log-probs, the plain way and the quick one: python -m pytest tests/speed/test_logprobs.py

Reference: transformers' own model called on one unpadded sequence at a time.
"""

import runpy
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rollout as plain
from plumbing.speed import fast
from plumbing.speed.caches import has_plain_cache

from plumbing.speed.rollouts import FastRollout
from plumbing.speed.fast import MAX_PACKED, distinct, groups_per_row, packed_hidden, response_logp, shared_hidden
from rollout import left_pad
from test_rollout import MODELS as KINDS, PROMPTS, make as made, rolled

qwen3, sliding, tiny_moe = MODELS = [partial(made, kind) for kind in KINDS]
SHAPE = dict(vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, intermediate_size=48, eos_token_id=15, pad_token_id=16,
             initializer_range=0.1)
SHOTS = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))     # 25 tokens that all prompts begin with


def few_shot(model):
    return rolled(model, T=10, seed=4, prompts=[SHOTS + p for p in (*PROMPTS, "7=")])


def reference_logp(model, rollout, temperature):
    """One sequence at a time, no padding, no cache: [B, T]."""
    out = torch.zeros(rollout.mask.shape)
    for i in range(len(rollout.mask)):
        prompt = rollout.prompt_ids[i // rollout.group_size][rollout.prompt_mask[i // rollout.group_size]]
        answer = rollout.response_ids[i][rollout.mask[i]]
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0] / temperature
        logp = logits.log_softmax(-1)
        for t, token in enumerate(answer):
            out[i, t] = logp[len(prompt) - 1 + t, token]
    return out


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_one_unpadded_sequence_at_a_time(make, temperature):
    model = make()
    rollout = rolled(model, temperature=temperature)
    assert len({int(n) for n in rollout.mask.sum(-1)}) > 2, "rows of several lengths"
    with torch.no_grad():
        want = reference_logp(model, rollout, temperature)
        for share in (True, False):
            got = (fast if share else plain).response_logp(model, rollout, temperature).logp
            assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(rollout.sampler_logp, want, atol=1e-5), "log-probs recorded while sampling"


@pytest.mark.parametrize("make", MODELS)
def test_shared_and_plain_path_have_equal_gradients(make):
    model = make()
    rollout = rolled(model)
    weights = torch.randn(rollout.mask.shape)
    grads = []
    for share in (True, False):
        model.zero_grad()
        ((fast if share else plain).response_logp(model, rollout).logp * weights).sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-4, atol=1e-5 * grad.abs().max()), name


@pytest.mark.parametrize("make", MODELS)
def test_a_common_prefix_computed_once_changes_no_token_no_log_prob_and_no_gradient(make, monkeypatch):
    model = make()
    batch = few_shot(model)
    assert batch.prefix == (0 if make is sliding else len(SHOTS)), "a sliding window would count the padding behind the prefix"
    with torch.no_grad():
        want = reference_logp(model, batch, 1.0)
    assert torch.allclose(batch.sampler_logp, want, atol=1e-5)
    weights, grads = torch.randn(want.shape), []
    for packed, share in ((MAX_PACKED, True), (0, True), (0, False)):
        monkeypatch.setattr(fast, "MAX_PACKED", packed)
        model.zero_grad()
        logp = (fast if share else plain).response_logp(model, batch).logp
        (logp * weights).sum().backward()
        assert torch.allclose(logp, want, atol=1e-5)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all((g - grads[-1]).norm() < 1e-5 * grads[-1].norm() for g in grads)
    monkeypatch.setattr(fast, "MIN_PREFIX", 10 ** 9)
    slow = few_shot(model)
    assert slow.prefix == 0 and torch.equal(batch.response_ids, slow.response_ids) and torch.equal(batch.mask, slow.mask)


FAMILIES = {"llama": {}, "qwen2": {}, "gemma": {}, "granite": {}, "cohere": {}, "stablelm": {}, "olmo2": {}, "phi3": {"sliding_window": None}, "gpt_neox": {},
            "mixtral": {"num_local_experts": 4, "sliding_window": None}, "gpt2": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "bloom": {}, "falcon": {"alibi": True},
            "gemma3_text": {}, "starcoder2": {"sliding_window": None}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_paths_give_the_hidden_states_of_one_unpadded_sequence_in_every_family(family, attention):
    """Positions by rotation, by learned vectors, by ALiBi; sliding windows; experts: what cannot be packed must not be."""
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"} | dict(vocab_size=64, bos_token_id=1)
    config = AutoConfig.for_model(family, **shape | FAMILIES[family])
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except ValueError as error:
        pytest.skip(str(error)[:60])
    generator = torch.Generator().manual_seed(0)
    tokens = lambda *shape: torch.randint(1, 64, shape, generator=generator)
    common, answers = tokens(17).tolist(), tokens(12, 5)
    prompts, able = [common + tokens(n).tolist() for n in (2, 6, 3, 5)], has_plain_cache(config)
    assert able == (family != "gemma3_text")
    with torch.no_grad():
        want = torch.stack([model.base_model(input_ids=torch.tensor([[*prompts[i // 3], *answers[i].tolist()]])).last_hidden_state[0, -6:-1]
                            for i in range(12)])             # [B, T, D]
        for prefix in {0, 17 * able}:
            rollout = FastRollout(*left_pad(prompts, 0, "cpu"), answers, answers > 0, None, None, None, 3, prefix=prefix)
            groups = groups_per_row(config, rollout)
            assert groups == (0 if family in ("gpt2", "opt", "bloom", "falcon", "gemma3_text") else 4)
            paths = [plain.response_hidden(model, rollout), shared_hidden(model, rollout)]
            paths += [packed_hidden(model, rollout, k) for k in {1, 2, 4} if groups]
            assert all(torch.allclose(path, want, atol=1e-5 * want.abs().max()) for path in paths)


def test_gradient_checkpointing_takes_the_plain_path_and_changes_nothing():
    for make in (qwen3, tiny_moe):
        model = make().train()
        rollout = rolled(model)
        model.train()
        grads = []
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable()
            model.zero_grad()
            response_logp(model, rollout).logp.sum().backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert torch.allclose(grads[0], grads[1], rtol=1e-4, atol=1e-5 * grads[0].abs().max())


def test_head_in_chunks_changes_nothing():
    model = qwen3()
    rollout = rolled(model)
    grads, values = [], []
    for limit in (2 ** 24, 17 * 5):                       # all at once; five rows at a time
        model.zero_grad()
        scores = response_logp(model, rollout, max_logits=limit, entropy_grad=True)
        (scores.logp.sum() + scores.entropy.sum()).backward()
        values.append(torch.stack([scores.logp, scores.entropy]).detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(values[0], values[1], atol=1e-6)
    assert torch.allclose(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_next_token_distribution():
    model = qwen3()
    rollout = rolled(model, G=1, temperature=0.8)
    scores = response_logp(model, rollout, 0.8)
    row = int(rollout.mask.sum(-1).argmax())
    prompt, answer = rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.response_ids[row][rollout.mask[row]]
    p = (model(input_ids=torch.cat([prompt, answer])[None]).logits[0] / 0.8).softmax(-1)
    want = -(p * p.log()).sum(-1)[len(prompt) - 1:len(prompt) - 1 + len(answer)]
    assert torch.allclose(scores.entropy[row][rollout.mask[row]], want, atol=1e-5)
    assert not scores.entropy.requires_grad or response_logp(model, rollout, entropy_grad=False).entropy.grad_fn is not None


def repeated(rollout):
    """The rollout with responses that occur twice in their group, but for the last group."""
    rows = torch.tensor([0, 0, 1, 0, 4, 5, 5, 4, 8, 9, 10, 11])
    return replace(rollout, response_ids=rollout.response_ids[rows], mask=rollout.mask[rows], sampler_logp=rollout.sampler_logp[rows])


def test_distinct_keeps_what_a_group_holds_once():
    part = repeated(rolled(qwen3(), G=4, T=12))
    small, where = distinct(part)
    assert small is part and where == slice(None), "the last group has four kinds: nothing to gain"
    part = part.rows(0, 8)
    small, where = distinct(part)
    assert small.group_size == 2 and len(small.mask) == 4 and torch.equal(small.prompt_ids, part.prompt_ids)
    assert torch.equal(small.mask[where], part.mask) and torch.equal(small.response_ids[where][part.mask], part.response_ids[part.mask])
    assert all(int(w) // 2 == i // 4 for i, w in enumerate(where)), "in its own group"
    assert distinct(part.rows(0, 1))[0].group_size == 1 and distinct(part.rows(0, 2))[0].group_size == 2


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("packed", [MAX_PACKED, 0])
def test_responses_that_occur_twice_are_computed_once_with_the_same_gradients(make, packed, monkeypatch):
    monkeypatch.setattr(fast, "MAX_PACKED", packed)
    model = make()
    part, weights, found = repeated(rolled(model, G=4, T=12)).rows(0, 8), torch.randn(8, 12), []
    for share in (True, False):
        model.zero_grad()
        scores = (fast if share else plain).response_logp(model, part, entropy_grad=True)
        ((scores.logp + scores.entropy) * weights[:, :scores.logp.shape[1]]).sum().backward()
        found.append((torch.stack([scores.logp, scores.entropy]), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (values, grad), (want, reference) = found
    assert torch.allclose(values, want, atol=1e-5) and (grad - reference).norm() < 1e-5 * reference.norm()


def test_micro_batches_of_a_rollout():
    model = qwen3()
    rollout = rolled(model, G=4)
    with torch.no_grad():
        whole = response_logp(model, rollout).logp
        for size in (1, 2, 4, 8):                         # parts of a group, and whole groups
            parts = torch.cat([response_logp(model, rollout.rows(i, min(i + size, 12))).logp for i in range(0, 12, size)])
            assert torch.allclose(parts, whole, atol=1e-5)
    with pytest.raises(ValueError, match="cut through groups"):
        rollout.rows(2, 6)


@pytest.mark.parametrize("make", MODELS)
def test_one_response_per_prompt_pays_nothing_for_the_machinery(make):
    model, rows = make(), []
    rollout = rolled(model, G=1)
    model.base_model.register_forward_pre_hook(lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True)
    response_logp(model, rollout)
    assert rows == [(3, rollout.prompt_ids.shape[1] + rollout.mask.shape[1] - 1)], "one plain forward"


@pytest.mark.parametrize("name, words", [("rollout", "log-probs of sampling against recomputed ones")])
def test_the_demos_show_their_concept(name, words, capsys):
    runpy.run_module(name, run_name="__main__")
    assert words in capsys.readouterr().out
