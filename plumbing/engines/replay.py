"""Rollout routing replay (R3, arXiv 2510.11370): the trainer uses the experts that the sampler's
routers chose.

The sampler's choices are stored with the rollout, one row per response, even if the sampler
computed several responses in one row. Each forward of the trainer then gets its part of them.
"""

from dataclasses import replace

import torch

from plumbing.speed.caches import copies_rows
from plumbing.speed.rollouts import FastRollout
from routes import Pass, Routes


def with_sampled_routes(rollout, recorded, reads=None):
    """The rollout as a FastRollout with `sampled`, the experts that the sampler's routers chose, in
    two passes: at the prompts [L, Q, P, K], laid out like prompt_ids, and at the responses without
    their last token [L, B, T-1, K]; -1: none. recorded: the Routes of the sampler's forwards.
    reads: if responses shared rows, (responses [b], rows that they read [b]) for each token step.
    """
    rollout = rollout if isinstance(rollout, FastRollout) else FastRollout.of(rollout)
    first = 2 if rollout.prefix else 1   # forwards over prompts; the later ones are token steps
    pairs = []
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
        pairs.append((prompts, responses))
    return replace(rollout, sampled=Routes(Pass(*pair) for pair in zip(*pairs)))


def at_their_places(rollout, prefix, rest, fill):
    """Join the shared prefix [L, 1, prefix, n] and the rest of the prompts [L, Q, P-prefix, n],
    which were computed separately, into one tensor [L, Q, P, n] padded on the left."""
    mask = rollout.prompt_mask                                                      # [Q, P]
    whole = rest.new_full((len(rest), *mask.shape, rest.shape[-1]), fill)           # [L, Q, P, n]
    whole[:, :, rollout.prefix:] = rest
    shared = mask & (mask.cumsum(-1) <= rollout.prefix)                             # [Q, P]
    whole[:, shared] = prefix.repeat(1, 1, len(mask), 1)[:, 0]      # [L, Q·prefix, n]
    return whole


def sampler_routes(args, policy, rollout):
    """The sampler's routes, arranged for the forwards that will score this rollout."""
    prompts, responses = rollout.sampled.passes
    G = rollout.group_size
    prefix = rollout.prefix
    alone = G == 1 and not prefix or not copies_rows(policy.config)
    if args.plain or args.gradient_checkpointing or alone:          # one forward for both
        return Routes([Pass(*(torch.cat([p.repeat_interleave(G, 1), r], 2)
                              for p, r in zip(prompts, responses)))])
    start = rollout.prompt_mask.shape[1] - int(rollout.prompt_mask[0].sum())
    passes = [Pass(*(x[:, :1, start:start + prefix] for x in prompts))] if prefix else []
    passes.append(Pass(*(x[:, :, prefix:] for x in prompts)))
    return Routes(passes + [responses] * (rollout.mask.shape[1] > 1))


def forced_routes(args, policy, rollout, passes=None):
    """The Routes that a forward over this rollout must use, or None. R2 replays `passes`, the
    routes of the old policy's recomputation (None during the recomputation itself); R3 replays the
    sampler's routes."""
    if args.routing_replay == "rollout" and passes is None:
        return sampler_routes(args, policy, rollout)
    return None if args.routing_replay == "none" else passes
