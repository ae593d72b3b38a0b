"""The loop of gspo.py again, with the whole family behind it: same sections, same names.

    prompt x ─► π_old samples G responses ─► verifier ─► advantages Â ─┐
                              └─► log-probs ─► importance ratio ───────┴─► clip, optimize ─► π_θ

`python train.py` trains a tiny mixture of experts on the last digits of a running sum, on a laptop;
--model_name_or_path and --dataset_name point the same loop at a Hugging Face checkpoint;
--algorithm picks another row of the family. `python train.py --help` lists all flags.

Rarely used flags (a reference policy, mismatch weights, routing replay, a critic …) enter at two
places: `extras.before_updates` and `extras.inside_loss` (plumbing/loop/extras.py).
"""

import sys

from plumbing.run.arguments import first_word, parse

if __name__ == "__main__":
    first_word(sys.argv[1:])     # --help and refusals do not wait for the imports below

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace

import torch
from transformers.utils import logging

from advantages import estimate_advantages, not_all_correct
from eval import held_out
from losses import combine_stats, policy_loss, token_weights
from plumbing.data import tasks
from plumbing.data.stream import PromptStream
from plumbing.loop import batches
from plumbing.loop.distillation import teacher_of
from plumbing.loop.extras import make_extras
from plumbing.model.actor import make_scorer, reference_of, trained_policy, write_merged
from plumbing.model.offload import HostAdamW
from plumbing.run import checkpoints, folder as run, screen
from plumbing.run.band import make_band
from plumbing.run.errors import errors_in_one_line
from plumbing.run.metrics import Recorder
from plumbing.parallel import processes
from plumbing.parallel.devices import widest
from plumbing.speed.rollouts import cut_routes, join_scores
from plumbing.engines.samplers import make_sampler
from rollout import Rollout, Scores, rows_of
from routes import Pass, Routes, routers_of
from tools.export import exported


# ------------------------------------------------------------------------------------- the batch

@dataclass
class Batch:
    """A rollout batch and all that an update needs of it. Tensors have a row per response."""

    rollout: Rollout
    problems: list                           # Q: the prompts, and the answers that are right
    parts: torch.Tensor                      # [B, K] the rewards in parts, one per verifier
    old_logp: torch.Tensor                   # [B, T] log π_old of each token
    rewards: torch.Tensor | None = None      # [B] the weighted sums of their parts
    advantages: torch.Tensor | None = None   # [B], or [B, T] where every token has its own
    weights: torch.Tensor | None = None      # [B, T] how tokens are averaged (per mini-batch)
    routes: Pass | None = None               # [L, B, T, ·] what π_old's routers chose (MoE)
    sampled: list | None = None              # [(rollout, parts)] of all --dynamic_sampling rounds

    # what rarely used flags add
    ref_logp: torch.Tensor | None = None     # [B, T] log π_ref (--beta)
    teacher_logp: torch.Tensor | None = None     # [B, T] log π_T (distillation)
    mismatch: torch.Tensor | None = None     # [B, T] weights trainer / sampler (--mismatch)
    factors: torch.Tensor | None = None      # [B, T] all constants on the clipped surrogate
    values: torch.Tensor | None = None       # [B, T] what the critic expected (--advantage gae)
    passes: Routes | None = None             # routes to force (--routing_replay)
    free_logp: torch.Tensor | None = None    # [B, T] log π_old with the routers' own choices, and
    free_routes: Pass | None = None          # these choices, where old_logp has forced routes

    def groups(self, index):
        """The groups of the prompts in `index` [q], in that order: a mini-batch."""
        problems = [self.problems[i] for i in index.tolist()]
        return self.cut(self.rollout.groups(index), problems, rows_of(index, self.group_size))

    def rows(self, start, stop):
        """Rows start:stop, whole groups or a part of one group: a micro-batch."""
        G = self.group_size
        problems = self.problems[start // G:(stop - 1) // G + 1]
        return self.cut(self.rollout.rows(start, stop), problems, torch.arange(start, stop))

    def cut(self, rollout, problems, rows):
        rows = rows.to(self.old_logp.device, non_blocking=True)
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: x[rows] for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        routes = {name: Pass(*(x[:, rows] for x in getattr(self, name)))       # [L, rows, T, ·]
                  for name in ("routes", "free_routes") if getattr(self, name)}
        passes = self.passes and cut_routes(self.passes, rows, self.rollout)
        return replace(self, rollout=rollout, problems=problems, passes=passes, **tensors, **routes)

    group_size = property(lambda self: self.rollout.group_size)


# --------------------------------------------------------------------------- 1. task and reward

def collect(args, learner, task, step):
    """π_old samples G responses to each prompt and verifiers judge them: (rollout, problems,
    rewards in parts [B, K], None). Dynamic sampling (DAPO): up to ten rounds, until enough groups
    have a signal; the last entry is then what was sampled in all rounds, [(rollout, parts)]."""
    rounds = []
    for attempt in range(10):
        indices = learner.stream.next(args.prompts_per_step, step)
        problems = [task.train[i] for i in indices]
        rollout, parts = sample_and_judge(args, learner, task, problems, step, attempt)
        if learner.stream.resample:
            correct = ~not_all_correct(parts[:, 0], args.num_generations)           # [Q]
            learner.stream.record(indices, correct.tolist())
        if not args.dynamic_sampling:
            return rollout, problems, parts, None
        rounds.append((rollout, problems, parts))
        full = batches.keep_signal(rounds, args.prompts_per_step, task.total, last=attempt == 9)
        if full:
            return *full, batches.all_sampled(rounds)


def sample_and_judge(args, learner, task, problems, step, attempt):
    """One round: (rollout, parts of the rewards [B, K])."""
    prompts = task.encode(learner.tokenizer, problems, args.chat_template, args.max_prompt_length)
    G, random = args.num_generations, generator_for(args, step, attempt + 1)
    uniforms = torch.rand(len(prompts) * G, args.max_completion_length, generator=random)  # [B, T]
    rollout = learner.sampler.sample(prompts, G, uniforms=uniforms)
    parts = learner.judge(rollout.texts, problems, rollout.token_lists())           # [B, K]
    return rollout, parts.to(rollout.mask.device)


def generator_for(args, step, attempt=0):
    """Random numbers of a rollout batch, whatever happened before: a resumed run draws the same."""
    return torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 16 + attempt)


