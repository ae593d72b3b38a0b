"""The sampling copy as an engine rounds it: row by row, to few bits. python -m pytest tests/model/test_sampler_dtype.py"""

import math

import pytest
import torch
from tiny_run import TINY, metrics

import train
from moe import TinyMoE
from plumbing.run.arguments import parse
from plumbing.engines.samplers import rounded
from plumbing.engines.samplers import sampling_copy
from plumbing.model.cold_start import tiny_config
from plumbing.data.running_sum import builtin_tokenizer


@pytest.mark.parametrize("dtype", ["int3", "int4", "int5", "int6", "int8"])
def test_rows_are_rounded_to_equally_spaced_levels_as_a_loop_in_float64_rounds_them(dtype):
    weight = torch.randn(3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))   # experts [E, out, in]
    weight[0, 0] = 0
    levels, expected = 2 ** (int(dtype[3:]) - 1) - 1, torch.zeros_like(weight)
    for e in range(3):
        for i in range(4):
            largest = max(abs(x) for x in weight[e, i].tolist())
            for j in range(7):
                if largest:
                    expected[e, i, j] = math.copysign(math.floor(abs(weight[e, i, j].item()) / largest * levels + 0.5), weight[e, i, j])
                    expected[e, i, j] *= largest / levels
    assert torch.allclose(rounded(weight, dtype), expected, rtol=0, atol=1e-12)
    assert len(rounded(weight, dtype)[1, 0].unique()) <= 2 * levels + 1


def test_float8_takes_the_nearest_of_all_its_numbers():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].double()
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(-1, keepdim=True).double() / 448
    nearest = numbers[((weight.double() / scale)[..., None] - numbers).abs().argmin(-1)] * scale
    assert torch.allclose(rounded(weight, "float8").double(), nearest, rtol=0, atol=1e-6)


def test_the_copy_is_rounded_and_the_policy_is_not():
    torch.manual_seed(0)
    policy = TinyMoE(tiny_config(parse(["--hidden_size", "16", "--num_hidden_layers", "1"]), builtin_tokenizer()))
    before = {name: p.clone() for name, p in policy.named_parameters()}
    errors = []
    for dtype in ("int8", "int6", "int4", "int3"):
        copied = dict(sampling_copy(policy, dtype).named_parameters())
        assert all(torch.equal(copied[name], p) == (p.dim() == 1) for name, p in before.items()), "matrices, and no vector"
        errors.append(sum((copied[name] - p).square().sum().item() for name, p in before.items()))
    assert errors == sorted(errors) and all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert sampling_copy(policy, "float32") is policy


def test_fewer_bits_are_further_from_the_trainer(workplace):
    found = {}
    for dtype in ("float32", "int8", "int3"):
        train.main([*TINY, "--steps", "1", "--sampler_dtype", dtype, "--output_dir", dtype])
        found[dtype] = metrics(dtype)[0]["mismatch_kl"]
    assert found["float32"] < 1e-10 < found["int8"] < found["int3"]
