"""--load_in_4bit, LoRA beside 4-bit weights: python -m pytest tests/features/test_four_bit.py

bitsandbytes computes on a CPU, too. The reference: the same model in float32, with the decoded
weights in the place of its own.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import models
from plumbing.data.running_sum import builtin_tokenizer
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


def test_experts_are_refused(dense, cold_start, run):
    said = run.refused(f"{dense} --model_name_or_path {cold_start}")
    assert "the experts of TinyMoE are not linear layers" in said


