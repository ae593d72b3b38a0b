"""Record, replay, compare and balance the routes of any mixture of experts.

In transformers 5 a router is a small module (its class name ends in "Router") that returns (logits
[N, E], gates [N, K], indices [N, K]) for N tokens. A forward hook on it records the chosen experts
or replaces them by recorded ones. A router that computes its gates in an unknown way raises
ValueError with its name. `python routes.py` shows an example.

Next: eval.py, which measures a policy and draws a run.
"""

import sys
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Pass(NamedTuple):
    """The routes of one forward of a model with L router layers."""

    indices: torch.Tensor  # [L, B, S, K] chosen experts; -1: not recorded, the router decides
    logits: torch.Tensor   # [L, B, S, E] router logits, with gradient if the forward had one

    def take(self, rows):
        """Those of the rows [n] along B."""
        rows = rows.to(self.indices.device, non_blocking=True)
        return Pass(self.indices[:, rows], self.logits[:, rows])

    def join(self, others):
        """These and those of further rows. Narrower ones are padded: -1, logits 0."""
        def cat(tensors, fill):
            width = max(x.shape[2] for x in tensors)
            return torch.cat([F.pad(x, (0, 0, 0, width - x.shape[2]), value=fill)
                              for x in tensors], 1)

        indices, logits = zip(self, *others)
        return Pass(cat(indices, -1), cat(logits, 0))


class UnknownRouter(ValueError):
    """A kind of router that this file cannot record or replay."""


class Routes:
    """The routes of one or several forwards, in order. For example, a forward over the prompts and
    one over the responses make two passes."""

    def __init__(self, passes=()):
        self.passes = list(passes)

    indices = property(lambda self: self.only().indices)
    logits = property(lambda self: self.only().logits)

    def only(self):
        only, = self.passes          # of several, take one of .passes
        return only

    def join(self, others):
        """These and those of further rows, forward by forward."""
        return Routes(first.join(rest) for first, *rest in zip(
            self.passes, *(other.passes for other in others), strict=True))


