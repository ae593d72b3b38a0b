"""rollout.py and logprobs.py: python -m pytest tests/test_rollout.py

References: transformers' own model called on one unpadded sequence at a time, and frequencies against exact probabilities.
"""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3MoeConfig)

import logprobs
import rollout as code
from moe import TinyMoE
from logprobs import MAX_PACKED, distinct, groups_per_row, packed_hidden, plain_hidden, response_logp, shared_hidden
from rollout import Rollout, concat, draw, left_pad, sample
from tasks import builtin_tokenizer

TOKENIZER = builtin_tokenizer()
PROMPTS = ["3+8=", "1+2+3+4=", "7="]                      # of three lengths: two are left-padded
SHAPE = dict(vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
             eos_token_id=15, pad_token_id=16, initializer_range=0.1)


def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def sliding():                                            # a window shorter than prompt and response: transformers' own cache layers
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)).eval()


def tiny_moe():
    torch.manual_seed(0)
    return TinyMoE(Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)).eval()


MODELS = [qwen3, sliding, tiny_moe]


def rolled(model, G=3, T=12, temperature=1.0, seed=0, **options):
    uniforms = torch.rand(len(PROMPTS) * G, T, generator=torch.Generator().manual_seed(seed))
    return sample(model, TOKENIZER, PROMPTS, G, T, temperature, uniforms, **options)


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
            got = response_logp(model, rollout, temperature, share_prompt=share).logp
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
        (response_logp(model, rollout, share_prompt=share).logp * weights).sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-4, atol=1e-5 * grad.abs().max()), name


SHOTS = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))        # 25 tokens that all prompts begin with


def few_shot(model, **options):
    uniforms = torch.rand(12, 10, generator=torch.Generator().manual_seed(4))
    return sample(model, TOKENIZER, [SHOTS + p for p in (*PROMPTS, "7=")], 3, 10, 1.0, uniforms, **options)


@pytest.mark.parametrize("make", MODELS)
def test_a_common_prefix_computed_once_changes_no_token_no_log_prob_and_no_gradient(make, monkeypatch):
    model = make()
    fast = few_shot(model)
    assert fast.prefix == (0 if make is sliding else len(SHOTS)), "a sliding window would count the padding behind the prefix"
    with torch.no_grad():
        want = reference_logp(model, fast, 1.0)
    assert torch.allclose(fast.sampler_logp, want, atol=1e-5)
    weights, grads = torch.randn(want.shape), []
    for packed, share in ((MAX_PACKED, True), (0, True), (0, False)):
        monkeypatch.setattr(logprobs, "MAX_PACKED", packed)
        model.zero_grad()
        logp = response_logp(model, fast, share_prompt=share).logp
        (logp * weights).sum().backward()
        assert torch.allclose(logp, want, atol=1e-5)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all((g - grads[-1]).norm() < 1e-5 * grads[-1].norm() for g in grads)
    monkeypatch.setattr(code, "MIN_PREFIX", 10 ** 9)
    slow = few_shot(model)
    assert slow.prefix == 0 and torch.equal(fast.response_ids, slow.response_ids) and torch.equal(fast.mask, slow.mask)


