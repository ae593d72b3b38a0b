"""Zero-variance groups, whose advantages are all 0, are left out of an update that they would not
change.
"""

import torch

from advantages import ADVANTAGES
from losses import has_pull


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
    if not learner.skip_zero_variance:
        return mini, None
    G = mini.group_size
    some = mini.rollout.mask.any(-1)                                                # [B]
    moves = some & mini.advantages.reshape(len(some), -1).ne(0).any(-1)             # [B]
    # one GPU synchronization for both
    some, moves = torch.stack([some, moves]).view(2, -1, G).any(-1).tolist()        # [Q] each
    groups = range(len(moves))
    live = [i for i in groups if moves[i]] or [some.index(True) if any(some) else 0]
    others = [i for i in groups if i not in live]
    if learner.settings.half:
        missing = -len(live) % max(1, learner.rows_per_pass() // G)
        live += others[:missing]
        others = others[missing:]
    rows = torch.arange(len(some) * G).view(-1, G)                                  # [Q, G]
    rest = mini.take(rows[others].flatten()) if others else None
    return mini.take(rows[live].flatten()), rest


def with_rest(stats, rest):
    """The statistics of a whole mini-batch, from those of its live groups and the groups that were
    left out: nothing is clipped where A = 0."""
    mask = rest.rollout.mask                                                        # [B, T]
    share = stats["tokens"] / (stats["tokens"] + mask.sum()).clamp(min=1)
    return stats | {name: stats[name] * share for name in ("clip_low", "clip_high")}
