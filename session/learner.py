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


BAD = 3          # updates in a row that are not finite end a run


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
    schedule: object             # number of updates -> share of --learning_rate
    stream: PromptStream         # which prompts come next
    features: Features           # what the flags of features/ add
    scaler: object               # of gradients, for --fp16
    world: int                   # how many processes share the work
    needs_old_entropy: bool      # whether π_old's entropies are computed
    update_options: dict         # for response_logp in an update
    frozen_batches: int          # rollout batches at the beginning that leave the policy as it is
    skip_zero_variance: bool     # whether an update may leave out zero-variance groups
    rows: str                    # SHA-256 of the training rows
    updates: int = 0             # optimizer steps so far
    bad: int = 0                 # updates in a row that were not finite

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
        size = self.rows_per_pass() if as_in_update else B
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
        return rows[processes.share(len(rows))].split(size)

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
        return sum(processes.gather(entries), [])

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
        stats["grad_norm"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # shards
        stats = {name: float(x) for name, x in stats.items()}
        stats["skipped"] = not math.isfinite(stats["grad_norm"] + stats["loss"])
        self.stop_if_bad(stats)
        if not stats["skipped"] and stats["tokens"]:
            self.optimizer.step()
            self.set_updates(self.updates + 1)
        self.scaler.update()
        return stats

    def stop_if_bad(self, stats):
        """End the run after BAD updates in a row that were not finite, or if all of its first batch
        were not. A gradient that left float16's range by its scale, which the scaler then lowers,
        does not count."""
        overflow = self.scaler.get_scale() > 1 and math.isfinite(stats["loss"])
        self.bad = self.bad + 1 if stats["skipped"] and not overflow else 0
        if not self.bad or self.bad < (
                BAD if self.updates else min(BAD, self.settings.updates_per_batch)):
            return
        wrong = [name for name, x in stats.items() if not math.isfinite(x)]
        advice = "lower --learning_rate and continue with --resume, or begin again"
        if not self.updates:
            advice = ("no update has been made, so look at that objective in losses.py, at the "
                      "terms that features add, and at the rewards")
        raise SystemExit(f"{self.bad} updates in a row were not finite with --algorithm "
                         f"{self.settings.algorithm}: {', '.join(wrong)}; {advice}")

    def set_updates(self, n):
        """n optimizer steps have been made: set the learning rate of the next one."""
        self.updates = n
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self.schedule(n)


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
    learner = Learner(
        settings, device, actor, tokenizer, sampler, reward_components, wrapped, optimizer,
        schedule=make_schedule(settings, run.frozen_batches),
        stream=run.stream, features=features, world=world,
        needs_old_entropy=run.needs_old_entropy, frozen_batches=run.frozen_batches,
        update_options={"entropy": run.needs_new_entropy, "record": run.needs_new_routes},
        skip_zero_variance=skipped_groups.can_be_skipped(settings, features, world),
        scaler=torch.amp.GradScaler(device.type, enabled=settings.fp16), rows=task.digest())
    learner.set_updates(0)
    return learner


def make_optimizer(settings, actor):
    parameters = [p for p in actor.parameters() if p.requires_grad]
    options = dict(lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
    if settings.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit
        return AdamW8bit(parameters, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


def make_schedule(settings, frozen_batches=0):
    """The share of the peak learning rate as a function of the optimizer steps so far:
    --warmup_steps of linear warm-up, then the schedule of --lr_scheduler_type. A skipped update
    does not count. frozen_batches: rollout batches at the peak rate before all that."""
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
    return share


def forced(policy, rollout):
    """`with forced(policy, rollout):` the routers take the experts that the rollout carries
    (features/routing_replay.py); if it carries none, they choose by themselves."""
    routes = rollout.forced_routes
    if routes is None:
        return nullcontext()
    return replay_routes(policy, routes.fit_to_forwards(rollout))


def longest_update(learner, rollout, T):
    """Forward and backward of T random tokens after the prompts of a rollout, as many responses as
    an update has in a pass, beside the gradients and moments of the update before."""
    rows = min(learner.rows_per_pass(), learner.settings.mini_batch_rows)
    part = rollout.take(torch.arange(rows))
    ids = torch.randint(learner.policy.config.vocab_size, (len(part.mask), T),
                        device=learner.device)                                      # [b, T]
    mask = torch.ones_like(ids, dtype=torch.bool)                                   # [b, T]
    new = learner.response_logp(replace(part, response_ids=ids, mask=mask, forced_routes=None),
                                **learner.update_options)
    sum(x.sum() for x in (new.logp, new.entropy, new.values) if x is not None).backward()
