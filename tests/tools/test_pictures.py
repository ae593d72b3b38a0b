"""The pictures of experiments/objectives.py show what the papers say.

    python -m pytest tests/tools/test_pictures.py
"""

import pytest
import torch

from experiments import objectives
from losses import OBJECTIVES


def test_ppo_removes_the_gradient_at_two_of_its_four_corners():
    ratio = torch.tensor([0.5, 1.5], dtype=torch.float64)
    (_, good), (_, bad) = (objectives.curves("ppo", A, ratio) for A in (1.0, -1.0))
    assert good.tolist() == pytest.approx([0.5, 0.0]) and bad.tolist() == pytest.approx([0.0, 1.5])
    good, bad = (objectives.curves("ppo", A, ratio)[0] for A in (1.0, -1.0))
    assert good.tolist() == pytest.approx([0.5, 1.2])
    assert bad.tolist() == pytest.approx([-0.8, -1.5])


@pytest.mark.parametrize("name", [name for name, row in OBJECTIVES.items() if row.source])
def test_every_member_weighs_an_unmoved_token_the_same(name):
    ones = torch.ones(1, dtype=torch.float64)
    for A in (1.0, -1.0):
        weight = objectives.curves(name, A, ones)[1].item()
        assert weight == pytest.approx(objectives.SHIFT if name == "rspo" else 1.0)


def test_the_shaded_band_is_the_papers():
    assert objectives.kept("gspo") == pytest.approx((0.9997, 1.0004), abs=1e-5)
    assert objectives.kept("gmpo") == pytest.approx((0.670, 1.492), abs=3e-3)            # e^±0.4
    assert objectives.kept("dppo") == pytest.approx((1 / 3, 5 / 3), abs=3e-3)            # 0.3 ± 0.2
    assert objectives.kept("cispo") == (0, 1.28) and objectives.kept("sapo") == (None, None)


def test_papers_stand_in_the_order_of_their_dates_and_each_objective_in_its_lane():
    when = objectives.when
    assert when("2412.25000") <= 0 == when("2501.00000") < when("2507.18071")
    assert objectives.lane("grpo") == 3 and objectives.lane("gspo") == objectives.lane("gmpo") == 4
