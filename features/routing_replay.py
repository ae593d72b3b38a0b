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
from plumbing.parallel.devices import autocast
from plumbing.refusal import Refusal
from routes import (Pass, Routes, UnknownRouter, find_routers, record_routes, replay_routes)


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
        rollout = import_module("rollout")                   # transformers: --help does not wait
        plain = rollout.Sampler(sampler.policy, sampler.tokenizer, sampler.max_new_tokens,
                                sampler.temperature, sampler.stop)      # a row per response
        return RecordingSampler(plain, settings)

    def __init__(self, run):
        self.settings = run.settings
        self.learner = None
        if not find_routers(run.actor.policy):
            raise Refusal("--routing_replay needs a mixture of experts: this model is dense, or "
                          "its routers are not separate modules")
        check_gates(run.actor.policy, run.settings.autocast_dtype)

    def after_scoring(self, learner, batch, old):
        """From here on the routes of π_old's own forwards are forced, if there were any: they are
        laid out as the updates' forwards need them."""
        self.learner = learner
        if old.passes is None:
            return
        free = None
        if self.settings.routing_replay == "rollout":     # the old log-probs have forced routes
            scores = learner.score(replace(batch.rollout, forced_routes=None))
            free = scores.routes
            batch.free_logp = scores.logp                                           # [B, T]
        routes = recorded_routes(old.passes, batch.rollout, free)
        batch.rollout = replace(batch.rollout, forced_routes=routes)

    def metrics(self, batch, mini, new):
        """free_routes: what the routers choose by themselves, under π_old and π_θ, which the core's
        flip_rate and tokens.jsonl describe."""
        routes = batch.rollout.forced_routes
        if not isinstance(routes, RecordedRoutes):
            return {}
        free = self.learner.score(replace(mini.rollout, forced_routes=None)).routes  # [L, B, T, ·]
        mini.free_routes = (mini.rollout.forced_routes.free or mini.routes, free)
        tokens = max(1, int(batch.rollout.mask.sum()))
        size = sum(x.nbytes for p in routes.recorded.passes for x in p)
        return {"route_bytes_per_token": size / tokens}


@torch.no_grad()
def check_gates(policy, dtype):
    """Refuse a policy whose routers compute their gates in an unknown way. dtype: that of
    autocast, or None."""
    ids = torch.tensor([[0, 1]], device=policy.device)                              # [1, 2]
    try:
        with autocast(policy.device, dtype), record_routes(policy) as routes:
            policy(input_ids=ids)
        with autocast(policy.device, dtype), replay_routes(policy, routes):
            policy(input_ids=ids)
    except UnknownRouter as error:
        raise Refusal(f"--routing_replay: {error}") from None


# -------------------------------------------------------------------- forced_routes of a rollout

@dataclass
class RecordedRoutes:
    """The routes of the forwards that scored the rollout: over [the shared prefix,] the prompts and
    the responses, or one forward over all."""

    recorded: Routes
    responses: int               # B
    free: Pass | None = None     # [L, B, T, ·] the routers' own choice if `recorded` was forced

    def take(self, rows):
        passes = take_shared(self.recorded.passes, self.responses, rows)
        return RecordedRoutes(Routes(passes), len(rows), self.free and self.free.take(rows))

    def fit_to_forwards(self, rollout):
        return self.recorded


def recorded_routes(routes, rollout, free=None):
    """The RecordedRoutes of the forwards that scored a rollout. They may have been several, for
    micro-batches or processes, each with a row of the shared prefix: the first is kept."""
    prefix, *others = routes.passes
    if prefix.indices.shape[2] == rollout.prefix:
        routes = Routes([prefix.take(torch.zeros(1, dtype=torch.long)), *others])
    return RecordedRoutes(routes, len(rollout.mask), free)


def take_shared(passes, B, rows):
    """The passes of the responses `rows` [n] of B. A row of a forward over prompts belongs to a
    whole group or a part of one; the row of the shared prefix belongs to all."""
    shares = [B // p.indices.shape[1] for p in passes]
    return [p.take(rows[::share] // share) for p, share in zip(passes, shares)]


@dataclass
class SampledRoutes:
    """The routes of the sampler."""

    prompts: Pass                # [L, Q, P, ·] a row per group
    responses: Pass              # [L, B, T-1, ·] without the last token, which predicts nothing
    together: bool               # whether the policy reads prompt and response in one forward

    def take(self, rows):
        B = self.responses.indices.shape[1]
        return SampledRoutes(*take_shared((self.prompts, self.responses), B, rows), self.together)

    def join(self, others, P, T):
        """All of these as one, padded to prompts of P tokens and responses of T tokens."""
        parts = [self, *others]
        prompts = [[F.pad(x, (0, 0, P - x.shape[2], 0), value=fill)
                    for x, fill in zip(part.prompts, (-1, 0))] for part in parts]
        responses = [[F.pad(x, (0, 0, 0, T - 1 - x.shape[2]), value=fill)
                      for x, fill in zip(part.responses, (-1, 0))] for part in parts]
        joined = [Pass(*(torch.cat(x, 1) for x in zip(*each))) for each in (prompts, responses)]
        return SampledRoutes(*joined, self.together)

    def fit_to_forwards(self, rollout):
        """The Routes, arranged for the forwards that will score this rollout."""
        G = rollout.group_size
        if self.together or G == 1:
            return Routes([Pass(*(torch.cat([p.repeat_interleave(G, 1), r], 2)
                                  for p, r in zip(self.prompts, self.responses)))])
        return Routes([self.prompts] + [self.responses] * (rollout.mask.shape[1] > 1))


# ------------------------------------------------------------------- recorded while sampling (R3)

class RecordingSampler(Wrapper):
    """Attaches SampledRoutes to what a plain sampler samples."""

    def __init__(self, sampler, settings):
        super().__init__(sampler)
        caches = import_module("plumbing.speed.caches")      # transformers: --help does not wait
        self.together = (settings.plain or settings.gradient_checkpointing
                         or not caches.copies_rows(self.policy.config))

    def sample(self, *inputs, **options):
        with record_routes(self.policy) as recorded:
            rollout = self.sampler.sample(*inputs, **options)
        passes = recorded.passes[:rollout.mask.shape[1]]     # of the prompts, then of each token
        prompts = Pass(*(x[:, ::rollout.group_size] for x in passes[0]))            # [L, Q, P, ·]
        responses = Pass(*(torch.cat([first[:, :, :0], *steps], 2)
                           for first, *steps in zip(*passes)))                      # [L, B, T-1, ·]
        routes = SampledRoutes(prompts, responses, self.together)
        return replace(rollout, forced_routes=routes)
