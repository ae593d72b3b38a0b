"""The reference policy of --beta: its KL in the loss or in the reward.

python -m pytest tests/features/test_reference_kl.py"""

import pytest

import reference
import train
from features import critic
from features.reference_kl import KLTerm
from reference import penalized

# ------------------------------------------------------------------------- the KL in the loss


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


@pytest.mark.parametrize("reduction", ["sequence-sum", "sequence-mean", "token-mean"])
def test_the_kl_is_averaged_as_the_loss_is_and_padding_has_none(reduction, calls, run):
    """TRL#6654: with sequence-sum a response's KL is the sum over its own tokens; the length enters
    once."""
    terms = calls(KLTerm, "loss")
    run(f"--steps 3 --warmup_steps 0 --beta 0.3 --reduction {reduction}")
    lengths = set()
    for (_, part, new, _), _, found in terms:
        kl = k3(new.logp.double(), part.extras["ref_logp"].double())
        rows = [x[m].tolist() for x, m in zip(kl, part.rollout.mask)]
        lengths |= {len(row) for row in rows}
        every = sum(map(sum, rows))
        want = {"sequence-sum": every / len(rows), "token-mean": every / sum(map(len, rows)),
                "sequence-mean": sum(sum(row) / len(row) for row in rows) / len(rows)}[reduction]
        assert found["kl_loss"].item() == pytest.approx(0.3 * want, rel=1e-4, abs=1e-7)
    assert found["kl_loss"] > 0 and len(lengths) > 1, "unequal lengths, and a policy that has moved"


# ------------------------------------------------------------------------- the KL in the reward

BETA = 0.5
MOVES = f"--beta {BETA} --steps 3 --warmup_steps 0 --learning_rate 0.003"


@pytest.mark.parametrize("line", [
    "--use_kl_in_reward", "--algorithm reinforce_plus_plus",             # it needs no flag
    "--use_kl_in_reward --algorithm ppo --lam 0.8 --steps_per_generation 1"])
def test_advantages_and_the_critics_targets_read_rewards_less_the_kl(line, calls, run):
    """What each row of ADVANTAGES makes of it: tests/concepts/test_advantages.py."""
    estimated, targets = calls(train, "estimate_advantages"), calls(critic, "value_loss")
    records = run(f"{MOVES} {line}")
    for ((_, rewards, *_), inputs, _), record in zip(estimated, records, strict=True):
        mask = inputs["mask"]
        gap = (inputs["old_logp"].double() - inputs["ref_logp"].double())[mask]     # [tokens]
        assert inputs["kl"][mask].tolist() == pytest.approx(gap.tolist(), abs=1e-6)
        assert inputs["beta"] == BETA and "kl_loss" not in record
        assert record["reward"] == pytest.approx(rewards.mean().item()), "without the KL"
    assert records[-1]["kl"] > 0 and len(targets) == 3 * ("ppo" in line)
    for ((_, rewards, *_), inputs, _), (target, *_) in zip(estimated, targets):
        rows = zip(rewards.tolist(), inputs["kl"], inputs["values"], inputs["mask"])
        returns = [reference.gae(penalized(reward, BETA, kl[m].tolist()), V[m].tolist(), 0.8)[1]
                   for reward, kl, V, m in rows]
        seen = target[2][target[3]].tolist()                 # its groups come in another order
        assert sorted(seen) == pytest.approx(sorted(sum(returns, [])), abs=1e-5)
