"""Optional terms that flags add to the loop of train.py, at two places: before the updates of a
rollout batch, and inside the loss of a micro-batch.

    before_updates   --overlong_cache, --length_penalty, --mask_truncated_completions,
                     --routing_replay,
                     a teacher's log-probs, and the rarer inputs of an --advantage
    inside_loss      --algorithm rspo, --router_aux_loss_coef

What has moved to features/ is not here.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch

from advantages import ADVANTAGES, length_penalty, overlong_penalty
from plumbing.data.running_sum import overlong_zone
from plumbing.loop.distillation import teacher_logp
from plumbing.engines.replay import forced_routes
from plumbing.model.actor import move_towards, pairs_of
from routes import (expert_share, has_sigmoid, load_balancing_loss, replay_routes, router_shift)

RARE_INPUTS = {   # of an --advantage (see advantages.INPUTS): (Extras, Batch) -> the input
    "parts": lambda extras, batch: batch.parts,                                     # [B, K]
    "part_weights": lambda extras, batch: extras.task.weights(batch.parts),         # K numbers
    "blamed": lambda extras, batch: blamed(extras.task, batch),                     # [B, T]
}


def make_extras(args, task, policy, reference=None, teacher=None):
    """The Extras of a run, or None if none of its flags is set."""
    rare = (args.overlong_cache, args.length_penalty,
            args.mask_truncated_completions,
            args.routing_replay != "none", args.router_aux_loss_coef, args.router_shift,
            args.teacher_model_name_or_path, args.self_distillation,
            RARE_INPUTS.keys() & ADVANTAGES[args.advantage].reads)
    return Extras(args, task, policy, reference, teacher) if any(rare) else None


class Extras:
    """reference: a Scorer of an average of the policies so far (--teacher_update_rate); teacher:
    one of the checkpoint of --teacher_model_name_or_path."""

    def __init__(self, args, task, policy, reference, teacher=None):
        self.args = args
        self.task = task
        self.policy = policy
        self.reference = reference
        self.teacher = teacher
        routed = args.router_shift or args.router_aux_loss_coef > 0
        self.options = {"record": True} if routed else {}    # of the new policy's forward

    def before_updates(self, learner, batch, old):
        """Set the fields of the batch that flags need. old: its Scores under π_old. Returns the
        further arguments of advantages.estimate_advantages."""
        args = self.args
        rollout = batch.rollout
        mask = batch.rollout.mask                                                        # [B, T]
        limit = self.task.max_completion_length
        batch.parts = shaped(args, batch.parts, rollout, limit)                     # [B, K]
        batch.sampled = batch.sampled and [
            (one, shaped(args, parts, one, limit)) for one, parts in batch.sampled]
        if args.mask_truncated_completions:                  # metrics still describe all of them
            batch.sampled = batch.sampled or [(rollout, batch.parts)]
            mask = mask & ~rollout.truncated[:, None]                               # [B, T]
            rollout = batch.rollout = replace(rollout, mask=mask)
        if args.routing_replay != "none":
            batch.passes = getattr(old, "passes", None)
        if free := getattr(old, "free", None):
            batch.free_logp = free.logp
            batch.free_routes = free.routes
        self.move_reference(learner, batch.step)
        reads = ADVANTAGES[args.advantage].reads
        inputs = {name: make(self, batch) for name, make in RARE_INPUTS.items() if name in reads}
        return inputs | self.of_teacher(learner, batch)

    def of_teacher(self, learner, batch):
        """The arguments of estimate_advantages for distillation; {} without a teacher."""
        args = self.args
        if self.teacher is None and not args.self_distillation:
            return {}
        teacher = self.reference if args.teacher_update_rate else self.teacher
        batch.teacher_logp = teacher_logp(args, learner, self.task, batch, teacher)
        return dict(teacher_logp=batch.teacher_logp, distillation_coef=args.distillation_coef)

    def move_reference(self, learner, step):
        """Before batch `step`, move the teacher of --self_distillation towards the policy."""
        if self.args.teacher_update_rate and step > 1:
            move_towards(self.reference, learner.policy, self.args.teacher_update_rate)

    def state_dict(self, learner):
        """What a checkpoint keeps: the weights of a reference that has moved."""
        moves = bool(self.args.teacher_update_rate)
        return {"reference": [old.data for old, _ in pairs_of(self.reference, learner.policy)]
                } if moves else {}

    def load_state_dict(self, learner, state):
        """The reverse of state_dict."""
        pairs = pairs_of(self.reference, learner.policy) if state else []
        for (old, _), saved in zip(pairs, state.get("reference", []), strict=True):
            old.data.copy_(saved)

    @contextmanager
    def forcing(self, rollout, passes=None, scorer=None):
        """Inside the block, the routers of the policy (or of another scorer's policy) are forced to
        the routes of --routing_replay for this rollout. Yields the keyword arguments that the
        scorer then needs."""
        policy = self.policy if scorer is None else scorer.policy
        routes = forced_routes(self.args, policy, rollout, passes)
        if routes is None:
            yield {}
        else:
            with replay_routes(policy, routes):
                yield {"replayed": True}

    def compares_routes(self, learner, passes, scorer):
        """Whether the policy was scored with forced routes, and what its routers choose by
        themselves is needed, too: for flip_rate and teacher_kl."""
        forced = passes is not None or self.args.routing_replay == "rollout"
        return forced and scorer is None and learner.has_routes

    def inside_loss(self, part, new, mini):
        """For a micro-batch `part` of the mini-batch `mini` with its Scores `new`: (arguments for
        policy_loss, further loss terms by name: load balancing)."""
        args = self.args
        mask = part.rollout.mask                                                    # [B, T]
        terms = {}
        if args.router_aux_loss_coef:  # the experts' shares are the old policy's
            logits = new.routes.logits                                              # [L, B, T, E]
            tokens = mini.rollout.mask                                              # [B, T]
            share = expert_share(mini.routes.indices, tokens, logits.shape[-1])     # [L, E]
            balance = load_balancing_loss(logits, mask, share, tokens.sum(),
                                          has_sigmoid(self.policy))
            terms["balance_loss"] = args.router_aux_loss_coef * balance
        arguments = {}
        if args.router_shift:
            arguments["router_shift"] = router_shift(part.routes.logits, new.routes.logits,
                                                     part.routes.indices, mask)     # [B, T]
        return arguments, terms


def shaped(args, parts, rollout, limit):
    """The parts of the rewards [B, K], with one more part for each of --overlong_cache (DAPO's
    penalty for responses near the length limit) and --length_penalty (on the length of responses to
    prompts that are mostly passed). Like the limit, both count all tokens of a response, including
    those that a tool inserted."""
    if not args.overlong_cache and not args.length_penalty:
        return parts
    places = torch.arange(1, rollout.mask.shape[1] + 1, device=rollout.mask.device)  # [T]
    lengths = (rollout.mask * places).amax(-1)                # [B] the last token is the policy's
    lengths = lengths.masked_fill(rollout.truncated, limit)    # [B]
    more = []
    if args.overlong_cache:
        cache = overlong_zone(args.overlong_cache, limit)
        more.append(overlong_penalty(lengths, limit, cache))   # [B]
    if args.length_penalty:
        penalty = length_penalty(lengths.float(), parts[:, 0] >= 1, rollout.group_size)
        more.append(args.length_penalty * penalty)                                  # [B]
    return torch.cat([parts, *(part[:, None] for part in more)], 1)                 # [B, K + more]


def blamed(task, batch):
    """[B, T] bool: the response tokens (one per character) at or after the first wrong step."""
    rollout = batch.rollout
    G = batch.rollout.group_size
    errors = [task.first_error(text, batch.problems[i // G])
              for i, text in enumerate(rollout.texts)]
    first = torch.tensor([0 if e is None else e for e in errors], device=rollout.mask.device)
    places = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)        # [T]
    return places >= first[:, None]                                                 # [B, T]
