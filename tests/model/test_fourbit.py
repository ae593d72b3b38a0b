"""--load_in_4bit, LoRA beside 4-bit weights: python -m pytest tests/model/test_fourbit.py

bitsandbytes computes on a CPU, too. The reference: the same model in float32, with the decoded weights in the place of its own.
"""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model import fourbit
from plumbing.model.actor import Run
from plumbing.model.adapters import add_adapters
from plumbing.model.policy import load_policy
from plumbing.run.arguments import parse
from plumbing.speed import fast
from rollout import response_logp, sample
from tiny_run import SMALL, differences, metrics

TOKENIZER = builtin_tokenizer()


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Flags of a run of LoRA beside a random dense checkpoint in 4 bits, whose rewards are a matter of chance."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    ends = dict(bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=128, initializer_range=0.1, **ends)).save_pretrained("dense")
    TOKENIZER.save_pretrained("dense")
    rng = random.Random(0)
    prompts = ["+".join(rng.choice("123456789") for _ in range(rng.randint(1, 5))) + "=" for _ in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in dict.fromkeys(prompts)))
    Path("mine.py").write_text("def reward(response, answer):\n    return sum(map(ord, response)) % 3 / 2\n")
    return [*SMALL, "--model_name_or_path", "dense", "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward", "--use_peft",
            "--load_in_4bit", "--max_completion_length", "8", "--learning_rate", "0.01", "--warmup_steps", "0"]


def test_the_layers_hold_four_bits_and_compute_with_what_they_decode(dense):
    args = parse(dense)
    small, _ = load_policy(args, None, torch.device("cpu"))
    plain, _ = load_policy(replace(args, load_in_4bit=False), None, torch.device("cpu"))
    from bitsandbytes.functional import dequantize_4bit
    weights = {name: dequantize_4bit(layer.weight.data, layer.weight.quant_state).float() for name, layer in fourbit.small_layers(small)}
    assert len(weights) == 2 * 7 and small.lm_head.weight.dtype == torch.float32
    for name, weight in weights.items():
        original, layer = plain.get_submodule(name).weight.data, small.get_submodule(name)
        assert layer.weight.nbytes == original.numel() / 2
        error = (weight - original).norm() / original.norm()
        assert 0.03 < error < 0.15, name                     # four bits of a normal distribution
        original.copy_(weight)
    ids = torch.tensor([[1, 10, 2, 11, 3]])
    torch.testing.assert_close(small(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=0)


def test_sampled_scored_and_replayed_through_the_same_weights(dense):
    """What sampling recorded is what both ways of scoring find, with adapters that say something."""
    policy, _ = load_policy(parse(dense), None, torch.device("cpu"))
    add_adapters(policy, parse(dense))
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.1)
    rollout = fast.sample(policy, TOKENIZER, ["1+2=", "3+4+5="], 6, 8, uniforms=torch.rand(12, 8))
    slow = sample(policy, TOKENIZER, ["1+2=", "3+4+5="], 1, 4, uniforms=torch.rand(2, 4))
    for batch in (rollout, slow):
        for logp in (response_logp(policy, batch).logp, fast.response_logp(policy, batch).logp):
            torch.testing.assert_close(logp, batch.sampler_logp, atol=1e-4, rtol=0)


@pytest.mark.parametrize("more", [[], ["--bf16", "true", "--beta", "0.1"], ["--fp16", "--gradient_checkpointing"]], ids=" ".join)
def test_a_run_trains_float32_adapters_and_samples_as_it_scores(more, dense):
    train.main([*dense, *more, "--steps", "2", "--output_dir", "run"])
    records = metrics("run")
    assert records[0]["grad_norm"] > 0 and records[0]["mismatch_kl"] < (1e-3 if more else 1e-9)
    assert records[0].get("kl") in (None, 0) or abs(records[0]["kl"]) < 1e-6      # the reference: adapters off
    from safetensors.torch import load_file
    saved = load_file("run/checkpoints/step_2/adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(weight.abs().max() > 0 for name, weight in saved.items())          # every B has moved


def test_a_run_resumes_exactly(dense):
    flags = [*dense, "--steps", "3", "--save_steps", "1", "--output_dir"]
    train.main([*flags, "whole"])
    train.main([*flags, "parts"])
    shutil.rmtree("parts/checkpoints/step_3")
    train.main([*flags, "parts", "--resume"])
    assert differences("whole", "parts", 3) == []


@pytest.mark.parametrize("flags, words", [
    ("--model_name_or_path m --load_in_4bit", "needs --use_peft"), ("--load_in_4bit --use_peft", "needs --model_name_or_path"),
    ("--model_name_or_path m --load_in_4bit --use_peft --shard", "--shard"),
    ("--model_name_or_path m --load_in_4bit --use_peft --sampler_dtype int8", "cannot be combined with --sampler_dtype int8")])
def test_what_does_not_go_with_it_is_refused(flags, words, monkeypatch, capsys, tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main(flags.split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1


def test_a_teacher_keeps_its_weights(dense):
    """The flag is about the policy: a teacher is not rounded, and may be a mixture of experts."""
    args = parse([*dense, "--algorithm", "grpo", "--advantage", "distillation", "--teacher_model_name_or_path", "dense"])
    cpu = torch.device("cpu")
    plain, tokenizer = load_policy(replace(args, load_in_4bit=False), None, cpu)
    teacher, _ = Run(args, None, tokenizer, cpu, None).another("teacher_model_name_or_path")
    assert fourbit.small_layers(teacher.policy) == []
    assert all(torch.equal(own, p) for own, p in zip(teacher.policy.parameters(), plain.parameters(), strict=True))


def test_experts_are_refused(dense, cold_start, capsys):
    name = dense.index("dense")
    with pytest.raises(SystemExit) as stop:
        train.main([*dense[:name], str(cold_start), *dense[name + 1:], "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "the experts of TinyMoE are not linear layers" in err and err.count("\n") == 1


def test_without_bitsandbytes_the_error_names_it(monkeypatch):
    from plumbing.run import checks
    find = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        parse("--model_name_or_path m --use_peft --load_in_4bit".split())


def test_a_weight_takes_half_a_byte_and_its_share_of_the_scales():
    """Two levels of scales; a table of 16 and one of 256 numbers beside them."""
    pytest.importorskip("bitsandbytes")
    policy = torch.nn.Sequential(torch.nn.Linear(2048, 512, bias=False))
    policy.get_output_embeddings = lambda: None
    layer = fourbit.quantize(policy).to("cpu")[0]
    state = layer.weight.quant_state
    held = layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert held == (1 / 2 + 1 / 64 + 4 / (64 * 256)) * 2048 * 512
