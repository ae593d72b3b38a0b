"""toy.py against plain loops. python -m pytest tests/concepts/test_toy.py"""

import itertools
import math
from statistics import geometric_mean, mean, pstdev

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


def loop_train(algorithm, low, high, rate, logits, chosen, rewards, minis):
    """One batch of responses of 8 digits with SGD, by loops: the logits [1000] after it."""
    tables = lambda logits: [softmax(logits[i:i + 10]) for i in range(0, 1000, 10)]
    old = tables(logits)
    for rows in minis:
        new = tables(logits)
        gradient = [0.0] * 1000
        for row in rows:
            group = rewards[row // 8 * 8:row // 8 * 8 + 8]
            A = (rewards[row] - mean(group)) / (pstdev(group) + 1e-6)
            ratios = [new[c // 10][c % 10] / old[c // 10][c % 10] for c in chosen[row]]
            if algorithm == "gspo":
                ratios = [geometric_mean(ratios)] * 8
            for c, ratio in zip(chosen[row], ratios):
                if not (A > 0 and ratio > high or A < 0 and ratio < low):
                    for y in range(10):
                        slope = (y == c % 10) - new[c // 10][y]
                        gradient[c // 10 * 10 + y] -= A * ratio * slope / (8 * len(rows))
        logits = [x - rate * g for x, g in zip(logits, gradient)]
    return torch.tensor(logits, dtype=torch.float64)


@pytest.mark.parametrize("algorithm, epsilon", [("grpo", 0.01), ("gspo", 0.003)])
def test_steps_are_those_of_a_loop(algorithm, epsilon):
    seed = SEEDS[:1]
    start = toy.start(seed, 8)
    drawn = (x.tolist() for x in toy.draw(start, seed, 0, 8, 8))
    minis = [rows.tolist() for rows in toy.split(seed, 0, 8, 2)]
    _, share, logits = toy.train(algorithm, 8, 60, epsilon, mini_batches=2, prompts=8, batches=1,
                                 seeds=seed, optimizer="sgd")
    assert 0.05 < share < 0.5
    torch.testing.assert_close(logits.flatten(), loop_train(
        algorithm, 1 - epsilon, 1 + epsilon, 60, start.flatten().tolist(), *drawn, minis))


def test_seeds_side_by_side_are_as_alone():
    together, alone = (toy.train("gspo", 8, 60, batches=3, seeds=seeds, optimizer="sgd")[0]
                       for seeds in (SEEDS, SEEDS[1:2]))
    torch.testing.assert_close(together[1:2], alone)
