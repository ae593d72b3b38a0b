"""moe.py, the policy: python -m pytest tests/concepts/test_moe.py

Reference: transformers' Qwen3MoeForCausalLM with the same weights, on the CPU in float32.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache,
                          GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache)

import train
from moe import TinyMoE
from plumbing.speed.experts import AllExperts
from tiny_run import TINY_MODEL

SHAPE = dict(vocab_size=19, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             intermediate_size=48, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
             max_position_embeddings=64, initializer_range=0.1)
VARIANTS = {
    "grouped queries": {},
    "a key per query": dict(num_key_value_heads=4, head_dim=16),
    "gates not normalized": dict(norm_topk_prob=False),
    "tied head": dict(tie_word_embeddings=True),
    "dense layer by name": dict(mlp_only_layers=[1]),
    "dense layers by step": dict(decoder_sparse_step=2, num_hidden_layers=4),
    "top-1, biases, padding id": dict(num_experts_per_tok=1, norm_topk_prob=False, attention_bias=True, pad_token_id=0),
    "experts of an odd width": dict(moe_intermediate_size=13),
    "all experts": dict(num_experts_per_tok=6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
}


def pair(**changes):
    """TinyMoE and transformers' model with the same random weights, norms and biases included."""
    torch.manual_seed(0)
    tiny = TinyMoE(Qwen3MoeConfig(**SHAPE | changes)).eval()
    for name, weight in tiny.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | changes)).eval()
    reference.set_experts_implementation("eager")            # a loop over experts: torch's grouped product is ours
    reference.load_state_dict(tiny.state_dict())             # strict: the same names and shapes
    reference.tie_weights()
    return tiny, reference


