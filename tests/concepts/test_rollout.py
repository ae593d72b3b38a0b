"""rollout.py: python -m pytest tests/concepts/test_rollout.py

References: transformers' own generation, plain sampling of every row, and frequencies against exact probabilities.
"""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from moe import TinyMoE
from plumbing.speed.rollouts import concat
from plumbing.speed.fast import sample
from rollout import draw, token_logp
from plumbing.data.running_sum import builtin_tokenizer

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


SHOTS = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))        # 25 tokens that all prompts begin with


def few_shot(model, **options):
    uniforms = torch.rand(12, 10, generator=torch.Generator().manual_seed(4))
    return sample(model, TOKENIZER, [SHOTS + p for p in (*PROMPTS, "7=")], 3, 10, 1.0, uniforms, **options)


def test_a_common_prefix_survives_cutting_and_joining():
    rollout = few_shot(qwen3())
    parts = concat([rollout.groups(torch.tensor([2, 0])), rollout.rows(3, 6), rollout.rows(9, 12)])
    assert rollout.rows(4, 5).prefix == parts.prefix == len(SHOTS)
    for q, i in enumerate((2, 0, 1, 3)):
        assert torch.equal(parts.prompt_ids[q][parts.prompt_mask[q]], rollout.prompt_ids[i][rollout.prompt_mask[i]])
    other = sample(qwen3(), TOKENIZER, PROMPTS, 3, 10)
    assert concat([rollout, other]).prefix == other.prefix == 0


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


def test_the_same_uniforms_give_the_same_tokens_however_rows_are_divided():
    model = qwen3()
    uniforms = torch.rand(9, 12, generator=torch.Generator().manual_seed(1))
    whole = sample(model, TOKENIZER, PROMPTS, 3, 12, 1.0, uniforms)
    parts = concat([sample(model, TOKENIZER, PROMPTS[i:i + 1], 3, 12, 1.0, uniforms[3 * i:3 * i + 3]) for i in range(3)])
    assert parts.texts == whole.texts and torch.equal(parts.mask, whole.mask)
    assert torch.allclose(parts.sampler_logp, whole.sampler_logp, atol=1e-5)
    assert torch.equal(parts.prompt_ids[parts.prompt_mask], whole.prompt_ids[whole.prompt_mask])


def test_draw_follows_the_softmax():
    """Any way to draw passes; that the inverse CDF is exact to rounding is tests/house/test_exact.py's to say."""
    logits = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0])
    p, n = logits.softmax(-1), 40_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(draw(logits.expand(n, -1), uniform), minlength=5) / n
    assert (counts - p).abs().le(4 * (p * (1 - p) / n).sqrt() + 1e-6).all(), "four standard errors"
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


@pytest.mark.parametrize("stop", [["5"], ["=", "12"]])
def test_stop_strings_work_with_a_tokenizer_that_has_no_letters(stop):
    """transformers' own test says "substring not found" there."""
    uniforms = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))
    rows = sample(qwen3(), TOKENIZER, ["3+8="], 24, 12, 1.0, uniforms, stop=stop)
    free = sample(qwen3(), TOKENIZER, ["3+8="], 24, 12, 1.0, uniforms)
    stopped = 0
    for i in range(24):
        ids = free.response_ids[i][free.mask[i]].tolist()
        spelled = [TOKENIZER.decode(ids[:n + 1]) for n in range(len(ids))]
        end = next((n + 1 for n, text in enumerate(spelled) if any(s in text for s in stop)), len(ids))
        assert rows.response_ids[i][rows.mask[i]].tolist() == ids[:end]
        stopped += end < len(ids)
    assert stopped > 3


def test_prompts_picks_whole_groups():
    rollout = rolled(qwen3(), G=2)
    picked = rollout.groups(torch.tensor([2, 0]))
    assert picked.texts == rollout.texts[4:6] + rollout.texts[0:2]
    assert torch.equal(picked.response_ids, rollout.response_ids[[4, 5, 0, 1]]) and torch.equal(picked.prompt_ids, rollout.prompt_ids[[2, 0]])


def test_a_token_that_is_ruled_out_has_no_entropy():
    """A logit of -inf: 0 · log 0 is 0, in the value and in the gradient."""
    logits = torch.tensor([[1.0, -torch.inf, 0.5], [0.0, 0.0, 2.0]], requires_grad=True)
    chosen, entropy = token_logp(lambda hidden: hidden, logits, torch.tensor([0, 2]), 1.0, entropy_grad=True)
    kept = torch.tensor([1.0, 0.5], dtype=torch.float64).requires_grad_()
    want = -(kept.softmax(-1) * kept.log_softmax(-1)).sum()
    assert entropy[0].item() == pytest.approx(want.item(), rel=1e-6) and chosen.isfinite().all()
    gradient, = torch.autograd.grad(entropy.sum(), logits)
    expected, = torch.autograd.grad(want, kept)
    assert gradient[0].tolist() == pytest.approx([expected[0].item(), 0.0, expected[1].item()], rel=1e-5)
