"""A frozen policy that follows the trained one: the reference of --sync_ref_model, the teacher of
--teacher_update_rate. `frozen` is a Scorer, as Run.load_reference of plumbing/model/actor.py.
"""

import torch

from plumbing.refusal import Refusal


@torch.no_grad()
def move_towards(frozen, policy, share):
    """Move the frozen policy towards the trained one, weight by weight: share · π + (1 - share) ·
    π_frozen (TR-DPO 2404.09656, TRL's sync_ref_model)."""
    for old, new in zip(frozen.policy.parameters(), policy.parameters(), strict=True):
        new = new.full_tensor() if hasattr(new, "full_tensor") else new      # of a sharded policy
        old.data = old.data.lerp(new.to(old.device, old.dtype), share)       # a new tensor: a
        # checkpoint may still hold the old one


def list_weights(frozen):
    """What a checkpoint keeps of a frozen policy that moves: its weights, a list of tensors."""
    return [p.data for p in frozen.policy.parameters()]


def restore_weights(frozen, weights):
    """The reverse of list_weights. Raises Refusal if weights is None."""
    if weights is None:
        raise Refusal("it has no reference policy or teacher that moves: leave out "
                      "--sync_ref_model and --teacher_update_rate")
    for weight, saved in zip(list_weights(frozen), weights, strict=True):
        weight.copy_(saved)
