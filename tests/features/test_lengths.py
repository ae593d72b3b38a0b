"""Long responses: the overlong penalty, and responses that were cut off left out of the loss.
python -m pytest tests/features/test_lengths.py"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from features.lengths import Lengths
from tiny_run import jsonl, state, write

CUT = "--max_completion_length 3 --mask_truncated_completions "      # answers of one number have


PLAYED = ("--model_name_or_path policy --dataset_name sums.jsonl --stop , "
          "--environment mine.py:Always --max_completion_length 4")


def test_the_penalty_counts_observations_and_a_response_that_was_cut_off():
    """In float64: 1 minus a fifth is 0.8."""
    settings = SimpleNamespace(overlong_cache=0.5)
    task = SimpleNamespace(max_completion_length=10, penalties=())
    lengths = Lengths(SimpleNamespace(settings=settings, task=task))
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0]]).bool()
    rollout = SimpleNamespace(mask=mask, truncated=torch.tensor([False, False, True]))
    longer = lengths._longer(rollout, torch.ones(3, 1).double())                    # [3, 2]
    assert longer.sum(-1).tolist() == [1, 0.8, 0]


def test_a_response_that_was_cut_off_has_no_gradient_and_its_reward_counts(run, calls, then):
    seen = calls(train, "policy_loss")
    then(train, "reward", lambda _, learner, rollout, problems: (
        torch.arange(len(rollout.mask))[:, None] % 2.0))
    [record] = run(CUT + "--prompts_per_step 8 --plain")
    assert 0 < record["truncated"] < 1 and record["length"] > 1       # of what was sampled
    for (*_, mask), options, _ in seen:                               # all rows count, as in TRL
        tokens = (len(mask) * mask.sum(-1, keepdim=True)).clamp(min=1)              # [b, 1]
        assert torch.allclose(options["weights"], mask / tokens)
    empty = torch.cat([~mask.any(-1) for (*_, mask), *_ in seen])
    assert empty.float().mean().item() == pytest.approx(record["truncated"])
    advantages = torch.cat([advantages for (*_, advantages, _), *_ in seen])
    assert any(advantages[empty] != 0)         # the rewards of responses that were cut off count


@pytest.mark.parametrize("flags", [
    "", "--plain", "--algorithm ppo", "--algorithm reinforce_plus_plus",
    "--algorithm grpo --entropy_quantile 0.5", "--beta 0.1", "--dynamic_sampling",
    "--routing_replay old", "--entropy_coef 0.1",
    "--mismatch token_truncate --sampler_dtype int4", "--reduction constant",
    "--router_aux_loss_coef 0.1", PLAYED])
def test_a_mini_batch_without_a_loss_token_is_a_step_of_zero(flags, run, cold_start):
    """All responses are cut off: no weight moves, nothing is NaN, and the metrics say so."""
    if flags == PLAYED:
        Path("policy").symlink_to(cold_start)
        jsonl("sums.jsonl", [{"prompt": f"{a}+{b}=", "answer": "2,1."}
                             for a in range(1, 4) for b in range(1, 4)])
        write("mine.py", "class Always:\n    def __init__(self, row):\n        pass\n"
                         "    def step(self, text):\n        return '1', 0, False\n")
    records = run("--steps 2 --max_completion_length 1 --mask_truncated_completions " + flags)
    assert [r["truncated"] for r in records] == [1, 1]
    assert all(r["skipped"] == 0 and r["loss"] == 0 for r in records)
    text = Path("run/metrics.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in text and "Infinity" not in text
    assert not state("run", 2)["optimizer"]["state"]                  # AdamW has not made a step
    assert flags != PLAYED or records[0]["length"] < 4            # observations do not count
