"""Checks your solutions of exercises 1 and 2: python -m pytest docs/exercises"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES, policy_loss                                           # noqa: E402


@pytest.mark.skipif(not (ROOT / "lengths.py").is_file(), reason="exercise 1: no lengths.py")
def test_1_the_shares_of_each_third(tmp_path):
    """Three responses of each length, whose s is 1.02; two of each have Â > 0."""
    def one(length, advantage):
        logp = [-1 + math.log(1.02)] * length
        return {"logp": logp, "old_logp": [-1.0] * length, "advantage": advantage}
    mini = [one(length, A) for length in (3, 9, 27) for A in (1.0, -1.0, 1.0)]
    line = json.dumps({"step": 1, "minibatches": [[one(5, 1.0)], mini, [one(7, 0.0)]]})
    (tmp_path / "minibatches.jsonl").write_text(line + "\n")
    printed = subprocess.run([sys.executable, ROOT / "lengths.py", tmp_path], check=True,
                             capture_output=True, encoding="utf-8").stdout
    pattern = r"\|y\| +([\d.]+) .*paper ([\d.]+) +0.01 ([\d.]+)"
    found = [[float(x) for x in match] for match in re.findall(pattern, printed)]
    assert found == [[3, .667, .667], [9, .667, .667], [27, .667, .667]]


@pytest.mark.skipif("gspo_root" not in OBJECTIVES, reason="exercise 2: no row gspo_root")
@pytest.mark.parametrize("s, kept", [(1.0, [1, 1]), (1.009, [1, 1]), (1.015, [1, 0]),
                                     (1.025, [0, 0]), (0.975, [1, 1])])
def test_2_a_range_that_shrinks_with_the_length(s, kept):
    """Responses of 4 and 16 tokens with Â = 1: 0.04/√|y| is 0.02 and 0.01."""
    mask = torch.arange(16) < torch.tensor([[4], [16]])                              # [2, 16]
    old = torch.full((2, 16), -1.0, dtype=torch.float64)                             # [2, 16]
    logp = (old + math.log(s)).requires_grad_()                                      # [2, 16]
    loss, stats = policy_loss("gspo_root", logp, old, torch.ones(2).double(), mask)
    gradient, = torch.autograd.grad(loss, logp)                                      # [2, 16]
    pushed = -2 * mask.sum(-1) * gradient[:, 0]                                      # [2]  N · |y|
    assert pushed.tolist() == pytest.approx([s * each for each in kept])
    dropped = (mask.sum(-1) * (1 - torch.tensor(kept))).sum() / mask.sum()
    assert stats["clip_high"].item() == pytest.approx(dropped.item()) and stats["clip_low"] == 0
