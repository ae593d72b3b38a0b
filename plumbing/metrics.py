"""Metrics: what a rollout batch says about itself, as one record for metrics.jsonl and one line on the screen.

Old log-probs against new ones are compared on the last mini-batch after its update, where the policy is furthest from the one that
sampled. Clip shares are means over all mini-batches, as in the papers; they count loss tokens.
"""

import json
import sys
import time

import torch

from plumbing import run as checkpoint
from eval import pass_at_1
from losses import kl_penalty
from plumbing.batches import old_and_new
from plumbing.compiled import buckets
from plumbing.processes import rank
from ratios import cross_entropy, perplexity, sequence_ratio
from routes import flip_rate, route_bytes


class Clock:
    """Seconds between laps, with the GPU's work waited for."""

    def __init__(self, device):
        self.device, self.laps, self.began = device, {}, time.perf_counter()
        self.last = self.began

    def lap(self, name):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now


def rollout_metrics(rollout, correct, rewards, group_size):
    """Rewards and lengths. correct [B] is the verifier's reward, rewards [B] what became of it (overlong penalty)."""
    lengths = rollout.mask.sum(-1).float()                                               # [B]
    groups = rewards.view(-1, group_size)                                                # [Q, G]
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(unbiased=False).item(),
            "pass_rate": (correct >= 1).float().mean().item(),
            "length": lengths.mean().item(), "inverse_length": (1 / lengths.clamp(min=1)).mean().item(),
            "truncated": rollout.truncated.float().mean().item(),
            "dead_groups": (groups.amax(-1) == groups.amin(-1)).float().mean().item()}


def update_metrics(updates):
    """Over the mini-batches of one rollout batch: means of losses and clip shares, the largest ratio, the last one's variances."""
    mean = lambda name: sum(u[name] for u in updates) / len(updates)
    last = updates[-1]
    record = {name: mean(name) for name in ("loss", "value_loss", "clip_low", "clip_high", "clip_signal", "grad_norm")}
    record |= {"ratio_max": max(u["ratio_max"] for u in updates), "log_w_var": last["log_w_var"], "log_s_var": last["log_s_var"],
               "variance_factor": last["log_s_var"] / last["log_w_var"] if last["log_w_var"] else None,
               "skipped": int(sum(u["skipped"] for u in updates)),
               "minibatches": [{k: u[k] for k in ("clip_low", "clip_high", "ratio_max", "log_w_var", "log_s_var", "grad_norm")} for u in updates]}
    return record


def policy_metrics(old_logp, new_logp, mask):
    """The old and the new policy on the same responses, all [B, T]: GSPO's s as a perplexity ratio and as exp(ΔH)."""
    old, new, s = perplexity(old_logp, mask), perplexity(new_logp, mask), sequence_ratio(new_logp, old_logp, mask)   # [B]
    delta_h = cross_entropy(old_logp, mask) - cross_entropy(new_logp, mask)              # [B]
    return {"perplexity_old": old.mean().item(), "perplexity_new": new.mean().item(), "delta_h": delta_h.mean().item(),
            "equivalence_error": (s - old / new).abs().max().item()}


def mismatch_kl(old_logp, sampler_logp, mask):
    """KL(sampler || trainer) per token in nats, by the estimator that is never negative: e^d - 1 - d, d = log π_old - log π_sampler."""
    d = (old_logp - sampler_logp)[mask]                                                  # [loss tokens]
    return (torch.expm1(d) - d).mean().item()


def weight_stats(weights, mask):
    """What importance weights w [B, T] cost, over the n loss tokens: mismatch_ess = (Σw)² / (n·Σw²), the
    share of the sample that counts, and mismatch_chi2 = mean (w - 1)². Of mean 1, ess = 1 / (1 + chi2)."""
    n, w = mask.sum().clamp(min=1), weights.masked_fill(~mask, 0.0)              # [B, T]
    return {"mismatch_ess": (w.sum() ** 2 / (n * w.square().sum()).clamp(min=1e-30)).item(),
            "mismatch_chi2": (((w - 1) ** 2 * mask).sum() / n).item()}