# ------------------------------------------------------------------------- 2. policy, 3. sampling

class Alone:
    """One process: nothing to share. plumbing/parallel/processes.py has these names for several."""

    world = staticmethod(lambda: 1)
    rank = staticmethod(lambda: 0)
    share = staticmethod(lambda n: slice(0, n))
    gather = staticmethod(lambda part: [part])
    on_first = staticmethod(lambda call: call())


NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)       # passes everything through


@dataclass
class Learner:
    """What is trained and what trains it, made once per run."""

    policy: torch.nn.Module      # π_θ, a causal LM of transformers or moe.TinyMoE
    actor: torch.nn.Module       # the policy and its critic, if there is one
    tokenizer: object
    sampler: object              # sampler.sample(prompts, G) -> Rollout
    judge: object                # Task.judge: responses -> the rewards in parts [B, K]
    scorer: object               # scorer(rollout) -> Scores; wrapped by DDP or FSDP2
    optimizer: torch.optim.Optimizer
    schedule: object
    stream: PromptStream         # which prompts come next
    extras: object = None        # what rarely used flags add; None: nothing
    team: object = Alone         # this process, or how several share the work
    objective: str = "gspo"      # row of losses.OBJECTIVES
    constants: dict | None = None    # of the objective's clip, where a run has its own
    band: object = None          # --epsilon auto: the clip range that follows log s
    has_routes: bool = False     # record what the routers of the policy choose
    scaler: object = NO_SCALER   # of gradients, for --fp16
    half: bool = False           # forwards in bfloat16 or float16
    exact: torch.dtype = torch.float64   # the widest floats of the device, for statistics


def make_learner(args, task, policy, tokenizer, device, progress=None):
    """The Learner of a run: everything that is fixed before the first batch. progress: the run's
    own counts, which a checkpoint keeps."""
    actor = make_scorer(args, policy).to(device)
    several = processes.world() > 1
    sampler = make_sampler(args, actor, tokenizer, task)
    judge = processes.divided(task.judge) if several else task.judge
    scorer = processes.wrap(actor, args.shard)
    optimizer = make_optimizer(args, actor)      # of the parameters that FSDP2 has put in place
    stream = PromptStream(task.sizes, args.seed, args.stage2_step, args.history_resampling)
    extras = make_extras(args, task, policy, reference_of(args, task, device, actor),
                         teacher_of(args, task, device, tokenizer))
    return Learner(policy, actor, tokenizer, sampler, judge, scorer, optimizer,
                   make_schedule(args, optimizer), stream, extras,
                   processes if several else Alone, args.objective, args.constants,
                   make_band(args, {} if progress is None else progress),
                   bool(routers_of(policy)) and args.old_logp == "recompute",
                   torch.amp.GradScaler(device.type, enabled=args.fp16), args.half,
                   widest(device))


