"""GSPO from query to new policy: the loop that stitches the concept files together.

    query x ─► π_old samples G responses ─► verifier ─► advantages Â ─┐
                             └─► log-probs ─► importance ratio ───────┴─► clip, optimise ─► π_θ

`python train.py` teaches a tiny Mixture of Experts the last digits of a running sum on a laptop;
--model_name_or_path and --dataset_name point the same loop at a Hugging Face checkpoint;
--algorithm picks another row of the family. `python train.py --help` lists all flags.
"""

import math
import sys
import time
from functools import partial

import torch
from transformers import set_seed
from transformers.utils import logging

import rollout as plain
from advantages import not_all_correct
from eval import held_out
from losses import policy_loss
from plumbing.data import tasks
from plumbing.loop import batches, replay
from plumbing.speed import compiled, fast, processes
from plumbing.run import metrics, folder as run
from plumbing.model.actor import (Actor, make_optimizer, make_schedule, reference_of, sampling_copy,
                            trained_policy, write_merged)
from plumbing.run.arguments import parse
from plumbing.loop.batches import score
from plumbing.speed.cutting import concat
from plumbing.run.errors import count_bad, errors_in_one_line
from plumbing.data.stream import PromptStream
from plumbing.loop.terms import (estimate_advantages, high_entropy, mismatch_correction,
                                 other_terms, shift, with_overlong_penalty)
from tools.trl import trl_config
from tools.view import save_tokens

# -------------------------------------------------------------------------- the steps of the loop

def collect(args, actor, tokenizer, task, stream, step):
    """π_old samples G responses to each query, verifiers judge them: (rollout, problems, rewards in
    parts [B, K]). Dynamic sampling (DAPO): up to ten rounds, until enough groups have a signal."""
    rounds = []
    for attempt in range(10):
        indices = stream.next(args.prompts_per_step, step)
        problems = [task.train[i] for i in indices]
        uniforms = torch.rand(len(problems), args.num_generations, args.max_completion_length,
                              generator=generator_for(args, step, attempt + 1))     # [Q, G, T]
        with processes.gathered(actor) as policy:
            rollout, parts = sample_and_verify(args, policy, tokenizer, task, problems, uniforms)
        stream.record(indices, (~not_all_correct(parts[:, 0], args.num_generations)).tolist())
        if not args.dynamic_sampling:
            return rollout, problems, parts
        rounds.append((rollout, problems, parts))
        full = batches.keep_signal(rounds, args.prompts_per_step, task.total, last=attempt == 9)
        if full:
            return full


def sample_and_verify(args, policy, tokenizer, task, problems, uniforms):
    """(rollout, parts of the rewards [B, K]) of all processes; each samples for its share."""
    own = processes.share(len(problems))
    prompts = task.encode(tokenizer, problems[own], args.chat_template, args.max_prompt_length)
    sampler = sampling_copy(policy, args.sampler_dtype, keep=args.torch_compile)
    sample = plain.sample if args.plain else fast.sample
    if args.routing_replay == "rollout":
        sample = partial(replay.sample_with_routes, sample)
    more = {"decoder": compiled.decoder(sampler)} if args.torch_compile else {}
    rollout = sample(sampler, tokenizer, prompts, args.num_generations, args.max_completion_length,
                     temperature=args.temperature, uniforms=uniforms[own].flatten(0, 1),
                     stop=task.stop, tool=task.tool, **more)
    asked = [p for p in problems[own] for _ in range(args.num_generations)]
    parts = task.judge(rollout.texts, asked)                                        # [B, K]
    rollouts, parts = zip(*processes.gather((rollout, parts)))
    return concat(rollouts), torch.cat(parts)                                       # [B, K]


def update(args, scorer, policy, optimizer, batch):
    """One optimiser step on a mini-batch: ratio, clip, loss, gradient. Returns its stats."""
    whole = batches.with_gradient(args, batches.with_weights(args, batch))
    bonus, routed = args.entropy_coef > 0, args.objective == "rspo" or args.router_aux_loss_coef > 0
    optimizer.zero_grad()
    parts = []
    for part in batches.micro_batches(args, whole):
        mask = part.rollout.mask                                                    # [B, T]
        with replay.replayed(args, policy, part.rollout, part.routes):
            new = scorer(part.rollout, temperature=args.temperature, record=routed, entropy=bonus,
                         entropy_grad=bonus)
            loss, stats = policy_loss(
                args.objective, new.logp, part["old_logp"], part["advantages"], mask,
                epsilon=args.epsilon, epsilon_high=args.epsilon_high, weights=part["weights"],
                router_shift=shift(args, part, new.routes), mismatch=part["factors"],
                dual_clip=args.dual_clip, off_policy_mask=args.off_policy_mask)
            more = other_terms(args, policy, part, new, whole)
            loss = loss + sum(more.values())
            (loss * processes.world()).backward()  # inside: checkpointed layers route again here
        parts.append(batches.part_stats(stats, loss, more))
    norm = batches.clip_gradient(optimizer, args.max_grad_norm)
    stats = batches.whole_stats(parts, batch.rollout.mask, norm)
    stats["skipped"] = not math.isfinite(stats["grad_norm"] + stats["loss"])
    if not stats["skipped"]:
        optimizer.step()
    return stats


# ---------------------------------------------------------------------------------------- the loop