def collapse(record, best_pass_rate):
    """A word if the run has lost what it had, else ''. Announced, never hidden."""
    if best_pass_rate >= 0.2 and record["pass_rate"] < best_pass_rate / 2:
        return "  COLLAPSED? pass rate below half its best"
    if record["entropy"] < 1e-4 and record["pass_rate"] < 0.5:
        return "  COLLAPSED? no entropy left"
    return ""


def line(record, steps, seconds_left, best_pass_rate):
    """One aligned line per rollout batch."""
    short = lambda x, digits=2: "-" if x is None else f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"
    small = lambda x: f"{x:.1e}".replace("e-0", "e-")
    seconds = sum(record[name] for name in ("seconds_rollout", "seconds_logp", "seconds_update"))
    flips = "" if record["flip_rate"] is None else f"flips {record['flip_rate']:5.1%}  "
    width = len(str(steps))
    return (f"batch {record['step']:{width}}/{steps}  reward {short(record['reward'])}  pass {short(record['pass_rate'])}  "
            f"len {record['length']:5.1f}  "
            f"clip {short(record['clip_low'] + record['clip_high'])} (low {short(record['clip_low'])} high {short(record['clip_high'])})  "
            f"var log w {small(record['log_w_var'])} log s {small(record['log_s_var'])}  {flips}ppl {short(record['perplexity_new'], 3)}  "
            f"|g| {short(record['grad_norm'])}  {seconds:.1f} s  {seconds_left:.0f} s left" + collapse(record, best_pass_rate)
            + (f"  {record['skipped']} bad update(s) skipped" if record["skipped"] else ""))


def samples(rollout, problems, correct, count=2):
    """The first response to each of the first queries, for samples.jsonl."""
    firsts = range(0, min(count, len(problems)) * rollout.group_size, rollout.group_size)
    return [{"prompt": problem.prompt, "response": rollout.texts[i], "reward": correct[i].item()} for problem, i in zip(problems, firsts)]


def read_metrics(run):
    """The whole lines of a run's metrics.jsonl; says on the error stream what it skipped. Raises ValueError if there is nothing to read."""
    file = run / "metrics.jsonl"
    if not run.is_dir():
        beside = sorted(f.parent.name for f in run.parent.glob("*/metrics.jsonl"))[:8]
        raise ValueError(f"there is no run folder {run}" + (f"; in {run.parent}/ there are: {', '.join(beside)}" if beside else ""))
    if not file.is_file():
        raise ValueError(f"{run} holds no metrics.jsonl: it is not a run, or has not finished its first rollout batch")
    records, skipped = [], []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        try:
            record = json.loads(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError):
            skipped.append(number)
    if skipped:
        print(f"eval.py: {file}: skipped {len(skipped)} line(s) that are cut off or are no metrics: {', '.join(map(str, skipped[:5]))}",
              file=sys.stderr)
    if not records:
        raise ValueError(f"{file} holds no whole line: nothing to draw")
    return records


# ------------------------------------------------------------------------------------------------------ before and after

def plan(args, run, task, device):
    """What this run will do, in a few lines."""
    band = "" if args.epsilon is None else f", band [1 - {args.epsilon:g}, 1 + {args.epsilon_high:g}]"
    model = args.model_name_or_path or (f"a tiny Mixture of Experts ({args.num_hidden_layers} layers, {args.num_experts} experts, "
                                        f"top-{args.num_experts_per_tok})")
    length = "" if args.model_name_or_path else "; the cold start before it takes about half a minute on two CPU cores, once"
    return "\n".join([f"{args.algorithm} teaches {model}: {task.name} ({len(task.train)} queries, {len(task.test)} held out), on {device}{length}",
                      f"{args.steps} rollout batches of {args.prompts_per_step} queries x {args.num_generations} responses, "
                      f"{args.steps_per_generation} mini-batches each{band}; numbers go to {run}/metrics.jsonl", *task.notes])


def scores(answers):
    mean, low, high = pass_at_1(answers["sampled"]["rewards"])
    return f"held-out pass@1 {mean:.3f} [{low:.3f}, {high:.3f}], greedy {pass_at_1(answers['greedy']['rewards'])[0]:.3f}"


