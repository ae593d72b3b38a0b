"""Sampling with top-p and top-k, and log-probs renormalized over the tokens that were kept.
References: transformers' own logits warpers, an enumerated expectation, a float64 loop. python -m pytest tests/concepts/test_kept_tokens.py"""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import train
from losses import policy_loss
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.run.arguments import parse
from plumbing.speed import fast
from plumbing.speed.rollouts import concat
from ratios import token_ratio
from rollout import draw_token, kept_tokens, only, response_logp, sample, token_logp
from tiny_run import TINY, differences, metrics

PROMPTS = [[3, 10, 4, 11], [7, 10, 2, 10, 9, 11], [1, 11]]


def model(seed=0):
    torch.manual_seed(seed)
    tokenizer = builtin_tokenizer()
    return tokenizer, Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        intermediate_size=48, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.6)).eval()


@pytest.mark.parametrize("top_p, top_k", [(0.9, 0), (0.5, 0), (1.0, 3), (0.8, 4), (1e-6, 0), (1.0, 1000)])
def test_the_kept_tokens_are_those_of_transformers(top_p, top_k):
    logits = 3 * torch.randn(20, 17, generator=torch.Generator().manual_seed(0))
    theirs = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    ours = only(logits, kept_tokens(logits, top_p, top_k))
    assert torch.equal(ours.isinf(), theirs.isinf()) and ours.isfinite().any(-1).all()


@pytest.mark.parametrize("way", [sample, fast.sample], ids=["plain", "fast"])
@pytest.mark.parametrize("settings", [dict(top_p=0.7), dict(top_k=2), dict(top_p=0.8, top_k=5, temperature=0.7)], ids=str)
def test_equal_policies_have_a_ratio_of_1_and_without_the_sets_it_is_the_surviving_mass(way, settings):
    tokenizer, policy = model()
    uniforms = torch.rand(12, 6, generator=torch.Generator().manual_seed(1))
    rollout = way(policy, tokenizer, PROMPTS, 4, 6, uniforms=uniforms, **settings)
    temperature, mask = settings.get("temperature", 1.0), rollout.mask
    assert rollout.kept.shape[:2] == mask.shape and (rollout.kept == rollout.response_ids[..., None]).any(-1)[mask].all()
    for scoring in (response_logp, fast.response_logp):
        logp = scoring(policy, rollout, temperature).logp
        torch.testing.assert_close(logp, rollout.sampler_logp, rtol=1e-5, atol=1e-5)
        assert torch.allclose(token_ratio(logp, rollout.sampler_logp, mask)[mask], torch.ones(()), atol=1e-5)
    rollout.kept = None                                                  # the omission: scored over the whole vocabulary
    whole = response_logp(policy, rollout, temperature).logp
    mass = token_ratio(whole, rollout.sampler_logp, mask)[mask]
    assert mass.max() <= 1 + 1e-6 and mass.mean() < 0.97


def test_plain_and_fast_draw_the_same_tokens_from_the_same_sets():
    tokenizer, policy = model()
    uniforms = torch.rand(12, 6, generator=torch.Generator().manual_seed(1))
    one, other = (way(policy, tokenizer, PROMPTS, 4, 6, uniforms=uniforms, top_p=0.7) for way in (sample, fast.sample))
    assert one.response_ids.equal(other.response_ids) and one.mask.equal(other.mask)
    sets = [[set(kept.tolist()) for kept in rollout.kept[rollout.mask]] for rollout in (one, other)]
    assert sets[0] == sets[1]


def test_entropies_are_those_of_the_kept_tokens():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = kept_tokens(logits, 0.8, 0)
    chosen, entropy = token_logp(lambda hidden: hidden, logits, kept[:, 0], 1.0, True, kept=kept)
    for row in range(5):
        tokens = set(kept[row].tolist())
        total = sum(math.exp(logits[row, k]) for k in tokens)
        p = {k: math.exp(logits[row, k]) / total for k in tokens}
        assert chosen[row].item() == pytest.approx(math.log(p[kept[row, 0].item()]))
        assert entropy[row].item() == pytest.approx(-sum(x * math.log(x) for x in p.values()))


def test_the_gradient_is_that_of_the_expected_reward_under_the_truncated_policy():
    """Enumerated over the kept tokens of π_old: E[w·A·∇log π] with both renormalized is the gradient of Σ π_K(y) A(y). Scored
    over the whole vocabulary instead, it is not."""
    generator = torch.Generator().manual_seed(2)
    old, reward = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    kept = kept_tokens(old[None], 0.8, 0)
    logits = (old + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)).requires_grad_()
    log_p = lambda x: only(x[None], kept).log_softmax(-1)[0]
    tokens = sorted(set(kept[0].tolist()))
    assert 1 < len(tokens) < 8
    true, = torch.autograd.grad((log_p(logits).exp()[tokens] * reward[tokens]).sum(), logits)
    mask, found, wrong = torch.ones(1, 1, dtype=torch.bool), 0, 0
    for y in tokens:
        weight = log_p(old)[y].exp()
        for renormalized in (True, False):
            new = log_p(logits)[y] if renormalized else logits.log_softmax(-1)[y]
            loss, _ = policy_loss("grpo", new.view(1, 1), log_p(old)[y].view(1, 1), reward[y].view(1), mask, epsilon=0.999, epsilon_high=0.999)
            gradient, = torch.autograd.grad(-loss, logits)
            found, wrong = (found + weight * gradient, wrong) if renormalized else (found, wrong + weight * gradient)
    torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(wrong, true, rtol=0.05)