def make_optimizer(args, actor):
    parameters = [p for p in actor.parameters() if p.requires_grad]
    if args.optimizer_offload and processes.world() > 1:
        raise ValueError("--optimizer_offload serves one process: its gradients leave the device "
                         "before they could be added up; use --shard")
    kind = HostAdamW if args.optimizer_offload else torch.optim.AdamW
    return kind(parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def make_schedule(args, optimizer):
    """The rate of every optimizer step: up from 1/n of the highest in n steps, then as flagged.

    To be stepped with the optimizer: an update that is skipped does not count.
    """
    n, steps = args.warmup_steps, args.steps * args.steps_per_generation

    def share(step):
        if step < n:
            return (step + 1) / n
        progress = min(1.0, (step - n) / max(1, steps - n))
        return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2,
                "constant_with_warmup": 1.0}[args.lr_scheduler_type]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


# ---------------------------------------------------------------------------------- 4. log-probs

@torch.no_grad()
def score(args, learner, rollout, entropy=False, replay=False, passes=None, scorer=None):
    """log π of a rollout's tokens under the policy (or another scorer) -> Scores. replay: with the
    routes of --routing_replay, which are `passes` or, without them, the sampler's; `free` then
    holds the Scores without replay."""
    own = learner.team.share(len(rollout.mask))
    # Without a backward as many rows fit as while sampling; in 16 bits they are as many as in an
    # update, to be rounded as there.
    alike = args.micro_batch_size or learner.half
    size = micro_batch_rows(args, learner) if alike else len(rollout.mask)
    extras, found = learner.extras, []
    for start in range(own.start, own.stop, size):
        stop = min(start + size, own.stop)
        part = rollout.rows(start, stop)
        forced = passes and cut_routes(passes, torch.arange(start, stop), rollout)
        replaying = extras and replay
        with extras.forcing(part, forced, scorer) if replaying else nullcontext({}) as options:
            scores = (scorer or learner.scorer)(part, temperature=args.temperature,
                                                entropy=entropy, record=learner.has_routes,
                                                **options)
        found.append(replace(scores, hidden=None))
    found = [scores for part in learner.team.gather(found) for scores in part]
    scores = found[0] if len(found) == 1 else join_scores(found)
    if extras and replay and extras.compares_routes(learner, passes, scorer):
        scores.free = score(args, learner, rollout)
    return scores


def micro_batch_rows(args, learner):
    """Rows per forward pass of an update: whole groups, or a part of one."""
    prompts = args.prompts_per_step // args.steps_per_generation // learner.team.world()
    return args.micro_batch_size or prompts * args.num_generations


# ------------------------------------------------ 5. advantages (advantages.py), 6. ratio and loss

def update(args, learner, mini):
    """One optimizer step on a mini-batch: ratio, clip, loss, gradient. Returns its statistics."""
    extras, team, band, scaler = learner.extras, learner.team, learner.band, learner.scaler
    epsilon, epsilon_high = band.edges() if band else (args.epsilon, args.epsilon_high)
    mini.weights = token_weights(mini.rollout.mask, args.reduction,
                                 group_size=args.num_generations,
                                 max_length=args.max_completion_length)             # [b, T]
    live = mini if args.plain else batches.with_gradient(args, mini)
    own, size = team.share(len(live.rollout.mask)), micro_batch_rows(args, learner)
    learner.optimizer.zero_grad()
    found = []
    for start in range(own.start, own.stop, size):
        part = live.rows(start, min(start + size, own.stop))
        with extras.forcing(part.rollout, part.passes) if extras else nullcontext({}) as options:
            if extras:
                options |= extras.options
            new = learner.scorer(part.rollout, temperature=args.temperature, **options)
            more, terms = extras.inside_loss(part, new, live) if extras else ({}, {})
            loss, stats = policy_loss(
                learner.objective, new.logp, part.old_logp, part.advantages, part.rollout.mask,
                epsilon=epsilon, epsilon_high=epsilon_high, weights=part.weights,
                dual_clip=args.dual_clip, off_policy_mask=args.off_policy_mask,
                constants=learner.constants, **more)
            loss = loss + sum(terms.values())
            scaler.scale(loss * team.world()).backward()  # here: checkpointed layers route again
        critic = terms.get("critic", torch.zeros_like(loss))
        found.append(stats | {"loss": loss.detach(), "value_loss": critic.detach()})

    scaler.unscale_(learner.optimizer)
    trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # shards have one
    stats = combine_stats([part for process in team.gather(found) for part in process])
    stats = stats if args.plain else batches.of_whole(stats, mini.rollout.mask)
    stats["grad_norm"] = norm
    values = torch.stack([x.to(norm.device, learner.exact) for x in stats.values()])
    stats = dict(zip(stats, values.tolist()))  # here, once, the end of an update is waited for
    stats["skipped"] = not math.isfinite(stats["grad_norm"] + stats["loss"])
    stats["overflow"] = stats["skipped"] and overflowed(scaler, stats)
    if not stats["skipped"]:
        learner.optimizer.step()
        learner.schedule.step()
    scaler.update()
    return stats


def overflowed(scaler, stats):
    """Whether a gradient is not finite only because it was scaled beyond float16's range, which a
    lower scale cures: nothing is wrong with the mini-batch."""
    return scaler.is_enabled() and math.isfinite(stats["loss"]) and scaler.get_scale() > 1


