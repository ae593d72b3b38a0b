"""GSPO from query to new policy: the loop that stitches the concept files together.

    query x ─► π_old samples G responses ─► verifier ─► advantages Â ─┐
                             └─► log-probs ─► importance ratio ───────┴─► clip and optimise ─► new π_θ

`python train.py` teaches a tiny Mixture of Experts the last digits of a running sum on a laptop; --model_name_or_path and --dataset_name
point the same loop at a Hugging Face checkpoint; --algorithm picks another row of the family. `python train.py --help` lists all flags.
"""

import math
import sys
import time
from contextlib import ExitStack

import torch
from torch import nn
from transformers import get_scheduler, set_seed
from transformers.utils import logging

from plumbing import run as checkpoint
from plumbing import processes as distributed
from plumbing import tasks
from advantages import VALUE_COEF, gae, group_advantages, has_signal, leave_one_out, overlong_penalty, reinforce_plus_plus, value_loss
from plumbing.arguments import parse
from eval import evaluate, pass_at_1
from plumbing.memory import advice
from plumbing.logprobs import distinct
from losses import combine_stats, kl_penalty, mismatch_mask, mismatch_weight, policy_loss, token_weights
from plumbing.metrics import Clock, line, mismatch_kl, plan, policy_metrics, report, rollout_metrics, samples, scores, update_metrics
from routes import Routes, flip_rate, has_routers, load_balancing_loss, record_routes, replay_routes, route_bytes, router_shift
from plumbing.policy import Actor, can_compile, compiled_step, load_policy, sampling_copy
from plumbing.trl import trl_config
from rollout import concat, sample

# ------------------------------------------------------------------------------------------------- the steps of the loop

