"""routes.py, the routers of any MoE: python -m pytest tests/concepts/test_routes.py

References: transformers' own router logits, plain loops over tokens, and finite differences in float64.
"""

import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache,
                          Glm4MoeConfig, Glm4MoeForCausalLM, GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM,
                          OlmoeConfig, OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM)

import rollout as plain
import train
from losses import policy_loss
from moe import TinyMoE
from plumbing.speed import fast
from plumbing.speed.rollouts import FastRollout, cat_routes, cut_routes, response_routes, route_rows
from plumbing.run.metrics import route_bytes
from ratios import token_ratio
from rollout import left_pad
from routes import (Pass, Routes, expert_share, flip_rate, load_balancing_loss,
                    record_routes, replay_routes, router_shift, routers_of)
from tiny_run import TINY, metrics

V, E, K = 19, 6, 2
SHAPE = dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, num_experts_per_tok=K, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None,
             bos_token_id=None, eos_token_id=None)
QWEN = SHAPE | dict(num_experts=E, moe_intermediate_size=24, shared_expert_intermediate_size=16, decoder_sparse_step=1)
SIGMOID = SHAPE | dict(num_local_experts=E, n_routed_experts=E, n_shared_experts=1, moe_intermediate_size=24, n_group=3,
                       topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.7, norm_topk_prob=True)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
FAMILIES = {
    "TinyMoE": lambda: TinyMoE(Qwen3MoeConfig(**QWEN, head_dim=8, norm_topk_prob=True)),
    "TinyMoE, a dense layer": lambda: TinyMoE(Qwen3MoeConfig(**QWEN, head_dim=8, mlp_only_layers=[1])),
    "Qwen3-MoE": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, head_dim=8, norm_topk_prob=True, mlp_only_layers=[0])),
    "Qwen2-MoE": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**QWEN)),
    "OLMoE": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=E)),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=E)),
    "GPT-OSS": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=E, head_dim=8,
                                                      rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "DeepSeek-V3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIGMOID | LATENT)),
    "GLM-4.5": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SIGMOID, head_dim=8)),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family="TinyMoE", seed=0):
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    for name, bias in model.named_buffers():
        if "correction_bias" in name:                        # sigmoid families: choosing and weighing differ
            bias.normal_(std=0.3)
    return model


