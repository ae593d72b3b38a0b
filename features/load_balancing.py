"""The load-balancing loss of a mixture of experts (Switch Transformer 2101.03961 eq. 4): it keeps
the router from sending most tokens to a few experts.

routes.py has the formula. The experts' shares are the old policy's, over the loss tokens of the
whole mini-batch, so that micro-batches do not change it.
"""

from dataclasses import dataclass

from features.feature import Feature, flag
from plumbing.refusal import Refusal
from routes import expert_share, find_routers, has_sigmoid, load_balancing_loss


@dataclass(frozen=True)
class Flags:
    router_aux_loss_coef: float = flag(
        0.0, "MoE: coefficient of the load-balancing loss", at_least=0, section="load balancing",
        needs={"old_logp=recompute": "the experts' loads come from the recomputed routes"})


class LoadBalancing(Feature):
    flags = Flags

    def __init__(self, learner):
        super().__init__(learner)
        policy = learner.policy
        if not find_routers(policy):
            raise Refusal("--router_aux_loss_coef needs a mixture of experts: this model is "
                          "dense, or its routers are not separate modules")
        self.sigmoid = has_sigmoid(policy)
        learner.needs_new_routes = True

    def loss(self, micro, scores, mini):
        logits = scores.routes.logits                                               # [L, b, T, E]
        tokens = mini.rollout.mask                                                  # [B, T]
        share = expert_share(mini.routes.indices, tokens, logits.shape[-1])         # [L, E]
        balance = load_balancing_loss(logits, micro.rollout.mask, share, tokens.sum(), self.sigmoid)
        return {"balance_loss": self.settings.router_aux_loss_coef * balance}
