"""The schedule of the learning rate: transformers' own, but for a warm-up that begins above 0.
A skipped update does not move it: tests/run/test_faults.py.
python -m pytest tests/loop/test_schedule.py"""

import pytest
import torch
from transformers import get_scheduler

from session.arguments import parse
from session.learner import make_schedule


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_rate_is_transformers_own_but_for_a_warm_up_from_1_over_n(kind):
    settings = parse(f"--steps 5 --steps_per_generation 4 --warmup_steps 6 "
                     f"--lr_scheduler_type {kind}".split())
    share = make_schedule(settings)
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    reference = get_scheduler(kind, optimizer, 6, 20)
    for step in range(21):
        want = (step + 1) / 6 if step < 6 else reference.get_last_lr()[0]
        assert share(step) == pytest.approx(want, abs=1e-9), step
        optimizer.step()
        reference.step()
