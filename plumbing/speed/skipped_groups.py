"""Zero-variance groups, whose advantages are all 0, are left out of an update that they would not
change.
"""

import torch

from advantages import ADVANTAGES


def can_be_skipped(settings, features, world):
    """Whether a group whose advantages are all 0 has no gradient in this run: the policy loss does
    not pull it towards π_old, and no feature adds a term to the loss. --plain skips none."""
    return (not settings.plain and world == 1 and ADVANTAGES[settings.advantage].per == "response"
            and not features.hooks["loss"] and not settings.row.kind.pulls)


def find_live_rows(mini, rows_per_pass=None):
    """The responses [n] of the groups of a mini-batch that change the gradient. At least one group
    stays, one with loss tokens if there is one, so that there is a forward. rows_per_pass: so many
    responses, or a multiple of it, with groups that change nothing if need be: in 16 bits a forward
    with fewer rows may round otherwise than that of the old log-probs, by more than GSPO's clip
    range; None: any number."""
    G = mini.group_size
    tokens = mini.rollout.mask.any(-1)                                              # [B]
    moves = tokens & mini.advantages.reshape(len(tokens), -1).ne(0).any(-1)         # [B]
    # one GPU synchronization for both
    tokens, moves = torch.stack([tokens, moves]).view(2, -1, G).any(-1).tolist()    # [Q] each
    groups = range(len(moves))
    live = [i for i in groups if moves[i]] or [tokens.index(True) if any(tokens) else 0]
    if rows_per_pass:
        missing = -len(live) % max(1, rows_per_pass // G)
        live += [i for i in groups if i not in live][:missing]
    return torch.arange(len(mini.problems)).view(-1, G)[live].flatten()             # [n]
