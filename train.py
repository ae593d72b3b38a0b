"""The full training loop: gspo.py plus the whole family, checkpoints and resume.

    prompt x ─► π_old samples G responses ─► rewards ─► advantages Â ─┐
                              └─► log-probs ─► importance ratio ──────┴─► clip, optimize ─► π_θ

`python train.py` trains a tiny mixture of experts on a laptop; --model_name_or_path and
--dataset_name point the same loop at a Hugging Face checkpoint; --help lists all flags.

Where each name of gspo.py is found here, in the order of its sections:

    running_sum                  plumbing/data/running_sum.py: running_sum()
    reward                       reward()
    Characters                   plumbing/data/running_sum.py: builtin_tokenizer()
    tiny_policy                  plumbing/model/cold_start.py: make_tiny_config()
    cold_start                   plumbing/model/cold_start.py: load_cold_start()
    make_schedule                session/learner.py: make_schedule()
    Rollout                      rollout.py: Rollout
    sample                       sample(), which collect() calls
    response_logp                learner.response_logp(); of a whole batch: learner.score()
    check_log_probs              plumbing/model/policy.py: check_log_probs()
    group_advantages             advantages.py: estimate_advantages()
    gspo_loss                    losses.py: policy_loss()
    grpo_loss                    losses.py: policy_loss(), another row of OBJECTIVES
    clipped_loss                 losses.py: token_surrogate()
    train                        train(), train_batch() and, for one mini-batch, update()
    gsm8k                        plumbing/data/tasks.py: load_task()

What a run may add (a reference policy, a critic, an entropy bonus …) is a file of features/, and
enters at the hooks of features/feature.py. A run from flags to summary is at the bottom.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # before torch: its threads spin while they wait for each
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")      # other, at the cost of other programs

from session.arguments import parse

SETTINGS = None
if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    SETTINGS = parse(sys.argv[1:])   # --help and wrong flags do not wait for the imports below

import gc
import random
import time
from dataclasses import dataclass, field, replace

import torch
from transformers.utils import logging

from advantages import estimate_advantages
from eval import held_out
from losses import policy_loss, token_weights
from plumbing.data.task import reward_dtype
from plumbing.data.tasks import prepare_task
from plumbing.model.actor import load_trained_policy
from plumbing.parallel import processes
from plumbing.refusal import Refusal
from rollout import Rollout, Scores, shared, take_fields
from routes import Pass, router_shift
from session import checkpoints, screen
from session.learner import Learner, forced
from session.metrics import Recorder, describe, first_responses


# -------------------------------------------------------------------------------- a rollout batch

@dataclass
class Batch:
    """A rollout batch and all that an update needs of it, which a hook may change. A field has an
    entry per response unless it is `shared`."""

    rollout: Rollout
    problems: list                           # B: the prompts, and the answers that are right
    parts: torch.Tensor                      # [B, K] the components of the rewards
    old_logp: torch.Tensor                   # [B, T] log π_old of each token
    task: object = shared()
    clip_range: tuple = shared()             # (epsilon, epsilon_high), as for policy_loss
    advantages: torch.Tensor | None = None   # [B], or [B, T] where every token has its own
    weights: torch.Tensor | None = None      # [B, T] how tokens are averaged (per mini-batch)
    factors: torch.Tensor | None = None      # [B, T] constants on the surrogate (scale_surrogate)
    routes: Pass | None = None               # [L, B, T, ·] what π_old's routers chose (MoE)
    free_routes: Pass | None = None          # [L, B, T, ·] what they choose if none were forced
    new_free_routes: Pass | None = None      # the same under π_θ, after the updates
    sampled: tuple = shared(default=())      # (rollout, parts) of each round of sampling
    step: int = shared(default=1)            # the number of the batch
    extras: dict = field(default_factory=dict)   # what features add, by name

    group_size = property(lambda self: self.rollout.group_size)      # G
    rewards = property(lambda self: self.task.total(self.parts))     # [B] follow from them

    def take(self, rows):
        """The responses `rows` [n], as many of every group: a mini-batch, a micro-batch."""
        return take_fields(self, rows)

    def scale_surrogate(self, factor):
        """Multiply the clipped surrogate of each token by factor [B, T], without a gradient. If a
        response has one ratio, as in GSPO, only the mean of its factors acts."""
        mask = self.rollout.mask.float()                                            # [B, T]
        self.factors = factor * (mask if self.factors is None else self.factors)    # [B, T]


# --------------------------------------------------------------------------------------- the loop

def train(learner, recorder, start, stop):
    """The rollout batches after `start` until --steps or a stop signal. Returns the last one's
    number."""
    settings = learner.settings
    step = start
    for step in range(start + 1, settings.steps + 1):
        batch, mini, updates, times = train_batch(learner, step)
        held = None
        if settings.eval_steps and step % settings.eval_steps == 0 and step < settings.steps:
            held = held_out(learner)
        recorder.log(batch, mini, updates, times, held)
        stopping = any(learner.gather([stop.since is not None]))     # in any process
        due = settings.save_steps and step % settings.save_steps == 0
        if due or stopping or step == settings.steps:
            checkpoints.save(recorder.folder, learner, step)
        if stopping:
            break
    return step


def train_batch(learner, step):
    """One rollout batch: sample, score, compare, update. Returns (Batch, its last mini-batch, the
    statistics of every optimizer step, when each phase began and the last one ended)."""
    settings = learner.settings
    times = [time.perf_counter()]
    # prompt x ─► π_old samples G responses ─► rewards, in components
    rollout, problems, parts, sampled = collect(learner, step)
    times.append(read_clock(learner.device))

    # log π_old(y|x): computed again as the updates will compute it, or as recorded in sampling
    old = Scores(rollout.sampler_logp, None, None)                                  # [B, T]
    if settings.old_logp == "recompute":
        old = learner.score(rollout, entropy=learner.needs_old_entropy)
    batch = Batch(rollout, problems, parts, old.logp, learner.task,
                  (settings.epsilon, settings.epsilon_high), routes=old.routes, sampled=sampled,
                  step=step)
    for after_scoring in learner.hooks["after_scoring"]:
        after_scoring(learner, batch, old)
    times.append(read_clock(learner.device))

    # rewards ─► advantages Â
    batch.advantages = estimate_advantages(
        settings.advantage, batch.rewards, batch.group_size, settings.scale_rewards,
        parts=batch.parts, part_weights=batch.task.weights(batch.parts), mask=batch.rollout.mask,
        old_logp=old.logp, entropy=old.entropy, **batch.extras)                     # [B] or [B, T]
    for change_advantages in learner.hooks["advantages"]:
        batch = change_advantages(batch) or batch

    # importance ratio ─► clip and optimize ─► new π_θ, a mini-batch of whole groups at a time
    updates, last = [], None
    for mini in mini_batches(learner, batch):
        updates.append(update(learner, mini))
        last = mini
    times.append(read_clock(learner.device))
    return batch, last, updates, times


def collect(learner, step):
    """(rollout, B problems, parts [B, K], (rollout, parts) of each round) of a rollout batch."""
    def draw(attempt):
        numbers = learner.stream.next(learner.settings.prompts_per_step)
        problems = [learner.task.train[i] for i in numbers]
        rollout, problems = sample(learner, problems, step, attempt)
        return rollout, problems, reward(learner, rollout, problems)
    rounds = [draw(0)]
    chosen = rounds[0]
    for resample in learner.hooks["resample"]:
        chosen = resample(rounds, draw)
    return *chosen, tuple((rollout, parts) for rollout, _, parts in rounds)


def sample(learner, problems, step, attempt=0):
    """π_old samples G responses to each prompt -> (Rollout, B problems)."""
    task = learner.task
    G = learner.settings.num_generations
    generator = generator_for(learner.settings.seed, step, attempt + 1)
    uniforms = task.draw_uniforms(generator, len(problems) * G)                     # [B, T]
    return task.sample(learner.sampler, problems, G, uniforms)


def reward(learner, rollout, problems):
    """The rewards of the responses, by component: [B, K] float64."""
    device = rollout.mask.device
    parts = learner.reward_components(rollout.texts, problems, rollout.token_lists(), rollout.games)
    return parts.to(device, reward_dtype(device))                                   # [B, K]


def mini_batches(learner, batch):
    """The batch in --steps_per_generation mini-batches of whole groups, with their token weights;
    all of it --num_iterations times, each in a new random order. old_logp stays as it is."""
    settings = learner.settings
    G = batch.group_size
    generator = generator_for(settings.seed, batch.step)
    groups = torch.arange(len(batch.problems)).view(-1, G)                          # [Q, G] rows
    orders = [torch.randperm(len(groups), generator=generator)
              for _ in range(settings.num_iterations)]                              # μ times [Q]
    for index in [part for order in orders for part in order.chunk(settings.steps_per_generation)]:
        mini = batch.take(groups[index].flatten())
        mini.weights = token_weights(mini.rollout.mask, settings.reduction, group_size=G,
                                     max_length=learner.task.max_completion_length) # [b, T]
        yield mini


def update(learner, mini):
    """One optimizer step on a mini-batch. Returns its statistics as numbers."""
    learner.optimizer.zero_grad()
    parts = []
    for rows in learner.micro_batches(mini):
        micro = mini.take(rows)
        parts.append(add_gradient(learner, micro, mini))
        if micro.factors is not None:                        # as they acted, for tokens.jsonl
            mini.factors = mini.rollout.mask.float() if mini.factors is None else mini.factors
            mini.factors[rows] = micro.factors                                      # [b, T]
    return learner.step(mini, parts)


def add_gradient(learner, micro, mini):
    """Ratio, clip and loss of a micro-batch; their gradient is added to that of the others of its
    mini-batch. Returns its statistics, and the loss with the terms that features add to it."""
    row = learner.settings.row
    mask = micro.rollout.mask                                                       # [b, T]
    with forced(learner.actor.policy, micro.rollout):
        scores = learner.response_logp(micro.rollout, temperature=learner.settings.temperature,
                                       **learner.update_options)
        for before_loss in learner.hooks["before_loss"]:     # what is scaled here acts
            before_loss(micro, scores, mini)
        terms = {}
        for loss_terms in learner.hooks["loss"]:
            terms |= loss_terms(micro, scores, mini)
        shift = None
        if row.ratio == "log-shifted":                       # RSPO, which compares routers
            shift = router_shift(micro.routes.logits, scores.routes.logits, micro.routes.indices,
                                 mask)                                              # [b, T]
        epsilon, epsilon_high = micro.clip_range
        loss, stats = policy_loss(
            row, scores.logp, micro.old_logp, micro.advantages, mask, epsilon=epsilon,
            epsilon_high=epsilon_high, weights=micro.weights, factors=micro.factors,
            router_shift=shift)
        loss = loss + sum(terms.values())
        # inside the block: checkpointed layers choose their experts again in backward
        learner.scaler.scale(loss * learner.world).backward()
    return stats, {name: x.detach() for name, x in {**terms, "loss": loss}.items()}


def read_clock(device):
    """The time in seconds, as soon as a GPU has finished its work."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def generator_for(seed, step, attempt=0):
    """Random numbers of a rollout batch, whatever happened before: a resumed run draws the same."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 16 + attempt)


# -------------------------------------------------------------------------------------- the script

def run_script(settings, task=None):
    """A run from its settings to its summary. task: a Task in place of the one that the flags name,
    for example Task(name, train, test, verify)."""
    began = time.perf_counter()
    device = processes.start(settings)
    task = prepare_task(settings, task)
    folder = processes.on_first(lambda: checkpoints.choose_folder(settings))
    newest = None                    # the checkpoint that a run goes on from
    if settings.resume:
        *_, newest = [None, *checkpoints.list_checkpoints(folder)]
    screen.print_once(screen.plan(settings, task, device))
    policy, tokenizer = load_trained_policy(settings, task, device, newest)
    screen.print_once(task.filter_prompts(tokenizer))
    random.seed(settings.seed)       # after the warm-up, which may be cached
    torch.manual_seed(settings.seed)
    learner = Learner(settings, task, policy, tokenizer, device)
    if settings.dry_run:
        return dry_run(learner)
    before = None if newest else held_out(learner)
    start = checkpoints.restore(newest, learner) if newest else 0
    folder = processes.on_first(lambda: checkpoints.begin_run(settings, folder, start))
    screen.print_once(f"metrics are written to {folder}/metrics.jsonl")
    screen.report(folder, task, "before", before)
    with checkpoints.Stop() as stop:
        step = train(learner, Recorder(folder, learner), start, stop)
    if step < settings.steps:
        screen.print_once(f"stopped after batch {step} and saved; python train.py --output_dir "
                          f"{folder} --resume continues")
        raise SystemExit(130)
    seconds = time.perf_counter() - began
    screen.report(folder, task, "after", held_out(learner), seconds=seconds,
                  steps=step)
    screen.print_once(f"{seconds:.0f} s; next: python eval.py ask {folder}/checkpoints/step_{step} "
                      f'"PROMPT", python eval.py dashboard {folder}')


def dry_run(learner):
    """Train on one rollout batch, then try an update with the longest responses: print the time and
    the memory that the run needs."""
    settings = learner.settings
    T = learner.task.max_completion_length
    screen.print_once("dry run: samples a rollout batch, scores it and takes "
                      f"{settings.updates_per_batch} optimizer steps")
    batch, _, _, times = train_batch(learner, 1)
    screen.print_once(f"dry run: an update with the longest responses ({T} tokens)")
    longest_update(learner, batch.rollout, T)
    seconds = times[-1] - times[0]
    screen.print_once(f"{describe(first_responses(batch)[0])}\na rollout batch takes "
                      f"{seconds:.1f} s, all of them {seconds * settings.steps / 60:.0f} min, "
                      "without evaluations")
    if learner.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2 ** 30
        screen.print_once(f"the longest update takes {peak:.1f} GiB")


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


def main(argv=None):
    """A run from its command line."""
    logging.disable_progress_bar()  # a bar for every checkpoint read or written
    logging.set_verbosity_error()
    try:
        run_script(SETTINGS or parse(argv))
    except torch.OutOfMemoryError as error:
        raise Refusal("out of GPU memory: lower --micro_batch_size, --max_completion_length, "
                      "--prompts_per_step or --eval_prompts, or do what docs/speed.md suggests; "
                      "--dry_run tries the longest responses") from error
    gc.collect()            # features and their learner refer to each other
    processes.stop()        # only here, where the policy that was trained is no longer in memory


if __name__ == "__main__":
    main()
    processes.leave()