def moved(model, scale=0.1):
    """The weights after a large step: many choices change."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn_like(p)
    return model


def batch(rows=4, width=9, padded=True):
    ids = torch.randint(0, V, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(width) >= torch.arange(rows)[:, None]).long() if padded else torch.ones_like(ids)
    return dict(input_ids=ids, attention_mask=mask)


def record(model, **inputs):
    with torch.no_grad(), record_routes(model) as routes:
        logits = model(**inputs).logits
    return routes, logits


# ---------------------------------------------------------------------------------------------------- record and replay

@every_family
def test_recorded_routes_are_the_models_own(family):
    model, inputs = make(family), batch()
    routes, _ = record(model, **inputs)
    layers = sum(type(m).__name__.endswith("Router") for m in model.modules())
    assert routes.indices.shape == (layers, 4, 9, K) and routes.logits.shape == (layers, 4, 9, E)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if family in ("Qwen3-MoE", "Qwen2-MoE", "OLMoE", "Mixtral", "GPT-OSS"):
        own = torch.stack(model(**inputs, output_router_logits=True).router_logits)                  # [L, N, E]
        assert torch.equal(routes.logits.flatten(1, 2), own)
        assert torch.equal(routes.indices.flatten(1, 2), own.softmax(-1).topk(K, -1).indices)


@every_family
def test_replay_on_unchanged_weights_leaves_the_logits_exactly_equal(family):
    model, inputs = make(family), batch()
    routes, before = record(model, **inputs)
    with replay_routes(model, routes):
        assert torch.equal(model(**inputs).logits, before)


@every_family
def test_replay_after_a_weight_change_keeps_the_recorded_experts_and_computes_their_current_gates(family):
    model, inputs = make(family), batch()
    routes, _ = record(model, **inputs)
    moved(model)
    free, natural = record(model, **inputs)
    assert flip_rate(routes.indices, free.indices, inputs["attention_mask"]).min() > 0.1
    seen = []
    with replay_routes(model, routes), record_routes(model) as used:
        routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
        hooks = [r.register_forward_hook(lambda module, args, output: seen.append((module, *output))) for r in routers]
        logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    assert torch.equal(used.indices, routes.indices) and not torch.allclose(logits, natural)
    for layer, (router, scores, gates, indices) in enumerate(seen):
        assert torch.equal(indices, routes.indices[layer].flatten(0, 1))
        for n in range(len(scores)):                         # a loop over tokens, in float64, by the family's published rule
            z = scores[n].tolist()
            if family in ("DeepSeek-V3", "GLM-4.5"):
                full = [1 / (1 + math.exp(-x)) for x in z]
            else:
                full = [math.exp(x) / sum(math.exp(y) for y in z) for x in z]
            chosen = [full[i] for i in indices[n].tolist()]
            if family not in ("TinyMoE, a dense layer", "Qwen2-MoE", "OLMoE"):           # norm_topk_prob is off there
                chosen = [g / sum(chosen) for g in chosen]
            scale = 1.7 if family in ("DeepSeek-V3", "GLM-4.5") else 1.0
            assert gates[n].tolist() == pytest.approx([g * scale for g in chosen], rel=1e-4)
    free_again, natural_again = record(model, **inputs)      # and nothing stays behind
    assert torch.equal(natural, natural_again) and torch.equal(free.indices, free_again.indices)


@every_family
def test_gradient_checkpointing_replays_the_same_routes(family):
    model, inputs = make(family).train(), batch()
    routes, _ = record(model, **inputs)
    moved(model, 0.03)
    grads = []
    for on in (False, True):
        if on:
            model.activation_checkpointing_enable()
        model.zero_grad()
        with replay_routes(model, routes), record_routes(model) as used:
            loss = model(**inputs, use_cache=False).logits.log_softmax(-1)[..., 3].sum()
            loss.backward()
        assert torch.equal(used.indices, routes.indices)
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    assert any(g is not None for g in grads[0])
    for a, b in zip(*grads):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5 * max(1, a.abs().max()))


def test_backward_outside_the_block_is_refused_with_gradient_checkpointing_and_fine_without():
    model, inputs = make().train(), batch()
    routes, _ = record(model, **inputs)
    with replay_routes(model, routes):
        loss = model(**inputs).logits.sum()
    loss.backward()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="call it inside the block"):
        with replay_routes(model, routes):
            model(**inputs).logits.sum()
    with torch.no_grad(), replay_routes(model, routes):
        model(**inputs)
    with replay_routes(model.eval(), routes):
        model(**inputs)


def test_the_router_learns_under_replay_also_about_experts_it_would_no_longer_choose():
    model, inputs = make().double(), batch(padded=False)
    routes, _ = record(model, **inputs)
    moved(model, 0.05)
    free, _ = record(model, **inputs)
    weight = model.model.layers[1].mlp.gate.weight
    weights = torch.randn(4, 9, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss():
        with replay_routes(model, routes):
            return (model(**inputs).logits.log_softmax(-1) * weights).sum()

    loss().backward()
    lost = (routes.indices[1][..., None] != free.indices[1][..., None, :]).all(-1)                   # [B, S, K]
    expert = routes.indices[1][lost].mode().values           # recorded, but no longer among the top K
    for e in (int(expert), (int(expert) + 1) % E):
        with torch.no_grad():
            weight[e, 0] += 1e-3                             # the router's softmax is float32 in every family: no smaller
            up = loss()
            weight[e, 0] -= 2e-3
            down = loss()
            weight[e, 0] += 1e-3
        assert weight.grad[e, 0].item() == pytest.approx(((up - down) / 2e-3).item(), rel=2e-3)
        assert weight.grad[e, 0] != 0


def test_recording_around_replay_shows_the_routers_own_choice():
    model, inputs = make(), batch(padded=False)
    routes, _ = record(model, **inputs)
    moved(model)
    with torch.no_grad(), record_routes(model) as own, replay_routes(model, routes):
        model(**inputs)
    expected = own.logits.softmax(-1).topk(K, -1).indices
    assert torch.equal(own.indices, expected) and not torch.equal(own.indices, routes.indices)


def test_recorded_logits_carry_their_gradient():
    model, inputs = make().train(), batch()
    grads = []
    for on in (False, True):
        if on:
            model.activation_checkpointing_enable()
        model.zero_grad()
        with record_routes(model) as routes:
            model(**inputs)
        balance(routes.logits, inputs["attention_mask"], routes.indices).backward()
        assert len(routes.passes) == 1                       # running layers again records nothing
        grads.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    assert grads[0].abs().sum() > 0 and torch.allclose(*grads)


# -------------------------------------------------------------------------------------------- micro-batches and prompts

def rollout(Q=3, G=2, P=4, T=5, prefix=0):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([5, 3, 4, 5, 2, 1])
    mask = torch.arange(T) < lengths[:Q * G, None]
    prompt_mask = torch.arange(P) >= torch.tensor([0, 1, 2])[:Q, None]
    prompts, answers = (torch.randint(0, V, shape, generator=generator) for shape in ((Q, P), (Q * G, T)))
    common = torch.randint(0, V, (prefix,), generator=generator).tolist()
    prompts = [common + ids[real].tolist() for ids, real in zip(prompts, prompt_mask)]
    prompts, prompt_mask = left_pad(prompts, 0, "cpu")
    never = torch.zeros(Q * G, dtype=torch.bool)
    return FastRollout(prompts, prompt_mask, answers, mask, torch.zeros(Q * G, T), never, [""] * (Q * G), G, prefix=prefix)


def logp_of(model, part, share, **options):
    """response_logp, the fast way (with a row per response, as under replay) or the plain one."""
    return fast.response_logp(model, part, **options) if share else plain.response_logp(model, part)


def scored(model, part, share, chunks):
    """Log-probs and routes of a rollout, recorded in chunks of whole prompts as train.py does."""
    logps, routes = [], []
    for start, stop in chunks:
        with torch.no_grad(), record_routes(model) as recorded:
            scores = logp_of(model, part.rows(start, stop), share, replayed=True)
        logps.append(scores.logp)
        routes.append(recorded)
    return torch.cat(logps), cat_routes(routes)


@pytest.mark.parametrize("family", ["TinyMoE", "Mixtral", "DeepSeek-V3"])
@pytest.mark.parametrize("share", [True, False])
def test_chunks_join_and_mini_batches_replay_their_rows(family, share):
    model, part = make(family), rollout()
    logp, routes = scored(model, part, share, [(0, 2), (2, 6)])
    whole_logp, whole = scored(model, part, share, [(0, 6)])
    assert torch.allclose(logp, whole_logp, atol=1e-5)
    for ours, theirs in zip(routes.passes, whole.passes, strict=True):
        assert torch.equal(ours.indices, theirs.indices) and torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    moved(model)
    for prompts in (slice(1, 3), slice(0, 1)):               # mini-batches cut otherwise than the chunks
        rows = slice(prompts.start * 2, prompts.stop * 2)
        mini = route_rows(routes, [prompts, rows] if share else [rows])
        with torch.no_grad(), replay_routes(model, mini), record_routes(model) as used:
            logp_of(model, part.rows(rows.start, rows.stop), share, replayed=True)
        for forced, old, index in zip(used.passes, routes.passes, [prompts, rows] if share else [rows], strict=True):
            assert torch.equal(forced.indices, old.indices[:, index])


def test_response_routes_are_the_same_from_a_shared_prompt_and_from_whole_rows():
    model, part = make(), rollout()
    ours, theirs = (response_routes(scored(model, part, share, [(0, 6)])[1], part) for share in (True, False))
    assert ours.indices.shape == (3, 6, 5, K) and ours.logits.shape == (3, 6, 5, E)
    assert torch.equal(ours.indices[:, part.mask], theirs.indices[:, part.mask])
    assert torch.allclose(ours.logits[:, part.mask], theirs.logits[:, part.mask], atol=1e-5)
    short = replace(part, response_ids=part.response_ids[:, :1], mask=part.mask[:, :1], sampler_logp=part.sampler_logp[:, :1])
    one = scored(model, short, True, [(0, 6)])[1]
    assert torch.equal(response_routes(one, short).indices[:, :, 0], ours.indices[:, :, 0])      # answers of one token: no second pass


@pytest.mark.parametrize("width", [2, 4])                    # 4: as wide as the rest of the prompts
def test_routes_of_what_all_prompts_begin_with_serve_every_mini_batch(width):
    model, part = make(), rollout(prefix=width)
    logp, routes = scored(model, part, True, [(0, 4), (4, 6)])
    assert [tuple(p.indices.shape[1:3]) for p in routes.passes] == [(2, width), (3, 4), (6, 5 - 1)]
    ours, theirs = (response_routes(r, part) for r in (routes, scored(model, part, False, [(0, 6)])[1]))
    assert torch.equal(ours.indices[:, part.mask], theirs.indices[:, part.mask])
    moved(model)
    rows = torch.tensor([4, 5, 0, 1])
    mini, old = part.groups(torch.tensor([2, 0])), cut_routes(routes, rows, part)
    for start, stop in ((0, 4), (0, 2), (2, 4), (1, 2)):     # the mini-batch, its groups, a part of one
        cut = cut_routes(old, torch.arange(start, stop), mini)
        with replay_routes(model, cut), record_routes(model) as used:
            fast.response_logp(model, mini.rows(start, stop), replayed=True)
        for forced, want in zip(used.passes, cut.passes, strict=True):
            assert torch.equal(forced.indices, want.indices)
        answers = response_routes(used, mini.rows(start, stop)).indices
        assert torch.equal(answers[:, :, 1:], routes.passes[2].indices[:, rows[start:stop]])


@pytest.mark.parametrize("family", ["TinyMoE", "Qwen3-MoE", "Mixtral"])
@pytest.mark.parametrize("share", [True, False])
def test_under_replay_every_grpo_token_ratio_on_unchanged_weights_is_exactly_one(family, share):
    model, part = make(family), rollout()
    old_logp, routes = scored(model, part, share, [(0, 6)])
    with replay_routes(model, routes):
        logp = logp_of(model, part, share, replayed=True).logp
    assert (token_ratio(logp, old_logp, part.mask)[part.mask] == 1).all()
    loss, stats = policy_loss("grpo", logp, old_logp, torch.tensor([1., -1., 1., -1., 1., -1.]), part.mask)
    loss.backward()
    assert stats["ratio_max"] == 1 and any(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)


def test_narrow_chunks_are_padded_with_no_route_and_the_router_decides_there():
    model = make()
    wide, narrow = batch(2, 9, padded=False), batch(3, 6, padded=False)
    routes = cat_routes([record(model, **wide)[0], record(model, **narrow)[0]])
    assert routes.indices.shape == (3, 5, 9, K)
    assert (routes.indices[:, 2:, 6:] == -1).all() and (routes.logits[:, 2:, 6:] == 0).all()
    inputs = batch(5, 9, padded=False)
    free, _ = record(model, **inputs)
    with torch.no_grad(), replay_routes(model, routes), record_routes(model) as used:
        model(**inputs)
    recorded = routes.indices >= 0
    assert torch.equal(used.indices[recorded], routes.indices[recorded])
    assert torch.equal(used.indices[0][~recorded[0]], free.indices[0][~recorded[0]])     # the first layer's inputs are the same


def test_two_forwards_are_replayed_in_order_with_a_cache():
    model, inputs = make(), batch(padded=False)
    ids = inputs["input_ids"]

    def run():
        cache = DynamicCache(config=model.config)
        return [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in (ids[:, :4], ids[:, 4:])]

    with torch.no_grad(), record_routes(model) as routes:
        before = run()
    assert [p.indices.shape[2] for p in routes.passes] == [4, 5]
    with torch.no_grad(), replay_routes(model, routes):
        assert all(torch.equal(a, b) for a, b in zip(before, run()))
    assert route_bytes(routes) == 3 * 4 * 9 * (K * 8 + E * 4)


# -------------------------------------------------------------------------------------------------------------- measures

def random_routes(seed, L=3, B=2, S=4):
    logits = torch.randn(L, B, S, E, generator=torch.Generator().manual_seed(seed))
    return logits.topk(K, -1).indices, logits


def test_flip_rate_equals_a_loop():
    (old, _), (new, _) = random_routes(0), random_routes(1)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    for layer, rate in enumerate(flip_rate(old, new, mask).tolist()):
        lost = chosen = 0
        for b in range(2):
            for s in range(4):
                for k in range(K if mask[b, s] else 0):
                    chosen += 1
                    lost += old[layer, b, s, k].item() not in new[layer, b, s].tolist()
        assert rate == pytest.approx(lost / chosen)
    assert flip_rate(old, old.flip(-1), mask).tolist() == [0, 0, 0]      # the order of the K does not matter
    assert flip_rate(old, (old + 1) % E * 0 - 5, mask).tolist() == [1, 1, 1]
    assert flip_rate(old, new, mask * 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.8])
def test_router_shift_equals_a_loop(floor):
    (old, old_logits), (_, new_logits) = random_routes(0), random_routes(1)
    new_logits.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    gamma = router_shift(old_logits, new_logits, old, mask, floor)
    assert gamma.dtype == torch.float32 and not gamma.requires_grad
    for b in range(2):
        for s in range(4):
            total = 0.0
            for layer in range(3):
                p, q = (x[layer, b, s].double().softmax(-1).tolist() for x in (old_logits, new_logits.detach()))
                total += sum(abs(math.log(q[e]) - math.log(p[e])) for e in old[layer, b, s].tolist()) / K
            expected = max(math.exp(-total / 3), floor) if mask[b, s] else 1.0
            assert gamma[b, s].item() == pytest.approx(expected, rel=1e-5)
    assert (router_shift(old_logits, old_logits, old) == 1).all()
    assert (router_shift(old_logits, new_logits, old) >= 0.8).all()
    assert router_shift(old_logits.bfloat16(), new_logits.bfloat16(), old).dtype == torch.float32


def balance(logits, mask, indices, **options):
    return load_balancing_loss(logits, mask, expert_share(indices, mask, E), **options)


def test_load_balancing_loss_is_one_at_perfect_balance_and_a_fraction_of_transformers_own():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
    one_hot, each = torch.eye(E).view(1, 1, E, E) * 50, torch.arange(E).view(1, 1, E, 1)   # top-1
    assert balance(one_hot, torch.ones(1, E), each).item() == pytest.approx(1)
    one = one_hot[:, :, :1].expand(1, 1, E, E)
    assert balance(one, torch.ones(1, E), each * 0).item() == pytest.approx(E)
    indices, logits = random_routes(0)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    theirs = [load_balancing_loss_func((layer.flatten(0, 1),), E, K, mask) / K for layer in logits]
    assert balance(logits, mask, indices).item() == pytest.approx((sum(theirs) / 3).item(), rel=1e-5)


@pytest.mark.parametrize("family", ["TinyMoE", "DeepSeek-V3"])
def test_load_balancing_loss_counts_the_recorded_experts_and_equals_a_loop(family):
    """DeepSeek-V3 chooses by groups and with a bias, and its scores are normalized sigmoids."""
    routes, _ = record(make(family), **batch())
    mask, sigmoid = batch()["attention_mask"], family == "DeepSeek-V3"
    guessed = routes.logits.softmax(-1).topk(K).indices.sort().values
    assert sigmoid == (guessed != routes.indices.sort().values).any()
    total = 0.0
    for logits, indices in zip(routes.logits.double(), routes.indices):
        share, mean, N = [0.0] * E, [0.0] * E, int(mask.sum())
        for b, s in mask.nonzero().tolist():
            z = logits[b, s].tolist()
            score = [1 / (1 + math.exp(-x)) if sigmoid else math.exp(x) for x in z]
            for e in range(E):
                share[e] += (indices[b, s] == e).sum().item() / (N * K)
                mean[e] += score[e] / sum(score) / N
        total += E * sum(f * p for f, p in zip(share, mean)) / len(routes.logits)
    ours = balance(routes.logits, mask, routes.indices, sigmoid=sigmoid).item()
    assert ours == pytest.approx(total, rel=1e-5)


def test_parts_of_a_mini_batch_add_up_to_its_load_balancing_loss_and_gradient():
    indices, logits = random_routes(0, B=4)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    logits.requires_grad_()
    whole = balance(logits, mask, indices)
    gradient, = torch.autograd.grad(whole, logits)
    share, tokens = expert_share(indices, mask, E), mask.sum()
    parts = sum(load_balancing_loss(logits[:, rows], mask[rows], share, tokens)
                for rows in (slice(0, 1), slice(1, 3), slice(3, 4)))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.allclose(torch.autograd.grad(parts, logits)[0], gradient, atol=1e-7)


def test_the_balancing_coefficient_means_the_same_for_every_micro_batch(workplace):
    losses = []
    for size in (["--micro_batch_size", "2"], ["--micro_batch_size", "4"], []):
        run = f"run{len(losses)}"
        train.main([*TINY, "--steps", "1", "--router_aux_loss_coef", "1", "--output_dir", run, *size])
        losses.append(metrics(run)[0]["loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5) and losses[0] > 0.9


# ------------------------------------------------------------------------------------------------------------- bad input

def test_a_model_without_routers_is_refused():
    dense = Qwen3ForCausalLM(Qwen3Config(**SHAPE | dict(head_dim=8)))
    assert len(routers_of(make())) == 3 and not routers_of(dense)
    for block in (lambda: record_routes(dense), lambda: replay_routes(dense, Routes())):
        with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers"), block():
            pass


def altered(routes, indices=lambda x: x, logits=lambda x: x):
    return Routes(Pass(indices(p.indices), logits(p.logits)) for p in routes.passes)


def both(change):
    return lambda routes: altered(routes, change, change)


WRONG = {
    "fewer rows": (lambda r: route_rows(r, [slice(0, 3)]), "(4, 9, 2, 6) here, (3, 9, 2, 6) recorded"),
    "fewer places": (both(lambda x: x[:, :, :8]), "(4, 9, 2, 6) here, (4, 8, 2, 6) recorded"),
    "rows and places swapped": (both(lambda x: x.transpose(1, 2)), "(9, 4, 2, 6) recorded"),
    "fewer experts per token": (lambda r: altered(r, lambda x: x[..., :1]), "(4, 9, 1, 6) recorded"),
    "more experts": (lambda r: altered(r, logits=lambda x: torch.cat([x, x], -1)), "(4, 9, 2, 12) recorded"),
    "fewer layers": (both(lambda x: x[:2]), "3 routers, but [2] are recorded"),
    "no routes": (lambda r: Routes(), "3 routers, but [] are recorded"),
    "not all used": (lambda r: Routes(r.passes * 2), "1 of 2 forwards"),
}


@pytest.mark.parametrize("change, words", WRONG.values(), ids=WRONG)
def test_routes_that_do_not_fit_are_refused(change, words):
    model, inputs = make(), batch()
    routes = change(record(model, **inputs)[0])
    with pytest.raises(ValueError) as caught:
        with torch.no_grad(), replay_routes(model, routes):
            model(**inputs)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_routes_that_are_never_used_or_too_few_are_refused():
    model, inputs = make(), batch()
    routes, _ = record(model, **inputs)
    with pytest.raises(ValueError, match="0 of 1"):
        with replay_routes(model, routes):
            pass
    two = Routes(routes.passes * 2)
    with pytest.raises(ValueError, match="more forwards than the 2 recorded"):
        with torch.no_grad(), replay_routes(model, two):
            for _ in range(3):
                model(**inputs)
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="with gradient checkpointing, record one"):
        with replay_routes(model, two):
            sum(model(**inputs).logits.sum() for _ in range(2)).backward()


def test_reading_several_forwards_as_one_is_refused():
    for routes in (Routes(), Routes([None, None])):
        with pytest.raises(ValueError, match=f"{len(routes.passes)} forwards, not one"):
            routes.indices
    routes, _ = record(make(), **batch())
    with pytest.raises(ValueError):
        route_rows(routes, [slice(0, 1), slice(0, 1)])              # one pass, two row indices
    with pytest.raises(ValueError):
        cat_routes([routes, Routes(routes.passes * 2)])


def test_families_whose_gates_follow_another_rule_are_refused_by_name():
    torch.manual_seed(0)
    shape = SHAPE | LATENT | dict(n_routed_experts=E, num_experts=E, n_shared_experts=1, moe_intermediate_size=24, n_group=1,
                                  first_k_dense_replace=1, topk_group=1, routed_scaling_factor=1.0, topk_method="greedy")
    model, inputs = DeepseekV2ForCausalLM(DeepseekV2Config(**shape)).eval(), batch()
    routes, _ = record(model, **inputs)
    with pytest.raises(ValueError, match="DeepseekV2TopkRouter is not supported"):
        with torch.no_grad(), replay_routes(model, routes):
            model(**inputs)


def test_a_router_that_returns_something_else_is_refused_by_name():
    model = make()

    class OtherRouter(torch.nn.Module):
        def forward(self, x):
            return x

    model.model.layers[1].mlp.gate = OtherRouter()
    with pytest.raises(ValueError, match="OtherRouter is not supported"), torch.no_grad(), record_routes(model):
        model(**batch())


def test_the_worked_example_shows_flips_and_that_replay_forces_the_old_experts(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "routes.py"), run_name="__main__")
    said = capsys.readouterr().out
    new, replayed = ([int(x) for x in re.findall(r"(\d+)%", part)] for part in
                     re.search(r"flip rate per layer (.*); with the old routes replayed (.*)\n", said).groups())
    marks = [line.count("^") for line in said.splitlines() if line.strip().startswith("flipped")]
    assert new == [round(100 * n / 26) for n in marks] and sum(marks) > 2 and replayed == [0, 0]
    w = [[float(x) for x in re.findall(r"\d\.\d+", line)[:12]] for line in said.splitlines() if "largest" in line]
    assert len(w) == 2 and w[0] != w[1] and all(x > 0 for row in w for x in row)