def left_padded(rows=4, width=11):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SHAPE["vocab_size"], (rows, width), generator=generator)
    mask = (torch.arange(width) >= torch.arange(rows)[:, None] * 2).long()
    return ids, mask


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_every_gradient_equal_transformers(changes):
    tiny, reference = pair(**changes)
    ids, mask = left_padded()
    weights = torch.randn(*ids.shape, SHAPE["vocab_size"], generator=torch.Generator().manual_seed(2)) * mask[..., None]
    for attention in (None, mask):
        ours, theirs = (m(input_ids=ids, attention_mask=attention).logits for m in (tiny, reference))
        assert (ours - theirs)[mask.bool()].abs().max() < 1e-5
        for model, logits in ((tiny, ours), (reference, theirs)):
            model.zero_grad()
            (logits.log_softmax(-1) * weights).sum().backward()
        theirs = dict(reference.named_parameters())
        assert {name for name, _ in tiny.named_parameters()} == set(theirs)
        for name, weight in tiny.named_parameters():
            assert (weight.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name


def test_left_padding_changes_no_real_token():
    tiny, _ = pair()
    ids, mask = left_padded()
    padded = tiny(ids, mask).logits
    for row, m, logits in zip(ids, mask.bool(), padded):
        assert torch.allclose(tiny(row[m][None]).logits[0], logits[m], atol=1e-5)


def test_positions_are_derived_from_the_mask_or_given():
    tiny, reference = pair()
    ids, mask = left_padded()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(tiny(ids, mask).logits, tiny(ids, mask, position_ids=position).logits)
    ours, theirs = (m(input_ids=ids, attention_mask=mask, position_ids=position * 3 + 5).logits for m in (tiny, reference))
    assert (ours - theirs)[mask.bool()].abs().max() < 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", [[11], [4, 7], [4] + [1] * 7])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_full_pass(padded, chunks, static):
    tiny, _ = pair()
    ids, mask = left_padded()
    attention = mask if padded else None
    full = tiny(ids, attention).logits
    cache = StaticCache(tiny.config, max_cache_len=16) if static else DynamicCache(config=tiny.config)
    parts, past = [], 0
    for width in chunks:
        now = slice(past, past + width)
        seen = attention[:, :past + width] if padded else None
        out = tiny(ids[:, now], seen, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        parts.append(out.logits)
        past += width
    real = mask.bool() if padded else torch.ones_like(mask).bool()
    assert (torch.cat(parts, 1) - full)[real].abs().max() < 1e-5


@torch.no_grad()
def test_a_cache_is_made_when_asked_for_and_the_head_can_be_limited():
    tiny, _ = pair()
    ids, _ = left_padded()
    out = tiny(ids, use_cache=True, logits_to_keep=2)
    assert torch.allclose(out.logits, tiny(ids).logits[:, -2:], atol=1e-6)
    assert out.past_key_values.get_seq_length() == ids.shape[1]
    assert tiny(ids).past_key_values is None
    assert torch.equal(tiny.get_output_embeddings()(tiny.base_model(input_ids=ids).last_hidden_state), tiny(ids).logits)


def test_gradients_flow_through_a_cached_prompt():
    tiny, _ = pair()
    ids, _ = left_padded()
    grads = []
    for split in (False, True):
        tiny.zero_grad()
        cache = DynamicCache(config=tiny.config)
        parts = [ids[:, :5], ids[:, 5:]] if split else [ids]
        logits = torch.cat([tiny(p, past_key_values=cache, use_cache=True).logits for p in parts], 1)
        logits.log_softmax(-1)[..., 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in tiny.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[0].norm()


def test_gradient_checkpointing_changes_nothing():
    tiny, _ = pair()
    ids, mask = left_padded()
    results = []
    for on in (False, True):
        tiny.train().zero_grad()
        if on:
            tiny.activation_checkpointing_enable()
        logits = tiny(ids, mask, use_cache=on).logits
        logits.log_softmax(-1)[mask.bool()][:, 3].sum().backward()
        results.append((logits, [p.grad for p in tiny.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0][1], results[1][1]))
    with pytest.raises(ValueError, match="past_key_values"):
        tiny(ids, past_key_values=DynamicCache(config=tiny.config))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@torch.no_grad()
def test_bfloat16_and_autocast_run():
    tiny, _ = pair()
    ids, mask = left_padded()
    exact = tiny(ids, mask).logits.softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = tiny(ids, mask).logits.float().softmax(-1)
    rounded = tiny.to(torch.bfloat16)(ids, mask).logits.float().softmax(-1)
    for other in (cast, rounded):
        assert (other - exact)[mask.bool()].abs().max() < 0.05


# ---------------------------------------------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True), dict(mlp_only_layers=[1], pad_token_id=0)], ids=str)
@torch.no_grad()
def test_transformers_reads_our_checkpoint_and_generates(tmp_path, changes):
    tiny, _ = pair(**changes)
    tiny.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3_moe" and not list(tmp_path.glob("*.bin"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, mask = left_padded()
    ours = tiny(ids, mask).logits
    assert (theirs(input_ids=ids, attention_mask=mask).logits - ours)[mask.bool()].abs().max() < 1e-5
    generated = theirs.generate(input_ids=ids[:1], max_new_tokens=3, do_sample=False)
    for t in range(ids.shape[1], generated.shape[1]):
        assert generated[0, t] == tiny(generated[:, :t], logits_to_keep=1).logits.argmax()


@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True), dict(decoder_sparse_step=2)], ids=str)
@torch.no_grad()
def test_we_read_what_transformers_and_we_wrote(tmp_path, changes):
    tiny, reference = pair(**changes)
    ids, _ = left_padded()
    for model in (reference, tiny):
        model.save_pretrained(tmp_path)
        again = TinyMoE.from_pretrained(tmp_path)
        assert torch.equal(again(ids).logits, tiny(ids).logits)
        assert all(p.requires_grad and p.device.type == "cpu" for p in again.parameters())
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == bool(changes.get("tie_word_embeddings"))


def test_a_given_state_dict_is_saved_and_the_precision_is_kept(tmp_path):
    tiny, _ = pair()
    weights = {name: torch.zeros_like(w, dtype=torch.bfloat16) for name, w in tiny.state_dict().items()}
    tiny.save_pretrained(tmp_path, state_dict=weights)
    again = TinyMoE.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16} and all((p == 0).all() for p in again.parameters())
    assert next(tiny.parameters()).abs().sum() > 0


