"""The schedule of the learning rate: transformers' own, but for a warm-up that begins above 0.
A skipped update does not move it: tests/run/test_faults.py.
python -m pytest tests/loop/test_schedule.py"""

import pytest
import torch
from transformers import get_scheduler

import session.learner
from session.arguments import parse


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_rate_is_transformers_own_but_for_a_warm_up_from_1_over_n(kind):
    args = parse(f"--steps 5 --steps_per_generation 4 --warmup_steps 6 --lr_scheduler_type {kind} "
                 "--learning_rate 0.5".split())
    ours, theirs = (torch.optim.SGD([torch.zeros(1)], 0.5) for _ in range(2))
    schedule = session.learner.make_schedule(args, ours)
    reference = get_scheduler(kind, theirs, 6, 20)
    for step in range(21):
        want = 0.5 * (step + 1) / 6 if step < 6 else reference.get_last_lr()[0]
        assert schedule.get_last_lr()[0] == pytest.approx(want, abs=1e-9), step
        for x in (ours, theirs, schedule, reference):
            x.step()
