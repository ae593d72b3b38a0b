"""What becomes of a response without loss tokens, and of the KL of --beta where lengths are summed or rewards equal.

Each has been a bug or a question in TRL (#6095, #6654, #5588); here is what this project does. References: loops in float64.
python -m pytest tests/loop/test_masked_and_dead.py
"""

import pytest
import torch

import train
from features.reference_kl import ReferenceKL
from losses import OBJECTIVES, policy_loss, token_weights
from tiny_run import TINY, metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_response_without_loss_tokens_adds_nothing_but_counts_as_a_response(name):
    """TRL#6095 (GMPO). With a mean over responses N includes it: the loss is that of the others, times (N - 1) / N."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(4, 5, generator=generator)                                       # [B, T]
    old = logp + 0.05 * torch.randn(4, 5, generator=generator)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    mask[0, 3:] = False
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])
    losses, grads = [], []
    for rows in ([0, 1, 2, 3], [0, 1, 3]):
        new, shift = logp[rows].clone().requires_grad_(), torch.ones(len(rows), 5)
        weights = token_weights(mask[rows], OBJECTIVES[name].reduction, group_size=len(rows), max_length=5)
        of_tokens = advantages[rows, None].expand(-1, 5).clone() if OBJECTIVES[name].ratio == "gspo-token" else advantages[rows]
        loss, stats = policy_loss(name, new, old[rows], of_tokens, mask[rows], weights=weights, router_shift=shift)
        loss.backward()
        assert loss.isfinite() and all(torch.as_tensor(value).isfinite().all() for value in stats.values())
        losses.append(loss.item())
        grads.append(new.grad)
    share = 0.75 if OBJECTIVES[name].reduction in ("sequence-mean", "sequence-sum", "constant") else 1.0
    assert (grads[0][2] == 0).all()
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1] * share), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grads[0][[0, 1, 3]], grads[1] * share, atol=1e-6, rtol=1e-5)


@pytest.fixture
def terms(monkeypatch):
    """[(part, new scores, the KL term)] of every micro-batch from now on."""
    calls, original = [], ReferenceKL.in_loss

    def watched(self, part, new, *others):
        result = original(self, part, new, *others)
        calls.append((part, new, result["kl_loss"]))
        return result
    monkeypatch.setattr(ReferenceKL, "in_loss", watched)
    return calls


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


@pytest.mark.parametrize("reduction", ["sequence-sum", "sequence-mean", "token-mean"])
def test_the_kl_is_averaged_as_the_loss_is_and_padding_has_none(reduction, terms, workplace):
    """TRL#6654: with sequence-sum a response's KL is the sum over its own tokens; the length enters once."""
    train.main([*TINY, "--steps", "3", "--warmup_steps", "0", "--beta", "0.3", "--reduction", reduction, "--output_dir", "run"])
    lengths = set()
    for part, new, found in terms:
        mask, rows = part.rollout.mask, []
        lengths |= set(mask.sum(-1).tolist())
        for i in range(len(mask)):
            rows.append([k3(new.logp[i, t].double(), part.more["ref_logp"][i, t].double()).item() for t in range(mask.shape[1]) if mask[i, t]])
        every = [x for row in rows for x in row]
        want = {"sequence-sum": sum(every) / len(rows), "token-mean": sum(every) / len(every),
                "sequence-mean": sum(sum(row) / len(row) for row in rows) / len(rows)}[reduction]
        assert found.item() == pytest.approx(0.3 * want, rel=1e-4, abs=1e-7)
    assert terms[-1][2] > 0 and len(lengths) > 1             # responses of unequal length, and a policy that has moved


def test_groups_of_equal_rewards_keep_their_kl(terms, workplace):
    """TRL#5588: the KL does not depend on the advantage, so with --beta such groups are in every update; without, they are not."""
    train.main([*TINY, "--steps", "3", "--warmup_steps", "0", "--beta", "0.3", "--output_dir", "run"])
    dead = [(part, new) for part, new, _ in terms[2:] for g in range(2) if not part.advantages[4 * g:4 * g + 4].any()]
    assert all(len(part.advantages) == 8 for part, _, _ in terms)                        # both groups of every mini-batch
    assert dead and any(record["dead_groups"] for record in metrics("run"))
    part, new = dead[-1]
    rows = (part.advantages == 0)[:, None] & part.rollout.mask
    logp = new.logp.detach().requires_grad_()
    (part.weights * k3(logp, part.more["ref_logp"]) * rows).sum().backward()
    assert logp.grad[rows].abs().max() > 0
