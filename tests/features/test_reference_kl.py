"""The reference policy of --beta, and its KL in the reward.

python -m pytest tests/features/test_reference_kl.py"""

from pathlib import Path

import pytest
import torch

import train
from features import critic
from plumbing.model import checksums
from plumbing.run.arguments import parse
from tiny_run import TINY
from tools import export


def test_a_checkpoint_without_the_reference_that_moved_is_refused_in_one_line(workplace, capsys):
    train.main([*TINY, "--steps", "1", "--beta", "0.1", "--sync_ref_model",
                "--ref_model_sync_steps", "1", "--output_dir", "run"])
    folder = Path("run/checkpoints/step_1")
    state = torch.load(folder / "state.pt", weights_only=True)
    state["extras"] = state.pop("features")["ReferenceKL"]   # where older versions kept it
    torch.save(state, folder / "state.pt")
    (folder / checksums.NAME).unlink()
    checksums.seal(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(["--output_dir", "run", "--resume", "--steps", "2"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "has no reference policy, which --sync_ref_model moves" in said


# ------------------------------------------------------------------------- the KL in the reward

BETA = 0.5
MOVES = f"--beta {BETA} --steps 3 --warmup_steps 0 --learning_rate 0.003"


@pytest.fixture
def estimated(monkeypatch):
    """[(rewards [B], what a batch gave, the advantages)] of every rollout batch from now on."""
    seen = []
    estimate = train.estimate_advantages

    def watched(name, rewards, *args, **inputs):
        seen.append((rewards, inputs, estimate(name, rewards, *args, **inputs)))
        return seen[-1][-1]
    monkeypatch.setattr(train, "estimate_advantages", watched)
    return seen


def penalized(rewards, inputs):
    """The reward of every loss token, in float64: a list of numbers per response."""
    rows = []
    for i, mask in enumerate(inputs["mask"]):
        places = mask.nonzero().flatten().tolist()
        old, ref = inputs["old_logp"][i], inputs["ref_logp"][i]
        row = [-BETA * (old[t].item() - ref[t].item()) for t in places]
        row[-1] += rewards[i].item()
        rows.append(row)
    return rows


def test_an_advantage_per_response_reads_the_sum_over_the_tokens(estimated, run):
    records = run(f"{MOVES} --use_kl_in_reward")
    for rewards, inputs, found in estimated:
        sums = torch.tensor([sum(row) for row in penalized(rewards, inputs)], dtype=torch.double)
        groups = sums.view(-1, 4)
        std = groups.std(-1, unbiased=False, keepdim=True)
        # where all rewards are equal, rounding decides: the first batch, whose KL is 0
        clear = (std > 1e-4).expand(groups.shape).flatten()
        want = ((groups - groups.mean(-1, keepdim=True)) / (std + 1e-6)).flatten()
        torch.testing.assert_close(found.double()[clear], want[clear], atol=2e-3, rtol=2e-3)
    assert clear.sum() > rewards.view(-1, 4).std(-1).gt(0).sum() * 4, "equal rewards, and a signal"
    assert all("kl_loss" not in record for record in records) and records[-1]["kl"] > 0
    assert [record["reward"] for record in records] == [
        pytest.approx(rewards.mean().item()) for rewards, _, _ in estimated], "without the KL"


def test_gae_and_the_critics_targets_read_it_per_token(estimated, run, monkeypatch):
    targets = []
    loss = critic.value_loss

    def kept(values, old_values, returns, mask, weights):
        targets.append(sorted(returns[mask].tolist()))       # its groups come in another order
        return loss(values, old_values, returns, mask, weights)
    monkeypatch.setattr(critic, "value_loss", kept)
    run(f"{MOVES} --use_kl_in_reward --algorithm ppo --lam 0.8 --steps_per_generation 1")
    for (rewards, inputs, found), seen in zip(estimated, targets, strict=True):
        want = []
        for i, row in enumerate(penalized(rewards, inputs)):
            places = inputs["mask"][i].nonzero().flatten().tolist()
            V = [inputs["values"][i, t].item() for t in places] + [0.0]
            errors = [r + V[k + 1] - V[k] for k, r in enumerate(row)]
            for k, t in enumerate(places):
                advantage = sum(0.8 ** j * error for j, error in enumerate(errors[k:]))
                assert found[i, t].item() == pytest.approx(advantage, abs=1e-5)
                want.append(advantage + V[k])
        assert seen == pytest.approx(sorted(want), abs=1e-5)
    assert len(estimated) == 3 and estimated[-1][1]["kl"].abs().max() > 1e-3


def test_reinforce_plus_plus_subtracts_it_without_the_flag(estimated, run):
    """The returns-to-go of the rewards per token, whitened."""
    records = run(f"{MOVES} --algorithm reinforce_plus_plus")
    assert all("kl_loss" not in record for record in records) and records[-1]["kl"] > 0
    for rewards, inputs, found in estimated:
        returns = [sum(row[k:]) for row in penalized(rewards, inputs) for k in range(len(row))]
        returns = torch.tensor(returns, dtype=torch.double)                             # [tokens]
        want = (returns - returns.mean()) / returns.std(unbiased=False)
        torch.testing.assert_close(found[inputs["mask"]].double(), want, atol=1e-4, rtol=1e-4)


def test_equal_weights_of_rewards_matter_beside_the_kl(refused):
    Path("rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 3)
    line = "--model_name_or_path m --dataset_name rows.jsonl --reward_weights 2 --beta 0.1"
    assert "multiplies every reward" in refused(line)
    assert parse(f"{line} --use_kl_in_reward".split()).reward_weights == [2.0]


def test_trl_has_no_kl_in_the_reward():
    settings = parse("--algorithm grpo --beta 0.1 --use_kl_in_reward".split())
    assert "it has no KL in the reward" in export.exported(export.trl, settings)