def find_routers(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


@contextmanager
def router_hooks(model, on_router, on_forward):
    """Inside the block, on_router(layer, router, output, shape) is called after each router and may
    return a replacement for its output; on_forward(shape) is called after each forward of the
    model. shape: (B, S) of the current forward; None while gradient checkpointing recomputes a
    layer in the backward pass."""
    number = {router: layer for layer, router in enumerate(find_routers(model))}
    base = getattr(model, "base_model", model)
    shape = None
    if not number:
        raise ValueError(f"{type(model).__name__} has no routers: no class name ends in 'Router'")

    def begin(module, args, kwargs):
        nonlocal shape
        shape = (args[0] if args else kwargs["input_ids"]).shape

    def end(module, args, output):
        nonlocal shape
        now = shape
        shape = None
        if output is not None:  # None: the forward raised an error
            on_forward(now)

    def routed(router, args, output):
        if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
            raise UnknownRouter(f"{type(router).__name__} is not supported: its output is not "
                                "(logits, gates, indices)")
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

    Nested inside replay_routes it records the forced routes; around replay_routes it records the
    routers' own. Raises ValueError for a model without routers."""
    routes = Routes()
    outputs = {}                                             # of the current forward, by layer

    def on_router(layer, router, output, shape):
        if shape:
            outputs[layer] = output

    def on_forward(shape):
        logits, _, indices = zip(*(outputs.pop(layer) for layer in sorted(outputs)))
        routes.passes.append(Pass(*(torch.stack(x).unflatten(1, shape) for x in (indices, logits))))

    with router_hooks(model, on_router, on_forward):
        yield routes


@contextmanager
def replay_routes(model, routes):
    """Force the recorded experts: forward k inside the block uses the experts of pass k; if there
    is only one pass, every forward uses it.

    Only the choice of experts is forced. The gates are computed from the current scores, so the
    router still receives a gradient. With gradient checkpointing, call backward() inside the block:
    it recomputes layers. Raises ValueError for routes that do not fit the model or the forwards."""
    passes = routes.passes
    forwards = 0
    many = len(routes.passes) > 1

    def on_router(layer, router, output, shape):
        if many and (not shape or forwards == len(passes)):
            raise ValueError(f"replay_routes: more forwards than the {len(passes)} recorded (with "
                             "gradient checkpointing, record one)")
        logits, gates, chosen = output                                  # [N, E], [N, K], [N, K]
        indices, old = (x[layer] for x in passes[forwards if many else 0])          # [B, S, K]
        here = (*(shape or indices.shape[:2]), chosen.shape[1], logits.shape[1])
        then = (*indices.shape, old.shape[2])
        if here != then:
            raise ValueError(f"replay_routes: (rows, positions, K, experts) are {here} here, "
                             f"{then} recorded")
        if not forwards:  # check that compute_gates reproduces the router's gates for its choice
            again = compute_gates(router, logits.detach(), chosen).float()          # [N, K]
            if not torch.allclose(again, gates.detach().float(), rtol=2e-2, atol=1e-4):
                raise UnknownRouter(f"{type(router).__name__} is not supported: it computes its "
                                    "gates in an unknown way")
        forced = indices.flatten(0, 1).to(chosen.device)                            # [N, K]
        forced = torch.where(forced < 0, chosen, forced)                            # [N, K]
        return logits, compute_gates(router, logits, forced).to(gates.dtype), forced

    def on_forward(shape):
        nonlocal forwards
        forwards += 1

    with router_hooks(model, on_router, on_forward) as layers:
        recorded = [len(p.indices) for p in passes]
        if set(recorded) != {layers}:
            raise ValueError(f"replay_routes: the model has {layers} routers, but {recorded} are "
                             "recorded")
        yield
        if forwards < len(passes):
            raise ValueError(f"replay_routes: {forwards} of {len(passes)} forwards were replayed")


def compute_gates(router, logits, indices):
    """The gates [N, K] of the experts `indices` [N, K], computed as this family of routers does."""
    if type(router).__name__.startswith("GptOss"):
        return logits.gather(-1, indices).softmax(-1)                               # [N, K]
    sigmoid = has_sigmoid(router)
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)   # [N, E]
    gates = scores.gather(-1, indices)                                              # [N, K]
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such option and always normalizes
        gates = gates / (gates.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))   # [N, K]
    return gates * getattr(router, "routed_scaling_factor", 1)


def has_sigmoid(model):
    """Whether the routers score experts by sigmoids, as DeepSeek-V3 and its successors do. They add
    a bias to the scores when they choose experts, but not in the gates."""
    return any(hasattr(m, "e_score_correction_bias") for m in model.modules())


def flip_rate(old_indices, new_indices, mask):
    """The share of the old expert choices that are not among the new ones, per layer: indices
    [L, B, S, K] each, mask [B, S] -> [L]."""
    kept = (old_indices[..., :, None] == new_indices[..., None, :]).any(-1)         # [L, B, S, K]
    lost = (~kept & mask.bool()[..., None]).sum((1, 2, 3))                          # [L]
    return lost / (mask.sum() * old_indices.shape[-1]).clamp(min=1)                 # [L]


@torch.no_grad()
def router_shift(old_logits, new_logits, old_indices, mask=None, floor=0.8):
    """RSPO's router shift γ (arXiv 2510.23027): 1 where the router probabilities of the old experts
    have not changed, smaller where they have. Logits [L, B, T, E] of softmax routers, old_indices
    [L, B, T, K] -> [B, T] float32 without gradient, 1 outside the mask [B, T]."""
    chosen = old_indices.clamp(min=0)                                               # [L, B, T, K]
    old = old_logits.float().log_softmax(-1).gather(-1, chosen)                     # [L, B, T, K]
    new = new_logits.float().log_softmax(-1).gather(-1, chosen)                     # [L, B, T, K]
    gamma = (-(new - old).abs().mean((0, -1))).exp().clamp(min=floor)       # [B, T]  max(γ, γ_min)
    return gamma if mask is None else gamma.masked_fill(~mask.bool(), 1.0)


