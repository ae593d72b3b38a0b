"""The first mini-batch's ratio is exactly 1 in 16 bits, on every path, even where a kernel rounds
otherwise for another number of rows. python -m pytest tests/loop/test_sixteen_bits.py

The kernel is simulated: a product whose sums are split, and rounded, at a place that follows from
the shape.
"""

import pytest
import torch
import torch.nn.functional as F

import models
import train
from tiny_run import chance, slow

PATHS = ["", "--micro_batch_size 4", "--micro_batch_size 8", "--micro_batch_size 12",
         "--micro_batch_size 2", "--gradient_checkpointing", "--plain", "--beta 0.1",
         "--fp16 --bf16 false", "--use_peft"]
QUICK = ("", "--micro_batch_size 12")


def by_shape(linear):
    """F.linear in 16 bits with its sum in two parts; where they meet follows from the number of
    rows."""
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


@pytest.mark.parametrize("path", [
    path if path in QUICK else slow(path) for path in PATHS])
def test_the_first_ratio_is_1_whatever_the_kernel_makes_of_the_shape(path, run, first,
                                                                     monkeypatch):
    """On a dense model; about a third of the groups have equal rewards."""
    if "peft" in path:
        pytest.importorskip("peft")
    models.saved("dense", "qwen2", vocab_size=32, hidden_size=64, head_dim=32,
                 intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    data = chance("float(sum(map(ord, response)) % 8 == 0)", 60)
    apart = []                                               # of a mini-batch: a list of forwards
    first(train, "update", lambda *_: apart.append([]))
    first(train, "policy_loss", lambda name, logp, old_logp, advantages, mask, **_:
          apart[-1].append(((logp - old_logp) * mask).abs().max().item()))
    monkeypatch.setattr(F, "linear", by_shape(F.linear))
    records = run(f"--model_name_or_path dense {data} --bf16 true --prompts_per_step 8 --steps 3 "
                  f"--warmup_steps 0 --algorithm grpo --learning_rate 1e-3 {path}")
    assert any(record["zero_variance_groups"] > 0 for record in records), "groups to leave out"
    assert [max(forwards) for forwards in apart[::2]] == [0, 0, 0], "two mini-batches a batch"
    assert min(max(forwards) for forwards in apart[1::2]) > 0, "and the policy does change"
