"""Zero-variance groups, whose advantages are all 0, are left out of an update that they would not
change.
"""

from dataclasses import replace

import torch

from advantages import ADVANTAGES
from losses import has_pull
from plumbing.speed.rollouts import FastRollout


def can_be_skipped(settings, features, world):
    """Whether a group whose advantages are all 0 has no gradient in this run: the policy loss does
    not pull it towards π_old, and no feature adds a term to the loss."""
    return (world == 1 and ADVANTAGES[settings.advantage].per == "response"
            and not features.hooks["loss"] and not has_pull(settings.row))


def split(learner, mini):
    """(live, rest): a mini-batch without the groups that do not change the gradient, and these
    groups; rest is None if every group stays. At least one group stays, one with loss tokens if
    there is one, so that there is a forward. In 16 bits the last forward is filled up with such
    groups: one with fewer rows may round otherwise than the forward of the old log-probs, by more
    than GSPO's clip range."""
    mask = mini.rollout.mask                                                        # [B, T]
    G = mini.group_size
    signal = mini.advantages.reshape(len(mask), -1).ne(0).any(-1)                   # [B]
    # The only GPU synchronization before the end of an update: for these two tensors.
    signal, tokens = torch.stack([signal, mask.sum(-1)]).tolist()                   # B ints each
    mini = replace(mini, rollout=FastRollout.extend(mini.rollout, tokens=tokens))
    if not learner.skip_zero_variance:
        return mini, None
    groups = range(len(mini.problems))
    moves = [a and n for a, n in zip(signal, tokens)]                               # B ints
    live = [i for i in groups if any(moves[i * G:(i + 1) * G])]                     # [q]
    live = live or [next((i for i in groups if any(tokens[i * G:(i + 1) * G])), 0)]
    if learner.settings.half:
        others = [i for i in groups if i not in live]
        live += others[:-len(live) % max(1, learner.rows_per_pass() // G)]
    others = [i for i in groups if i not in live]
    rest = mini.groups(torch.tensor(others)) if others else None
    return mini.groups(torch.tensor(live)), rest


def with_rest(stats, rest):
    """The statistics of a whole mini-batch, from those of its live groups and the groups that were
    left out: nothing is clipped where A = 0."""
    mask = rest.rollout.mask                                                        # [B, T]
    share = stats["tokens"] / (stats["tokens"] + mask.sum()).clamp(min=1)
    return stats | {name: stats[name] * share for name in ("clip_low", "clip_high")}
