"""What is trained and what trains it: the policy, its sampler, the optimizer and its schedule.

make_learner makes them once per run, before the first rollout batch; train.py calls the Learner's
methods in every batch.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from advantages import ADVANTAGES
from features.feature import Features
from losses import combine_stats
from plumbing.data.stream import PromptStream
from plumbing.engines.samplers import SharedSampler, make_sampler
from plumbing.model.actor import Run, make_scorer
from plumbing.parallel import processes
from plumbing.speed import skipped_groups
from plumbing.speed.rollouts import join_scores
from routes import replay_routes
from session.arguments import BITSANDBYTES


@dataclass
class Learner:
    """What is trained and what trains it, made once per run."""

    settings: object
    device: torch.device
    actor: torch.nn.Module       # the policy and its critic, if there is one: a Scorer
    tokenizer: object
    sampler: object              # sampler.sample(prompts, G) -> Rollout
    reward_components: object    # Task.reward_components: responses -> [B, K]
    response_logp: object        # response_logp(rollout) -> Scores; wrapped by DDP or FSDP2
    optimizer: torch.optim.Optimizer
    schedule: object
    stream: PromptStream         # which prompts come next
    features: Features           # what the flags of features/ add
    scaler: object               # of gradients, for --fp16
    world: int                   # how many processes share the work
    needs_old_entropy: bool      # whether π_old's entropies are computed
    update_options: dict         # for response_logp in an update
    frozen_batches: int          # rollout batches at the beginning that leave the policy as it is
    widest: torch.dtype          # the most precise format of the device
    skip_zero_variance: bool     # whether an update may leave out zero-variance groups

    @property
    def policy(self):
        """π_θ, a causal LM of transformers or moe.TinyMoE."""
        return self.actor.policy

    @torch.no_grad()
    def score(self, rollout, entropy=False, scorer=None):
        """response_logp of a whole rollout without gradient, in micro-batches -> Scores. scorer:
        another than the actor."""
        settings = self.settings
        scorer = scorer or self.actor
        record = settings.old_logp == "recompute" and scorer.routed      # the routers' choices
        B = len(rollout.mask)
        # in 16 bits with as many rows as in an update, so that both round alike
        as_in_update = settings.micro_batch_size or settings.autocast_dtype
        size = settings.scoring_batch_size or (self.rows_per_pass() if as_in_update else B)
        chunks = []
        for rows in self.split(torch.arange(B), size):
            chunk = rollout.take(rows)
            with forced(scorer.policy, chunk):
                scores = scorer(chunk, temperature=settings.temperature, entropy=entropy,
                                record=record)
            chunks.append(replace(scores, hidden=None))
        chunks = self.gather(chunks)
        return chunks[0] if len(chunks) == 1 else join_scores(chunks)

    def micro_batches(self, mini):
        """The responses [n] of each forward pass of an update, of this process's share. Groups
        without a gradient are left out."""
        rows = torch.arange(len(mini.problems))                                     # [B]
        if self.skip_zero_variance:
            size = self.rows_per_pass() if self.settings.autocast_dtype else None
            rows = skipped_groups.find_live_rows(mini, size)                        # [n]
        return self.split(rows, self.rows_per_pass())

    def split(self, rows, size):
        """This process's share of the responses `rows` [n], at most `size` at a time."""
        share = processes.share(len(rows)) if self.world > 1 else slice(None)
        return rows[share].split(size)

    def rows_per_pass(self):
        """Rows of a forward pass of an update: whole groups, or a part of one. In 16 bits a row may
        be rounded otherwise among more or fewer rows: all passes then have the same number of rows,
        at most --micro_batch_size."""
        settings = self.settings
        G = settings.num_generations
        rows = settings.prompts_per_step // settings.steps_per_generation // self.world * G
        size = settings.micro_batch_size or rows
        while settings.autocast_dtype and size > G and rows % size:
            size -= G
        return size

    def gather(self, entries):
        """The entries of all processes' lists, in their order, as one list."""
        return sum(processes.gather(entries), []) if self.world > 1 else entries

    def step(self, mini, stats):
        """Clip the norm of the gradient of a mini-batch and change the weights, unless loss or
        gradient are not finite. stats: those of its micro-batches in this process. Returns those of
        the mini-batch as numbers."""
        stats = combine_stats(self.gather(stats))
        share = stats["tokens"] / mini.rollout.mask.sum().clamp(min=1)   # that was not left out
        stats |= {name: stats[name] * share for name in ("clip_low", "clip_high")}
        if mini.step <= self.frozen_batches:
            self.policy.zero_grad()      # without a gradient AdamW leaves weights and moments alone
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, self.settings.max_grad_norm or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm      # of shards
        stats["grad_norm"] = norm
        values = torch.stack([x.to(norm.device, self.widest) for x in stats.values()])
        stats = dict(zip(stats, values.tolist()))    # the only synchronization with the GPU
        stats["skipped"] = not math.isfinite(stats["grad_norm"] + stats["loss"])
        stats["overflow"] = stats["skipped"] and overflowed(self.scaler, stats)
        stats["empty"] = stats["tokens"] == 0
        if not stats["skipped"] and not stats["empty"]:
            self.optimizer.step()
            self.schedule.step()
        self.scaler.update()
        return stats


