"""eval.py: estimators against enumeration. Its commands: test_ask.py, test_passk.py, tests/tools.
python -m pytest tests/run/test_eval.py"""

import itertools

import pytest
import torch

from eval import bootstrap, pass_at_k, reward_scores
from plumbing.data.task import Task


def test_a_limit_does_not_change_the_numbers_before_it():
    """The task's own limit is drawn as ever; what lies beyond comes from a second generator."""
    def draw(length):
        task = Task("sums", [], [], None, max_completion_length=length, own_length=7)
        return task.draw_uniforms(torch.Generator().manual_seed(3), 5, 2)           # [5, 2, T]
    own = torch.rand(5, 2, 7, generator=torch.Generator().manual_seed(3))           # [5, 2, 7]
    longest = draw(40)
    assert torch.equal(draw(7), own)
    for length in (1, 6, 7, 8, 25, 40):
        assert draw(length).shape == (5, 2, length)
        assert torch.equal(draw(length), longest[..., :length])
    assert len(longest.unique()) > 395, "and none of them twice"


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(.5)
    assert pass_at_k(10_000, 10_000, 1) == 1 and pass_at_k(10_000, 0, 10_000) == 0


def test_bootstrap_covers_the_mean_of_a_known_distribution_about_95_times_in_100():
    generator, covered, trials = torch.Generator().manual_seed(0), 0, 300
    for trial in range(trials):                              # 80 problems of 4 samples
        rates = (torch.rand(80, 4, generator=generator) < .3).double().mean(-1)
        low, high = bootstrap(rates, draws=500, seed=trial)
        covered += low <= .3 <= high
    assert .91 <= covered / trials <= .98                    # binomial: one deviation is 1.3 %
    assert bootstrap([.25] * 7) == (.25, .25)


def test_a_response_is_right_from_a_reward_of_1_on_and_a_problem_counts_once():
    """Fewer than eight problems have no interval."""
    rewards = [[1], [0.9], [0], [0], [2], [1]]               # of two responses to three problems
    task = Task("rare", [], [], lambda response, problem: 0.0)
    scores = reward_scores(task, rewards, 2)
    assert scores["reward"] == pytest.approx([2.45 / 3]) and scores["pass_at_1"] == (0.5,)
    nine = reward_scores(task, 3 * rewards, 2)["pass_at_1"]
    assert nine == (0.5, *bootstrap(3 * [0.5, 0, 1]))
    assert scores["reward_parts"] == {"correct": pytest.approx(4.9 / 6)}
    assert scores["rewards"][0] == [1, 0.9]                  # float64, as in training
