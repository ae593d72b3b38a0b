"""The pictures of experiments/pictures.py show what the papers say.

    python -m pytest tests/tools/test_pictures.py
"""

import pytest
import torch

from experiments import pictures
from losses import OBJECTIVES
from tools import style


def weights(name, *ratios):
    """Of good and of bad answers at these ratios."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    return [pictures.weight(name, A, ratio).tolist() for A in (1.0, -1.0)]


@pytest.mark.parametrize("name", [name for name, row in OBJECTIVES.items()
                                  if row.source and row.ratio != "log-shifted"])
def test_every_member_weighs_an_unmoved_token_the_same(name):
    assert weights(name, 1.0) == [pytest.approx([1.0])] * 2


@pytest.mark.parametrize("name, low, high", [
    ("gspo", 0.9997, 1.0004), ("gmpo", 0.6703, 1.4918), ("dppo", 1 / 3, 5 / 3)])    # 0.3 ± 0.2
def test_the_gradient_ends_at_the_papers_clip_range(name, low, high):
    good, _ = weights(name, high - 1e-4, high + 1e-3)
    _, bad = weights(name, low + 1e-4, low - 1e-3)
    assert good[0] > 0.3 < bad[0] and good[1] == bad[1] == 0


def test_the_six_of_readme_are_six_kinds_of_clip_or_ratio():
    assert len({(OBJECTIVES[name].ratio, OBJECTIVES[name].clip) for name in pictures.SIX}) == 6
    six = [axes.get_title("left").split(":")[0] for axes in pictures.objectives_six().axes]
    assert six == ["GRPO", "GSPO", "CISPO", "DPPO", "DRO", "SAPO"]
    style.pyplot().close("all")
