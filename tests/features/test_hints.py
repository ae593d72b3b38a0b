"""The hints of --self_distillation are measured in tokens, and those that the policy cannot read
are refused before the first batch.

python -m pytest tests/features/test_hints.py
"""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

import train
from tiny_run import SMALL, metrics

PLACES = 50
TOLD = "--algorithm grpo --advantage distillation --self_distillation answer".split()


def bytes_tokenizer():
    """A token per byte of UTF-8: three for a Chinese character."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = bytes_tokenizer()
    ends = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    llama = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                 max_position_embeddings=PLACES, **ends)
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    torch.manual_seed(0)
    for name, model in (
            ("gpt2", GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=PLACES,
                                                **ends))),
            ("dynamic", LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **llama))),
            ("llama", LlamaForCausalLM(LlamaConfig(**llama)))):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)


def flags(model, answer, *more):
    rows = [{"prompt": f"{i}+1=", "answer": answer} for i in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*SMALL, "--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--verifier",
            "exact", *TOLD, "--steps", "1", "--max_prompt_length", "16",
            "--max_completion_length", "8", "--output_dir", "run", *more]


SIBLING = "--self_distillation sibling --max_completion_length 24".split()


@pytest.mark.parametrize("answer, more, said", [
    ("7" * 38, [], "can have 43 tokens, and with --max_completion_length 8 it needs 51 positions"),
    ("答" * 13, [], "can have 44 tokens, and with --max_completion_length 8 it needs 52 positions"),
    ("7", SIBLING, "can have 29 tokens, and with --max_completion_length 24 it needs 53 positions"),
], ids=["digits", "chinese", "sibling"])
@pytest.mark.parametrize("model", ["gpt2", "dynamic"])
def test_a_hint_that_the_policy_cannot_read_is_refused_before_the_start(model, answer, more, said,
                                                                        place, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(flags(model, answer, *more))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and not Path("run").exists()
    assert said in error and f"the policy has {PLACES}" in error and "--hint_template" in error


@pytest.mark.parametrize("model, answer, more", [
    ("gpt2", "7" * 37, []), ("dynamic", "答" * 12, []), ("llama", "答" * 17, []),
    ("llama", "7" * 90, []), ("gpt2", "7", [*SIBLING, "--max_completion_length", "22"])])
def test_a_hint_that_it_can_read_is_not_limited(model, answer, more, place):
    train.main(flags(model, answer, *more))
    assert len(metrics("run")) == 1
