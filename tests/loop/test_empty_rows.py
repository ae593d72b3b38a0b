"""Rows without loss tokens change no metric and end no run.

python -m pytest tests/loop/test_empty_rows.py
"""

import math
from dataclasses import replace

import pytest
import torch

from losses import policy_loss
from rollout import Scores
from routes import Pass
from session.metrics import Recorder, policy_metrics


def near(want, **tolerance):
    """pytest.approx of a float; anything else as it is."""
    return pytest.approx(want, **tolerance) if isinstance(want, float) else want


def test_perplexities_are_means_over_the_responses_with_loss_tokens():
    old = torch.tensor([[-1.0, -3.0], [-2.0, 9.0], [9.0, 9.0]])                     # [B, T]
    new = torch.tensor([[-2.0, -3.0], [-4.0, 9.0], [9.0, 9.0]])                     # [B, T]
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()                            # [B, T]
    want = {"perplexity_old": math.exp(2), "perplexity_new": (math.exp(2.5) + math.exp(4)) / 2,
            "delta_h": (-0.5 - 2) / 2}
    scores = Scores(new, entropy=old, hidden=None)
    found, none = (policy_metrics(old, scores, some) for some in (mask, ~mask & mask))
    for name, value in want.items():
        assert found[name] == pytest.approx(value) and none[name] is None, name


def test_updates_without_loss_tokens_are_not_averaged_over(run):
    records = run("--mask_truncated_completions --max_completion_length 3 --warmup_steps 0 "
                  "--steps 8")
    norms = [[one["grad_norm"] for one in record["minibatches"]] for record in records]
    half = [i for i, (one, two) in enumerate(norms) if (one == 0) != (two == 0)]
    assert half
    assert [records[i]["grad_norm"] for i in half] == [max(norms[i]) for i in half]


def with_empty_group(batch):
    """The batch, and a copy of its last group after it, without loss tokens."""
    B = len(batch.problems)
    more = batch.take(torch.tensor([*range(B), *range(B - batch.group_size, B)]))
    mask = more.rollout.mask.clone()
    mask[B:] = False
    return replace(more, rollout=replace(more.rollout, mask=mask))


def of_rows(scores, rows):
    """The Scores of these rows."""
    cut = {name: x[rows] for name, x in vars(scores).items() if isinstance(x, torch.Tensor)}
    if scores.routes is not None:
        cut["routes"] = Pass(*(x[:, rows] for x in scores.routes))
    return replace(scores, **cut)


@pytest.mark.parametrize("flags", [
    "--algorithm gspo", "--beta 0.1", "--algorithm ppo", "--algorithm rspo",
    "--algorithm grpo --entropy_quantile 0.5 --entropy_coef 0.01",
    "--routing_replay old --beta 0.1",
    "--algorithm grpo --sampler_dtype int8 --mismatch token_truncate --mismatch_mask token"])
def test_an_added_empty_group_changes_no_metric(flags, run, monkeypatch):
    compared, make = [], Recorder.make_record

    def twice(recorder, batch, mini, new, updates, times):
        record = make(recorder, batch, mini, new, updates, times)
        G = batch.group_size
        rows = [*range(len(new.logp)), *range(len(new.logp) - G, len(new.logp))]
        empty = torch.zeros_like(mini.rollout.mask)
        _, stats = policy_loss(recorder.settings.row, new.logp, mini.old_logp, mini.advantages,
                               empty, weights=empty.float(),
                               router_shift=torch.ones_like(mini.old_logp))
        losses = {name: 0.0 for name in updates[0] if name.endswith("loss")}
        nothing = {name: x.item() for name, x in stats.items()} | losses | dict(
            grad_norm=0.0, skipped=False)
        more = make(recorder, with_empty_group(batch), with_empty_group(mini), of_rows(new, rows),
                    [nothing, *updates], times)
        assert more.pop("minibatches")[1:] == record["minibatches"]
        compared.append((record, more))
        return record
    monkeypatch.setattr(Recorder, "make_record", twice)
    run(f"{flags} --steps 3 --warmup_steps 0")
    assert len(compared) == 3
    for record, more in compared:
        for name in more.keys() - {"discarded_groups", "zero_variance_groups"}:  # of one more
            assert more[name] == near(record[name], rel=1e-5, abs=1e-7), name