def test_all_tokens_that_end_a_response_survive_load_and_save(workplace):
    """A checkpoint whose comma ends a response, as its end-of-sequence token does."""
    made, = (workplace / "runs" / "cold_start").iterdir()
    folder = shutil.copytree(made, workplace / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(",")]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    train.main([*TINY_MODEL, "--model_name_or_path", str(folder), "--steps", "1", "--output_dir", "run"])
    saved = workplace / "run" / "checkpoints" / "step_1"
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == ends
    assert TinyMoE.from_pretrained(saved).generation_config.eos_token_id == ends
    for line in (workplace / "run" / "samples.jsonl").read_text().splitlines():
        for sample in json.loads(line)["samples"]:
            assert "," not in sample["response"][:-1]        # nothing follows the first comma


def edited(change):
    """A damage done to the weights of a checkpoint folder."""
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return damage


def reconfigured(**values):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
    return damage


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
BAD = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json there"),
    "pickled weights only": (pickled, "pickled weights are not read"),
    "weights missing": (edited(lambda w: w.pop("model.norm.weight")), "model.norm.weight"),
    "an expert missing": (edited(lambda w: w.pop(EXPERT)), "some experts' weights are missing"),
    "misshapen": (edited(lambda w: w.update({"model.norm.weight": torch.ones(5)})), "norm.weight"),
    "an expert misshapen": (edited(lambda w: w.update({EXPERT: torch.ones(5, 32)})),
                            "some experts' weights are missing"),
    "left over": (edited(lambda w: w.update({"model.layers.7.x": torch.ones(5)})), "layers.7.x"),
    "fewer layers in config": (reconfigured(num_hidden_layers=2), "model.layers.2"),
    "more layers in config": (reconfigured(num_hidden_layers=4), "model.layers.3"),
    "more experts in config": (reconfigured(num_experts=8, num_local_experts=8), "mlp"),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"), "header"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "another architecture": (reconfigured(model_type="mixtral"), "model.layers.0"),
    "top-K": (reconfigured(num_experts_per_tok=7), "num_experts_per_tok 7 exceeds num_experts 6"),
    "RoPE scaling": (reconfigured(rope_parameters=LINEAR), "'linear'"),
    "sliding window": (reconfigured(use_sliding_window=True, sliding_window=4), "sliding_window 4"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_a_bad_checkpoint_ends_the_script_in_one_line(tmp_path, monkeypatch, damage, words, capfd):
    """Whatever is wrong with the weights: none is ever filled in with random numbers."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "checkpoint"
    pair()[0].save_pretrained(folder)
    damage(folder)
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        train.main(["--model_name_or_path", str(folder), "--device", "cpu", "--output_dir", str(tmp_path / "run")])
    message = capfd.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1
    assert message.startswith(f"train.py: --model_name_or_path {folder}") and words in message


def test_the_class_itself_refuses_what_it_cannot_be(tmp_path):
    pair()[0].save_pretrained(tmp_path)
    reconfigured(model_type="mixtral")(tmp_path)
    with pytest.raises(ValueError, match="reads model_type 'qwen3_moe', not 'mixtral'"):
        TinyMoE.from_pretrained(tmp_path)


def test_a_config_that_cannot_be_built_is_refused():
    for changes, words in ((dict(num_experts_per_tok=7), "num_experts_per_tok 7 exceeds num_experts 6"),
                           (dict(hidden_act="gelu"), "hidden_act 'gelu'"), (dict(attention_dropout=0.1), "dropout 0.1")):
        with pytest.raises(ValueError, match=words):
            TinyMoE(Qwen3MoeConfig(**SHAPE | changes))


def test_all_experts_at_once_are_the_chosen_ones_one_by_one():
    experts = pair()[0].model.layers[0].mlp.experts
    x = torch.randn(23, experts.down_proj.shape[1])                                 # [N, D]
    gates, indices = torch.rand(23, len(experts.down_proj)).topk(2, -1)             # [N, K]
    found = []
    for way in (experts, AllExperts(experts)):                                      # the same parameters
        given = x.clone().requires_grad_(), gates.clone().requires_grad_()
        y = way(*given, indices)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*given, *experts.parameters()])])
    for one, other in zip(*found):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max(), (one - other).abs().max()
