"""Rollout routing replay (R3, arXiv 2510.11370): the trainer takes the experts the sampler took.

What the sampler's routers chose is kept beside the rollout, a row per response, whatever the
sampler did to be quick. A forward of the trainer then gets the part that belongs to it.
"""

from contextlib import nullcontext

import torch

from plumbing.speed import fast
from plumbing.speed.caches import copies_rows
from routes import Pass, Routes, record_routes, replay_routes


def sample_with_routes(sample, model, *inputs, **options):
    """`sample`, and in rollout.routes two passes: the choices at the prompts [L, Q, P, K], laid out
    as prompt_ids are, and at the responses but for their last token [L, B, T-1, K]; -1: none."""
    reads = []
    if sample is fast.sample:
        options["reads"] = reads
    with record_routes(model) as recorded:
        rollout = sample(model, *inputs, **options)
    first = 2 if rollout.prefix else 1   # forwards over prompts; the others are token steps
    found = []
    for tensors, fill in zip(zip(*recorded.passes), (-1, 0.0)):  # indices, then logits
        *prefix, prompts = tensors[:first]                          # [L, Q or B, P, n]
        prompts = prompts[:, ::prompts.shape[1] // len(rollout.prompt_ids)]         # [L, Q, P, n]
        if prefix:
            prompts = at_their_places(rollout, prefix[0], prompts, fill)
        B, T = rollout.mask.shape
        responses = prompts.new_full((len(prompts), B, T - 1, prompts.shape[-1]), fill)
        for t, step in enumerate(tensors[first:first + T - 1]):     # [L, rows, 1, n]
            live, rows = reads[t] if reads else (slice(None), slice(None))
            responses[:, live, t] = step[:, rows, 0]
        found.append((prompts, responses))
    rollout.routes = Routes(Pass(*pair) for pair in zip(*found))
    return rollout


def at_their_places(rollout, prefix, rest, fill):
    """The shared prefix [L, 1, prefix, n] and the rest [L, Q, P-prefix, n] of the prompts, computed
    apart, as one [L, Q, P, n] that is padded on the left."""
    mask = rollout.prompt_mask                                                      # [Q, P]
    whole = rest.new_full((len(rest), *mask.shape, rest.shape[-1]), fill)           # [L, Q, P, n]
    whole[:, :, rollout.prefix:] = rest
    shared = mask & (mask.cumsum(-1) <= rollout.prefix)                             # [Q, P]
    whole[:, shared] = prefix.repeat(1, 1, len(mask), 1)[:, 0]      # [L, Q·prefix, n]
    return whole


def sampler_routes(args, policy, rollout):
    """The sampler's routes as the forwards that score this rollout will ask for them."""
    (prompts, responses), G, prefix = rollout.routes.passes, rollout.group_size, rollout.prefix
    alone = G == 1 and not prefix or not copies_rows(policy.config)
    if args.plain or args.gradient_checkpointing or alone:          # one forward for both
        return Routes([Pass(*(torch.cat([p.repeat_interleave(G, 1), r], 2)
                              for p, r in zip(prompts, responses)))])
    start = rollout.prompt_mask.shape[1] - int(rollout.prompt_mask[0].sum())
    passes = [Pass(*(x[:, :1, start:start + prefix] for x in prompts))] if prefix else []
    passes.append(Pass(*(x[:, :, prefix:] for x in prompts)))
    return Routes(passes + [responses] * (rollout.mask.shape[1] > 1))


def replayed(args, policy, rollout, routes=None):
    """The context in which a rollout is computed with replay: R2 takes the routes of the old
    policy's recomputation (None while it recomputes), R3 those of the sampler."""
    if args.routing_replay == "rollout" and routes is None:
        routes = sampler_routes(args, policy, rollout)
    if args.routing_replay == "none" or routes is None:
        return nullcontext()
    return replay_routes(policy, routes)
