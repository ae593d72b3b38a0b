"""What is trained and what trains it: the policy, its sampler, the optimizer and its schedule.

The Learner is made once per run, before the first rollout batch; the features are made with it.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from advantages import ADVANTAGES
from features.feature import find_hooks
from losses import combine_stats
from plumbing.data.stream import PromptStream
from plumbing.engines.samplers import SharedSampler, make_sampler
from plumbing.model.actor import make_scorer
from plumbing.model.policy import load_policy
from plumbing.parallel import processes
from rollout import join_fields
from routes import replay_routes


BAD = 3          # updates in a row that are not finite end a run


class Learner:
    """What is trained and what trains it, made once per run."""

    def __init__(self, settings, task, policy, tokenizer, device):
        # The order in which a run is built:
        #   1. the policy is loaded, and changed by the features' `load` (actor.py)
        #   2. the actor around it is moved to the device
        #   3. the features are made: they may add a critic to the actor, or replace the stream
        #   4. the sampler is wrapped by the features
        #   5. the actor is wrapped by DDP, or sharded by FSDP2
        #   6. the optimizer gets the parameters of the actor: FSDP2 has replaced them
        reads = ADVANTAGES[settings.advantage].reads
        self.settings = settings
        self.task = task
        self.tokenizer = tokenizer
        self.device = device
        self.actor = make_scorer(settings, policy, critic="values" in reads).to(device)
        self.stream = PromptStream(len(task.train), settings.seed)     # which prompts come next
        self.world = processes.world()   # how many processes share the work
        self.updates = 0                 # optimizer steps so far
        self.bad = 0                     # updates in a row that were not finite

        # what a feature may set when it is made
        self.reference = None            # a Scorer, in place of a second copy of the policy
        self.needs_old_entropy = "entropy" in reads              # old.entropy in after_scoring
        self.needs_new_entropy = False                           # scores.entropy in loss
        self.needs_new_routes = settings.router_shift            # scores.routes in loss
        self.features = [feature(self) for feature in settings.features]
        self.hooks = find_hooks(self.features)

        self.sampler = make_sampler(settings, policy, tokenizer, task, training=True)
        self.reward_components = task.reward_components          # responses -> [B, K]
        if self.world > 1:
            self.sampler = SharedSampler(self.sampler, self.actor)
            self.reward_components = processes.share_reward_components(self.reward_components)
        self.response_logp = processes.wrap(self.actor, settings.shard)      # rollout -> Scores
        self.update_options = {"entropy": self.needs_new_entropy, "record": self.needs_new_routes}
        self.optimizer = make_optimizer(settings, self.actor)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]  # at the peak
        self.schedule = make_schedule(settings)                  # updates so far -> share of them
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.fp16)
        self.data_digest = task.digest()
        # a group whose advantages are all 0 has no gradient: the policy loss does not pull it
        # towards π_old, and no feature adds a term
        self.skip_zero_variance = (
            not settings.plain and self.world == 1 and not self.hooks["loss"]
            and ADVANTAGES[settings.advantage].per == "response" and not settings.row.pulls)
        self.set_updates(0)

    def __setattr__(self, name, value):
        if name == "settings" and hasattr(self, name):
            raise AttributeError("settings are fixed when a run begins: half of them would not act "
                                 "any more. What may change is a field of the Batch: clip_range")
        super().__setattr__(name, value)

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
        return chunks[0] if len(chunks) == 1 else join_fields(chunks)

    def micro_batches(self, mini):
        """The responses [n] of each forward pass of an update, of this process's share. Groups
        without a gradient are left out."""
        rows = torch.arange(len(mini.problems))                                     # [B]
        if self.skip_zero_variance:
            size = self.rows_per_pass() if self.settings.autocast_dtype else None
            rows = find_live_rows(mini, size)                                       # [n]
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

    def step(self, mini, parts):
        """Clip the norm of the gradient of a mini-batch and change the weights, unless loss or
        gradient are not finite. parts: (statistics, terms of the loss) of its micro-batches in this
        process. Returns those of the mini-batch as numbers."""
        stats, terms = zip(*self.gather(parts))
        stats = combine_stats(stats) | {name: sum(x[name] for x in terms) for name in terms[0]}
        share = stats["tokens"] / mini.rollout.mask.sum().clamp(min=1)   # that was not left out
        stats |= {name: stats[name] * share for name in ("clip_low", "clip_high")}
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
            for after_step in self.hooks["after_step"]:
                after_step(self, mini, stats)
        self.scaler.update()
        return stats

    def stop_if_bad(self, stats):
        """End the run after BAD updates in a row that were not finite. A gradient that left
        float16's range by its scale, which the scaler then lowers, does not count."""
        overflow = self.scaler.get_scale() > 1 and math.isfinite(stats["loss"])
        self.bad = self.bad + 1 if stats["skipped"] and not overflow else 0
        if self.bad == BAD:
            wrong = [name for name, x in stats.items() if not math.isfinite(x)]
            raise SystemExit(f"{BAD} updates in a row were not finite: {', '.join(wrong)}; lower "
                             "--learning_rate and continue with --resume, or, if no update has "
                             "been made, look at the loss and at the rewards")

    def load_reference(self):
        """A frozen Scorer of the policy that the run started from. No random numbers of the run are
        drawn."""
        if self.reference:
            return self.reference
        with torch.random.fork_rng(devices=[]):
            policy, _ = load_policy(self.settings, self.task, self.device)
        return make_scorer(self.settings, policy).to(self.device).requires_grad_(False)

    def set_updates(self, n):
        """n optimizer steps have been made: set the learning rate of the next one."""
        self.updates = n
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            group["lr"] = rate * self.schedule(n)


def find_live_rows(mini, rows_per_pass=None):
    """The responses [n] of the groups of a mini-batch that change the gradient. At least one group
    stays, one with loss tokens if there is one, so that there is a forward. rows_per_pass: so many
    responses, or a multiple of it, with groups that change nothing if need be: in 16 bits a forward
    with fewer rows may round otherwise than that of the old log-probs, by more than GSPO's clip
    range; None: any number."""
    G = mini.group_size
    tokens = mini.rollout.mask.any(-1)                                              # [B]
    moves = tokens & mini.advantages.reshape(len(tokens), -1).ne(0).any(-1)         # [B]
    # one GPU synchronization for both
    tokens, moves = torch.stack([tokens, moves]).view(2, -1, G).any(-1).tolist()    # [Q] each
    groups = range(len(moves))
    live = [i for i in groups if moves[i]] or [tokens.index(True) if any(tokens) else 0]
    if rows_per_pass:
        missing = -len(live) % max(1, rows_per_pass // G)
        live += [i for i in groups if i not in live][:missing]
    return torch.arange(len(mini.problems)).view(-1, G)[live].flatten()             # [n]


def make_optimizer(settings, actor):
    parameters = [p for p in actor.parameters() if p.requires_grad]
    options = dict(lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
    if settings.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit
        return AdamW8bit(parameters, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


def make_schedule(settings):
    """The share of the peak learning rate as a function of the optimizer steps so far:
    --warmup_steps of linear warm-up, then the schedule of --lr_scheduler_type. A skipped update
    does not count."""
    n = settings.warmup_steps
    steps = settings.steps * settings.updates_per_batch

    def share(step):
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
