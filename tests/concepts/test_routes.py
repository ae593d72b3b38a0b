"""routes.py, the routers of any MoE: python -m pytest tests/concepts/test_routes.py

References: transformers' own router logits, plain loops over tokens, and finite differences in
float64.
"""

import math

import pytest
import torch

import models
from plumbing.model.actor import checkpoint_activations
from rollout import join
from routes import (Pass, Routes, expert_share, find_routers, flip_rate, load_balancing_loss,
                    record_routes, replay_routes, router_shift)

V, E, K = 19, 6, 2
SHAPE = dict(vocab_size=V, num_hidden_layers=3, num_experts=E, num_experts_per_tok=K,
             moe_intermediate_size=24, intermediate_size=24, max_position_embeddings=64,
             initializer_range=0.2, eos_token_id=None, pad_token_id=None)
SIGMOID = dict(n_routed_experts=E, n_shared_experts=1, n_group=3, topk_group=2,
               first_k_dense_replace=1, routed_scaling_factor=1.7, norm_topk_prob=True)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
              v_head_dim=8, num_key_value_heads=4)
SHARED = dict(shared_expert_intermediate_size=16, decoder_sparse_step=1)
FAMILIES = {  # name in transformers, sizes
    "TinyMoE": ("tiny_moe", dict(norm_topk_prob=True)),
    "TinyMoE, raw gates": ("tiny_moe", {}),
    "Qwen3-MoE": ("qwen3_moe", dict(norm_topk_prob=True, mlp_only_layers=[0])),
    "Qwen2-MoE": ("qwen2_moe", SHARED),
    "OLMoE": ("olmoe", {}),
    "Mixtral": ("mixtral", {}),
    "GPT-OSS": ("gpt_oss", dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "DeepSeek-V3": ("deepseek_v3", SIGMOID | LATENT),
    "GLM-4.5": ("glm4_moe", SIGMOID),
}
SIGMOIDS = ("DeepSeek-V3", "GLM-4.5")
UNNORMALIZED = ("TinyMoE, raw gates", "Qwen2-MoE", "OLMoE")
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family="TinyMoE"):
    name, sizes = FAMILIES[family]
    model = models.make(name, **SHAPE | sizes)
    for name, bias in model.named_buffers():
        if "correction_bias" in name:            # sigmoid families: choosing and weighing differ
            bias.normal_(std=0.3)
    return model


def moved(model, scale=0.1):
    """The weights after a large step: many choices change."""
    torch.manual_seed(5)
    for p in model.parameters():
        p.data += scale * torch.randn_like(p)
    return model


def batch(rows=4, width=9, padded=True):
    ids = torch.randint(0, V, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(width) >= torch.arange(rows)[:, None] * padded).long()
    return dict(input_ids=ids, attention_mask=mask)


def record(model, **inputs):
    with torch.no_grad(), record_routes(model) as routes:
        logits = model(**inputs).logits
    return routes, logits


def replay(model, routes, **inputs):
    """(the routes that a forward under replay used, its logits)."""
    with replay_routes(model, routes):
        return record(model, **inputs)


def hooks(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]


def checkpointed(model):
    """The model without and with gradient checkpointing, in training mode."""
    for on in (False, True):
        model.train().zero_grad()
        if on:
            checkpoint_activations(model)
        yield model


# ----------------------------------------------------------------------------- record and replay

@every_family
def test_recorded_routes_are_the_models_own_and_replayed_change_no_logit(family):
    model, inputs = make(family), batch()
    routes, before = record(model, **inputs)
    L = len(find_routers(model))
    assert routes.indices.shape == (L, 4, 9, K) and routes.logits.shape == (L, 4, 9, E)
    assert not hooks(model)
    if family in ("Qwen3-MoE", "Qwen2-MoE", "OLMoE", "Mixtral", "GPT-OSS"):
        own = torch.stack(model(**inputs, output_router_logits=True).router_logits)  # [L, N, E]
        assert torch.equal(routes.logits.flatten(1, 2), own)
        assert torch.equal(routes.indices.flatten(1, 2), own.softmax(-1).topk(K, -1).indices)
    assert torch.equal(replay(model, routes, **inputs)[1], before)


def gates(family, z, chosen):
    """The gates of the chosen experts from a router's logits, by the family's published rule."""
    full = [1 / (1 + math.exp(-x)) if family in SIGMOIDS else math.exp(x) for x in z]
    total = 1.0 if family in SIGMOIDS else sum(full)
    picked = [full[i] / total for i in chosen]
    if family not in UNNORMALIZED:
        picked = [g / sum(picked) for g in picked]
    return [g * (1.7 if family in SIGMOIDS else 1.0) for g in picked]


