"""The pictures of experiments/pictures.py show what the papers say.

    python -m pytest tests/tools/test_pictures.py
"""

import pytest
import torch

from experiments import pictures as objectives
from losses import OBJECTIVES
from tools import style


def test_ppo_removes_the_gradient_at_two_of_its_four_corners():
    ratio = torch.tensor([0.5, 1.5], dtype=torch.float64)
    (_, good), (_, bad) = (objectives.curves("ppo", A, ratio) for A in (1.0, -1.0))
    assert good.tolist() == pytest.approx([0.5, 0.0]) and bad.tolist() == pytest.approx([0.0, 1.5])
    good, bad = (objectives.curves("ppo", A, ratio)[0] for A in (1.0, -1.0))
    assert good.tolist() == pytest.approx([0.5, 1.2])
    assert bad.tolist() == pytest.approx([-0.8, -1.5])


@pytest.mark.parametrize("name", [name for name, row in OBJECTIVES.items()
                                  if row.source and row.ratio != "log-shifted"])
def test_every_member_weighs_an_unmoved_token_the_same(name):
    ones = torch.ones(1, dtype=torch.float64)
    for A in (1.0, -1.0):
        weight = objectives.curves(name, A, ones)[1].item()
        assert weight == pytest.approx(1.0)


def test_the_shaded_band_is_the_papers():
    assert objectives.kept("gspo") == pytest.approx((0.9997, 1.0004), abs=1e-5)
    assert objectives.kept("gmpo") == pytest.approx((0.670, 1.492), abs=3e-3)            # e^±0.4
    assert objectives.kept("dppo") == pytest.approx((1 / 3, 5 / 3), abs=3e-3)            # 0.3 ± 0.2
    assert objectives.kept("cispo") == (0, 1.28) and objectives.kept("sapo") == (None, None)


@pytest.mark.parametrize("name", ["reinforce", "ppo", "gspo", "gmpo", "dro", "sapo",
                                  "luspo", "sequence_is"])
def test_the_integral_of_the_weight_is_the_surrogate_where_no_gradient_is_stopped(name):
    ratio = objectives.ratios(objectives.zoom(name))
    for A in (1.0, -1.0):
        surrogate = objectives.curves(name, A, ratio)[0]
        surrogate = surrogate - surrogate[(ratio - 1).abs().argmin()]
        moved = objectives.climbed(name, A, ratio)[5:]               # 1 / ratio is steep near 0
        offset = surrogate[5:] - moved
        assert offset.max() - offset.min() < 4e-3 * (ratio[-1] - ratio[0])
        assert moved.abs().max() > 0.1 * (ratio[-1] - ratio[0])


def test_every_clip_range_is_wide_enough_to_be_seen():
    assert objectives.zoom("gspo") == objectives.zoom("gspo_token") == 500
    assert objectives.zoom("ppo") == objectives.zoom("cispo") == objectives.zoom("kpop") == 1
    for name in objectives.SIX:
        low, high = objectives.kept(name)
        shown = objectives.ratios(objectives.zoom(name))
        if low is not None:
            width = min(high, shown[-1]) - max(low, shown[0])
            assert width > 0.1 * (shown[-1] - shown[0]), name


def test_edges_are_written_with_the_decimals_they_need():
    assert [objectives.edge(x) for x in objectives.kept("gspo")] == ["0.9997", "1.0004"]
    assert [objectives.edge(x) for x in objectives.kept("grpo")] == ["0.8", "1.2"]
    assert [objectives.edge(x) for x in objectives.kept("cispo")] == ["0", "1.28"]


def test_the_six_of_readme_are_six_kinds_of_clip_or_ratio():
    assert len({(OBJECTIVES[name].ratio, OBJECTIVES[name].clip) for name in objectives.SIX}) == 6
    six = [axes.get_title("left").split("\n")[0] for axes in objectives.objectives_six().axes]
    assert [title for title in six if title] == ["GRPO", "GSPO", "CISPO", "DPPO", "IPO", "SAPO"]
    style.pyplot().close("all")


def test_every_objective_has_a_colour_that_can_be_told_from_the_others():
    colours = [style.GREY, *(style.colour(name) for name in OBJECTIVES)]
    rgb = [torch.tensor([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]) for colour in colours]
    for i, one in enumerate(rgb):
        for other in rgb[:i]:
            assert (one - other).norm() > 0.2