def make_learner(settings, task, policy, tokenizer, device):
    """The Learner of a run: everything that is fixed before the first batch."""
    # The order in which a run is built:
    #   1. the policy is loaded, and changed by the features' `load` (actor.py: load_trained_policy)
    #   2. the actor around it is moved to the device
    #   3. the features are made: they may add a critic to the actor, or replace run.stream
    #   4. the sampler is wrapped by the features
    #   5. the actor is wrapped by DDP, or sharded by FSDP2
    #   6. the optimizer gets the parameters of the actor: FSDP2 has replaced them
    reads = ADVANTAGES[settings.advantage].reads
    actor = make_scorer(settings, policy, critic="values" in reads).to(device)
    stream = PromptStream(len(task.train), settings.seed)
    run = Run(settings, task, tokenizer, device, actor, stream,
              needs_old_entropy="entropy" in reads, needs_new_routes=settings.router_shift)
    features = Features(feature(run) for feature in settings.features)
    sampler = make_sampler(settings, policy, tokenizer, task, training=True)
    reward_components = task.reward_components
    world = processes.world()
    if world > 1:
        sampler = SharedSampler(sampler, actor)
        reward_components = processes.share_reward_components(reward_components)
    wrapped = processes.wrap(actor, settings.shard)
    optimizer = make_optimizer(settings, actor)
    return Learner(
        settings, device, actor, tokenizer, sampler, reward_components, wrapped, optimizer,
        schedule=make_schedule(settings, optimizer, run.frozen_batches),
        stream=run.stream, features=features, world=world,
        needs_old_entropy=run.needs_old_entropy, frozen_batches=run.frozen_batches,
        update_options={"entropy": run.needs_new_entropy, "record": run.needs_new_routes},
        skip_zero_variance=skipped_groups.can_be_skipped(settings, features, world),
        widest=torch.float32 if device.type == "mps" else torch.float64,    # MPS has no float64
        scaler=torch.amp.GradScaler(device.type, enabled=settings.fp16))


def make_optimizer(settings, actor):
    parameters = [p for p in actor.parameters() if p.requires_grad]
    options = dict(lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
    if settings.optim in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW(parameters, fused=settings.optim == "adamw_torch_fused", **options)
    from bitsandbytes import optim
    return getattr(optim, BITSANDBYTES[settings.optim])(parameters, **options)


def make_schedule(settings, optimizer, frozen_batches=0):
    """The learning rate of every optimizer step: --warmup_steps of linear warm-up, then the
    schedule of --lr_scheduler_type. It moves on with the optimizer: a skipped update does not
    count. frozen_batches: rollout batches at the peak rate before all that."""
    n = settings.warmup_steps
    head = frozen_batches * settings.updates_per_batch
    steps = settings.steps * settings.updates_per_batch - head

    def share(step):
        step -= head
        if step < 0:
            return 1.0
        if step < n:
            return (step + 1) / n
        progress = min(1.0, (step - n) / max(1, steps - n))
        return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2,
                "constant_with_warmup": 1.0}[settings.lr_scheduler_type]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def overflowed(scaler, stats):
    """Whether a gradient left float16's range only by its scale, which the scaler then lowers."""
    return scaler.is_enabled() and math.isfinite(stats["loss"]) and scaler.get_scale() > 1


def forced(policy, rollout):
    """`with forced(policy, rollout):` the routers take the experts that the rollout carries
    (features/routing_replay.py); if it carries none, they choose by themselves."""
    routes = rollout.forced_routes
    if routes is None:
        return nullcontext()
    return replay_routes(policy, routes.fit_to_forwards(rollout))
