"""Sampling with top-p and top-k, and log-probs renormalized over the tokens that were kept.
References: transformers' own logits warpers, an enumerated expectation, a float64 loop.
python -m pytest tests/features/test_kept_tokens.py
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import models
from features.kept_tokens import KeepingSampler, kept_tokens, mask_others
from losses import policy_loss
from plumbing.data.running_sum import builtin_tokenizer
from experiments import stale
from plumbing.speed import fast
from ratios import token_ratio
from rollout import Sampler, response_logp

PROMPTS = [[3, 10, 4, 11], [7, 10, 2, 10, 9, 11], [1, 11]]
TOKENIZER = builtin_tokenizer()
POLICY = models.make(num_hidden_layers=1, initializer_range=0.6)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rolled(kind=fast.FastSampler, prompts=PROMPTS, group_size=4, seed=1, *, top_p=1.0, top_k=0,
           temperature=1.0):
    sampler = KeepingSampler(kind(POLICY, TOKENIZER, 6), SimpleNamespace(
        top_p=top_p, top_k=top_k, temperature=temperature))
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts) * group_size, 6, generator=generator)
    return sampler.sample(prompts, group_size, uniforms=uniforms)


def sets_of(rollout):
    return rollout.kept_tokens.ids                                                  # [B, T, K]


@pytest.mark.parametrize("top_p, top_k", [(0.9, 0), (0.5, 0), (1.0, 3), (0.8, 4), (1e-6, 0),
                                          (1.0, 1000)])
def test_the_kept_tokens_are_those_of_transformers(top_p, top_k):
    logits = 3 * draw(20, 17)
    theirs = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    ours = mask_others(logits, kept_tokens(logits, top_p, top_k))
    assert torch.equal(ours.isinf(), theirs.isinf()) and ours.isfinite().any(-1).all()


@pytest.mark.parametrize("kind", [Sampler, fast.FastSampler])
@pytest.mark.parametrize("settings", [dict(top_p=0.7), dict(top_k=2),
                                      dict(top_p=0.8, top_k=5, temperature=0.7)], ids=str)
def test_the_ratio_is_1_and_without_the_sets_the_surviving_mass(kind, settings):
    rollout = rolled(kind, **settings)
    temperature, mask = settings.get("temperature", 1.0), rollout.mask
    assert sets_of(rollout).shape[:2] == mask.shape
    assert (sets_of(rollout) == rollout.response_ids[..., None]).any(-1)[mask].all()
    for scoring in (response_logp, fast.fast_response_logp):
        logp = scoring(POLICY, rollout, temperature).logp
        torch.testing.assert_close(logp, rollout.sampler_logp, rtol=1e-5, atol=1e-5)
        w = token_ratio(logp, rollout.sampler_logp, mask)[mask]
        assert torch.allclose(w, torch.ones(()), atol=1e-5)
    rollout = replace(rollout, kept_tokens=None)     # the omission: over the whole vocabulary
    whole = response_logp(POLICY, rollout, temperature).logp
    mass = token_ratio(whole, rollout.sampler_logp, mask)[mask]
    assert mass.max() <= 1 + 1e-6 and mass.mean() < 0.97


@pytest.mark.parametrize("renormalized", [True, False])
def test_the_gradient_is_that_of_the_expected_reward_under_the_truncated_policy(renormalized):
    """Enumerated over the kept tokens of π_old: E[w·A·∇log π] with both renormalized is the
    gradient of Σ π_K(y) A(y). Scored over the whole vocabulary instead, it is not."""
    old, reward = draw(8, seed=2), draw(8, seed=3)
    kept = kept_tokens(old[None], 0.8, 0)
    logits = (old + 0.3 * draw(8, seed=4)).requires_grad_()

    def log_p(x):
        return mask_others(x[None], kept).log_softmax(-1)[0]
    tokens = sorted(set(kept[0].tolist()))
    assert 1 < len(tokens) < 8
    expected = (log_p(logits).exp()[tokens] * reward[tokens]).sum()
    true, = torch.autograd.grad(expected, logits)
    found = 0
    for y in tokens:
        new = (log_p(logits) if renormalized else logits.log_softmax(-1))[y]
        loss, _ = policy_loss("grpo", new.view(1, 1), log_p(old)[y].view(1, 1), reward[y].view(1),
                              torch.ones(1, 1).bool(), epsilon=0.999, epsilon_high=0.999)
        found = found + log_p(old)[y].exp() * torch.autograd.grad(-loss, logits)[0]
    if renormalized:
        torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-12)
    assert renormalized or not torch.allclose(found, true, rtol=0.05)


# ------------------------------------------------------------------------------- the command line

@pytest.mark.parametrize("flags", [
    "--top_p 0.8", "--top_k 2", "--top_p 0.8 --plain", "--top_p 0.8 --beta 0.1",
    "--top_p 0.8 --routing_replay rollout", "--top_p 0.8 --dynamic_sampling",
    "--top_p 0.8 --algorithm grpo --advantage distillation --self_distillation answer"])
def test_a_run_scores_what_it_sampled(flags, run):
    record, = run(f"--learning_rate 1e-12 {flags}")
    assert record["mismatch_kl"] < 1e-9 and record["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert record.get("kl", 0) < 1e-9


def test_a_sampler_of_ones_own_returns_the_sets(run):
    words = run.refused(f"--top_p 0.8 --sampler {stale.__file__}:Stale0", begun=True)
    assert 'Stale0 does not return the kept tokens (Rollout.kept_tokens' in words


