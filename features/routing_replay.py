"""Routing replay: the experts of a mixture that were chosen once are chosen again, so that the old
and the new log-prob of a token come from the same part of the model.

    old       (R2, 2507.18071 §5.3) those of the recomputation of the old log-probs
    rollout   (R3, 2510.11370) those that the sampler's routers chose

The routes travel with the rollout, in attached["routes"], and are cut and joined with it; whoever
scores such a rollout forces them (session/learner.py: forced). Only the choice is forced: gates
and their gradient are the current policy's.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from features.feature import Feature, flag, refuse
from plumbing.engines.wrapper import Wrapper
from plumbing.parallel.devices import autocast
from routes import Pass, Routes, find_routers, record_routes, replay_routes


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
        kind = settings.routing_replay
        if kind == "old" and settings.old_logp == "sampler":
            refuse(settings, "old_logp", "cannot be combined with --routing_replay old: it reuses "
                   "the routes of the recomputation; --routing_replay rollout reuses the sampler's")
        if kind == "rollout" and settings.sampler:
            refuse(settings, "sampler", "cannot be combined with --routing_replay rollout: only "
                   "the built-in sampler records routes")

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        recorded = training and settings.routing_replay == "rollout"
        return RecordingSampler(sampler, settings) if recorded else sampler

    def __init__(self, run):
        self.settings = run.settings
        self.learner = None
        with autocast(run.device, run.settings.half):
            check_routers(run.actor.policy)

    def after_scoring(self, learner, batch, old):
        """From here on the routes of π_old's own forwards are forced, if there were any: they are
        laid out as the updates' forwards need them."""
        self.learner = learner
        if old.passes is None:
            return
        own = None
        if self.settings.routing_replay == "rollout":     # the old log-probs have forced routes
            free = learner.score(batch.rollout.without("routes"))
            own = free.routes
            batch.free_logp = free.logp                                             # [B, T]
        batch.rollout = attach(batch.rollout, RecordedRoutes(old.passes, own))

    def metrics(self, batch, mini, new):
        """free_routes: what the routers choose by themselves, under π_old and π_θ, which the core's
        flip_rate and tokens.jsonl describe."""
        routes = batch.rollout.attached["routes"]
        if not isinstance(routes, RecordedRoutes):
            return {"route_bytes_per_token": None}
        free = self.learner.score(mini.rollout.without("routes")).routes            # [L, B, T, ·]
        mini.more["free_routes"] = (mini.rollout.attached["routes"].own or mini.routes, free)
        tokens = max(1, int(batch.rollout.mask.sum()))
        return {"route_bytes_per_token": route_bytes(routes.recorded) / tokens}


@torch.no_grad()
def check_routers(policy):
    """Refuse a policy that has no routers, or routers whose gates cannot be computed again."""
    if not find_routers(policy):
        raise ValueError("--routing_replay needs a mixture of experts: this model is dense, or its "
                         "routers are not separate modules")
    ids = torch.tensor([[0, 1]], device=policy.device)                              # [1, S]
    with record_routes(policy) as routes:
        policy(input_ids=ids)
    with replay_routes(policy, routes):
        policy(input_ids=ids)


def attach(rollout, routes):
    return replace(rollout, attached=rollout.attached | {"routes": routes})


def route_bytes(routes):
    """The memory of recorded routes, in bytes."""
    return sum(x.numel() * x.element_size() for p in routes.passes for x in p)


# ------------------------------------------------------------------- what is attached to a rollout

