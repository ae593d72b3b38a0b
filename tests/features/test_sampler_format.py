"""The sampling copy as an engine rounds it: row by row, to few bits.
python -m pytest tests/features/test_sampler_format.py"""

import math

import pytest
import torch

import models
from features.sampler_format import rounded, sampling_copy


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def to_levels(row, levels):
    """Each number of a row rounded to a multiple of its largest / levels, halves away from 0."""
    unit = max(map(abs, row)) / levels
    return [math.copysign(math.floor(abs(x) / unit + 0.5) * unit, x) if unit else 0 for x in row]


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_rows_are_rounded_to_equally_spaced_levels_as_a_loop_in_float64_rounds_them(bits):
    weight, levels = random(3, 4, 7, dtype=torch.float64), 2 ** (bits - 1) - 1      # [E, out, in]
    weight[0, 0] = 0
    expected = [[to_levels(row, levels) for row in expert] for expert in weight.tolist()]
    found = rounded(weight, f"int{bits}")
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=0,
                          atol=1e-12)
    assert len(found[1, 0].unique()) <= 2 * levels + 1


def test_the_copy_is_rounded_and_the_policy_is_not():
    policy, errors = models.make("tiny_moe", num_hidden_layers=1), []
    weights = dict(policy.named_parameters())
    before = {name: p.clone() for name, p in weights.items()}
    for dtype in ("int8", "int5", "int4", "int3"):
        copied = dict(sampling_copy(policy, dtype).named_parameters())
        for name, p in before.items():
            assert torch.equal(copied[name], p) == (p.dim() == 1), "matrices, and no vector"
        errors.append(sum((copied[name] - p).square().sum().item() for name, p in before.items()))
    assert errors == sorted(errors) and all(torch.equal(weights[name], before[name])
                                            for name in weights)
    assert sampling_copy(policy, "float32") is policy