@every_family
def test_replay_after_a_weight_change_forces_the_experts_and_computes_their_gates(family):
    model, inputs = make(family), batch()
    routes, _ = record(model, **inputs)
    free, natural = record(moved(model), **inputs)
    assert flip_rate(routes.indices, free.indices, inputs["attention_mask"]).min() > 0.1
    seen, outputs = [], lambda module, args, output: seen.append(output)
    with replay_routes(model, routes):                      # and after its hooks come ours
        handles = [router.register_forward_hook(outputs) for router in find_routers(model)]
        used, logits = record(model, **inputs)
    for handle in handles:
        handle.remove()
    assert torch.equal(used.indices, routes.indices) and not torch.allclose(logits, natural)
    for layer, (scores, found, indices) in enumerate(seen):
        assert torch.equal(indices, routes.indices[layer].flatten(0, 1))
        for z, g, chosen in zip(scores.tolist(), found, indices.tolist()):
            assert g.tolist() == pytest.approx(gates(family, z, chosen), rel=1e-4)
    again, natural_again = record(model, **inputs)          # and nothing stays behind
    assert torch.equal(natural, natural_again) and torch.equal(free.indices, again.indices)


@every_family
def test_gradient_checkpointing_replays_the_same_routes(family):
    model, inputs = make(family), batch()
    routes, _ = record(model, **inputs)
    gradients = []
    for model in checkpointed(moved(model, 0.03)):
        with replay_routes(model, routes), record_routes(model) as used:
            model(**inputs, use_cache=False).logits.log_softmax(-1)[..., 3].sum().backward()
        assert torch.equal(used.indices, routes.indices)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for a, b in zip(*gradients):
        assert torch.allclose(a, b, atol=1e-5 * max(1, a.abs().max()))


def test_the_router_learns_under_replay_also_about_experts_it_would_no_longer_choose():
    model, inputs = make().double(), batch(padded=False)
    routes, _ = record(model, **inputs)
    free, _ = record(moved(model, 0.05), **inputs)
    weight = model.model.layers[1].mlp.gate.weight
    factors = torch.randn(4, 9, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss(e=0, step=0.0):
        weight.data[e, 0] += step
        with replay_routes(model, routes):
            value = (model(**inputs).logits.log_softmax(-1) * factors).sum()
        weight.data[e, 0] -= step
        return value
    loss().backward()
    kept = (routes.indices[1][..., None] == free.indices[1][..., None, :]).any(-1)  # [B, S, K]
    lost = routes.indices[1][~kept].mode().values.item()    # recorded, no longer among the top K
    h = 1e-3                                     # the softmax is float32 in every family: no less
    for e in (lost, (lost + 1) % E):
        slope = ((loss(e, h) - loss(e, -h)) / (2 * h)).item()
        assert weight.grad[e, 0].item() == pytest.approx(slope, rel=2e-3) and slope


def test_recorded_logits_carry_their_gradient():
    inputs, gradients = batch(), []
    for model in checkpointed(make()):
        with record_routes(model) as routes:
            model(**inputs)
        balance(routes.logits, inputs["attention_mask"], routes.indices).backward()
        assert len(routes.passes) == 1                      # running layers again records nothing
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    assert gradients[0].abs().sum() > 0 and torch.allclose(*gradients)


def test_narrow_chunks_are_padded_with_no_route_and_the_router_decides_there():
    model = make()
    chunks = [record(model, **batch(*shape, padded=False))[0] for shape in ((2, 9), (3, 6))]
    routes = join(chunks)
    assert routes.indices.shape == (3, 5, 9, K)
    assert (routes.indices[:, 2:, 6:] == -1).all() and (routes.logits[:, 2:, 6:] == 0).all()
    inputs = batch(5, 9, padded=False)
    (free, _), (used, _) = record(model, **inputs), replay(model, routes, **inputs)
    recorded = routes.indices >= 0
    assert torch.equal(used.indices[recorded], routes.indices[recorded])
    first = ~recorded[0]                         # the inputs of the first layer are the same
    assert torch.equal(used.indices[0][first], free.indices[0][first])


# --------------------------------------------------------------------------------------- measures

MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])


def random_routes(seed):
    logits = torch.randn(3, 2, 4, E, generator=torch.Generator().manual_seed(seed))
    return logits.topk(K, -1).indices, logits


def test_flip_rate_equals_a_loop():
    (old, _), (new, _) = random_routes(0), random_routes(1)
    for layer, rate in enumerate(flip_rate(old, new, MASK).tolist()):
        pairs = [(set(old[layer, b, s].tolist()), set(new[layer, b, s].tolist()))
                 for b, s in MASK.nonzero().tolist()]
        assert rate == pytest.approx(sum(len(a - b) for a, b in pairs) / (K * len(pairs)))
    assert flip_rate(old, old.flip(-1), MASK).tolist() == [0, 0, 0]     # their order is nothing
    assert flip_rate(old, new, MASK * 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.8])
