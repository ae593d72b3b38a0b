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
    train                        train() and, for one mini-batch, update()
    gsm8k                        plumbing/data/tasks.py: load_task()

What a run may add (a reference policy, a critic, an entropy bonus …) is a file of features/, and
enters at the hooks of features/feature.py. A run from flags to summary is at the bottom.
"""

import os
import sys

if "OMP_WAIT_POLICY" not in os.environ:  # before torch: its threads spin while they wait for each
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")      # other, at the cost of other programs

from session.arguments import check_flags_first, parse

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    check_flags_first(sys.argv[1:])     # --help and refusals do not wait for the imports below

import time
from dataclasses import dataclass, field

import torch
from transformers.utils import logging

from advantages import estimate_advantages
from eval import held_out
from losses import policy_loss, token_weights
from plumbing.data.tasks import prepare_task
from plumbing.model.actor import load_trained_policy
from plumbing.model.chat import name_ends
from plumbing.model.policy import describe_fit
from plumbing.parallel import processes
from rollout import Rollout, Scores, take_fields
from routes import Pass, router_shift
from session import checkpoints, dry_run, folder as folders, screen
from session.errors import errors_in_one_line
from session.learner import forced, make_learner
from session.metrics import Recorder
from session.signals import StopSignals


# -------------------------------------------------------------------------------- a rollout batch

@dataclass
class Batch:
    """A rollout batch and all that an update needs of it. Tensors have a row per response."""

    rollout: Rollout
    problems: list                           # B: the prompts, and the answers that are right
    parts: torch.Tensor                      # [B, K] the components of the rewards
    old_logp: torch.Tensor                   # [B, T] log π_old of each token
    rewards: torch.Tensor | None = None      # [B] the weighted sums of their components
    advantages: torch.Tensor | None = None   # [B], or [B, T] where every token has its own
    weights: torch.Tensor | None = None      # [B, T] how tokens are averaged (per mini-batch)
    factors: torch.Tensor | None = None      # [B, T] constants on the surrogate (scale_surrogate)
    routes: Pass | None = None               # [L, B, T, ·] what π_old's routers chose (MoE)
    free_logp: torch.Tensor | None = None    # [B, T] log π_old without forced routes, if forced
    free_routes: Pass | None = None          # [L, B, T, ·] what π_old's routers choose then
    new_free_routes: Pass | None = None      # the same under π_θ, after the updates
    sampled: tuple = ()                      # (rollout, parts) of each round of sampling
    step: int = 1                            # the number of the batch
    extras: dict = field(default_factory=dict)   # what features add, by name

    group_size = property(lambda self: self.rollout.group_size)      # G

    def take(self, rows):
        """The responses `rows` [n], whole groups or a part of one: a mini-batch, a micro-batch."""
        return take_fields(self, rows)

    def scale_surrogate(self, factor):
        """Multiply the clipped surrogate of each token by factor [B, T], without a gradient."""
        mask = self.rollout.mask.float()                                            # [B, T]
        self.factors = factor * (mask if self.factors is None else self.factors)    # [B, T]


# --------------------------------------------------------------------------------------- the loop

def train(settings, learner, task, recorder, saver):
    """Rollout batches until --steps or a stop signal."""
    G = settings.num_generations
    hooks = learner.features.hooks
    for step in range(saver.step + 1, settings.steps + 1):
        times = [time.perf_counter()]
        # prompt x ─► π_old samples G responses ─► rewards, in components
        rollout, problems, parts, sampled = collect(settings, learner, task, step)
        times.append(read_clock(learner.device))

        # log π_old(y|x): computed again as the updates will compute it, or as recorded in sampling
        old = Scores(rollout.sampler_logp, None, None)                              # [B, T]
        if settings.old_logp == "recompute":
            old = learner.score(rollout, entropy=learner.needs_old_entropy)
        batch = Batch(rollout, problems, parts, old.logp, routes=old.routes, sampled=sampled,
                      step=step)
        for after_scoring in hooks["after_scoring"]:
            after_scoring(learner, batch, old)
        times.append(read_clock(learner.device))

        # rewards ─► advantages Â
        batch.rewards = task.total(batch.parts, G)                                  # [B]
        batch.advantages = estimate_advantages(
            settings.advantage, batch.rewards, G, settings.scale_rewards, parts=batch.parts,
            part_weights=task.weights(batch.parts), mask=batch.rollout.mask, old_logp=old.logp,
            entropy=old.entropy, **batch.extras)                                    # [B] or [B, T]
        for change_advantages in hooks["advantages"]:
            change_advantages(batch)

        # importance ratio ─► clip and optimize ─► new π_θ, a mini-batch of whole groups at a time
        updates = []
        for mini in mini_batches(settings, task, batch):
            updates.append(update(settings, learner, mini))
        times.append(read_clock(learner.device))

        # what happened: the last mini-batch once more, under the new policy
        new = learner.score(mini.rollout, entropy=True)
        evaluate = settings.eval_steps and step % settings.eval_steps == 0 and step < settings.steps
        held = saver.unless_stopped(lambda: held_out(settings, learner, task)) if evaluate else None
        recorder.log(batch, mini, new, updates, times, held)
        if saver.step_done(step):
            break


def collect(settings, learner, task, step):
    """(rollout, B problems, parts [B, K], (rollout, parts) of each round) of a rollout batch."""
    def draw(attempt):
        problems = [task.train[i] for i in learner.stream.next(settings.prompts_per_step)]
        rollout = sample(settings, learner, task, problems, step, attempt)
        problems = [p for p in problems for _ in range(settings.num_generations)]   # B
        if task.played:
            problems = [p.opened(game) for p, game in zip(problems, rollout.games)]
        return rollout, problems, reward(learner, rollout, problems)
    rounds = [draw(0)]
    chosen = rounds[0]
    for resample in learner.features.hooks["resample"]:
        chosen = resample(rounds, draw)
    return *chosen, tuple((rollout, parts) for rollout, _, parts in rounds)


def sample(settings, learner, task, problems, step, attempt=0):
    """π_old samples G responses to each prompt -> Rollout."""
    prompts = task.encode(learner.tokenizer, problems)
    B = len(prompts) * settings.num_generations
    uniforms = task.draw_uniforms(generator_for(settings.seed, step, attempt + 1), B)      # [B, T]
    played = {"problems": problems, "task": task} if task.played else {}
    return learner.sampler.sample(prompts, settings.num_generations, uniforms=uniforms, **played)


def reward(learner, rollout, problems):
    """The rewards of the responses, by component: [B, K]."""
    parts = learner.reward_components(rollout.texts, problems, rollout.token_lists(), rollout.games)
    return parts.to(rollout.mask.device)                                            # [B, K]


def mini_batches(settings, task, batch):
    """The batch in --steps_per_generation mini-batches of whole groups, with their token weights;
    all of it --num_iterations times, each in a new random order. old_logp stays as it is."""
    G = settings.num_generations
    generator = generator_for(settings.seed, batch.step)
    groups = torch.arange(len(batch.problems)).view(-1, G)                          # [Q, G] rows
    orders = [torch.randperm(len(groups), generator=generator)
              for _ in range(settings.num_iterations)]                              # μ times [Q]
    for index in [part for order in orders for part in order.chunk(settings.steps_per_generation)]:
        mini = batch.take(groups[index].flatten())
        mini.weights = token_weights(mini.rollout.mask, settings.reduction, group_size=G,
                                     max_length=task.max_completion_length)         # [b, T]
        yield mini


def update(settings, learner, mini):
    """One optimizer step on a mini-batch. Returns its statistics as numbers."""
    learner.optimizer.zero_grad()
    stats = [add_gradient(settings, learner, mini.take(rows), mini)
             for rows in learner.micro_batches(mini)]
    return learner.step(mini, stats)


def add_gradient(settings, learner, micro, mini):
    """Ratio, clip and loss of a micro-batch; their gradient is added to that of the others of its
    mini-batch. Returns its statistics."""
    rollout = micro.rollout
    with forced(learner.actor.policy, rollout):
        scores = learner.response_logp(rollout, temperature=settings.temperature,
                                       **learner.update_options)
        shift = None
        if settings.row.ratio == "log-shifted":              # RSPO, which compares routers
            shift = router_shift(micro.routes.logits, scores.routes.logits, micro.routes.indices,
                                 rollout.mask)                                      # [b, T]
        loss, stats = policy_loss(
            settings.row, scores.logp, micro.old_logp, micro.advantages, rollout.mask,
            epsilon=settings.epsilon, epsilon_high=settings.epsilon_high, weights=micro.weights,
            factors=micro.factors, router_shift=shift)
        terms = {}
        for loss_terms in learner.features.hooks["loss"]:
            terms |= loss_terms(micro, scores, mini)
        loss = loss + sum(terms.values())
        # inside the block: checkpointed layers choose their experts again in backward
        learner.scaler.scale(loss * learner.world).backward()
    return stats | {name: x.detach() for name, x in {**terms, "loss": loss}.items()}


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
    """Everything between the command line and the summary. task: a Task in place of the one that
    the flags name, for example Task(name, train, test, verify)."""
    run_training(settings, task, processes.start(settings))
    processes.stop()        # only here, where the policy that was trained is no longer in memory


def run_training(settings, task, device):
    """Run folder, policy, learner, the loop, and what is printed before and after it."""
    began = time.perf_counter()
    task = prepare_task(settings, task)
    with StopSignals() as signals, folders.run_folder(settings) as folder:
        saved = None                     # the checkpoint that a run goes on from
        if settings.resume:
            saved = processes.on_first(lambda: checkpoints.find_newest(folder))
        screen.print_once(screen.plan(settings, folder, task, device))
        policy, tokenizer = load_trained_policy(settings, task, device, saved)
        screen.print_once(name_ends(policy, tokenizer))
        screen.print_once(task.filter_prompts(tokenizer))
        screen.print_once(describe_fit(policy, tokenizer, task))
        checkpoints.seed_all(settings.seed)      # the same critic if the warm-up is cached
        learner = make_learner(settings, task, policy, tokenizer, device)
        if settings.dry_run:
            estimate = dry_run.Estimate(settings, learner, task, began)
            estimate.evaluated(held_out(estimate.evaluation, learner, task))
            train(estimate.training, learner, task, estimate, estimate)
            return estimate.print()
        progress = checkpoints.Progress()
        if not saved:
            progress.before = held_out(settings, learner, task)
        # saves the last complete batch if an error ends the next
        with checkpoints.Saver(folder, learner, progress, task, signals) as saver:
            if saved:
                screen.print_once(saver.restore(saved))
            screen.print_once(processes.on_first(
                lambda: folders.begin_run(settings, folder, task, saver.step)))
            if not saved:
                screen.print_once(screen.before(progress, time.perf_counter() - began))
            recorder = Recorder(folder, task, learner, progress, saver.step)
            train(settings, learner, task, recorder, saver)
        if saver.step < settings.steps or saver.stop():
            screen.print_once(screen.stopped(settings, folder, saver.step))
            raise SystemExit(130)
        after = held_out(settings, learner, task)
        recorder.held_out(saver.step, after)
        screen.report(settings, folder, task, progress, after, time.perf_counter() - began)


def main(argv=None):
    logging.disable_progress_bar()  # a bar for every checkpoint read or written; ours has its own
    logging.set_verbosity_error()   # what it would warn of is refused, in one line
    argv = sys.argv[1:] if argv is None else argv
    with errors_in_one_line():
        run_script(parse(argv))


if __name__ == "__main__":
    main()
