"""LoRA and frozen matrices in 16 bits: features/lora.py.

References: peft's own PeftModel, torch's AdamW on the same weights, the flags through train.main.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from features.lora import WithoutAdapters, add_adapters
from plumbing.refusal import Refusal
from rollout import Scorer
from test_rollout import make as made, rolled

qwen3 = partial(made, "qwen3")
tiny_moe = partial(made, "tiny_moe")

ARGS = SimpleNamespace(lora_r=4, lora_alpha=8, lora_target_modules=[], seed=0)
IDS = torch.arange(5)[None]


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


@pytest.mark.parametrize("flags", ["--routing_replay old --bf16", "--algorithm rspo"])
def test_adapters_go_with(flags, run):
    pytest.importorskip("peft")
    assert run(f"--use_peft {flags}")[0]["grad_norm"] > 0


@pytest.mark.parametrize("flags, words", [
    ("--use_peft --shard", "--use_peft .*--shard"),
    ("--use_peft --lora_target_modules nowhere", "nowhere")])
def test_what_cannot_be_combined_is_refused_in_a_line(flags, words, run):
    pytest.importorskip("peft")
    with pytest.raises(Refusal, match=words) as refusal:
        run(flags)
    assert "\n" not in str(refusal.value)