def test_router_shift_equals_a_loop(floor):
    (old, old_logits), (_, new_logits) = random_routes(0), random_routes(1)
    gamma = router_shift(old_logits, new_logits.requires_grad_(), old, MASK, floor)
    assert gamma.dtype == torch.float32 and not gamma.requires_grad
    for b, s in torch.ones(2, 4).nonzero().tolist():
        total = 0.0
        for layer in range(3):
            p, q = (x[layer, b, s].double().log_softmax(-1).tolist()
                    for x in (old_logits, new_logits))
            total += sum(abs(q[e] - p[e]) for e in old[layer, b, s].tolist()) / K
        expected = max(math.exp(-total / 3), floor) if MASK[b, s] else 1.0
        assert gamma[b, s].item() == pytest.approx(expected, rel=1e-5)
    half = router_shift(old_logits.bfloat16(), new_logits.bfloat16(), old)
    assert half.dtype == torch.float32 and (half >= 0.8).all()


def balance(logits, mask, indices, **options):
    return load_balancing_loss(logits, mask, expert_share(indices, mask, E), **options)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_load_balancing_loss_counts_the_recorded_experts_and_equals_a_loop(sigmoid):
    """The experts were chosen by other logits, as DeepSeek-V3 chooses by groups and with a bias."""
    (recorded, _), (_, routed) = random_routes(0), random_routes(1)
    total, score = 0.0, (lambda x: 1 / (1 + math.exp(-x))) if sigmoid else math.exp
    for logits, indices in zip(routed.double(), recorded):
        chosen = indices[MASK.bool()].flatten().tolist()
        scores = [[score(x) for x in row] for row in logits[MASK.bool()].tolist()]
        for e in range(E):
            mean = sum(row[e] / sum(row) for row in scores) / len(scores)
            total += E * chosen.count(e) / len(chosen) * mean / len(routed)
    found = balance(routed, MASK, recorded, sigmoid=sigmoid).item()
    assert found == pytest.approx(total, rel=1e-5)
    equal = torch.eye(E)[None, None]                                    # each expert once
    assert balance(50 * equal, torch.ones(1, E), equal.argmax(-1, keepdim=True)).item() == 1


# -------------------------------------------------------------------------------------- bad input

def altered(indices=lambda x: x, logits=lambda x: x):
    return lambda routes: Routes(Pass(indices(p.indices), logits(p.logits)) for p in routes.passes)


def both(change):
    return altered(change, change)


def times(n):
    return lambda routes: Routes(routes.passes * n)


UNFIT = {  # what became of the routes, and how many forwards replay them
    "rows and places swapped": (both(lambda x: x.transpose(1, 2)), 1),
    "fewer experts per token": (altered(lambda x: x[..., :1]), 1),
    "more experts": (altered(logits=lambda x: torch.cat([x, x], -1)), 1),
    "no routes": (times(0), 1), "not all used": (times(2), 1), "never used": (times(1), 0),
    "too few": (times(2), 3)}


@pytest.mark.parametrize("change, forwards", UNFIT.values(), ids=UNFIT)
def test_routes_that_do_not_fit_are_refused(change, forwards):
    model, inputs = make(), batch()
    routes = change(record(model, **inputs)[0])
    with pytest.raises(ValueError, match="replay_routes"), torch.no_grad(), \
            replay_routes(model, routes):
        for _ in range(forwards):
            model(**inputs)
    assert not hooks(model)


class OtherRouter(torch.nn.Module):
    def forward(self, x):
        return x


def with_another_router():
    model = make()
    model.model.layers[1].mlp.gate = OtherRouter()
    return model


V2 = SIGMOID | LATENT | dict(n_group=1, topk_group=1, routed_scaling_factor=1.0,
                             topk_method="greedy", norm_topk_prob=False)
STRANGE = [  # a model, what it is asked for, the name of what is refused
    (lambda: models.make("qwen3"), record, "Qwen3ForCausalLM has no routers"),
    (lambda: models.make("qwen3"), lambda model, **inputs: replay(model, Routes(), **inputs),
     "Qwen3ForCausalLM has no routers"),
    (with_another_router, record, "OtherRouter is not supported"),
    (lambda: models.make("deepseek_v2", **SHAPE | V2),       # its gates follow another rule
     lambda model, **inputs: replay(model, record(model, **inputs)[0], **inputs),
     "DeepseekV2TopkRouter is not supported"),
]


@pytest.mark.parametrize("model, act, words", STRANGE)
def test_a_model_without_known_routers_is_refused_by_name(model, act, words):
    with pytest.raises(ValueError, match=words):
        act(model(), **batch())