def train(args, saver, actor, tokenizer, task, device, progress):
    """Rollout batches until --steps or a stop signal -> (number of the last one, progress)."""
    policy, scorer = actor.policy, processes.wrap(actor, args.shard)
    optimizer = make_optimizer(args, actor)
    schedule = make_schedule(args, optimizer)
    stream = PromptStream(task.sizes, args.seed, args.stage2_step, args.history_resampling)
    reference = reference_of(args, task, device, actor)
    progress = {"bad": 0, "best_pass_rate": 0.0, "verifier_errors": 0, **progress}
    saver.hold(actor, tokenizer, optimizer, schedule, stream, progress)
    step = start = saver.restore() if args.resume else 0
    stop, clock = run.stop_on_signals(), metrics.Clock(device, start, args.steps)

    for step in range(start + 1, args.steps + 1):
        clock.begin()

        # query x ─► π_old samples G responses ─► verifier
        rollout, problems, parts = collect(args, actor, tokenizer, task, stream, step)
        mask = rollout.mask                                                         # [B, T]
        clock.lap("seconds_rollout")

        # log π_old(y|x): computed again as the updates will compute it, or as recorded in sampling
        old, tensors = None, {"old_logp": rollout.sampler_logp}                     # [B, T]
        if args.old_logp == "recompute":
            quantile = args.entropy_quantile > 0
            old = score(args, scorer, policy, rollout, entropy=quantile, replay=True)
            tensors = {"old_logp": old.logp, **high_entropy(args, old.entropy, mask)}   # [B, T]
        tensors |= mismatch_correction(args, tensors["old_logp"], rollout)          # [B, T]
        if reference is not None:  # scored as old_logp is: equal policies differ by exactly 0
            tensors["ref_logp"] = score(args, reference, reference.policy, rollout).logp    # [B, T]
        clock.lap("seconds_logp")

        # rewards ─► advantages Â
        parts = with_overlong_penalty(args, parts.to(device), rollout)              # [B, K]
        values = old and old.values                                                 # [B, T] or None
        tensors |= estimate_advantages(args, parts, rollout, problems, task, tensors, values)
        rewards = tensors["rewards"] = task.total(parts)                            # [B]
        batch = batches.Batch(rollout, tensors, old and old.routes)

        # importance ratio ─► clip and optimise ─► new π_θ, one mini-batch of whole groups at a time
        updates = []
        order = torch.randperm(len(problems), generator=generator_for(args, step))
        for prompts in order.chunk(args.steps_per_generation):
            mini = batch.prompts(prompts)
            updates.append(update(args, scorer, policy, optimizer, mini))
            if not updates[-1]["skipped"]:
                schedule.step()
            progress["bad"] = count_bad(args, saver.folder, step, updates[-1]["skipped"],
                                        progress["bad"], mini)
        clock.lap("seconds_update")

        # what happened: the last mini-batch once more, under the new policy
        new = score(args, scorer, policy, mini.rollout, entropy=True)
        record = metrics.batch_record(args, step, task, parts, updates, batch, mini, new, clock,
                                      optimizer, progress)
        if args.eval_steps and step % args.eval_steps == 0 and step < args.steps:
            record["pass_at_1"] = held_out(args, actor, tokenizer, task)["sampled"]["pass_at_1"]
        metrics.log(args, saver.folder, record, rollout, problems, rewards, progress, clock)
        save_tokens(args, saver.folder, step, tokenizer, task, mini, problems, prompts, new)
        saver.mark(step)
        stopping = stop()
        if stopping or step == args.steps or args.save_steps and step % args.save_steps == 0:
            saver.save()
        if stopping:
            break
    return step, progress


def generator_for(args, step, attempt=0):
    """Random numbers of a rollout batch, whatever happened before: a resumed run draws the same."""
    return torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 16 + attempt)


# -------------------------------------------------------------------------------------- the script

def run_script(args, task=None):
    """Everything between the command line and the summary. task: another than the flags name."""
    began, device = time.perf_counter(), processes.start(args)
    task = task or tasks.from_arguments(args)
    with run.run_folder(args) as folder:
        saved = run.newest_of_all(folder) if args.resume else None
        metrics.say(metrics.plan(args, folder, task, device))
        policy, tokenizer = trained_policy(args, task, device, saved)
        metrics.say(task.keep_what_fits(tokenizer, args.chat_template, args.max_prompt_length))
        set_seed(args.seed)  # the same critic whether there was a cold start just now or not
        actor = Actor(policy, args).to(device)
        progress = {} if saved else {"before": held_out(args, actor, tokenizer, task)}
        run.begin_run(args, folder)
        metrics.say(metrics.first_scores(progress.get("before"), time.perf_counter() - began))
        with run.Saver(args, folder) as saver:  # saves the last batch if an error ends the next
            step, progress = train(args, saver, actor, tokenizer, task, device, progress)
        if step < args.steps:
            metrics.say(f"stopped after batch {step} and saved; the same command with --output_dir "
                        f"{folder} --resume goes on")
            raise SystemExit(130)
        write_merged(args, task, policy, tokenizer, folder)
        after = held_out(args, actor, tokenizer, task)
        metrics.report(args, folder, task, progress["before"], after, time.perf_counter() - began)
    processes.stop()


def main(argv=None):
    logging.disable_progress_bar()  # a bar for every checkpoint read or written; ours has its own
    logging.set_verbosity_error()   # what it would warn of is refused, in one line
    argv = sys.argv[1:] if argv is None else argv
    with errors_in_one_line(argv):
        args = parse(argv)
        print(trl_config(args)) if args.print_trl_config else run_script(args)


if __name__ == "__main__":
    main()
