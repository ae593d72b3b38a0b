"""Optional terms that flags add inside the loss of a micro-batch: --algorithm rspo,
--router_aux_loss_coef.

What has moved to features/ is not here.
"""

from routes import expert_share, has_sigmoid, load_balancing_loss, router_shift


def make_extras(args, policy):
    """The Extras of a run, or None if none of its flags is set."""
    rare = (args.router_aux_loss_coef, args.router_shift)
    return Extras(args, policy) if any(rare) else None


class Extras:
    def __init__(self, args, policy):
        self.args = args
        self.policy = policy
        routed = args.router_shift or args.router_aux_loss_coef > 0
        self.options = {"record": True} if routed else {}    # of the new policy's forward

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