def expert_share(indices, mask, experts):
    """f_e, the share of all choices that fall on each expert: indices [L, B, T, K], mask [B, T] ->
    [L, E], without gradient; 0 for a mask without tokens."""
    chosen = indices[:, mask.bool()]                                                # [L, N, K]
    counts = F.one_hot(chosen, experts).float().sum((1, 2))                         # [L, E]
    return counts / max(1, chosen[0].numel())                                       # [L, E]


def load_balancing_loss(logits, mask, share, tokens=None, sigmoid=False):
    """The load-balancing loss of Switch Transformer (arXiv 2101.03961, eq. 4), averaged over
    layers: 1 if all experts get an equal share, at most E/K. For one layer, transformers' loss is K
    times this one.

    Router logits [L, B, T, E], mask [B, T], share [L, E] from `expert_share`. If share and tokens
    (the number of loss tokens) are those of the whole mini-batch, the losses and gradients of its
    micro-batches add up to those of the mini-batch. sigmoid: score the experts by sigmoids, as
    DeepSeek-V3 does (arXiv 2412.19437, eq. 17-20)."""
    logits = logits[:, mask.bool()].float()                                         # [L, N, E]
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)                    # [L, N, E]
    probs = scores / scores.sum(-1, keepdim=True)                                   # [L, N, E]
    tokens = mask.sum() if tokens is None else tokens
    mean = probs.sum(1) / tokens.clamp(min=1)                                       # [L, E]  P_e
    return (share * mean).sum(-1).mean() * logits.shape[-1]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    import copy

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    old_policy = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, head_dim=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        initializer_range=0.3))
    new_policy = copy.deepcopy(old_policy)      # an update moves every weight a little
    for weight in new_policy.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    ids = torch.randint(16, (1, 13))                                                # [1, S]
    mask = torch.ones(1, 13, dtype=torch.bool)                                      # [1, S]

    @torch.no_grad()
    def token_logp(policy):
        logp = policy(input_ids=ids).logits[:, :-1].log_softmax(-1)                 # [1, S-1, V]
        return logp.gather(-1, ids[:, 1:, None])[0, :, 0]                           # [S-1]

    with record_routes(old_policy) as old:
        old_logp = token_logp(old_policy)
    with record_routes(new_policy) as new:
        new_logp = token_logp(new_policy)
    with replay_routes(new_policy, old), record_routes(new_policy) as replayed:
        replayed_logp = token_logp(new_policy)

    print("A MoE of 2 layers reads 13 tokens before and after an update of its weights.\n"
          "The 2 of 8 experts of every token, before > after:\n")
    for layer, (before, after) in enumerate(zip(old.indices[:, 0], new.indices[:, 0])):
        print(f"  layer {layer}  ", *(f" {min(a)}{max(a)}>{min(b)}{max(b)}"
                                    for a, b in zip(before.tolist(), after.tolist())))
    rates = [", ".join(f"{rate:.0%}" for rate in flip_rate(old.indices, routes.indices, mask))
             for routes in (new, replayed)]
    print(f"\nflip rate per layer   {rates[0]}; with the old routes replayed {rates[1]}\n"
          "\nToken ratios w = π_new / π_old of tokens 2 to 13, with the new and the old routes:\n")
    for name, logp in (("new routes", new_logp), ("replayed", replayed_logp)):
        w = (logp - old_logp).exp()                                                 # [S-1]
        print(f"  {name:>12}   " + " ".join(f"{x:.2f}" for x in w.tolist())
              + f"   largest |log w| {w.log().abs().max():.2f}")
    gamma = router_shift(old.logits, new.logits, old.indices)                       # [1, S]
    print("\nRSPO keeps the new routes and weights a token by its router shift γ, here "
          f"{gamma.min():.2f} to {gamma.max():.2f}")
