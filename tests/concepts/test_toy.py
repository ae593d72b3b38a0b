"""toy.py against plain loops. python -m pytest tests/concepts/test_toy.py"""

import itertools
import math

import pytest
import torch

import toy

SEEDS = torch.tensor([1, 2, 3])


def softmax(row):
    total = math.fsum(map(math.exp, row))
    return [math.exp(x) / total for x in row]


def test_uniforms_are_the_documented_hash():
    def mix(h):
        h = (h ^ h >> 16) * 0x7feb352d % 2**32
        h = (h ^ h >> 15) * 0x846ca68b % 2**32
        return h ^ h >> 16
    expected = [(mix(mix(mix(mix(3) ^ 7) ^ 2) ^ i) + 0.5) / 2**32 for i in range(5)]
    assert toy.uniforms(SEEDS, 7, 2, 5)[2].tolist() == expected


def test_pass_rate_is_that_of_all_prompts():
    logits = torch.randn(10, 10, 10, dtype=torch.float64)
    total = 0
    for terms in itertools.product(range(10), repeat=3):
        before, p = 0, 1
        for x in terms:
            right = (before + x) % 10
            p *= softmax(logits[before, x].tolist())[right]
            before = right
        total += p / 1000
    assert toy.exact_pass_rate(logits, 3).item() == pytest.approx(total, rel=1e-12)


def test_first_policies_and_their_samples_have_the_pass_rate():
    logits = toy.start(SEEDS, 24)
    torch.testing.assert_close(toy.exact_pass_rate(logits, 24), torch.full((3,), 0.35).double())
    chosen, rewards = toy.draw(logits, SEEDS, 0, 24, 1000)
    assert rewards.mean().item() == pytest.approx(0.35, abs=0.015)
    assert (chosen // 100 % 10)[:, 1:].equal((chosen % 10)[:, :-1])      # each after the one before


def test_seeds_side_by_side_are_as_alone():
    together, alone = (toy.train("gspo", 8, 60, batches=3, seeds=seeds, optimizer="sgd")[0]
                       for seeds in (SEEDS, SEEDS[1:2]))
    torch.testing.assert_close(together[1:2], alone)
