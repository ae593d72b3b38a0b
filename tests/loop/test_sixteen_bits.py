"""The first mini-batch's ratio is exactly 1 in 16 bits, on every path, even where a kernel rounds otherwise for
another number of rows. python -m pytest tests/loop/test_sixteen_bits.py

The kernel is simulated: a product whose sums are split, and rounded, at a place that follows from the shape.
"""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from plumbing.data.running_sum import builtin_tokenizer
from tiny_run import SMALL, metrics

TOKENIZER = builtin_tokenizer()
PATHS = ["", "--micro_batch_size 4", "--micro_batch_size 8", "--micro_batch_size 12", "--micro_batch_size 2", "--gradient_checkpointing",
         "--plain", "--beta 0.1", "--fp16 --bf16 false", "--use_peft", "--use_peft --load_in_4bit"]
QUICK = ("", "--micro_batch_size 12")


def by_shape(linear):
    """F.linear in 16 bits with its sum in two parts; where they meet follows from the number of rows."""
    def product(x, weight, bias=None):
        if not torch.is_autocast_enabled("cpu"):
            return linear(x, weight, bias)
        kind = torch.get_autocast_dtype("cpu")
        x, weight, rows = x.to(kind), weight.to(kind), x.numel() // x.shape[-1]
        cut = 1 + rows * 7 % (x.shape[-1] - 1)
        with torch.autocast("cpu", enabled=False):
            out = linear(x[..., :cut], weight[:, :cut]) + linear(x[..., cut:], weight[:, cut:])
        return out if bias is None else out + bias.to(kind)
    return product


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A dense model, rows, and a verifier that gives about a third of the groups equal rewards."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    ends = dict(bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                                 intermediate_size=128, initializer_range=0.1, **ends)).save_pretrained("dense")
    TOKENIZER.save_pretrained("dense")
    rng = random.Random(0)
    prompts = ["+".join(rng.choice("123456789") for _ in range(rng.randint(1, 5))) + "=" for _ in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in dict.fromkeys(prompts)))
    Path("mine.py").write_text("def reward(response, answer):\n    return float(sum(map(ord, response)) % 8 == 0)\n")


@pytest.mark.parametrize("path", [pytest.param(path, marks=() if path in QUICK else pytest.mark.slow) for path in PATHS])
def test_the_first_ratio_is_1_whatever_the_kernel_makes_of_the_shape(path, place, monkeypatch):
    if "--use_peft" in path:
        pytest.importorskip("peft")
    if "4bit" in path:
        pytest.importorskip("bitsandbytes")
    apart, loss, update = [], train.policy_loss, train.update

    def watched_update(*args, **options):
        apart.append([])                                     # a mini-batch: a list of its forwards
        return update(*args, **options)

    def watched_loss(objective, logp, old_logp, advantages, mask, **options):
        apart[-1].append(((logp - old_logp) * mask).abs().max().item())
        return loss(objective, logp, old_logp, advantages, mask, **options)
    monkeypatch.setattr(train, "update", watched_update)
    monkeypatch.setattr(train, "policy_loss", watched_loss)
    monkeypatch.setattr(F, "linear", by_shape(F.linear))
    train.main([*SMALL, "--model_name_or_path", "dense", "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward", "--bf16", "true",
                "--prompts_per_step", "8", "--max_completion_length", "8", "--warmup_steps", "0", "--steps", "3", "--algorithm", "grpo",
                "--learning_rate", "1e-3", "--output_dir", "run", *path.split()])
    assert any(record["dead_groups"] > 0 for record in metrics("run")), "groups to leave out"
    assert [max(forwards) for forwards in apart[::2]] == [0, 0, 0]                     # two mini-batches a batch
    assert min(max(forwards) for forwards in apart[1::2]) > 0                          # and the policy does change


def test_the_simulated_kernel_does_depend_on_the_shape():
    x, weight = torch.randn(6, 64), torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(by_shape(F.linear)(x, weight)[:4], by_shape(F.linear)(x[:4], weight))
        assert torch.equal(by_shape(F.linear)(x, weight)[:4], by_shape(F.linear)(x.flip(0), weight).flip(0)[:4])
