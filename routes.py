"""The routers of any mixture of experts, watched, replayed and compared.

Works on any MoE of transformers 5, where every router is a small module (its class name ends in "Router") that returns
(logits [N, E], gates [N, K], indices [N, K]) for N tokens: one forward hook on it records the choice or forces an old one.
moe.py re-exports all of it. `python moe.py` shows it at work.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Pass(NamedTuple):
    """The routes of one forward of a model with L router layers."""
    indices: torch.Tensor        # [L, B, S, K] chosen experts; -1: nothing recorded, the router decides
    logits: torch.Tensor         # [L, B, S, E] router logits, with their gradient if the forward had one


class Routes:
    """The routes of one or several forwards, in order: a prompt and then its responses are two."""

    def __init__(self, passes=()):
        self.passes = list(passes)

    indices = property(lambda self: self.only().indices)
    logits = property(lambda self: self.only().logits)

    def only(self):
        if len(self.passes) != 1:
            raise ValueError(f"these routes hold {len(self.passes)} forwards, not one: read routes.passes")
        return self.passes[0]

    def rows(self, rows):
        """Some rows of the batch; rows: for each pass an index along B (slice, list or integer tensor)."""
        return Routes(Pass(*(x[:, index] for x in p)) for p, index in zip(self.passes, rows, strict=True))

    @classmethod
    def cat(cls, parts):
        """Chunks of a batch joined along B, pass by pass; narrower ones are padded on the right with indices -1 and logits 0."""
        def join(tensors, fill):
            width = max(x.shape[2] for x in tensors)
            return torch.cat([F.pad(x, (0, 0, 0, width - x.shape[2]), value=fill) for x in tensors], 1)

        passes = zip(*(part.passes for part in parts), strict=True)
        return cls(Pass(join([c.indices for c in chunks], -1), join([c.logits for c in chunks], 0.0)) for chunks in passes)

    def responses(self, prompt_width, batch):
        """The routes that predict response tokens, Pass(indices [L, B, T, K], logits [L, B, T, E]): token t's at place P - 1 + t.

        From one pass over prompt and response, or two: prompts [Q, P], whose last place serves B/Q responses, then responses. Before
        them may come a pass over what all prompts begin with.
        """
        start, passes = prompt_width - 1, list(self.passes)
        while start >= passes[0].indices.shape[2]:
            start -= passes.pop(0).indices.shape[2]
        first = (x[:, :, start:].repeat_interleave(batch // x.shape[1], 1) for x in passes[0])
        return Pass(*(torch.cat(xs, 2) for xs in zip(first, *passes[1:])))


def has_routers(model):
    return any(type(m).__name__.endswith("Router") for m in model.modules())


@contextmanager
def router_hooks(model, on_router, on_forward):
    """on_router(layer, router, output, shape) may replace a router's output; on_forward(shape) follows a whole forward.

    shape: (B, S) of the forward under way; None while the backward of gradient checkpointing runs a layer again.
    """
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    base, shape = getattr(model, "base_model", model), None
    if not routers:
        raise ValueError(f"{type(model).__name__} has no routers: no module's class name ends in 'Router'")

    def begin(module, args, kwargs):
        nonlocal shape
        inputs = args[0] if args else kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
        shape = tuple(inputs.shape[:2])

    def end(module, args, output):
        nonlocal shape
        now, shape = shape, None
        if output is not None:                               # None: the forward raised an error
            on_forward(now)

    def hook(layer):
        def after(router, args, output):
            if isinstance(output, tuple) and len(output) == 3:
                logits, gates, indices = output
                if logits.dim() == 2 and gates.shape == indices.shape and not indices.is_floating_point():
                    return on_router(layer, router, output, shape)
            raise ValueError(f"{type(router).__name__} is not supported: not (logits [N, E], gates [N, K], indices [N, K])")
        return after

    handles = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers)]
    handles += [base.register_forward_pre_hook(begin, with_kwargs=True), base.register_forward_hook(end, always_call=True)]
    try:
        yield len(routers)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_routes(model):
    """`with record_routes(model) as routes:` every forward of the model inside the block appends one Pass to routes.passes.

    Entered inside replay_routes it records the forced routes, around it the routers' own. ValueError for a model without routers.
    """
    routes, now = Routes(), {}

    def on_router(layer, router, output, shape):
        if shape:
            now[layer] = output

    def on_forward(shape):
        logits, _, indices = zip(*(now.pop(layer) for layer in sorted(now)))
        routes.passes.append(Pass(torch.stack(indices).unflatten(1, shape), torch.stack(logits).unflatten(1, shape)))

    with router_hooks(model, on_router, on_forward):
        yield routes


@contextmanager
def replay_routes(model, routes):
    """Force recorded choices: forward k of the model inside the block takes the experts of pass k; a single pass serves them all.

    Only the choice is forced: the gates are computed from the current scores of all experts, so the router learns. With gradient
    checkpointing, call backward() inside the block. ValueError for routes of another shape or model, or not all used.
    """
    passes, forwards, recomputed, due = routes.passes, 0, 0, 0

    def on_router(layer, router, output, shape):
        nonlocal recomputed
        recomputed += not shape
        if len(passes) > 1 and (not shape or forwards == len(passes)):
            raise ValueError(f"replay_routes: a forward too many for {len(passes)} recorded (gradient checkpointing needs one)")
        logits, gates, chosen = output                                                       # [N, E], [N, K], [N, K]
        recorded, old = (x[layer] for x in passes[forwards if len(passes) > 1 else 0])       # [B, S, K], [B, S, E]
        here, there = (*(shape or recorded.shape[:2]), chosen.shape[1], logits.shape[1]), (*recorded.shape, old.shape[2])
        if here != there:
            raise ValueError(f"replay_routes: (rows, places, top-K, experts) are {here} here, {there} recorded")
        with torch.no_grad():                                # never silently wrong: its own choice must give its own gates
            own = forwards or torch.allclose(gates_of(router, logits, chosen).float(), gates.float(), rtol=2e-2, atol=1e-4)
        if not own:
            raise ValueError(f"replay_routes: {type(router).__name__} is not supported: its gates are of a kind unknown here")
        forced = recorded.flatten(0, 1).to(chosen.device)                                    # [N, K]
        forced = torch.where(forced < 0, chosen, forced)                                     # [N, K]
        return logits, gates_of(router, logits, forced).to(gates.dtype), forced

    def on_forward(shape):
        nonlocal forwards, due
        forwards += 1
        due += torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", 0) and m.training for m in model.modules())

    with router_hooks(model, on_router, on_forward) as layers:
        if {len(p.indices) for p in passes} != {layers}:
            raise ValueError(f"replay_routes: {layers} routers here, {[len(p.indices) for p in passes]} in the recorded forwards")
        yield
        if forwards < len(passes):
            raise ValueError(f"replay_routes: {forwards} of {len(passes)} recorded forwards were replayed")
        if due and not recomputed:
            raise ValueError("replay_routes: gradient checkpointing runs routers again in backward(): call it inside the block")


def gates_of(router, logits, indices):
    """The gates [N, K] of the experts `indices` [N, K], from the scores of all experts, as the router's family computes them."""
    if type(router).__name__.startswith("GptOss"):
        return logits.gather(-1, indices).softmax(-1)                                        # [N, K]
    sigmoid = hasattr(router, "e_score_correction_bias")     # DeepSeek-V3's heirs; the bias counts in the choice, not in the gate
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)        # [N, E]
    gates = scores.gather(-1, indices)                                                       # [N, K]
    if getattr(router, "norm_topk_prob", True):              # Mixtral has no such switch and always normalises
        gates = gates / (gates.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))            # [N, K]
    return gates * getattr(router, "routed_scaling_factor", 1)


