"""--num_iterations: every mini-batch is used several times. python -m pytest tests/run/test_reuse.py

That the weights are those of gspo.py with the same constant: tests/concepts/test_gspo_and_train.py.
"""

import pytest
import torch

import train
from tiny_run import TINY, metrics

FLAGS = [*TINY, "--steps", "2", "--num_iterations", "3", "--warmup_steps", "0"]


@pytest.fixture
def uses(workplace, monkeypatch):
    """The mini-batches of a run of two batches, in which each is used three times."""
    minis = []
    update = train.update

    def recording(settings, learner, mini):
        minis.append(mini)
        return update(settings, learner, mini)
    monkeypatch.setattr(train, "update", recording)
    train.main([*FLAGS, "--output_dir", "run"])
    return minis


def test_every_use_has_all_prompts_in_a_new_order_and_the_first_old_log_probs(uses):
    assert len(uses) == 2 * 3 * 2                                # batches, uses, mini-batches
    batches = [[[problem.prompt for mini in uses[start:start + 2] for problem in mini.problems]
                for start in range(first, first + 6, 2)] for first in (0, 6)]
    assert all(sorted(order) == sorted(orders[0]) for orders in batches for order in orders)
    assert any(order != orders[0] for orders in batches for order in orders)
    first, again = ({tuple(row.tolist()) for mini in uses[start:start + 2] for row in mini.old_logp}
                    for start in (0, 4))
    assert first == again


def test_metrics_tell_the_first_use_from_the_last(uses):
    for record in metrics("run"):
        assert len(record["minibatches"]) == 6
        assert record["minibatches"][0]["clip_low"] + record["minibatches"][0]["clip_high"] == 0
        first, last = (sum(m["clip_low"] for m in part) / 2
                       for part in (record["minibatches"][:2], record["minibatches"][4:]))
        assert record["clip_low_first_use"] == pytest.approx(first)
        assert record["clip_low_last_use"] == pytest.approx(last)
    assert record["log_w_var_last_use"] > record["log_w_var_first_use"] > 0


def test_the_schedule_counts_every_use(uses):
    assert len(uses) == 12
    state = torch.load("run/checkpoints/step_2/state.pt", weights_only=True)
    assert state["schedule"]["last_epoch"] == 12
    assert metrics("run")[-1]["lr"] == pytest.approx(0, abs=1e-12)


def test_other_names_point_to_it(capsys):
    for name in ("mu", "ppo_epochs"):
        with pytest.raises(SystemExit):
            train.main([f"--{name}", "2"])
        assert "did you mean --num_iterations" in capsys.readouterr().err
