"""Routing replay: the experts of a mixture that were chosen once are chosen again, so that the old
and the new log-prob of a token come from the same part of the model.

    old       (R2, 2507.18071 §5.3) those of the recomputation of the old log-probs
    rollout   (R3, 2510.11370) those that the sampler's routers chose

The routes travel with the rollout, as its forced_routes, and are cut and joined with it; whoever
scores such a rollout forces them (session/learner.py: forced). Only the choice is forced: gates
and their gradient are the current policy's.
"""

from dataclasses import dataclass, replace
from importlib import import_module

import torch
import torch.nn.functional as F

from features.feature import Feature, flag, refuse
from plumbing.engines.wrapper import Wrapper
from plumbing.refusal import Refusal
from routes import Pass, Routes, find_routers, record_routes


@dataclass(frozen=True)
class Flags:
    routing_replay: str = flag(
        "none", "MoE: routers reuse the experts that were chosen while the old log-probs were "
                "computed (old) or while the responses were sampled (rollout)",
        choices=("none", "old", "rollout"), section="the routers' choices, forced")


class RoutingReplay(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.routing_replay != "none"

    @classmethod
    def check(cls, settings):
        replay = settings.routing_replay
        if replay == "old" and settings.old_logp == "sampler":
            refuse(settings, "old_logp", "cannot be combined with --routing_replay old: it reuses "
                   "the routes of the recomputation; --routing_replay rollout reuses the sampler's")
        if replay == "rollout" and settings.sampler:
            refuse(settings, "sampler", "cannot be combined with --routing_replay rollout: only "
                   "the built-in sampler records routes")

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        if not training or settings.routing_replay != "rollout":
            return sampler
        return RecordingSampler(sampler, settings)

    def __init__(self, learner):
        super().__init__(learner)
        policy = learner.policy
        if not find_routers(policy):
            raise Refusal("--routing_replay needs a mixture of experts: this model is dense, or "
                          "its routers are not separate modules")
        self.together = reads_together(self.settings, policy)

    def after_scoring(self, learner, batch, old):
        """From here on the routes of π_old's own forwards are forced, if there were any."""
        if old.passes is None:
            return
        if self.settings.routing_replay == "rollout":     # the old log-probs have forced routes
            free = learner.score(replace(batch.rollout, forced_routes=None))
            batch.free_routes = free.routes                                         # [L, B, T, ·]
        routes = recorded_routes(old.passes, batch.rollout, self.together)
        batch.rollout = replace(batch.rollout, forced_routes=routes)

    def metrics(self, batch, mini, new):
        """The core's flip_rate and tokens.jsonl describe what the routers choose by themselves."""
        if self.settings.old_logp != "sampler":              # which records no routes
            free = self.learner.score(replace(mini.rollout, forced_routes=None))
            mini.new_free_routes = free.routes                                      # [L, B, T, ·]
        return {}


def reads_together(settings, policy):
    """Whether the policy reads prompt and response in one forward."""
    caches = import_module("plumbing.speed.caches")          # transformers: --help does not wait
    return (settings.plain or settings.gradient_checkpointing
            or not caches.copies_rows(policy.config))


# -------------------------------------------------------------------- forced_routes of a rollout

@dataclass
class ForcedRoutes:
    """The experts that the routers take where a rollout is scored."""

    prefix: Pass                 # [L, 1, ·, ·] of the shared prefix, if it has a forward of its own
    prompts: Pass                # [L, Q, ·, ·] of the rest of the prompts, a row per prompt
    responses: Pass              # [L, B, T-1, ·] without the last token, which predicts nothing
    together: bool               # whether the policy reads prompt and response in one forward

    def take(self, rows):
        G = self.responses.indices.shape[1] // self.prompts.indices.shape[1]
        return replace(self, prompts=self.prompts.take((rows // G).unique_consecutive()),
                       responses=self.responses.take(rows))

    def join(self, others):
        """These and those of further rows, which the sampler's routers chose; narrower prompts are
        padded on the left."""
        prompts = [part.prompts for part in (self, *others)]
        P = max(routes.indices.shape[2] for routes in prompts)
        first, *rest = (Pass(*(F.pad(x, (0, 0, P - x.shape[2], 0), value=fill)
                               for x, fill in zip(routes, (-1, 0)))) for routes in prompts)
        return replace(self, prompts=first.join(rest),
                       responses=self.responses.join([part.responses for part in others]))

    def fit_to_forwards(self, rollout):
        """The Routes, arranged for the forwards that will score this rollout."""
        G = rollout.readers
        prefix = self.prefix.indices.shape[2]
        if self.together or G == 1 and not prefix:
            return Routes([Pass(*(torch.cat([p.repeat_interleave(G, 1), r], 2)
                                  for p, r in zip(self.prompts, self.responses)))])
        responses = [self.responses] * (rollout.mask.shape[1] > 1)
        return Routes([self.prefix] * (prefix > 0) + [self.prompts] + responses)


def recorded_routes(routes, rollout, together=False):
    """The ForcedRoutes of the forwards that scored a rollout: over [the shared prefix,] the prompts
    and the responses, or one forward over all. There may have been several of each, for
    micro-batches or processes: the first row of the prefix and of each prompt is kept."""
    B, T = rollout.mask.shape
    Q = B // rollout.readers
    passes = list(routes.passes)
    shared = rollout.prefix * (passes[0].indices.shape[2] == rollout.prefix)
    prefix = Pass(*(x[:, :1, :shared] for x in passes[0]))
    if shared:
        del passes[0]
    P = rollout.prompt_ids.shape[1] - shared
    prompts = Pass(*(x[:, ::x.shape[1] // Q, :P] for x in passes[0]))
    responses = Pass(*(x[:, :, x.shape[2] - (T - 1):] for x in passes[-1]))
    if T == 1:                                               # no forward over the responses
        responses = Pass(*(x[:, :1].expand(-1, B, -1, -1) for x in responses))
    return ForcedRoutes(prefix, prompts, responses, together)


# ------------------------------------------------------------------- recorded while sampling (R3)

class RecordingSampler(Wrapper):
    """Attaches ForcedRoutes to what a sampler samples in the plain way, with a row per response."""

    def __init__(self, sampler, settings):
        super().__init__(sampler)
        self.together = reads_together(settings, self.policy)

    def sample(self, *inputs, **options):
        sample = import_module("rollout").Sampler.sample     # transformers: --help does not wait
        with record_routes(self.policy) as recorded:
            rollout = sample(self.sampler, *inputs, **options)
        passes = recorded.passes[:rollout.mask.shape[1]]     # of the prompts, then of each token
        prompts = Pass(*(x[:, ::rollout.group_size] for x in passes[0]))            # [L, Q, P, ·]
        responses = Pass(*(torch.cat([first[:, :, :0], *steps], 2)
                           for first, *steps in zip(*passes)))                      # [L, B, T-1, ·]
        prefix = Pass(*(x[:, :1, :0] for x in passes[0]))
        routes = ForcedRoutes(prefix, prompts, responses, self.together)
        return replace(rollout, forced_routes=routes)