def flip_rate(old_indices, new_indices, mask):
    """Share of the old choices that the new ones lack, per layer: indices [L, B, S, K], mask [B, S] of loss tokens -> [L]."""
    lost = (old_indices[..., :, None] != new_indices[..., None, :]).all(-1)                  # [L, B, S, K]
    lost = (lost & mask.bool()[..., None]).sum((1, 2, 3))                                    # [L]
    return lost / (mask.sum() * old_indices.shape[-1]).clamp(min=1)                          # [L]


@torch.no_grad()
def router_shift(old_logits, new_logits, old_indices, mask=None, floor=0.8):
    """RSPO's γ (arXiv 2510.23027): 1 where the router stood still, less where the old experts' probabilities moved.

    Logits [L, B, T, E] of softmax routers, old_indices [L, B, T, K] -> [B, T] float32, no gradient; 1 outside the mask [B, T].
    """
    chosen = old_indices.clamp(min=0)                                                        # [L, B, T, K]
    old, new = (x.float().log_softmax(-1).gather(-1, chosen) for x in (old_logits, new_logits))   # [L, B, T, K]
    gamma = (-(new - old).abs().mean((0, -1))).exp().clamp(min=floor)                        # [B, T]  max(γ, γ_min)
    return gamma if mask is None else gamma.masked_fill(~mask.bool(), 1.0)


def load_balancing_loss(logits, mask, top_k):
    """Switch Transformer's loss (arXiv 2101.03961, eq. 4), mean over layers: 1 if all experts get an equal share, E/K at worst.

    Logits [L, B, S, E] of a softmax router, mask [B, S] of tokens that count. transformers' own is top_k times this (one layer).
    """
    probs = logits[:, mask.bool()].softmax(-1, dtype=torch.float32)                          # [L, N, E]
    share = F.one_hot(probs.topk(top_k, -1).indices, probs.shape[-1]).float().mean((1, 2))   # [L, E]  f_e, of all N·K choices
    return (share * probs.mean(1)).sum(-1).mean() * probs.shape[-1]


def route_bytes(routes):
    """Memory that recorded routes take, in bytes."""
    return sum(x.numel() * x.element_size() for p in routes.passes for x in p)
