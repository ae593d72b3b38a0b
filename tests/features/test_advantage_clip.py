"""The clip of advantages. python -m pytest tests/features/test_advantage_clip.py"""

from types import SimpleNamespace

import pytest
import torch

import train
from features.advantage_clip import AdvantageClip


@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_every_advantage_is_limited_up_and_down(shape):
    torch.manual_seed(0)
    A = torch.randn(shape)
    batch = SimpleNamespace(advantages=A.clone())
    AdvantageClip(SimpleNamespace(settings=SimpleNamespace(advantage_clip=0.5))).advantages(batch)
    want = [max(-0.5, min(0.5, x)) for x in A.flatten().tolist()]
    assert batch.advantages.flatten().tolist() == want and max(want) == 0.5 == -min(want)


def test_the_loss_gets_the_limited_ones_with_distillation_in_them(run, monkeypatch):
    seen = []
    loss = train.policy_loss

    def watched(objective, logp, old_logp, advantages, mask, **options):
        seen.append(advantages)
        return loss(objective, logp, old_logp, advantages, mask, **options)
    monkeypatch.setattr(train, "policy_loss", watched)
    run("--algorithm grpo --self_distillation answer --distillation_coef 1 --advantage_clip 0.25")
    assert max(A.abs().max().item() for A in seen) == 0.25