def collect(args, actor, tokenizer, task, stream, step):
    """π_old samples G responses to each query and the verifier judges them: (rollout, problems, correct [B]).

    Dynamic sampling (DAPO) keeps only groups with both right and wrong answers and goes on until the batch is full of them; what ten
    rounds do not fill (all is learnt, or nothing) is filled with other groups, which have no gradient.
    """
    G, T, Q, kept = args.num_generations, args.max_completion_length, args.prompts_per_step, []
    for attempt in range(10):
        indices = stream.next(args.prompts_per_step)
        problems = [task.train[i] for i in indices]
        own = distributed.share(len(problems))
        uniforms = torch.rand(len(problems), G, T, generator=generator_for(args, step, attempt + 1))[own].flatten(0, 1)   # [B, T]
        prompts = [tasks.encode_prompt(tokenizer, p, args.chat_template, args.max_prompt_length) for p in problems[own]]
        with distributed.gathered(actor) as policy:
            compiled = args.torch_compile and can_compile(policy.device.type)
            sampler = sampling_copy(policy, args.sampler_dtype, keep=compiled)
            rollout = sample(sampler, tokenizer, prompts, G, T, temperature=args.temperature, uniforms=uniforms, stop=task.stop,
                             compiled=compiled_step(sampler) if compiled else None)
        rewards = [task.verify(text, problems[own][i // G]) for i, text in enumerate(rollout.texts)]
        parts = distributed.gather((rollout, rewards))
        rollout = concat([part[0] for part in parts])
        rewards = torch.tensor([r for part in parts for r in part[1]])                             # [B]
        stream.record(indices, (rewards.view(-1, G) >= 1).all(-1).tolist())
        if not args.dynamic_sampling:
            return rollout, problems, rewards
        signal = has_signal(rewards, G)                                                            # [Q]
        keep = (signal.int().argsort(descending=True, stable=True) if attempt == 9 else signal.nonzero().squeeze(-1))   # [q]
        if len(keep):
            kept.append((rollout.prompts(keep), [problems[i] for i in keep], rewards[rollout.rows_of(keep).cpu()]))
        if sum(len(k[1]) for k in kept) >= Q:
            rollout, problems = concat([k[0] for k in kept]), [p for k in kept for p in k[1]][:Q]
            return rollout.rows(0, Q * G), problems, torch.cat([k[2] for k in kept])[:Q * G]


def score(args, scorer, policy, rollout, record, entropy=False):
    """A rollout under the policy as it is, without gradient: logp [B, T]; entropy [B, T], values [B, T] and Routes, or None."""
    own, parts, routes = distributed.share(len(rollout.mask)), [], []
    # Without a backward as many rows fit as while sampling; in bfloat16 they are as many as in an update, to be rounded as there.
    size = micro_size(args) if args.micro_batch_size or args.bf16 else len(rollout.mask)
    for start in range(own.start, own.stop, size):
        with torch.no_grad(), ExitStack() as stack:
            recorded = stack.enter_context(record_routes(policy)) if record else None
            part, where = rollout.rows(start, min(start + size, own.stop)), slice(None)
            if record and not args.plain and not args.bf16:
                part, where = distinct(part)                 # response_logp does it by itself, but not while routes are recorded
            scores, values = scorer(part, temperature=args.temperature, share_prompt=not args.plain, entropy=entropy)
        parts.append([x if x is None else x[where] for x in (scores.logp, scores.entropy, values)])
        if record:                                           # the last pass is the one over responses
            routes.append(recorded.rows([slice(None)] * (len(recorded.passes) - 1) + [where]))
    parts = [part for process in distributed.gather(parts) for part in process]
    logp, entropy, values = (None if p[0] is None else torch.cat(p) for p in zip(*parts))                       # [B, T]
    routes = Routes.cat([r for process in distributed.gather(routes) for r in process]) if record else None
    return logp, entropy, values, routes


def cut_routes(routes, rows, rollout):
    """The routes of some rows [n] of a rollout. A row of a pass over prompts serves a group, or the part of one that is a micro-batch; a
    pass over what all prompts begin with serves them all."""
    if routes is None:
        return None
    shares = [len(rollout.mask) // p.indices.shape[1] for p in routes.passes]
    index = [rows[::share] // share for share in shares]
    if routes.passes[0].indices.shape[2] == rollout.prefix:
        index[0] = slice(1)
    return routes.rows(index)


def response_routes(routes, rollout):
    return routes.responses(rollout.prompt_ids.shape[1], len(rollout.mask))


def skips_dead_groups(args):
    """Whether groups of equal rewards may be left out of an update: one process, one advantage per response, and no other term in the loss."""
    others = args.beta or args.entropy_coef or args.router_aux_loss_coef or args.advantage == "gae"
    return distributed.world() == 1 and args.advantage in ("group", "leave_one_out") and not args.token_credit and not others


def micro_size(args):
    """Rows per forward pass: whole groups, or a part of one."""
    return args.micro_batch_size or args.prompts_per_step // args.steps_per_generation // distributed.world() * args.num_generations


def estimate_advantages(args, rewards, rollout, problems, task, values):
    """Rewards [B] -> (advantages [B] or [B, T], returns [B, T] or None), by the estimator that --advantage names."""
    G, mask = args.num_generations, rollout.mask
    if args.advantage == "gae":
        return gae(rewards, values, mask)
    if args.advantage.startswith("reinforce_plus_plus"):
        return reinforce_plus_plus(rewards, mask, G if args.advantage.endswith("baseline") else None), None
    advantages = leave_one_out(rewards, G) if args.advantage == "leave_one_out" else group_advantages(rewards, G, scale=args.scale_rewards)
    if args.token_credit:                                    # what stands before the first wrong step of a wrong answer is not to blame
        errors = [task.first_error(text, problems[i // G]) for i, text in enumerate(rollout.texts)]
        first = torch.tensor([0 if e is None else e for e in errors], device=mask.device)[:, None]                 # [B, 1]
        blamed = (torch.arange(mask.shape[1], device=mask.device) >= first) | (advantages[:, None] > 0)           # [B, T]
        return advantages[:, None] * blamed, None                                                                   # [B, T]
    return advantages, None


def correction(args, old_logp, sampler_logp, mask):
    """Weight times rejection, [B, T]: what a token counts for whose sampler was not quite the policy."""
    weights = mask.float()                                                                                        # [B, T]
    if args.mismatch:
        weights = mismatch_weight(old_logp, sampler_logp, mask, args.mismatch, 0.0, args.mismatch_high)
    if args.mismatch_mask:
        weights = weights * mismatch_mask(old_logp, sampler_logp, mask, args.mismatch_mask, args.mismatch_mask_low,
                                          args.mismatch_mask_high)
    return weights


def update(args, scorer, policy, optimizer, rollout, batch, routes):
    """One optimiser step on one mini-batch: ratio, clip, loss, gradient. Returns its stats; `skipped` if loss or gradient was not finite."""
    G, tokens = args.num_generations, rollout.mask.sum()
    weights = token_weights(rollout.mask, args.reduction, group_size=G, max_length=args.max_completion_length)     # [B, T]
    per_token = token_weights(rollout.mask, "token-mean")                                                         # [B, T]
    batch = batch | {"weights": weights, "per_token": per_token}
    if skips_dead_groups(args):                              # A = 0: no gradient, so no forward; the weights above still count them
        live = batch["advantages"].view(-1, G).ne(0).any(-1).nonzero().squeeze(-1)                                # [q]
        live = live if len(live) else torch.zeros(1, dtype=torch.long, device=live.device)
        rows = rollout.rows_of(live)
        rollout, batch, routes = rollout.prompts(live), {k: v[rows] for k, v in batch.items()}, cut_routes(routes, rows, rollout)
    own, size, parts, extra = distributed.share(len(rollout.mask)), micro_size(args), [], {"loss": 0.0, "value_loss": 0.0}
    keep_routes = args.objective == "rspo" or args.router_aux_loss_coef > 0
    optimizer.zero_grad()
    for start in range(own.start, own.stop, size):
        rows = slice(start, min(start + size, own.stop))
        part, b = rollout.rows(rows.start, rows.stop), {key: value[rows] for key, value in batch.items()}
        old_routes = cut_routes(routes, torch.arange(rows.start, rows.stop, device=rollout.mask.device), rollout)
        with ExitStack() as stack:
            if args.routing_replay:
                stack.enter_context(replay_routes(policy, old_routes))
            new_routes = stack.enter_context(record_routes(policy)) if keep_routes else None
            scores, values = scorer(part, temperature=args.temperature, share_prompt=not args.plain, entropy=args.entropy_coef > 0,
                                    entropy_grad=args.entropy_coef > 0)
            shift = None
            if args.objective == "rspo":
                old, new = response_routes(old_routes, part), response_routes(new_routes, part)
                shift = router_shift(old.logits, new.logits, old.indices, part.mask)                               # [B, T]
            loss, stats = policy_loss(args.objective, scores.logp, b["old_logp"], b["advantages"], part.mask, epsilon=args.epsilon,
                                      epsilon_high=args.epsilon_high, weights=b["weights"], router_shift=shift,
                                      mismatch=b.get("mismatch"), dual_clip=args.dual_clip)
            if args.beta:
                loss = loss + args.beta * (b["weights"] * kl_penalty(scores.logp, b["ref_logp"], part.mask, args.kl_estimator,
                                                                      b["old_logp"])).sum()
            if args.entropy_coef:
                loss = loss - args.entropy_coef * (b["per_token"] * scores.entropy).sum()
            if values is not None:
                critic = value_loss(values, b["values"], b["returns"], part.mask, b["per_token"])
                loss, extra["value_loss"] = loss + VALUE_COEF * critic, extra["value_loss"] + critic.detach()
            if args.router_aux_loss_coef:
                balance = load_balancing_loss(response_routes(new_routes, part).logits, part.mask, policy.config.num_experts_per_tok)
                loss = loss + args.router_aux_loss_coef * balance * len(part.mask) / len(rollout.mask)
            (loss * distributed.world()).backward()          # inside: gradient checkpointing runs the routers again
        parts.append(stats)
        extra["loss"] += loss.detach()
    stats = combine_stats([s for process in distributed.gather(parts) for s in process])
    for name in ("clip_low", "clip_high"):                   # shares of all loss tokens, those of dead groups included
        stats[name] = stats[name] * stats["tokens"] / tokens
    stats |= {key: float(distributed.total(torch.as_tensor(value, device=rollout.mask.device))) for key, value in extra.items()}
    norm = nn.utils.clip_grad_norm_(scorer.parameters(), args.max_grad_norm or math.inf)
    stats["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    stats["skipped"] = not math.isfinite(stats["grad_norm"]) or not math.isfinite(stats["loss"])
    if not stats["skipped"]:
        optimizer.step()
    return {key: float(value) for key, value in stats.items()}


# ----------------------------------------------------------------------------------------------------------------- the loop

def train(args, run, actor, tokenizer, task, device, progress):
    """Rollout batches until --steps or a stop signal. Returns the number of the last one, and what is remembered of the run."""
    policy, scorer = actor.policy, distributed.wrap(actor, args.shard)
    optimizer = make_optimizer(args, actor)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.steps * args.steps_per_generation)
    stream = tasks.PromptStream(task.sizes, args.seed, args.stage2_step * args.prompts_per_step or None, args.history_resampling)
    reference = Actor(load_policy(args, task, device)[0], args).requires_grad_(False) if args.beta else None
    progress = {"bad": 0, "best_pass_rate": 0.0, **progress}
    step = start = checkpoint.restore(args, run, actor, optimizer, schedule, stream, progress) if args.resume else 0
    routed = has_routers(policy) and args.old_logp == "recompute"
    stop, seconds = checkpoint.stop_on_signals(), []

    for step in range(start + 1, args.steps + 1):
        clock = Clock(device)

        # query x ─► π_old samples G responses ─► verifier
        rollout, problems, correct = collect(args, actor, tokenizer, task, stream, step)
        mask = rollout.mask                                                                                  # [B, T]
        clock.lap("seconds_rollout")

        # log π_old(y|x): computed again as the updates will compute it, or as recorded while sampling
        old_logp, values, routes = rollout.sampler_logp, None, None                                          # [B, T]
        if args.old_logp == "recompute":
            old_logp, _, values, routes = score(args, scorer, policy, rollout, record=routed)                # [B, T]
        batch = {"old_logp": old_logp}
        if args.mismatch or args.mismatch_mask:
            batch["mismatch"] = correction(args, old_logp, rollout.sampler_logp, mask)                       # [B, T]
        if reference is not None:
            # the same way as old_logp, so that policies that are equal differ by exactly 0
            batch["ref_logp"] = score(args, reference, reference.policy, rollout, record=routed)[0]         # [B, T]
        clock.lap("seconds_logp")

        # rewards ─► advantages Â
        rewards = correct.to(device)                                                                         # [B]
        if args.overlong_cache:
            cache = max(1, round(args.overlong_cache * args.max_completion_length))
            rewards = rewards + overlong_penalty(mask.sum(-1), args.max_completion_length, cache)
        batch["advantages"], returns = estimate_advantages(args, rewards, rollout, problems, task, values)
        if values is not None:
            batch |= {"values": values, "returns": returns}

        # importance ratio ─► clip and optimise ─► new π_θ, one mini-batch of whole groups after the other
        updates, order = [], torch.randperm(len(problems), generator=generator_for(args, step))
        for prompts in order.chunk(args.steps_per_generation):
            rows = rollout.rows_of(prompts)
            mini, part = rollout.prompts(prompts), {name: tensor[rows] for name, tensor in batch.items()}
            mini_routes = cut_routes(routes, rows, rollout)
            updates.append(update(args, scorer, policy, optimizer, mini, part, mini_routes))
            schedule.step()
            progress["bad"] = checkpoint.count_bad(args, run, step, updates[-1]["skipped"], progress["bad"], mini, part)
        clock.lap("seconds_update")

        # what happened: the last mini-batch once more, under the new policy
        new_logp, entropy, _, new_routes = score(args, scorer, policy, mini, record=routed, entropy=True)
        flips = flip_rate(*(response_routes(r, mini).indices for r in (mini_routes, new_routes)), mini.mask).tolist() if routed else None
        record = {"step": step, **rollout_metrics(rollout, correct, rewards.cpu(), args.num_generations), **update_metrics(updates),
                  **policy_metrics(part["old_logp"], new_logp, mini.mask), "entropy": entropy[mini.mask].mean().item(),
                  "kl": kl_penalty(old_logp, batch["ref_logp"], mask)[mask].mean().item() if reference is not None else None,
                  "mismatch_kl": mismatch_kl(old_logp, rollout.sampler_logp, mask) if args.old_logp == "recompute" else None,
                  "compiled": args.torch_compile and can_compile(device.type), "lr": schedule.get_last_lr()[0],
                  "verifier_errors": sum(task.verifier_errors.values()),
                  "flip_rate": sum(flips) / len(flips) if routed else None, "flip_rate_per_layer": flips,
                  "route_bytes_per_token": route_bytes(routes) / int(mask.sum()) if args.routing_replay else None, **clock.laps}
        seconds.append(time.perf_counter() - clock.began)
        record["tokens_per_second"] = int(mask.sum()) / seconds[-1]
        progress["best_pass_rate"] = max(progress["best_pass_rate"], record["pass_rate"])
        if args.eval_steps and step % args.eval_steps == 0 and step < args.steps:
            record["pass_at_1"] = pass_at_1(held_out(args, actor, tokenizer, task)["sampled"]["rewards"])
        if distributed.rank() == 0:
            checkpoint.append(run / "metrics.jsonl", record)
            checkpoint.append(run / "samples.jsonl", {"step": step, "samples": samples(rollout, problems, correct)})
            print(line(record, args.steps, sum(seconds) / len(seconds) * (args.steps - step), progress["best_pass_rate"]), flush=True)
        stopping = any(distributed.gather(bool(stop)))
        if stopping or step == args.steps or args.save_steps and step % args.save_steps == 0:
            checkpoint.snapshot(args, run, step, actor, tokenizer, optimizer, schedule, stream, progress)
        if stopping:
            break
    return step, progress


def generator_for(args, step, attempt=0):
    """Random numbers that belong to a rollout batch, whatever happened before: a resumed run draws the same ones."""
    return torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 16 + attempt)


def make_optimizer(args, actor):
    if args.optim == "sgd":
        return torch.optim.SGD(actor.parameters(), lr=args.learning_rate)
    return torch.optim.AdamW(actor.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


# ---------------------------------------------------------------------------------------------------------------- the script

def held_out(args, actor, tokenizer, task):
    """Answers to held-out queries, {"sampled": ..., "greedy": ...} as eval.evaluate returns them; None with --eval_samples 0."""
    if not args.eval_samples:
        return None
    with distributed.gathered(actor) as policy:
        return {kind: evaluate(policy, tokenizer, task, task.test[:args.eval_prompts], args.eval_samples, args.max_completion_length,
                               temperature=temperature, max_prompt_length=args.max_prompt_length, chat=args.chat_template)
                for kind, temperature in (("sampled", args.temperature), ("greedy", 0.0))}


def run_script(args):
    """Everything between the command line and the summary."""
    began, device = time.perf_counter(), distributed.start(args)
    say = print if distributed.rank() == 0 else lambda *_: None
    task = tasks.from_arguments(args)
    with checkpoint.run_folder(args) as run:
        _, saved = distributed.on_first(lambda: checkpoint.newest(run)) if args.resume else (0, None)
        say(plan(args, run, task, device))
        policy, tokenizer = load_policy(args, task, device, saved)
        if (args.objective == "rspo" or args.routing_replay or args.router_aux_loss_coef) and not has_routers(policy):
            raise ValueError(f"--model_name_or_path {args.model_name_or_path} is dense: rspo, --routing_replay and --router_aux_loss_coef need "
                             "a mixture of experts")
        set_seed(args.seed)                                  # the same critic whether there was a cold start just now or not
        actor = Actor(policy, args).to(device)
        progress = {} if saved else {"before": held_out(args, actor, tokenizer, task)}
        distributed.on_first(lambda: checkpoint.begin_run(args, run))
        if progress.get("before"):
            say(f"before: {scores(progress['before'])}   ({time.perf_counter() - began:.0f} s)\n")
        step, progress = train(args, run, actor, tokenizer, task, device, progress)
        if step < args.steps:
            say(f"stopped after batch {step} and saved; the same command with --output_dir {run} --resume goes on")
            raise SystemExit(130)
        after = held_out(args, actor, tokenizer, task)
        if distributed.rank() == 0:
            report(args, run, task, progress["before"], after, time.perf_counter() - began)
    distributed.stop()


def main(argv=None):
    logging.disable_progress_bar()                           # a bar for every checkpoint read or written; ours has its own
    logging.set_verbosity_error()                            # what it would warn of is refused, in one line
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        print(trl_config(args)) if args.print_trl_config else run_script(args)
    except (ValueError, OSError) as error:
        leave(2, error)
    except torch.OutOfMemoryError:
        leave(2, advice(args, torch.cuda.mem_get_info()[1]))
    except RuntimeError as error:
        if not distributed.lost_another(error):
            raise
        leave(1, f"process {distributed.rank()} stops, as another one of this job is gone; --resume goes on from the last checkpoint")
    except KeyboardInterrupt:
        sys.stderr.write("\n")                               # below the terminal's ^C
        leave(130, "stopped at once; what came after the last checkpoint is lost, --resume goes on from there")


def leave(code, why):
    sys.stderr.write(f"train.py: {why}\n")                   # one write: print makes two, which processes of one job would mix
    raise SystemExit(code)


if __name__ == "__main__":
    main()
