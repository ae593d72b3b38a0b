"""The schedule of the learning rate: transformers' own, but for a warm-up that begins above 0.
python -m pytest tests/loop/test_schedule.py"""

import warnings

import pytest
import torch
from transformers import get_scheduler

import train
from plumbing.run.arguments import parse


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_the_rate_is_transformers_own_but_for_a_warm_up_from_1_over_n(kind):
    args = parse(f"--steps 5 --steps_per_generation 4 --warmup_steps 6 --lr_scheduler_type {kind} "
                 "--learning_rate 0.5".split())
    ours, theirs = (torch.optim.SGD([torch.zeros(1)], 0.5) for _ in range(2))
    schedule, reference = train.make_schedule(args, ours), get_scheduler(kind, theirs, 6, 20)
    for step in range(21):
        want = 0.5 * (step + 1) / 6 if step < 6 else reference.get_last_lr()[0]
        assert schedule.get_last_lr()[0] == pytest.approx(want, abs=1e-9), step
        for x in (ours, theirs, schedule, reference):
            x.step()


def test_the_first_update_moves_the_weights_and_a_skipped_one_not_the_schedule(
        run, first, then):
    """Four updates, warm-up of three; the first is spoilt: torch has nothing to warn of."""
    rates, weights = [], []

    def before(args, learner, mini):
        rates.append(learner.optimizer.param_groups[0]["lr"])
        weights.append([p.detach().clone() for p in learner.policy.parameters()])
    first(train, "update", before)
    then(train, "policy_loss", lambda result, *_, **__:
         (result[0] * float("nan"), result[1]) if len(rates) == 1 else None)
    then(train, "make_learner", lambda learner, *_: weights.append(learner.policy.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = run("--steps 2 --learning_rate 0.3 --warmup_steps 3 --algorithm grpo --beta 0.1")
    after, *weights = [[p.detach() for p in each] for each in weights]
    moved = [not all(map(torch.equal, one, other))
             for one, other in zip(weights, [*weights[1:], after])]
    assert rates == pytest.approx([0.1, 0.1, 0.2, 0.3]) and moved == [False, True, True, True]
    assert [record["skipped"] for record in records] == [1, 0]
