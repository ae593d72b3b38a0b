"""Optional terms that flags add to the loop of train.py, at two places: before the updates of a
rollout batch, and inside the loss of a micro-batch.

    before_updates   --routing_replay
    inside_loss      --algorithm rspo, --router_aux_loss_coef

What has moved to features/ is not here.
"""

from contextlib import contextmanager

from plumbing.engines.replay import forced_routes
from routes import (expert_share, has_sigmoid, load_balancing_loss, replay_routes, router_shift)


def make_extras(args, policy):
    """The Extras of a run, or None if none of its flags is set."""
    rare = (args.routing_replay != "none", args.router_aux_loss_coef, args.router_shift)
    return Extras(args, policy) if any(rare) else None


class Extras:
    def __init__(self, args, policy):
        self.args = args
        self.policy = policy
        routed = args.router_shift or args.router_aux_loss_coef > 0
        self.options = {"record": True} if routed else {}    # of the new policy's forward

    def before_updates(self, learner, batch, old):
        """Set the fields of the batch that flags need. old: its Scores under π_old."""
        if self.args.routing_replay != "none":
            batch.passes = getattr(old, "passes", None)
        if free := getattr(old, "free", None):
            batch.more["free_logp"] = free.logp                                     # [B, T]
            batch.free_routes = free.routes

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
