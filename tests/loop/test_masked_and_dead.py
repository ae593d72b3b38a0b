"""What becomes of a response without loss tokens, and of the KL of --beta where lengths are summed
or rewards equal. python -m pytest tests/loop/test_masked_and_dead.py

Each has been a bug or a question in TRL (#6095, #6654, #5588); here is what this project does.
References: loops in float64.
"""

import math

import pytest
import torch

from features.reference_kl import ReferenceKL
from losses import OBJECTIVES
from reference import G, only, ragged
from test_losses import ours

MEANS = ("sequence-mean", "sequence-sum", "constant")        # over responses


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_response_without_loss_tokens_adds_nothing_but_counts_as_a_response(name):
    """TRL#6095 (GMPO). With a mean over responses N includes it: the loss is that of the others,
    times (N - 1) / N."""
    batch = only(slice(8, 16), ragged())                     # its third row has no loss token
    others = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    whole, rest = (ours(name, b, group_size=len(b.mask), max_length=10)
                   for b in (batch, only(others, batch)))
    share = 7 / 8 if OBJECTIVES[name].reduction in MEANS else 1
    assert not batch.mask[2].any() and not whole.gradient[2].any()
    assert whole.loss == pytest.approx(rest.loss * share)
    torch.testing.assert_close(whole.gradient[others], rest.gradient * share)
    assert all(math.isfinite(value) for value in whole.stats.values())


@pytest.fixture
def terms(then):
    """[(part, new scores, the KL term)] of every micro-batch from now on."""
    calls = []
    then(ReferenceKL, "in_loss", lambda found, self, part, new, *others: calls.append(
        (part, new, found["kl_loss"])))
    return calls


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


@pytest.mark.parametrize("reduction", ["sequence-sum", "sequence-mean", "token-mean"])
def test_the_kl_is_averaged_as_the_loss_is_and_padding_has_none(reduction, terms, run):
    """TRL#6654: with sequence-sum a response's KL is the sum over its own tokens; the length enters
    once."""
    run(f"--steps 3 --warmup_steps 0 --beta 0.3 --reduction {reduction}")
    lengths = set()
    for part, new, found in terms:
        kl = k3(new.logp.double(), part.more["ref_logp"].double())
        rows = [x[m].tolist() for x, m in zip(kl, part.rollout.mask)]
        lengths |= {len(row) for row in rows}
        every = sum(map(sum, rows))
        want = {"sequence-sum": every / len(rows), "token-mean": every / sum(map(len, rows)),
                "sequence-mean": sum(sum(row) / len(row) for row in rows) / len(rows)}[reduction]
        assert found.item() == pytest.approx(0.3 * want, rel=1e-4, abs=1e-7)
    assert terms[-1][2] > 0 and len(lengths) > 1, "unequal lengths, and a policy that has moved"


def test_groups_of_equal_rewards_keep_their_kl(terms, run):
    """TRL#5588: the KL does not depend on the advantage, so with --beta such groups are in every
    update; without, they are not."""
    records = run("--steps 3 --warmup_steps 0 --beta 0.3")
    assert all(len(part.advantages) == 2 * G for part, *_ in terms)     # both of each mini-batch
    dead = [(part, new) for part, new, _ in terms[2:]
            if not part.advantages.view(2, G).any(-1).all()]
    assert dead and any(record["dead_groups"] for record in records)
    part, new = dead[-1]
    rows = (part.advantages == 0)[:, None] & part.rollout.mask                      # [B, T]
    logp = new.logp.detach().requires_grad_()
    (part.weights * k3(logp, part.more["ref_logp"]) * rows).sum().backward()
    assert logp.grad[rows].abs().max() > 0