def test_rollouts_with_sets_are_cut_and_joined():
    tokenizer, policy = model()
    parts = [fast.sample(policy, tokenizer, PROMPTS[:n], 2, 6, uniforms=torch.rand(2 * n, 6, generator=torch.Generator().manual_seed(n)),
                         top_p=p) for n, p in ((1, 0.5), (3, 0.9))]
    joined = concat(parts)
    logp = response_logp(policy, joined).logp
    assert torch.allclose(logp[joined.mask], joined.sampler_logp[joined.mask], atol=1e-5)
    one = joined.groups(torch.tensor([2]))
    assert torch.allclose(response_logp(policy, one).logp, logp[4:6], atol=1e-5)


# ------------------------------------------------------------------------------------------------ the command line

@pytest.mark.parametrize("flags", [["--top_p", "0.8"], ["--top_k", "2"], ["--top_p", "0.8", "--plain"], ["--top_p", "0.8", "--beta", "0.1"],
                                   ["--top_p", "0.8", "--routing_replay", "rollout"], ["--top_p", "0.8", "--dynamic_sampling"],
                                   ["--top_p", "0.8", "--algorithm", "grpo", "--advantage", "distillation", "--self_distillation"]], ids=" ".join)
def test_a_run_scores_what_it_sampled(flags, workplace):
    train.main([*TINY, "--steps", "1", "--learning_rate", "1e-12", "--output_dir", "run", *flags])
    record, = metrics("run")
    assert record["mismatch_kl"] < 1e-9 and record["ratio_max"] == pytest.approx(1, abs=1e-4) and (record["kl"] or 0) < 1e-9


def test_without_the_sets_every_ratio_is_off(workplace, monkeypatch):
    drawn = train.sample

    def forgetting(*inputs, **options):
        rollout = drawn(*inputs, **options)
        rollout.kept = None
        return rollout
    monkeypatch.setattr(train, "sample", forgetting)
    train.main([*TINY, "--steps", "1", "--learning_rate", "1e-12", "--top_p", "0.8", "--output_dir", "run"])
    assert metrics("run")[0]["mismatch_kl"] > 1e-3


def test_top_p_resumes_bit_equal(workplace):
    flags = ["--top_p", "0.9", "--lr_scheduler_type", "constant_with_warmup", "--save_steps", "1"]
    for name, steps, more in (("whole", "3", []), ("parts", "2", []), ("parts", "3", ["--resume"])):
        train.main([*TINY, *flags, "--steps", steps, "--output_dir", name, *more])
    assert differences("whole", "parts", 3) == []


@pytest.mark.parametrize("flags, words", [(["--top_p", "1.5"], "between 0 and 1"), (["--top_p", "0"], "is not above 0"),
                                          (["--top_k", "-1"], "is not at least 0"), (["--top_p", "0.9", "--sampler", "vllm"], "built-in sampler")])
def test_what_cannot_be_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        parse(flags)


def test_a_drawn_token_is_one_of_the_set():
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(0))
    kept = kept_tokens(logits, 0.6, 0)
    token, logp = draw_token(only(logits, kept), torch.rand(50, generator=torch.Generator().manual_seed(1)), 1.0)
    assert (kept == token[:, None]).any(-1).all() and logp.isfinite().all()


def test_the_page_of_a_run_knows_the_sets_and_the_responses_that_were_cut_off(workplace):
    train.main([*TINY, "--steps", "1", "--prompts_per_step", "8", "--top_p", "0.9", "--max_completion_length", "3",
                "--mask_truncated_completions", "--output_dir", "run"])
    group = json.loads(Path("run/tokens.jsonl").read_text().splitlines()[0])
    for mask, tokens, sets in zip(group["mask"], group["tokens"], group["kept"]):
        assert all(token in kept for m, token, kept in zip(mask, tokens, sets) if m)
    train.main([*TINY, "--steps", "1", "--max_completion_length", "1", "--mask_truncated_completions", "--output_dir", "short"])
    group = json.loads(Path("short/tokens.jsonl").read_text().splitlines()[0])
    assert group["cut_off"] == [True] * 4 and all(len(tokens) == 1 for tokens in group["tokens"])
