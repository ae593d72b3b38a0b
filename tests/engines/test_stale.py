"""A sampler that lags behind the policy. python -m pytest tests/engines/test_stale.py"""

import copy
from pathlib import Path

import pytest
import torch
from tiny_run import TINY, differences, metrics
from transformers import Qwen3Config, Qwen3ForCausalLM

import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.speed.fast import FastSampler
from plumbing.engines.stale import Stale0, Stale1, Stale2, Stale8

STALE = str(Path(__file__).parents[2] / "plumbing" / "engines" / "stale.py")


def batches(kind, count, rounds=1):
    """[(what `kind` sampled, the policy at that time)] of `count` batches with an update after each."""
    torch.manual_seed(0)
    tokenizer = builtin_tokenizer()
    policy = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, intermediate_size=48, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    sampler, found = kind(policy, tokenizer, 6), []
    for n in range(count):
        uniforms = torch.rand(8, 6, generator=torch.Generator().manual_seed(n))     # [B, T]
        for _ in range(rounds):
            rollout = sampler.sample([tokenizer.encode("1+2=")] * 4, 2, uniforms=uniforms)
        found.append((rollout, copy.deepcopy(policy), uniforms))
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(torch.randn_like(p) * .3)
    return tokenizer, found


@pytest.mark.parametrize("kind, rounds", [(Stale0, 1), (Stale1, 1), (Stale2, 1), (Stale2, 3), (Stale8, 1)])
def test_batch_n_is_sampled_by_the_policy_of_batch_n_minus_k(kind, rounds):
    tokenizer, found = batches(kind, 5, rounds)
    for n, (rollout, _, uniforms) in enumerate(found):
        policies = [policy for _, policy, _ in found]
        own = [FastSampler(policy, tokenizer, 6).sample([tokenizer.encode("1+2=")] * 4, 2, uniforms=uniforms) for policy in policies]
        equal = [torch.allclose(rollout.sampler_logp, other.sampler_logp, atol=1e-5) for other in own]
        assert equal == [i == max(0, n - kind.k) for i in range(5)]


def test_a_batch_without_an_update_does_not_shorten_the_lag():
    """The policies of five batches, the update of the second skipped: 0 1 1 2 3. A lag of 1 is one policy, not one batch."""
    sampler = Stale1(torch.nn.Linear(1, 1), None, 1)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSampler, "sample", lambda self: drawn.append(self.policy.weight.item()))
        for number in (0, 1, 1, 2, 3):
            torch.nn.init.constant_(sampler.policy.weight, number)
            sampler.sample()
    assert drawn == [0, 0, 0, 1, 2]


def test_no_lag_is_the_built_in_sampler_and_a_lag_shows_from_the_second_batch_on(workplace):
    def run(name, *flags):
        train.main([*TINY, "--steps", "3", "--save_steps", "3", "--output_dir", name, *flags])
        return metrics(name)
    run("none", "--old_logp", "sampler")
    run("stale0", "--old_logp", "sampler", "--sampler", f"{STALE}:Stale0")
    assert [place for place in differences("none", "stale0", 3) if "/origin/" not in place] == []
    lag = [record["mismatch_kl"] for record in run("stale2", "--sampler", f"{STALE}:Stale2")]
    assert lag[0] < 1e-9 < 1e-6 < min(lag[1:])
    assert metrics("none")[1:] != run("stale1", "--old_logp", "sampler", "--sampler", f"{STALE}:Stale1")[1:]