def test_a_common_prefix_survives_cutting_and_joining():
    rollout = few_shot(qwen3())
    parts = concat([rollout.prompts(torch.tensor([2, 0])), rollout.rows(3, 6), rollout.rows(9, 12)])
    assert rollout.rows(4, 5).prefix == parts.prefix == len(SHOTS)
    for q, i in enumerate((2, 0, 1, 3)):
        assert torch.equal(parts.prompt_ids[q][parts.prompt_mask[q]], rollout.prompt_ids[i][rollout.prompt_mask[i]])
    other = sample(qwen3(), TOKENIZER, PROMPTS, 3, 10)
    assert concat([rollout, other]).prefix == other.prefix == 0


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
    prompts, able = [common + tokens(n).tolist() for n in (2, 6, 3, 5)], code.has_plain_cache(config)
    assert able == (family != "gemma3_text")
    with torch.no_grad():
        want = torch.stack([model.base_model(input_ids=torch.tensor([[*prompts[i // 3], *answers[i].tolist()]])).last_hidden_state[0, -6:-1]
                            for i in range(12)])             # [B, T, D]
        for prefix in {0, 17 * able}:
            rollout = Rollout(*left_pad(prompts, 0, "cpu", prefix), answers, answers > 0, None, None, None, 3, prefix)
            groups = groups_per_row(config, rollout, 5)
            assert groups == (0 if family in ("gpt2", "opt", "bloom", "falcon", "gemma3_text") else 4)
            paths = [plain_hidden(model, rollout, 5), shared_hidden(model, rollout, 5)]
            paths += [packed_hidden(model, rollout, 5, k) for k in {1, 2, 4} if groups]
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


@pytest.mark.parametrize("make", MODELS)
def test_dropping_ended_rows_changes_no_token(make):
    model = make()
    often, never = rolled(model, drop_every=1, seed=3), rolled(model, drop_every=1000, seed=3)
    assert torch.equal(often.mask, never.mask) and torch.equal(often.response_ids[often.mask], never.response_ids[never.mask])
    assert often.truncated.tolist() == never.truncated.tolist() and often.texts == never.texts


def sharpened(make):
    """A sure policy: its responses to a prompt stay equal for a while, and part later."""
    model = make()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 12
    return model


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("G, T, temperature", [(8, 12, 1.0), (8, 12, 0.5), (4, 6, 0)])
def test_responses_that_are_equal_so_far_share_a_row_and_part_where_they_differ(make, G, T, temperature):
    model, rows = sharpened(make), []
    model.register_forward_pre_hook(lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    tree = rolled(model, G, T, temperature, drop_every=1)
    shared, rows[:] = sum(rows[1:]), []
    each = rolled(model, G, T, temperature, drop_every=1000)
    assert shared < 0.8 * sum(rows[1:]), "the model computes fewer rows"
    assert torch.equal(tree.response_ids[tree.mask], each.response_ids[each.mask]) and torch.equal(tree.mask, each.mask)
    assert tree.texts == each.texts and torch.equal(tree.truncated, each.truncated)
    assert torch.allclose(tree.sampler_logp, each.sampler_logp, atol=1e-5)
    if temperature == 0:
        assert shared <= len(PROMPTS) * (T - 1) and len(set(tree.texts)) <= len(PROMPTS), "greedy: one row per prompt"
    else:
        assert len(set(tree.texts)) > len(PROMPTS)


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
    monkeypatch.setattr(logprobs, "MAX_PACKED", packed)
    model = make()
    part, weights, found = repeated(rolled(model, G=4, T=12)).rows(0, 8), torch.randn(8, 12), []
    for share in (True, False):
        model.zero_grad()
        scores = response_logp(model, part, share_prompt=share, entropy_grad=True)
        ((scores.logp + scores.entropy) * weights[:, :scores.logp.shape[1]]).sum().backward()
        found.append((torch.stack(scores[:2]), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (values, grad), (want, reference) = found
    assert torch.allclose(values, want, atol=1e-5) and (grad - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.parametrize("make", [qwen3, tiny_moe])
def test_a_static_cache_as_compiled_code_wants_it_changes_no_token(make):
    model = make()
    plain, static = rolled(model), rolled(model, compiled=model.forward)
    assert torch.equal(plain.response_ids, static.response_ids) and torch.equal(plain.mask, static.mask)
    torch.testing.assert_close(plain.sampler_logp, static.sampler_logp, rtol=1e-5, atol=1e-5)


def test_a_sliding_window_is_refused_for_compiled_sampling():
    with pytest.raises(ValueError, match="--torch_compile: mistral has other layers"):
        rolled(sliding(), compiled=sliding().forward)


def test_the_same_uniforms_give_the_same_tokens_however_rows_are_divided():
    model = qwen3()
    uniforms = torch.rand(9, 12, generator=torch.Generator().manual_seed(1))
    whole = sample(model, TOKENIZER, PROMPTS, 3, 12, 1.0, uniforms)
    parts = concat([sample(model, TOKENIZER, PROMPTS[i:i + 1], 3, 12, 1.0, uniforms[3 * i:3 * i + 3]) for i in range(3)])
    assert parts.texts == whole.texts and torch.equal(parts.mask, whole.mask)
    assert torch.allclose(parts.sampler_logp, whole.sampler_logp, atol=1e-5)
    assert torch.equal(parts.prompt_ids[parts.prompt_mask], whole.prompt_ids[whole.prompt_mask])


def test_draw_follows_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0])
    p = logits.softmax(-1)
    grid = (torch.arange(100_000) + 0.5) / 100_000       # every quantile once: frequencies are exact to 1e-5
    counts = torch.bincount(draw(logits.expand(len(grid), -1), grid), minlength=5) / len(grid)
    assert torch.allclose(counts, p, atol=2e-5)
    assert draw(logits[None], torch.tensor([0.99999994])).item() < 5


def test_draw_never_picks_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(1001, -1)
    assert set(draw(logits, torch.linspace(0, 0.999999, 1001)).tolist()) == {1, 3}


def test_greedy_is_the_argmax_of_plain_generation():
    model = qwen3()
    rollout = sample(model, TOKENIZER, PROMPTS, 1, 8, temperature=0)
    for prompt, row, mask in zip(PROMPTS, rollout.response_ids, rollout.mask):
        ids = TOKENIZER(prompt, return_tensors="pt")["input_ids"]
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=16)[0, ids.shape[1]:]
        assert row[mask].tolist() == want[:int(mask.sum())].tolist()


def test_the_end_token_is_a_loss_token_and_padding_is_not():
    rollout = rolled(qwen3(), G=8, T=40)
    for ids, mask, cut in zip(rollout.response_ids, rollout.mask, rollout.truncated):
        n = int(mask.sum())
        assert mask[:n].all() and not mask[n:].any()
        assert (ids[:n] == 15).sum() == (0 if cut else 1), "exactly one <eos>, the last loss token, unless the row was cut off"
        if not cut:
            assert ids[n - 1] == 15
        else:
            assert n == 40
    assert rollout.truncated.any() or (~rollout.truncated).any()


def test_a_sampled_pad_token_is_a_loss_token():
    """A random policy really samples <pad>; masks go by position, not by id."""
    rollout = rolled(qwen3(), G=32, T=30)
    assert (rollout.response_ids[rollout.mask] == 16).any()


def byte_tokenizer():
    """A byte-pair tokenizer of 300 tokens, some of which hold the stop string in the middle of other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["a\nb a\nb max(1,2)=2\nmax(3,1)=3\n the the then 12 12 123"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def test_stop_strings_end_a_row_and_stay_loss_tokens():
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | dict(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0))).eval()
    uniforms = torch.rand(64, 40, generator=torch.Generator().manual_seed(0))
    stopped, free = (sample(model, tokenizer, ["max(1,2)="], 64, 40, 1.0, uniforms, stop=stop) for stop in (["\n", "12"], []))
    ends = 0
    for i in range(64):
        ids = stopped.response_ids[i][stopped.mask[i]].tolist()
        assert free.response_ids[i][:len(ids)].tolist() == ids, "the same uniforms, the same tokens up to the stop"
        text = tokenizer.decode(ids, skip_special_tokens=True)
        before = tokenizer.decode(ids[:-1], skip_special_tokens=True)
        assert not any(s in before for s in ("\n", "12")), "a row ends with the token that completes a stop string"
        assert not any(s in stopped.texts[i] for s in ("\n", "12")) and text.startswith(stopped.texts[i])
        ends += any(s in text for s in ("\n", "12"))
        assert stopped.truncated[i] == (len(ids) == 40 and not any(s in text for s in ("\n", "12")) and ids[-1] != 0)
    assert ends > 5


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


def test_prompts_picks_whole_groups():
    rollout = rolled(qwen3(), G=2)
    picked = rollout.prompts(torch.tensor([2, 0]))
    assert picked.texts == rollout.texts[4:6] + rollout.texts[0:2]
    assert torch.equal(picked.response_ids, rollout.response_ids[[4, 5, 0, 1]]) and torch.equal(picked.prompt_ids, rollout.prompt_ids[[2, 0]])
