"""What is trained and what trains it: the policy, its sampler, the optimizer and its schedule.

Everything here is made once per run, before the first rollout batch; train.py calls it.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from advantages import ADVANTAGES
from features.feature import Features
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
    widest: torch.dtype          # the most precise format of the device
    skip_zero_variance: bool     # whether an update may leave out zero-variance groups

    @property
    def policy(self):
        """π_θ, a causal LM of transformers or moe.TinyMoE."""
        return self.actor.policy

    @torch.no_grad()
    def score(self, rollout, entropy=False, scorer=None):
        """response_logp of a whole rollout without gradient, in micro-batches -> Scores. scorer:
        another than the policy's."""
        # In 16 bits with as many rows as in an update, so that both round alike; else all at once.
        as_in_update = self.settings.micro_batch_size or self.settings.half
        other = scorer or self.actor
        record = self.settings.old_logp == "recompute" and other.routed      # the routers' choices
        chunks = []
        B = len(rollout.mask)
        size = self.settings.scoring_batch_size or (None if as_in_update else B)
        for rows in self.micro_batches(torch.arange(B), size):
            part = rollout.take(rows)
            with forced(other.policy, part):
                scores = (scorer or self.response_logp)(
                    part, temperature=self.settings.temperature, entropy=entropy,
                    record=record)
            chunks.append(replace(scores, hidden=None))
        chunks = self.gather(chunks)
        return chunks[0] if len(chunks) == 1 else join_scores(chunks)

    def rows_to_update(self, mini):
        """The responses [n] of a mini-batch that an update needs."""
        if not self.skip_zero_variance:
            return torch.arange(len(mini.problems))
        return skipped_groups.find_live_rows(mini, self.settings.half and self.rows_per_pass())

    def micro_batches(self, rows, size=None):
        """This process's share of the responses `rows` [n], in chunks for one forward pass each.
        size: rows per pass; None: as in an update."""
        share = processes.share(len(rows)) if self.world > 1 else slice(None)
        return rows[share].split(size or self.rows_per_pass())

    def rows_per_pass(self):
        """Rows of a forward pass of an update: whole groups, or a part of one. In 16 bits a row may
        be rounded otherwise among more or fewer rows: all passes then have the same number of rows,
        at most --micro_batch_size."""
        settings = self.settings
        G = settings.num_generations
        rows = settings.prompts_per_step // settings.steps_per_generation // self.world * G
        size = settings.micro_batch_size or rows
        while settings.half and size > G and rows % size:
            size -= G
        return size

    def gather(self, parts):
        """The parts of all processes, in their order, as one list."""
        return sum(processes.gather(parts), []) if self.world > 1 else parts


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
    run = Run(settings, task, tokenizer, device, actor, stream)
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
        schedule=make_schedule(settings, optimizer, features.head_start),
        stream=run.stream, features=features, world=world,
        needs_old_entropy=features.needs_old_entropy or "entropy" in reads,
        update_options={"entropy": features.needs_new_entropy,
                        "record": features.needs_routes or settings.router_shift},
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


def make_schedule(settings, optimizer, head_start=0):
    """The learning rate of every optimizer step: --warmup_steps of linear warm-up, then the
    schedule of --lr_scheduler_type. It moves on with the optimizer: a skipped update does not
    count. head_start: rollout batches at the peak rate before all that."""
    n = settings.warmup_steps
    head = head_start * settings.updates_per_batch
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
