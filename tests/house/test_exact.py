"""What is exact in this implementation and need not be in another. python -m pytest tests/house/test_exact.py"""

import torch

from rollout import draw


def test_the_inverse_cdf_gives_every_token_its_share_of_the_quantiles():
    logits = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0])
    p = logits.softmax(-1)
    grid = (torch.arange(100_000) + 0.5) / 100_000       # every quantile once: frequencies are exact to 1e-5
    counts = torch.bincount(draw(logits.expand(len(grid), -1), grid), minlength=5) / len(grid)
    assert torch.allclose(counts, p, atol=2e-5)
