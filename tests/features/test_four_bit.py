"""--load_in_4bit, LoRA beside 4-bit weights: python -m pytest tests/features/test_four_bit.py

bitsandbytes computes on a CPU, too. The reference: the same model in float32, with the decoded
weights in the place of its own.
"""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

import models
from features import four_bit
from features.lora import add_adapters
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.actor import Run
from plumbing.model.policy import load_policy
from session import checks
from session.arguments import parse
from plumbing.speed import fast
from rollout import response_logp, sample
from tiny_run import chance, differences

TOKENIZER, CPU = builtin_tokenizer(), torch.device("cpu")


@pytest.fixture
def dense(workplace):
    """Flags of a run of LoRA beside a random dense checkpoint in 4 bits, whose rewards are a matter
    of chance."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    models.saved("dense", "qwen2", vocab_size=32, hidden_size=64, head_dim=16,
                 intermediate_size=128)
    return (f"{chance()} --use_peft --load_in_4bit --learning_rate 0.01 --warmup_steps 0 "
            "--model_name_or_path dense")


def loaded(flags, transform=four_bit.quantize):
    return load_policy(parse(flags.split()), None, CPU, transform=transform)[0]


def small_layers(policy):
    """[(name, layer)] of the 4-bit layers."""
    return [(name, module) for name, module in policy.named_modules()
            if hasattr(getattr(module, "weight", None), "quant_state")]


def close(one, other, atol=1e-5):
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


def test_the_layers_hold_four_bits_and_compute_with_what_they_decode(dense):
    from bitsandbytes.functional import dequantize_4bit
    small, plain = loaded(dense), loaded(dense, lambda policy: policy)
    layers = small_layers(small)
    assert len(layers) == 2 * 7 and small.lm_head.weight.dtype == torch.float32
    for name, layer in layers:
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        original = plain.get_submodule(name).weight.data
        assert layer.weight.nbytes == original.numel() / 2
        error = (weight - original).norm() / original.norm()
        assert 0.03 < error < 0.15, name                     # four bits of a normal distribution
        original.copy_(weight)
    ids = torch.tensor([[1, 10, 2, 11, 3]])
    close(small(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_sampled_scored_and_replayed_through_the_same_weights(dense):
    """What sampling recorded is what both ways of scoring find, with adapters that say
    something."""
    policy = loaded(dense)
    add_adapters(policy, parse(dense.split()))
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    prompts = ["1+2=", "3+4+5="]
    for batch in (fast.fast_sample(policy, TOKENIZER, prompts, 6, 8, uniforms=torch.rand(12, 8)),
                  sample(policy, TOKENIZER, prompts, 1, 4, uniforms=torch.rand(2, 4))):
        for score in (response_logp, fast.fast_response_logp):
            close(score(policy, batch).logp, batch.sampler_logp, atol=1e-4)


@pytest.mark.parametrize("more", ["", "--bf16 true --beta 0.1", "--fp16 --gradient_checkpointing"])
def test_a_run_trains_float32_adapters_and_samples_as_it_scores(more, dense, run):
    first, _ = run(f"{dense} {more} --steps 2")
    assert first["grad_norm"] > 0 and first["mismatch_kl"] < (1e-3 if more else 1e-9)
    assert abs(first.get("kl") or 0) < 1e-6                  # the reference: adapters off
    saved = load_file("run/checkpoints/step_2/adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(weight.any() for weight in saved.values())    # every B has moved


def test_a_run_resumes_exactly(dense, run):
    run(f"{dense} --steps 3 --save_steps 1", folder="whole")
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step_3")
    run(f"{dense} --steps 3 --resume")
    assert differences("whole", "run", 3) == []


@pytest.mark.parametrize("flags, words", [
    ("--model_name_or_path m --load_in_4bit", "needs --use_peft"),
    ("--load_in_4bit --use_peft", "needs --model_name_or_path"),
    ("--model_name_or_path m --load_in_4bit --use_peft --shard", "--shard"),
    ("--model_name_or_path m --load_in_4bit --use_peft --sampler_dtype int8",
     "cannot be combined with --sampler_dtype: it samples")])
def test_what_does_not_go_with_it_is_refused(flags, words, refused):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    assert words in refused(flags)


def test_a_teacher_keeps_its_weights(dense):
    """The flag is about the policy: a teacher is not rounded, and may be a mixture of experts."""
    told = "--algorithm grpo --advantage distillation --teacher_model_name_or_path dense"
    args = parse(f"{dense} {told}".split())
    plain = loaded(dense, lambda policy: policy)
    run = Run(args, None, TOKENIZER, CPU, None, None)
    teacher, _ = run.load_checkpoint("teacher_model_name_or_path")
    assert small_layers(teacher.policy) == []
    assert all(map(torch.equal, teacher.policy.parameters(), plain.parameters()))


def test_experts_are_refused(dense, cold_start, run):
    said = run.refused(f"{dense} --model_name_or_path {cold_start}")
    assert "the experts of TinyMoE are not linear layers" in said


def test_bitsandbytes_prints_no_warning_of_missing_kernels():
    """Wherever it is imported first: by peft, by transformers or for --optim."""
    assert not logging.getLogger("bitsandbytes.backends").isEnabledFor(logging.WARNING)


def test_without_bitsandbytes_the_error_names_it(monkeypatch):
    find = checks.find_spec
    monkeypatch.setattr(checks, "find_spec",
                        lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        parse("--model_name_or_path m --use_peft --load_in_4bit".split())