@dataclass
class RecordedRoutes:
    """The routes of the forwards that scored the rollout: over [the shared prefix,] the prompts and
    the responses, or one forward over all."""

    recorded: Routes
    own: Pass | None = None      # [L, B, T, ·] the routers' own choice, where `recorded` was forced

    def cut(self, rollout, prompts, rows):
        """Those of the responses `rows` [n] of the rollout. A row of a forward over prompts belongs
        to a whole group or a part of one; the row of the shared prefix belongs to all."""
        passes = self.recorded.passes
        shares = [len(rollout.mask) // p.indices.shape[1] for p in passes]
        index = [rows[::share] // share for share in shares]
        if passes[0].indices.shape[2] == getattr(rollout, "prefix", 0):
            index[0] = slice(1)
        own = self.own and self.own.rows(rows)
        return RecordedRoutes(self.recorded.rows(index), own)

    def fit_to_forwards(self, policy, rollout):
        return self.recorded


@dataclass
class SampledRoutes:
    """The routes of the sampler, a row per response, even if it computed several in one row; where
    it computed none, indices are -1 and the router decides."""

    prompts: Pass                # [L, Q, P, ·] laid out like prompt_ids
    responses: Pass              # [L, B, T-1, ·] without the last token, which predicts nothing
    together: bool               # whether the policy reads prompt and response in one forward

    def cut(self, rollout, prompts, rows):
        return replace(self, prompts=self.prompts.rows(prompts),
                       responses=self.responses.rows(rows))

    def join(self, others, P, T):
        """All of these as one, padded to prompts of P tokens and responses of T tokens."""
        parts = [self, *others]
        prompts = [[F.pad(x, (0, 0, P - x.shape[2], 0), value=fill)
                    for x, fill in zip(part.prompts, (-1, 0))] for part in parts]
        responses = [[F.pad(x, (0, 0, 0, T - 1 - x.shape[2]), value=fill)
                      for x, fill in zip(part.responses, (-1, 0))] for part in parts]
        joined = [Pass(*(torch.cat(x, 1) for x in zip(*some))) for some in (prompts, responses)]
        return SampledRoutes(*joined, self.together)

    def fit_to_forwards(self, policy, rollout):
        """The Routes, arranged for the forwards that will score this rollout."""
        G = rollout.group_size
        prefix = getattr(rollout, "prefix", 0)
        if self.together or G == 1 and not prefix:
            return Routes([Pass(*(torch.cat([p.repeat_interleave(G, 1), r], 2)
                                  for p, r in zip(self.prompts, self.responses)))])
        start = rollout.prompt_mask.shape[1] - int(rollout.prompt_mask[0].sum())
        shared = Pass(*(x[:, :1, start:start + prefix] for x in self.prompts))
        passes = [shared] if prefix else []
        passes.append(Pass(*(x[:, :, prefix:] for x in self.prompts)))
        return Routes(passes + [self.responses] * (rollout.mask.shape[1] > 1))


# ------------------------------------------------------------------- recorded while sampling (R3)

class RecordingSampler(Wrapper):
    """Attaches SampledRoutes to what it samples."""

    def __init__(self, sampler, settings):
        super().__init__(sampler)
        self.shares_rows = not settings.plain        # a FastSampler, which reports who reads what
        self.together = settings.gradient_checkpointing

    def sample(self, *inputs, **options):
        reads = [] if self.shares_rows else None
        if self.shares_rows:
            options["reads"] = reads
        with record_routes(self.policy) as recorded:
            rollout = self.sampler.sample(*inputs, **options)
        prompts, responses = sampled_routes(rollout, recorded, reads)
        # a sampler that reads a prompt once per response is plain, or has states that cannot be
        # copied for other rows, as Mamba's: then the policy reads it so, too
        each = recorded.passes[0].indices.shape[1] == len(rollout.mask)
        return attach(rollout, SampledRoutes(prompts, responses, self.together or each))


def sampled_routes(rollout, recorded, reads=None):
    """(routes at the prompts [L, Q, P, ·], routes at the responses [L, B, T-1, ·]), as in
    SampledRoutes. recorded: the Routes of the sampler's forwards. reads: if responses shared rows,
    (responses [b], rows that they read [b]) for each token step."""
    shared = getattr(rollout, "prefix", 0)
    first = 2 if shared else 1           # forwards over prompts; the later ones are token steps
    pairs = []
    for tensors, fill in zip(zip(*recorded.passes), (-1, 0.0)):  # indices, then logits
        *prefix, prompts = tensors[:first]                          # [L, Q or B, P, n]
        prompts = prompts[:, ::prompts.shape[1] // len(rollout.prompt_ids)]         # [L, Q, P, n]
        if prefix:
            prompts = join_prompts(rollout, prefix[0], prompts, fill)
        B, T = rollout.mask.shape
        responses = prompts.new_full((len(prompts), B, T - 1, prompts.shape[-1]), fill)
        for t, step in enumerate(tensors[first:first + T - 1]):     # [L, rows, 1, n]
            live, rows = reads[t] if reads else (slice(None), slice(None))
            responses[:, live, t] = step[:, rows, 0]
        pairs.append((prompts, responses))
    return [Pass(*pair) for pair in zip(*pairs)]


def join_prompts(rollout, prefix, rest, fill):
    """Join the shared prefix [L, 1, prefix, n] and the rest of the prompts [L, Q, P-prefix, n],
    which were computed separately, into one tensor [L, Q, P, n] padded on the left."""
    mask = rollout.prompt_mask                                                      # [Q, P]
    whole = rest.new_full((len(rest), *mask.shape, rest.shape[-1]), fill)           # [L, Q, P, n]
    whole[:, :, rollout.prefix:] = rest
    shared = mask & (mask.cumsum(-1) <= rollout.prefix)                             # [Q, P]
    whole[:, shared] = prefix.repeat(1, 1, len(mask), 1)[:, 0]      # [L, Q·prefix, n]
    return whole