def report(args, run, task, before, after, seconds):
    """Before and after, two transcripts, and what to try next; summary.json. The first process only."""
    if rank():
        return
    summary = {"seconds": seconds, "steps": args.steps}
    if after:
        for when, answers in (("before", before), ("after", after)):
            mean, low, high = pass_at_1(answers["sampled"]["rewards"])
            summary |= {f"pass_at_1_{when}": mean, f"interval_{when}": [low, high], f"greedy_{when}": pass_at_1(answers["greedy"]["rewards"])[0]}
        for i in range(2):
            print(f"\nquery   {task.test[i].prompt.strip()}   (right: {task.test[i].answer})")
            for when, answers in (("before", before), ("after", after)):
                text, reward = answers["sampled"]["texts"][i][0], answers["sampled"]["rewards"][i][0]
                print(f"{when:7} {text!r} {'right' if reward >= 1 else 'wrong'}")
        print(f"\nbefore: {scores(before)}\nafter:  {scores(after)}")
    checkpoint.write_text(run / "summary.json", json.dumps(summary, indent=1))
    grpo = "the same command with --algorithm grpo" if args.model_name_or_path else "python train.py --algorithm grpo"
    band = "the same with --epsilon 0.2 --epsilon_high 0.27" if args.model_name_or_path else "python train.py --epsilon 0.2 --epsilon_high 0.27"
    print(f"{seconds:.0f} s; metrics, samples and the checkpoint are in {run}/\n\nworth trying next:\n"
          f"  {f'python eval.py dashboard {run}':<50}# the run in pictures\n"
          f"  {grpo:<50}# the token-level relative, from the same start\n"
          f"  {band:<50}# GSPO with GRPO's band: what does the narrow one do?")


def batch_record(args, step, correct, rewards, updates, batch, mini, new, clock):
    """What metrics.jsonl says of one rollout batch. correct, rewards [B]: the verifier's, and what became
    of them. mini: the last mini-batch, `new` its Forward under the new policy."""
    rollout, mask, flips, route_cost = batch.rollout, batch.rollout.mask, None, None
    if new.routes is not None and mini.routes is not None:
        old_routes, new_routes = old_and_new(mini, new.routes)
        flips = flip_rate(old_routes.indices, new_routes.indices, mini.rollout.mask).tolist()
    if args.routing_replay != "none" and batch.routes is not None:
        route_cost = route_bytes(batch.routes) / int(mask.sum())
    old_logp, ref_logp, compared = batch["old_logp"], batch["ref_logp"], args.old_logp == "recompute"
    return {"step": step, **rollout_metrics(rollout, correct, rewards.cpu(), args.num_generations),
            **update_metrics(updates), **policy_metrics(mini["old_logp"], new.logp, mini.rollout.mask),
            "entropy": new.entropy[mini.rollout.mask].mean().item(),
            "kl": None if ref_logp is None else kl_penalty(old_logp, ref_logp, mask)[mask].mean().item(),
            "mismatch_kl": mismatch_kl(old_logp, rollout.sampler_logp, mask) if compared else None,
            **({} if batch["mismatch"] is None else weight_stats(batch["mismatch"], mask)),
            "compiled": args.torch_compile and bool(buckets()),
            "compiled_buckets": buckets() if args.torch_compile else [],
            "flip_rate": sum(flips) / len(flips) if flips else None, "flip_rate_per_layer": flips,
            "route_bytes_per_token": route_cost, **clock.laps,
            "tokens_per_second": int(mask.sum()) / (time.perf_counter() - clock.began)}


def log(args, run, record, rollout, problems, correct, progress, seconds_left):
    """The record to metrics.jsonl, some responses to samples.jsonl, a line to the screen."""
    if rank() == 0:
        checkpoint.append(run / "metrics.jsonl", record)
        checkpoint.append(run / "samples.jsonl", {"step": record["step"], "samples": samples(rollout, problems, correct)})
        print(line(record, args.steps, seconds_left, progress["best_pass_rate"]), flush=True)


def say(text):
    """To the screen, from one process."""
    if rank() == 0:
        print(text)
