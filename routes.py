"""The routers of any mixture of experts: recorded, replayed, compared, balanced.

In transformers 5 a router is a small module (its class name ends in "Router") that returns (logits
[N, E], gates [N, K], indices [N, K]) for N tokens. One forward hook on it records the choice, or
forces a recorded one. Gates of an unknown kind are refused by name. `python moe.py` shows it.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Pass(NamedTuple):
    """The routes of one forward of a model with L router layers."""

    indices: torch.Tensor  # [L, B, S, K] chosen experts; -1: nothing recorded, the router decides
    logits: torch.Tensor   # [L, B, S, E] router logits, with gradient if the forward had one


class Routes:
    """The routes of one or several forwards, in order: a prompt and then its responses are two."""

    def __init__(self, passes=()):
        self.passes = list(passes)

    indices = property(lambda self: self.only().indices)
    logits = property(lambda self: self.only().logits)

    def only(self):
        if len(self.passes) != 1:
            raise ValueError(f"these routes hold {len(self.passes)} forwards, not one")
        return self.passes[0]


def routers_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


@contextmanager
def router_hooks(model, on_router, on_forward):
    """on_router(layer, router, output, shape) may replace a router's output; on_forward(shape)
    follows a whole forward. shape: (B, S) of the forward under way; None while the backward of
    gradient checkpointing runs a layer again."""
    number = {router: layer for layer, router in enumerate(routers_of(model))}
    base, shape = getattr(model, "base_model", model), None
    if not number:
        raise ValueError(f"{type(model).__name__} has no routers: no class name ends in 'Router'")

    def begin(module, args, kwargs):
        nonlocal shape
        inputs = args[0] if args else kwargs.get("input_ids")
        shape = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]

    def end(module, args, output):
        nonlocal shape
        now, shape = shape, None
        if output is not None:  # None: the forward raised an error
            on_forward(now)

    def routed(router, args, output):
        if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
            raise ValueError(f"{type(router).__name__} is not supported: its output is another")
        return on_router(number[router], router, output, shape)

    handles = [router.register_forward_hook(routed) for router in number]
    handles.append(base.register_forward_pre_hook(begin, with_kwargs=True))
    handles.append(base.register_forward_hook(end, always_call=True))
    try:
        yield len(number)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_routes(model):
    """`with record_routes(model) as routes:` each forward inside appends a Pass to routes.passes.

    Inside replay_routes it records forced routes, around it the routers' own. ValueError for a
    model without routers."""
    routes, now = Routes(), {}

    def on_router(layer, router, output, shape):
        if shape:
            now[layer] = output

    def on_forward(shape):
        logits, _, indices = zip(*(now.pop(layer) for layer in sorted(now)))
        routes.passes.append(Pass(*(torch.stack(x).unflatten(1, shape) for x in (indices, logits))))

    with router_hooks(model, on_router, on_forward):
        yield routes


@contextmanager
def replay_routes(model, routes):
    """Force recorded choices: forward k inside takes the experts of pass k; one pass serves all.

    Only the choice is forced: the gates are those of the current scores, so the router learns. With
    gradient checkpointing, call backward() inside. ValueError for routes that do not fit."""
    passes, forwards, many = routes.passes, 0, len(routes.passes) > 1
    recomputed, due = 0, 0  # layers that a backward ran again; forwards whose backward will do so

    def on_router(layer, router, output, shape):
        nonlocal recomputed
        recomputed += not shape
        if many and (not shape or forwards == len(passes)):
            raise ValueError(f"replay_routes: a forward too many for {len(passes)} recorded "
                             "(gradient checkpointing needs one)")
        logits, gates, chosen = output                                  # [N, E], [N, K], [N, K]
        indices, old = (x[layer] for x in passes[forwards if many else 0])          # [B, S, K]
        here = (*(shape or indices.shape[:2]), chosen.shape[1], logits.shape[1])
        then = (*indices.shape, old.shape[2])
        if here != then:
            raise ValueError(f"replay_routes: (rows, places, K, experts) are {here} here, {then} "
                             "recorded")
        if not forwards:  # never silently wrong: its own choice must give its own gates
            own = gates_of(router, logits.detach(), chosen).float()                 # [N, K]
            if not torch.allclose(own, gates.detach().float(), rtol=2e-2, atol=1e-4):
                raise ValueError(f"{type(router).__name__} is not supported: its kind of gates")
        forced = indices.flatten(0, 1).to(chosen.device)                            # [N, K]
        forced = torch.where(forced < 0, chosen, forced)                            # [N, K]
        return logits, gates_of(router, logits, forced).to(gates.dtype), forced

    def on_forward(shape):
        nonlocal forwards, due
        forwards += 1
        again = any(getattr(m, "gradient_checkpointing", 0) and m.training for m in model.modules())
        due += torch.is_grad_enabled() and again

    with router_hooks(model, on_router, on_forward) as layers:
        recorded = [len(p.indices) for p in passes]
        if set(recorded) != {layers}:
            raise ValueError(f"replay_routes: {layers} routers here, {recorded} recorded")
        model.replays_routes = True  # plumbing/speed/fast.py then keeps a row per response
        try:
            yield
        finally:
            model.replays_routes = False
        if forwards < len(passes):
            raise ValueError(f"replay_routes: {forwards} of {len(passes)} forwards were replayed")
        if due and not recomputed:
            raise ValueError("replay_routes: backward() runs the layers again: call it inside the "
                             "block")


def gates_of(router, logits, indices):
    """Gates [N, K] of the experts `indices` [N, K] by the rule of the router's family."""
    if type(router).__name__.startswith("GptOss"):
        return logits.gather(-1, indices).softmax(-1)                               # [N, K]
    sigmoid = has_sigmoid(router)
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)   # [N, E]
    gates = scores.gather(-1, indices)                                              # [N, K]
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such switch, and normalises
        gates = gates / (gates.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))   # [N, K]
    return gates * getattr(router, "routed_scaling_factor", 1)


