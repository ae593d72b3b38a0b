"""moe.py, the policy: python -m pytest tests/concepts/test_moe.py

Reference: transformers' Qwen3MoeForCausalLM with the same weights, on the CPU in float32.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import models
from moe import TinyMoE
from tiny_run import read_json

V = 19
SHAPE = dict(vocab_size=V, num_hidden_layers=3, moe_intermediate_size=24, num_experts=6,
             norm_topk_prob=True, max_position_embeddings=64, eos_token_id=None, pad_token_id=None)
VARIANTS = {
    "grouped queries": {},
    "a key per query": dict(num_key_value_heads=4, head_dim=16),
    "gates not normalized": dict(norm_topk_prob=False),
    "tied head": dict(tie_word_embeddings=True),
    "top-1, biases, padding id": dict(num_experts_per_tok=1, norm_topk_prob=False,
                                      attention_bias=True, pad_token_id=0),
    "experts of an odd width": dict(moe_intermediate_size=13),
    "all experts": dict(num_experts_per_tok=6,
                        rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
}


def make(**changes):
    """TinyMoE with random norms and biases, too."""
    tiny = models.make("tiny_moe", **SHAPE | changes)
    for weight in tiny.parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return tiny


def pair(**changes):
    """TinyMoE and transformers' model with the same weights."""
    tiny, reference = make(**changes), models.make("qwen3_moe", **SHAPE | changes)
    reference.set_experts_implementation("eager")            # a loop over experts
    reference.load_state_dict(tiny.state_dict())             # strict: the same names and shapes
    reference.tie_weights()
    return tiny, reference


IDS = torch.randint(1, V, (4, 11), generator=torch.Generator().manual_seed(1))
REAL = torch.arange(11) >= torch.arange(4)[:, None] * 2                # left-padded
MASK = REAL.long()


def apart(one, other, where=REAL):
    """The largest difference of two tensors of logits at real tokens."""
    return (one - other)[where].abs().max()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_every_gradient_equal_transformers(changes):
    both = pair(**changes)
    factors = torch.randn(4, 11, V, generator=torch.Generator().manual_seed(2)) * MASK[..., None]
    for attention in (None, MASK):
        logits = [model(input_ids=IDS, attention_mask=attention).logits for model in both]
        assert apart(*logits) < 1e-5
        for model, found in zip(both, logits):
            model.zero_grad()
            (found.log_softmax(-1) * factors).sum().backward()
        ours, theirs = (dict(model.named_parameters()) for model in both)
        assert ours.keys() == theirs.keys()
        largest = max(weight.grad.norm() for weight in theirs.values())
        for name, weight in ours.items():
            gap = (weight.grad - theirs[name].grad).norm()
            assert gap <= 1e-4 * theirs[name].grad.norm() + 1e-6 * largest, name


def test_positions_are_derived_from_the_mask_or_given():
    tiny, reference = pair()
    position = (MASK.cumsum(-1) - 1).clamp(min=0)
    given = tiny(IDS, MASK, position_ids=position).logits
    assert torch.equal(tiny(IDS, MASK).logits, given)
    ours, theirs = (model(input_ids=IDS, attention_mask=MASK, position_ids=position * 3 + 5).logits
                    for model in (tiny, reference))
    assert apart(ours, theirs) < 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", [[11], [4, 7], [4] + [1] * 7], ids=str)
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_full_pass(padded, chunks):
    tiny, mask = make(), MASK if padded else None
    cache = DynamicCache(config=tiny.config)
    parts, past = [], 0
    for part in IDS.split(chunks, 1):
        past += part.shape[1]
        seen = mask[:, :past] if padded else None
        out = tiny(part, seen, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        parts.append(out.logits)
    real = REAL if padded else torch.ones_like(REAL)
    assert apart(torch.cat(parts, 1), tiny(IDS, mask).logits, real) < 1e-5


@torch.no_grad()
def test_a_cache_is_made_when_asked_for_and_the_head_can_be_limited():
    tiny = make()
    logits = tiny(IDS).logits
    out = tiny(IDS, use_cache=True, logits_to_keep=2)
    assert torch.allclose(out.logits, logits[:, -2:], atol=1e-6)
    assert out.past_key_values.get_seq_length() == IDS.shape[1]
    assert tiny(IDS).past_key_values is None
    hidden = tiny.base_model(input_ids=IDS).last_hidden_state
    assert torch.equal(tiny.get_output_embeddings()(hidden), logits)


# ------------------------------------------------------------------------------------ checkpoints

@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True, pad_token_id=0)], ids=str)
@torch.no_grad()
def test_transformers_reads_our_checkpoint(tmp_path, changes):
    tiny = make(**changes)
    tiny.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert not list(tmp_path.glob("*.bin"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert apart(theirs(input_ids=IDS, attention_mask=MASK).logits, tiny(IDS, MASK).logits) < 1e-5


@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True)], ids=str)
@torch.no_grad()
def test_we_read_what_transformers_and_we_wrote(tmp_path, changes):
    tiny, reference = pair(**changes)
    for model in (reference, tiny):
        model.save_pretrained(tmp_path)
        again = TinyMoE.from_pretrained(tmp_path)
        assert torch.equal(again(IDS).logits, tiny(IDS).logits)
        assert all(p.requires_grad and p.device.type == "cpu" for p in again.parameters())
        tied = again.lm_head.weight is again.model.embed_tokens.weight
        assert tied == ("tie_word_embeddings" in changes)


def test_the_precision_of_saved_weights_is_kept(tmp_path):
    make().bfloat16().save_pretrained(tmp_path)
    for weight in TinyMoE.from_pretrained(tmp_path).parameters():
        assert weight.dtype == torch.bfloat16


def edited(change):
    """A damage done to the weights of a checkpoint folder."""
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return damage


def reconfigured(**values):
    def damage(folder):
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    return damage


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
BAD = {
    "an expert missing": (edited(lambda w: w.pop(EXPERT)), None),
    "misshapen": (edited(lambda w: w.update({"model.norm.weight": torch.ones(5)})), "norm.weight"),
    "an expert misshapen": (edited(lambda w: w.update({EXPERT: torch.ones(5, 32)})), None),
    "left over": (edited(lambda w: w.update({"model.layers.7.x": torch.ones(5)})), "layers.7.x"),
    "another architecture": (reconfigured(model_type="mixtral"), "model_type 'mixtral'"),
    "RoPE scaling": (reconfigured(rope_parameters=LINEAR), "'linear'"),
    "sliding window": (reconfigured(use_sliding_window=True, sliding_window=4),
                       "sliding_window 4"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_no_weight_of_a_bad_checkpoint_is_filled_in_with_random_numbers(damage, words, tmp_path):
    make().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=words):
        TinyMoE.from_pretrained(tmp_path)
