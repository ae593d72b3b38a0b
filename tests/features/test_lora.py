"""LoRA and frozen matrices in 16 bits: features/lora.py, plumbing/model/frozen.py.

References: peft's own PeftModel, torch's AdamW on the same weights, the flags through train.main.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import models
from features.lora import WithoutAdapters, add_adapters
from plumbing.model.frozen import round_frozen
from features.sampler_format import sampling_copy
from rollout import Scorer
from test_rollout import make as made, rolled
from tiny_run import chance

qwen3 = partial(made, "qwen3")
tiny_moe = partial(made, "tiny_moe")

ARGS = SimpleNamespace(lora_r=4, lora_alpha=8, lora_target_modules=[], seed=0)
IDS = torch.arange(5)[None]
STEP = "run/checkpoints/step_2"


def adapted(make, trained=True):
    """(a model with adapters, its logits before they were put in)"""
    torch.manual_seed(1)
    model = make()
    model.name_or_path = "base"
    before = model(input_ids=IDS).logits.detach()
    add_adapters(model, ARGS)
    if trained:
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(std=0.3)
    return model, before


@pytest.mark.parametrize("make", [qwen3, tiny_moe])
def test_new_adapters_change_nothing_and_the_reference_is_the_model_without_them(make):
    pytest.importorskip("peft")
    new, before = adapted(make, trained=False)
    assert torch.equal(new(input_ids=IDS).logits, before)
    rollout = rolled(new)
    model, before = adapted(make)
    reference = WithoutAdapters(Scorer(model))
    assert torch.equal(reference(rollout).logp, Scorer(new)(rollout).logp)
    assert not torch.allclose(model(input_ids=IDS).logits, before, atol=1e-2)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


def test_the_sampling_copy_rounds_weights_and_no_buffer():
    model = qwen3()
    rounded = sampling_copy(model, "bfloat16")
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    frequencies = dict(model.named_buffers())
    assert frequencies
    assert all(torch.equal(b, frequencies[name]) for name, b in rounded.named_buffers())


@pytest.mark.parametrize("flags", ["--routing_replay old --bf16", "--algorithm rspo"])
def test_adapters_go_with(flags, run):
    pytest.importorskip("peft")
    assert run(f"--use_peft {flags}")[0]["grad_norm"] > 0


def test_gpt2s_layers_carry_adapters_too(run):
    """They are transformers' Conv1D, weights [in, out]; peft adds the products the right way
    round."""
    peft = pytest.importorskip("peft")
    models.saved("gpt2", "gpt2", n_positions=64, initializer_range=0.02)
    first, _ = run(f"--model_name_or_path gpt2 {chance('len(response) % 3 / 2', 25)} --steps 2 "
                   "--warmup_steps 0 --learning_rate 0.01 --use_peft --bf16 true "
                   "--sampler_dtype float32 --max_prompt_length 32")
    assert first["grad_norm"] > 0
    ours, theirs = (AutoModelForCausalLM.from_pretrained("gpt2") for _ in range(2))
    add_adapters(ours, SimpleNamespace(**vars(ARGS) | dict(lora_r=16, lora_alpha=32)), STEP)
    layers = {name.split(".")[-4] for name, _ in ours.named_parameters() if "lora_A" in name}
    assert layers == {"c_attn", "c_proj", "c_fc"}
    plain = peft.PeftModel.from_pretrained(theirs, STEP).merge_and_unload()
    torch.testing.assert_close(plain(input_ids=IDS).logits, ours(input_ids=IDS).logits, atol=1e-5,
                               rtol=0)


def test_without_peft_the_error_names_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install peft" in run.refused("--use_peft")


@pytest.mark.parametrize("make", [qwen3, tiny_moe])
def test_frozen_matrices_in_16_bits_compute_what_autocast_computes(make):
    pytest.importorskip("peft")
    found = []
    for halved in (False, True):
        model, _ = adapted(make)
        if halved:
            round_frozen(model)
            assert any(p.dtype == torch.bfloat16 for p in model.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=IDS).logits
        logits.float().square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("flags, wanted", [
    ("--use_peft --shard", "--shard"),
    ("--use_peft --beta 0.1 --sync_ref_model", "whose weights do not move"),
    ("--use_peft --algorithm sdpo", "--teacher_update_rate: without adapters"),
    ("--lora_target_modules q_proj", "--use_peft"),
    ("--use_peft --lora_target_modules nowhere", "nowhere")])
def test_what_cannot_be_combined_is_refused_in_a_line(flags, wanted, run):
    if "--lora_target_modules" in flags:
        pytest.importorskip("peft")
    assert wanted in run.refused(flags)
