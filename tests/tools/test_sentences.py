"""What is read off the map's runs: python -m pytest tests/tools/test_sentences.py"""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from shared import sentences  # noqa: E402


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_kendalls_rank_correlation_is_scipys(order):
    stats = pytest.importorskip("scipy.stats")
    x = [0.1, 0.4, 0.9]
    assert sentences.kendall(list(zip(x, order))) == pytest.approx(stats.kendalltau(x, order).statistic)


def test_a_drop_is_measured_from_the_best_batch_before_it():
    assert sentences.drop([.5, .4, .8, .9, .6, .85]) == pytest.approx(.3)
    assert sentences.drop([.1, .2, .3]) == 0
