"""Join rollouts, scores and routes. Values are unchanged; only the shape is."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from routes import Pass, Routes


def concat(rollouts):
    """Join rollouts of the same group size. Narrower ones are padded: prompts on the left,
    responses on the right."""
    P, T = (max(getattr(r, name).shape[1] for r in rollouts) for name in ("prompt_ids", "mask"))

    def left(name):
        width = lambda r: P - r.prompt_ids.shape[1]
        return torch.cat([F.pad(getattr(r, name), (width(r), 0)) for r in rollouts])

    def right(name):
        return torch.cat([F.pad(getattr(r, name), (0, T - r.mask.shape[1])) for r in rollouts])

    first = rollouts[0]
    routes = first.forced_routes and first.forced_routes.join(
        [r.forced_routes for r in rollouts[1:]], P, T)
    rewards = {"turn_rewards": right("turn_rewards")} if first.games else {}
    return replace(
        first, **{name: left(name) for name in ("prompt_ids", "prompt_mask")},
        **{name: right(name) for name in ("response_ids", "mask", "sampler_logp")}, **rewards,
        truncated=torch.cat([r.truncated for r in rollouts]),
        texts=[text for r in rollouts for text in r.texts],
        forced_routes=routes, games=[game for r in rollouts for game in r.games],
        prefix=find_shared_prefix(rollouts), own_prompts=any(r.own_prompts for r in rollouts))


def find_shared_prefix(rollouts):
    """The length of the prefix that all rollouts share; 0 if one has none or they differ."""
    prefix = min(r.prefix for r in rollouts)
    begins = {tuple(r.prompt_ids[0][r.prompt_mask[0]][:prefix].tolist()) for r in rollouts}
    return prefix if len(begins) == 1 else 0


def join_scores(parts):
    """Scores of consecutive rows of a rollout as one."""
    def cat(name, join=torch.cat):
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else join(values)

    return replace(parts[0], logp=cat("logp"), entropy=cat("entropy"), values=cat("values"),
                   passes=cat("passes", join_routes),
                   routes=cat("routes", lambda x: Pass(*(torch.cat(y, 1) for y in zip(*x)))))


# ------------------------------------------------------------------------------------------ routes

def join_routes(parts):
    """Join chunks of a batch along B. Narrower ones are padded, indices with -1, logits with 0."""
    def join(tensors, fill):
        width = max(x.shape[2] for x in tensors)
        wide = [F.pad(x, (0, 0, 0, width - x.shape[2]), value=fill) for x in tensors]
        return torch.cat(wide, 1)

    chunks = (zip(*passes) for passes in zip(*(part.passes for part in parts), strict=True))
    return Routes(Pass(join(indices, -1), join(logits, 0)) for indices, logits in chunks)


def select_response_routes(routes, rollout):
    """The routes of the positions that predict the response tokens (token t is predicted at
    position P - 1 + t): Pass(indices [L, B, T, K], logits). The routes come from forwards over
    [the shared prefix,] the prompts and the responses, or from one forward over all."""
    start = rollout.prompt_ids.shape[1] - 1
    passes = list(routes.passes)
    while start >= passes[0].indices.shape[2]:
        start -= passes.pop(0).indices.shape[2]
    share = len(rollout.mask) // passes[0].indices.shape[1]  # responses that read a row
    first = (x[:, :, start:].repeat_interleave(share, 1) for x in passes[0])
    return Pass(*(torch.cat(parts, 2) for parts in zip(first, *passes[1:])))
