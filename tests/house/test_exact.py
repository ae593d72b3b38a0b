"""What is exact in this implementation and need not be in another: correct the test if it is meant
to change. python -m pytest tests/house/test_exact.py"""

import torch

from rollout import draw


def test_the_inverse_cdf_gives_every_token_its_share_of_the_quantiles():
    logits, n = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0]), 100_000
    grid = (torch.arange(n) + 0.5) / n         # every quantile once: exact to 1e-5
    counts = torch.bincount(draw(logits.expand(n, -1), grid), minlength=5) / n
    assert torch.allclose(counts, logits.softmax(-1), atol=2e-5)