def has_sigmoid(model):
    """Whether routers score by sigmoids: DeepSeek-V3's heirs. Their bias counts in the choice."""
    return any(hasattr(m, "e_score_correction_bias") for m in model.modules())


def flip_rate(old_indices, new_indices, mask):
    """Share of the old choices that the new ones lack: [L, B, S, K], mask [B, S] -> [L]."""
    kept = (old_indices[..., :, None] == new_indices[..., None, :]).any(-1)         # [L, B, S, K]
    lost = (~kept & mask.bool()[..., None]).sum((1, 2, 3))                          # [L]
    return lost / (mask.sum() * old_indices.shape[-1]).clamp(min=1)                 # [L]


@torch.no_grad()
def router_shift(old_logits, new_logits, old_indices, mask=None, floor=0.8):
    """RSPO's γ (arXiv 2510.23027): 1 where the probabilities of the old experts stood still, else
    less. Logits [L, B, T, E] of softmax routers, old_indices [L, B, T, K] -> [B, T] float32 without
    gradient, 1 outside the mask [B, T]."""
    chosen = old_indices.clamp(min=0)                                               # [L, B, T, K]
    old = old_logits.float().log_softmax(-1).gather(-1, chosen)                     # [L, B, T, K]
    new = new_logits.float().log_softmax(-1).gather(-1, chosen)                     # [L, B, T, K]
    gamma = (-(new - old).abs().mean((0, -1))).exp().clamp(min=floor)       # [B, T]  max(γ, γ_min)
    return gamma if mask is None else gamma.masked_fill(~mask.bool(), 1.0)


def expert_share(indices, mask, experts):
    """f_e, an expert's share of all choices: [L, B, T, K], mask [B, T] -> [L, E], no gradient."""
    chosen = indices[:, mask.bool()]                                                # [L, N, K]
    return F.one_hot(chosen, experts).float().mean((1, 2))                          # [L, E]


def load_balancing_loss(logits, mask, share, tokens=None, sigmoid=False):
    """Switch Transformer's loss (arXiv 2101.03961, eq. 4), mean over layers: 1 if all experts get
    an equal share, E/K at worst. transformers' own is K times this (one layer).

    Router logits [L, B, T, E], mask [B, T], share [L, E] from `expert_share`. Parts of a mini-batch
    add up to its loss and gradient, given the whole's share and number of tokens. sigmoid: as
    DeepSeek-V3 has it (arXiv 2412.19437, eq. 17-20)."""
    logits = logits[:, mask.bool()].float()                                         # [L, N, E]
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)                    # [L, N, E]
    probs = scores / scores.sum(-1, keepdim=True)                                   # [L, N, E]
    mean = probs.sum(1) / (mask.sum() if tokens is None else tokens)                # [L, E]  P_e
    return (share * mean).sum(-1).mean() * logits.shape[-1]
