"""The fast sampler is the plain one, and fast paths save what they should (plumbing/speed/fast.py;
benchmarks/ measures it). python -m pytest tests/speed/test_fast_paths.py

References: transformers' own cache; the CPU allocator's peak. Log-probs: test_logprobs.py.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch

import rollout
from plumbing.speed import fast
from plumbing.speed.fast import fast_response_logp, fast_sample
from rollout import join, sample
from test_rollout import PROMPTS, assert_same, every_model, make, responses, rolled

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import shapes  # noqa: E402
import timing  # noqa: E402


fast_rolled = functools.partial(rolled, draw_with=fast_sample)


# ---------------------------------------------------------------------------------------- sampling

@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@every_model
def test_the_fast_sampler_draws_the_tokens_of_the_plain_one(kind, temperature):
    model = make(kind)
    assert_same(*(rolled(model, T=20, temperature=temperature, draw_with=draw)
                  for draw in (fast_sample, sample)))


def test_a_common_prefix_survives_cutting_and_joining():
    shots = "".join(f"{i}+{i}={2 * i % 10}," for i in range(5))         # all prompts begin with it
    rollout = fast_rolled(make(), T=10, seed=4, prompts=[shots + p for p in (*PROMPTS, "7=")])
    taken = ([6, 7, 8, 0, 1, 2], [3, 4, 5], [9, 10, 11])     # whole groups of three
    parts = join([rollout.take(torch.tensor(rows)) for rows in taken])
    assert rollout.take(torch.tensor([4])).prefix == parts.prefix == len(shots)
    rows = sum(taken, [])
    for row, i in enumerate(rows):
        ours, theirs = (x.prompt_ids[j][x.prompt_mask[j]] for x, j in ((parts, row), (rollout, i)))
        assert torch.equal(ours, theirs)
    assert parts.texts == [rollout.texts[i] for i in rows]
    assert responses(parts) == [responses(rollout)[i] for i in rows]
    other = fast_rolled(make(), T=10)
    assert join([rollout, other]).prefix == other.prefix == 0


@every_model
def test_dropping_ended_rows_changes_no_token(kind):
    model = make(kind)
    assert_same(*(fast_rolled(model, drop_every=n, seed=3) for n in (1, 1000)))


@every_model
@pytest.mark.parametrize("G, T, temperature", [(8, 12, 1.0), (8, 12, 0.5), (4, 6, 0)])
def test_responses_that_are_equal_so_far_share_a_row_and_part_where_they_differ(
        kind, G, T, temperature):
    model, rows = make(kind), []
    model.get_output_embeddings().weight.data *= 12         # a sure policy: equal for a while
    model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    tree = fast_rolled(model, G, T, temperature, drop_every=1)
    shared, rows[:] = sum(rows[1:]), []
    each = fast_rolled(model, G, T, temperature, drop_every=1000)
    assert shared < 0.8 * sum(rows[1:]), "the model computes fewer rows"
    assert_same(tree, each)
    if temperature == 0:                                    # greedy: one row per prompt
        assert shared <= len(PROMPTS) * (T - 1) and len(set(tree.texts)) <= len(PROMPTS)
    else:
        assert len(set(tree.texts)) > len(PROMPTS)


@pytest.mark.parametrize("flag, module, unused", [
    ("", rollout, "sample"), ("--plain", fast, "fast_sample")])
def test_a_run_samples_the_fast_way_unless_it_is_plain(flag, module, unused, run, monkeypatch):
    monkeypatch.setattr(module, unused, None)
    run(flag)


# ----------------------------------------------------------------------------------------- memory

def test_the_peak_of_an_update_does_not_hold_the_logits_of_all_tokens(monkeypatch):
    V = 8192
    monkeypatch.setattr("rollout.MAX_LOGITS", 64 * V)
    model = shapes.random_model("qwen2", 16, 1, 2, 2, 16, V, tied=False)

    def peak(T):
        batch = shapes.random_rollout(V, 1, 1, 8, T)
        score = lambda: fast_response_logp(model, batch, entropy=False)
        model.zero_grad()
        return timing.peak_bytes(lambda: score().logp.sum().backward())
    more = peak(512) - peak(256)
    assert more < 0.25 * 256 * V * 4, "256 more tokens cost far less than one row of logits each"
