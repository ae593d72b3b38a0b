"""A sampler that lags behind the policy. python -m pytest tests/engines/test_stale.py"""

import copy
from pathlib import Path

import pytest
import torch

from models import make
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.engines.stale import Stale0, Stale1, Stale2, Stale8
from plumbing.speed.fast import FastSampler
from tiny_run import differences

STALE = Path(__file__).parents[2] / "plumbing" / "engines" / "stale.py"


@pytest.mark.parametrize("kind, rounds", [(Stale0, 1), (Stale1, 1), (Stale2, 1), (Stale2, 3),
                                          (Stale8, 1)])
def test_batch_n_is_sampled_by_the_policy_of_batch_n_minus_k(kind, rounds):
    """Five batches with an update after each; rounds: how often each batch samples."""
    tokenizer, policy = builtin_tokenizer(), make(num_hidden_layers=1)
    prompts = [tokenizer.encode("1+2=")] * 4
    sampler, policies, found = kind(policy, tokenizer, 6), [], []
    for n in range(5):
        uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(n))     # [B, T]
        for _ in range(rounds):
            rollout = sampler.sample(prompts, 2, uniforms=uniforms)
        policies.append(copy.deepcopy(policy))
        found.append((rollout, uniforms))
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(torch.randn_like(p) * .3)
    for n, (rollout, uniforms) in enumerate(found):
        own = [FastSampler(policy, tokenizer, 6).sample(prompts, 2, uniforms=uniforms)
               for policy in policies]
        equal = [torch.equal(rollout.mask, other.mask)
                 and torch.allclose(rollout.sampler_logp, other.sampler_logp, atol=1e-5)
                 for other in own]
        assert equal == [i == max(0, n - kind.k) for i in range(5)]


def test_a_batch_without_an_update_does_not_shorten_the_lag(monkeypatch):
    """The policies of five batches, the update of the second skipped: 0 1 1 2 3. A lag of 1 is one
    policy, not one batch."""
    sampler, drawn = Stale1(torch.nn.Linear(1, 1), None, 1), []
    monkeypatch.setattr(FastSampler, "sample",
                        lambda self: drawn.append(self.policy.weight.item()))
    for number in (0, 1, 1, 2, 3):
        torch.nn.init.constant_(sampler.policy.weight, number)
        sampler.sample()
    assert drawn == [0, 0, 0, 1, 2]


def test_no_lag_is_the_built_in_sampler_and_a_lag_shows_from_the_second_batch_on(run):
    line = "--steps 3 --save_steps 3 "
    none = run(line + "--old_logp sampler", folder="none")
    run(line + f"--old_logp sampler --sampler {STALE}:Stale0", folder="stale0")
    assert [place for place in differences("none", "stale0", 3) if "/origin/" not in place] == []
    records = run(line + f"--sampler {STALE}:Stale2", folder="stale2")
    lag = [record["mismatch_kl"] for record in records]
    assert lag[0] < 1e-9 < 1e-6 < min(lag[1:])
    stale = run(line + f"--old_logp sampler --sampler {STALE}:Stale1", folder="stale1")
    assert none[1:] != stale[1:]
