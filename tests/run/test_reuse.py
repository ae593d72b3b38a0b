"""--num_iterations: every mini-batch is used several times. pytest tests/run/test_reuse.py

That the weights are those of gspo.py with the same constant: tests/concepts/test_gspo_and_train.py.
"""

import pytest

import train


def test_every_use_has_all_prompts_in_a_new_order_and_the_first_old_log_probs(
        run, first):
    """Two batches of two mini-batches, each used three times; the schedule counts every use."""
    uses = []
    first(train, "update", lambda learner, mini: uses.append(mini))
    records = run("--steps 2 --num_iterations 3 --warmup_steps 0")
    assert len(uses) == 2 * 3 * 2                            # batches, uses, mini-batches
    batches = [[[problem.prompt for mini in uses[start:start + 2] for problem in mini.problems]
                for start in range(first, first + 6, 2)] for first in (0, 6)]
    assert all(sorted(order) == sorted(orders[0]) for orders in batches for order in orders)
    assert any(order != orders[0] for orders in batches for order in orders)
    once, again = ({tuple(row.tolist()) for mini in uses[start:start + 2] for row in mini.old_logp}
                    for start in (0, 4))
    assert once == again
    assert records[-1]["lr"] == pytest.approx(0, abs=1e-12)
    for record in records:                                   # the first use and the last
        parts = record["minibatches"]
        assert len(parts) == 6 and parts[0]["clip_low"] + parts[0]["clip_high"] == 0
