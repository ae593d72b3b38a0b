"""Cutting and joining: a rollout, and routes, by groups and by rows. No number changes."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from rollout import Rollout
from routes import Pass, Routes


def rows_of(rollout, index):
    """Row numbers [q·G] of the groups of the prompts in `index` [q], on the index's device."""
    offsets = torch.arange(rollout.group_size, device=index.device)                 # [G]
    return (index[:, None] * rollout.group_size + offsets).flatten()


def prompts_of(rollout, index):
    """The groups of the prompts in `index` [q] (integers), as a rollout of their own."""
    return cut(rollout, index, rows_of(rollout, index), rollout.group_size)


def rows_between(rollout, start, stop):
    """Rows start:stop: whole groups, or part of one group; else ValueError."""
    G = rollout.group_size
    if (start % G or stop % G) and start // G != (stop - 1) // G:
        raise ValueError(f"rows {start}:{stop} cut through groups of {G}")
    prompts, rows = slice(start // G, (stop - 1) // G + 1), torch.arange(start, stop)
    return cut(rollout, prompts, rows, min(G, stop - start))


def cut(rollout, prompts, rows, group_size):
    numbers, rows = rows.tolist(), rows.to(rollout.mask.device, non_blocking=True)
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.to(rollout.mask.device, non_blocking=True)
    parts = {name: getattr(rollout, name)[prompts] for name in ("prompt_ids", "prompt_mask")}
    parts |= {name: getattr(rollout, name)[rows]
              for name in ("response_ids", "mask", "sampler_logp", "truncated")}
    routes = rollout.routes and route_rows(rollout.routes, [prompts, rows])
    tokens = rollout.tokens and [rollout.tokens[i] for i in numbers]
    return replace(rollout, **parts, texts=[rollout.texts[i] for i in numbers], routes=routes,
                   group_size=group_size, tokens=tokens)


def counted_places(rollout):
    """The N loss tokens among all B·T places, [N], without a wait for the GPU; None where they were
    not counted before."""
    if rollout.tokens is not None:
        return torch.nonzero_static(rollout.mask.flatten(), size=sum(rollout.tokens))[:, 0]


def concat(rollouts):
    """Rollouts of the same group size as one; narrower ones are padded, prompts on their left."""
    P, T = (max(getattr(r, name).shape[1] for r in rollouts) for name in ("prompt_ids", "mask"))
    first = rollouts[0]

    def left(name):
        width = lambda r: P - r.prompt_ids.shape[1]
        return torch.cat([F.pad(getattr(r, name), (width(r), 0)) for r in rollouts])

    def right(name):
        return torch.cat([F.pad(getattr(r, name), (0, T - r.mask.shape[1])) for r in rollouts])
    return Rollout(left("prompt_ids"), left("prompt_mask"), right("response_ids"), right("mask"),
                   right("sampler_logp"), torch.cat([r.truncated for r in rollouts]),
                   [t for r in rollouts for t in r.texts], first.group_size, shared(rollouts),
                   concat_routes(rollouts, P, T))


def shared(rollouts):
    """The prefix that rollouts share, if each has one and they begin alike; else 0."""
    prefix = min(r.prefix for r in rollouts)
    begins = {tuple(r.prompt_ids[0][r.prompt_mask[0]][:prefix].tolist()) for r in rollouts}
    return prefix if len(begins) == 1 else 0


# ------------------------------------------------------------------------------------------ routes

def route_rows(routes, rows):
    """Some rows of the batch; rows: for each forward an index along B."""
    pairs = zip(routes.passes, rows, strict=True)
    return Routes(Pass(p.indices[:, index], p.logits[:, index]) for p, index in pairs)


def cut_routes(routes, rows, rollout):
    """The routes of some rows [n] of a rollout. A row of a forward over prompts serves a group, or
    part of one; a forward over the shared prefix serves everybody."""
    if routes is None:
        return None
    shares = [len(rollout.mask) // p.indices.shape[1] for p in routes.passes]
    index = [rows[::share] // share for share in shares]
    if routes.passes[0].indices.shape[2] == rollout.prefix:
        index[0] = slice(1)
    return route_rows(routes, index)


def cat_routes(parts):
    """Chunks of a batch joined along B; narrower ones are padded: indices -1, logits 0."""
    def join(tensors, fill):
        width = max(x.shape[2] for x in tensors)
        wide = [F.pad(x, (0, 0, 0, width - x.shape[2]), value=fill) for x in tensors]
        return torch.cat(wide, 1)

    chunks = (zip(*passes) for passes in zip(*(part.passes for part in parts), strict=True))
    return Routes(Pass(join(indices, -1), join(logits, 0)) for indices, logits in chunks)


def response_routes(routes, rollout):
    """What predicts the response tokens, t at place P - 1 + t: Pass(indices [L, B, T, K], logits).
    The routes' forwards: [shared prefix,] prompts, responses; or all in one."""
    start, passes = rollout.prompt_ids.shape[1] - 1, list(routes.passes)
    while start >= passes[0].indices.shape[2]:
        start -= passes.pop(0).indices.shape[2]
    share = len(rollout.mask) // passes[0].indices.shape[1]  # responses that read a row
    first = (x[:, :, start:].repeat_interleave(share, 1) for x in passes[0])
    return Pass(*(torch.cat(parts, 2) for parts in zip(first, *passes[1:])))


def concat_routes(rollouts, P, T):
    """The routes of rollouts that are joined, with prompts of P tokens and responses of T."""
    if rollouts[0].routes is None:
        return None
    passes = [], []
    for rollout in rollouts:
        for pair, (indices, logits) in zip(passes, rollout.routes.passes):
            left = (P - indices.shape[2], 0) if pair is passes[0] else (0, T - 1 - indices.shape[2])
            pair.append([F.pad(indices, (0, 0, *left), value=-1), F.pad(logits, (0, 0, *left))])
    return Routes(Pass(*(torch.cat(x, 1) for x in zip(*pair))) for pair in passes)
