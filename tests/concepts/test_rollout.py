"""rollout.py: python -m pytest tests/concepts/test_rollout.py

References: transformers' own generation and frequencies against exact probabilities. That the fast
functions give the same results: tests/speed.
"""

import math

import pytest
import torch

import models
from plumbing.data.running_sum import builtin_tokenizer
from rollout import draw, join, response_logp, sample, token_logp

TOKENIZER = builtin_tokenizer()
PROMPTS = ["3+8=", "1+2+3+4=", "7="]             # of three lengths: two are left-padded
PAD = 16
MODELS = {  # a window shorter than prompt and response: transformers' own cache layers
    "qwen3": ("qwen3", {}), "sliding": ("mistral", dict(sliding_window=5)),
    "tiny_moe": ("tiny_moe", {})}
every_model = pytest.mark.parametrize("kind", MODELS)


def make(kind="qwen3"):
    name, sizes = MODELS[kind]
    return models.make(name, **sizes)


def uniforms(rows, width, seed=0):
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))


def rolled(model, G=3, T=12, temperature=1.0, seed=0, prompts=PROMPTS, draw_with=sample, **options):
    return draw_with(model, TOKENIZER, prompts, G, T, temperature,
                     uniforms(len(prompts) * G, T, seed), **options)


def assert_same(one, other):
    assert torch.equal(one.mask, other.mask) and one.texts == other.texts
    assert torch.equal(one.response_ids[one.mask], other.response_ids[other.mask])
    assert torch.equal(one.truncated, other.truncated)
    assert torch.allclose(one.sampler_logp, other.sampler_logp, atol=1e-5)


def responses(rollout):
    """The ids of the loss tokens of each row, lists of ints."""
    return [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, rollout.mask)]


# ------------------------------------------------------------------------------- rows of a rollout

def test_rows_are_as_many_of_every_group():
    rollout = rolled(make())                                 # 3 groups of 3 responses
    for rows, size in (([3, 4, 5, 6, 7, 8], 3), ([3, 4], 2), ([7], 1), ([6, 7, 8, 0, 1, 2], 3),
                       ([0, 2, 3, 4], 2)):
        part = rollout.take(torch.tensor(rows))
        assert part.texts == [rollout.texts[i] for i in rows] and part.group_size == size
        assert torch.equal(part.prompt_ids, rollout.prompt_ids[rows])
    for rows in ([0, 1, 3], [1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 2, 5]):
        with pytest.raises(ValueError, match="cut through groups of 3"):
            rollout.take(torch.tensor(rows))


def test_the_same_uniforms_give_the_same_tokens_however_rows_are_divided():
    model, numbers = make(), uniforms(9, 12, seed=1)
    whole = sample(model, TOKENIZER, PROMPTS, 3, 12, 1.0, numbers)
    parts = join([sample(model, TOKENIZER, [prompt], 3, 12, 1.0, part)
                    for prompt, part in zip(PROMPTS, numbers.split(3))])
    assert_same(parts, whole)
    prompts = [x.prompt_ids[x.prompt_mask] for x in (parts, whole)]
    assert torch.equal(*prompts)


@every_model
def test_log_probs_of_sampling_and_of_scoring_are_those_of_each_sequence_alone(kind):
    model = make(kind)
    rollout = rolled(model, temperature=0.7)
    want = models.own_logp(model, rollout, 0.7)              # 0 outside the mask
    for found in (rollout.sampler_logp, response_logp(model, rollout, 0.7).logp):
        assert torch.allclose(found, want, atol=1e-5)


# ----------------------------------------------------------------------------------------- drawing

def test_draw_follows_the_softmax():
    """Any way to draw passes; that the inverse CDF is exact to rounding is for
    tests/house/test_exact.py to say."""
    logits = torch.tensor([2.0, 0.0, -1.0, -30.0, 1.0])
    p, n = logits.softmax(-1), 40_000
    counts = torch.bincount(draw(logits.expand(n, -1), uniforms(1, n)[0]), minlength=5) / n
    four_errors = 4 * (p * (1 - p) / n).sqrt()
    assert (counts - p).abs().le(four_errors + 1e-6).all()
    assert draw(logits[None], torch.tensor([0.99999994])).item() < 5


def test_draw_never_picks_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(1001, -1)
    assert set(draw(logits, torch.linspace(0, 0.999999, 1001)).tolist()) == {1, 3}


def test_greedy_is_the_argmax_of_plain_generation():
    model = make()
    found = responses(sample(model, TOKENIZER, PROMPTS, 1, 8, temperature=0))
    for prompt, ids in zip(PROMPTS, found):
        given = TOKENIZER(prompt, return_tensors="pt")["input_ids"]
        want = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8,
                              do_sample=False, pad_token_id=PAD)[0, given.shape[1]:]
        assert ids == want[:len(ids)].tolist()


# ---------------------------------------------------------------------------- where a response ends

def test_the_end_token_is_a_loss_token_and_padding_is_not():
    rollout = rolled(make(), G=8, T=40)
    models.check_ends(rollout, TOKENIZER, 40)
    lengths = rollout.mask.sum(-1, keepdim=True)                                    # [B, 1]
    assert rollout.mask.equal(torch.arange(40) < lengths) and (~rollout.truncated).any()


def test_a_sampled_pad_token_is_a_loss_token():
    """A random policy really samples <pad>; masks go by position, not by id."""
    rollout = rolled(make(), G=32, T=30)
    assert (rollout.response_ids[rollout.mask] == PAD).any()


BYTES = models.byte_tokenizer()


@pytest.mark.parametrize("tokenizer, prompt, stop, T, least", [
    (BYTES, "max(1,2)=", ["\n", "12"], 40, 5),              # tokens that hold it amid other text
    (TOKENIZER, "3+8=", ["5"], 12, 3),                      # a tokenizer without letters, where
    (TOKENIZER, "3+8=", ["=", "12"], 12, 3)], ids=str)      # transformers' own test fails
def test_stop_strings_end_a_row_and_stay_loss_tokens(tokenizer, prompt, stop, T, least):
    model = models.make(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    stopped, free = (sample(model, tokenizer, [prompt], 64, T, 1.0, uniforms(64, T), stop=words)
                     for words in (stop, []))
    ends = 0
    for i, (ids, whole) in enumerate(zip(responses(stopped), responses(free))):
        spelled = [tokenizer.decode(whole[:n + 1], skip_special_tokens=True)
                   for n in range(len(whole))]
        hits = [n + 1 for n, text in enumerate(spelled) if any(word in text for word in stop)]
        end = hits[0] if hits else len(whole)
        assert ids == whole[:end], "it ends with the token that completes a stop string"
        text = stopped.texts[i]
        assert spelled[end - 1].startswith(text) and not any(word in text for word in stop)
        cut = not hits and len(ids) == T and ids[-1] != tokenizer.eos_token_id
        assert stopped.truncated[i] == cut
        ends += bool(hits)
    assert ends > least


def test_a_token_that_is_ruled_out_has_no_entropy():
    """A logit of -inf: 0 · log 0 is 0, in the value and in the gradient."""
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    chosen, entropy = token_logp(lambda hidden: hidden, logits, torch.tensor([0]), 1.0)
    assert entropy.item() == pytest.approx(math.log(2)) and chosen.item() == -entropy.item()
    gradient, = torch.autograd.grad(entropy.sum(), logits)
    assert gradient.tolist()[0] == pytest.approx([0, 0, 0], abs=1e-6)