# ------------------------------------------------------------------------------------ 7. the loop

def train(args, learner, task, recorder, saver):
    """Rollout batches until --steps or a stop signal. Returns the number of the last one."""
    extras = learner.extras
    step = saver.step
    for step in range(saver.step + 1, args.steps + 1):
        recorder.begin()

        # prompt x ─► π_old samples G responses ─► verifier
        rollout, problems, parts, sampled = collect(args, learner, task, step)
        recorder.lap("seconds_rollout")

        # log π_old(y|x): computed again as the updates will compute it, or as recorded in sampling
        old = Scores(rollout.sampler_logp, None, None)                              # [B, T]
        if args.old_logp == "recompute":
            old = score(args, learner, rollout, entropy=args.entropy_quantile > 0, replay=True)
        batch = Batch(rollout, problems, parts, old.logp, routes=old.routes, sampled=sampled)
        inputs = extras.before_updates(args, learner, batch, old, score) if extras else {}
        recorder.lap("seconds_logp")

        # rewards ─► advantages Â
        batch.rewards = task.total(batch.parts)                                     # [B]
        batch.advantages = estimate_advantages(
            args.advantage, batch.rewards, args.num_generations, args.scale_rewards,
            clip=args.advantage_clip, mask=rollout.mask, old_logp=batch.old_logp, **inputs)

        # importance ratio ─► clip and optimize ─► new π_θ, one mini-batch of whole groups at a time
        updates = []
        order = torch.randperm(len(problems), generator=generator_for(args, step))
        for index in order.chunk(args.steps_per_generation):
            mini = batch.groups(index)
            updates.append(update(args, learner, mini))
            bad = updates[-1]["skipped"] and not updates[-1]["overflow"]
            recorder.count_bad(step, bad, mini)
        recorder.lap("seconds_update")

        # what happened: the last mini-batch once more, under the new policy
        new = score(args, learner, mini.rollout, entropy=True, replay=True, passes=mini.passes)
        evaluate = args.eval_steps and step % args.eval_steps == 0 and step < args.steps
        held = held_out(args, learner.actor, learner.tokenizer, task) if evaluate else None
        recorder.log(step, batch, mini, new, updates, held)
        stopping = saver.mark(step)
        if stopping or step == args.steps or args.save_steps and step % args.save_steps == 0:
            saver.save()
        if stopping:
            break
    return step


# -------------------------------------------------------------------------------------- the script

def run_script(args, task=None):
    """Everything between the command line and the summary. task: another than the flags name, for
    example Task(name, train, test, verify)."""
    device = processes.start(args)
    run_on(device, args, task)
    processes.stop()        # only here, where the policy that was trained is no longer in memory


def run_on(device, args, task):
    """One run on this process's device. The arguments are those of run_script."""
    began, task = time.perf_counter(), tasks.of_run(args, task)
    with run.run_folder(args) as folder:
        saved = checkpoints.newest_of_all(folder) if args.resume else None
        screen.say(screen.plan(args, folder, task, device))
        policy, tokenizer = trained_policy(args, task, device, saved)
        screen.say(task.keep_what_fits(tokenizer, args.chat_template, args.max_prompt_length))
        checkpoints.seed_all(args.seed)  # the same critic whether or not the cold start was cached
        progress = {"bad": 0, "best_pass_rate": 0.0, "verifier_errors": 0}
        learner = make_learner(args, task, policy, tokenizer, device, progress)
        if not saved:
            progress["before"] = held_out(args, learner.actor, tokenizer, task)
        run.begin_run(args, folder)
        screen.say(screen.first_scores(progress.get("before"), time.perf_counter() - began))
        # saves the last complete batch if an error ends the next
        with checkpoints.Saver(args, folder, learner, progress) as saver:
            if args.resume:
                saver.restore()
            recorder = Recorder(args, folder, task, learner, progress, device, saver.step)
            step = train(args, learner, task, recorder, saver)
        if step < args.steps:
            screen.say(f"stopped after batch {step} and saved; the same command with --output_dir "
                       f"{folder} --resume continues")
            raise SystemExit(130)
        write_merged(args, task, policy, tokenizer, folder)
        after = held_out(args, learner.actor, tokenizer, task)
        screen.report(args, folder, task, progress["before"], after,
                      time.perf_counter() - began)


def main(argv=None):
    logging.disable_progress_bar()  # a bar for every checkpoint read or written; ours has its own
    logging.set_verbosity_error()   # what it would warn of is refused, in one line
    argv = sys.argv[1:] if argv is None else argv
    with errors_in_one_line(argv):
        args = parse(argv)
        text = exported(args)
        print(text) if text else run_script(args)


if __name__ == "__main__":
    main()
