"""FastRollout, a rollout with data for speed, and functions that join and cut rollouts and routes.
Values are unchanged; only the shape is.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from rollout import Rollout
from routes import Pass, Routes


@dataclass
class FastRollout(Rollout):
    """A rollout with the additional fields that fast.py needs."""

    prefix: int = 0              # number of first tokens that all prompts share
    tokens: list | None = None   # B numbers of loss tokens, if they were counted

    @classmethod
    def extend(cls, rollout, **more):
        """The same rollout as a FastRollout."""
        return cls(**{f.name: getattr(rollout, f.name) for f in fields(rollout)} | more)

    def cut(self, prompts, rows, group_size):
        tokens = self.tokens and [self.tokens[i] for i in rows.tolist()]
        return replace(super().cut(prompts, rows, group_size), tokens=tokens)

    def find_loss_tokens(self):
        """The indices [N] of the loss tokens among the B·T positions, without a GPU
        synchronization; None if they were not counted before, or on MPS (torch 2.11 lacks it)."""
        if self.tokens is not None and self.mask.device.type != "mps":
            return torch.nonzero_static(self.mask.flatten(), size=sum(self.tokens))[:, 0]


def concat(rollouts):
    """Join rollouts of the same group size. Narrower ones are padded: prompts on the left,
    responses on the right."""
    P, T = (max(getattr(r, name).shape[1] for r in rollouts) for name in ("prompt_ids", "mask"))

    def left(name):
        width = lambda r: P - r.prompt_ids.shape[1]
        return torch.cat([F.pad(getattr(r, name), (width(r), 0)) for r in rollouts])

    def right(name):
        return torch.cat([F.pad(getattr(r, name), (0, T - r.mask.shape[1])) for r in rollouts])
    joined = Rollout(left("prompt_ids"), left("prompt_mask"), right("response_ids"), right("mask"),
                     right("sampler_logp"), torch.cat([r.truncated for r in rollouts]),
                     [t for r in rollouts for t in r.texts], rollouts[0].group_size,
                     {name: x.join([r.attached[name] for r in rollouts[1:]], P, T)
                      for name, x in rollouts[0].attached.items()},
                     right("turn_rewards") if rollouts[0].games else None,
                     [game for r in rollouts for game in r.games or []] or None)
    if not all(isinstance(r, FastRollout) for r in rollouts):
        return joined
    return FastRollout.extend(joined, prefix=find_shared_prefix(rollouts))


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

    join = dict(logp=torch.cat, entropy=torch.cat, values=torch.cat, passes=join_routes,
                routes=lambda values: Pass(*(torch.cat(x, 1) for x in zip(*values))))
    names = [f.name for f in fields(parts[0]) if f.name in join]
    return replace(parts[0], **{name: cat(name, join[name]) for name in names})


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
