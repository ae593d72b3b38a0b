"""Groups of equal rewards, which do not change the gradient, are left out of an update."""

from dataclasses import replace

import torch

from advantages import ADVANTAGES
from plumbing.speed.rollouts import FastRollout


def with_gradient(learner, batch):
    """The batch without groups of equal rewards, if that does not change the gradient: if A = 0 at
    all loss tokens of the group and the loss has no other term. At least one group is kept, one
    with loss tokens if there is one, so that there is a forward. In 16 bits the last forward is
    filled up with such groups: one with fewer rows may round otherwise than the forward of the old
    log-probs, by more than GSPO's clip range."""
    settings = learner.settings
    row = settings.row
    others = learner.features.adds_gradient or row.kind.pulls and row.constants[row.kind.pulls]
    per_response = ADVANTAGES[settings.advantage].per == "response"
    mask = batch.rollout.mask
    G = settings.num_generations
    signal = batch.advantages.reshape(len(mask), -1).ne(0).any(-1)                  # [B]
    # The only GPU synchronization before the end of an update: for these two tensors.
    signal, tokens = torch.stack([signal, mask.sum(-1)]).tolist()                   # B ints each
    batch = replace(batch, rollout=FastRollout.of(batch.rollout, tokens=tokens))
    if others or not per_response or learner.world > 1:
        return batch
    groups = range(len(mask) // G)
    moves = [a and n for a, n in zip(signal, tokens)]                               # B ints
    live = [i for i in groups if any(moves[i * G:(i + 1) * G])]                     # [q]
    live = live or [next((i for i in groups if any(tokens[i * G:(i + 1) * G])), 0)]
    if settings.half:
        dead = [i for i in groups if i not in live]
        live += dead[:-len(live) % max(1, learner.rows_per_pass() // G)]
    return batch.groups(torch.tensor(live))


def of_whole(stats, mask):
    """Correct the statistics of a mini-batch whose groups of equal rewards were left out, so that
    clip shares are relative to all its loss tokens (mask [B, T]): nothing is clipped where A = 0.
    Other statistics remain those of the computed groups."""
    share = stats["tokens"] / mask.sum().clamp(min=1)
    return stats | {name: stats[name] * share for name in ("clip_low", "clip_high")}
