"""Metrics: what a rollout batch says about itself, a record for metrics.jsonl and a line to read.

Old log-probs against new ones are compared on all loss tokens of the last mini-batch after its
update, where the policy is furthest from the one that sampled. Clip shares are means over all
mini-batches, as in the papers; they count loss tokens.
"""

import json
import sys
import time

import torch

from advantages import has_signal
from losses import kl_penalty
from plumbing.run import folder as run, trackers
from plumbing.loop.batches import old_and_new
from plumbing.speed.compiled import buckets
from plumbing.speed.processes import rank
from ratios import cross_entropy, perplexity, ratio_stats, sequence_ratio
from routes import flip_rate

ROUNDING = 1e-10  # Var[log w] of a policy that has not moved, scored twice in float32


class Clock:
    """Seconds between the laps of a rollout batch, with the GPU's work waited for, and how long the
    batches that are left will take. start: the last one before; steps: the last there will be."""

    def __init__(self, device, start=0, steps=1):
        self.device, self.start, self.steps, self.born = device, start, steps, time.perf_counter()
        self.begin()

    def begin(self):
        self.laps, self.began = {}, time.perf_counter()
        self.last = self.began

    def seconds_left(self, step):
        """At the end of batch `step`."""
        return (time.perf_counter() - self.born) / (step - self.start) * (self.steps - step)

    def lap(self, name):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now


def rollout_metrics(rollout, parts, task):
    """Rewards, in parts [B, K], and lengths; an answer passes with 1 in the first part."""
    lengths, G = rollout.mask.sum(-1).float(), rollout.group_size                   # [B]
    rewards, means = task.total(parts), parts.mean(0).tolist()                      # [B]
    live = has_signal(rewards, G).float().mean().item() if G > 1 else 1.0
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(unbiased=False).item(),
            "reward_parts": dict(zip([*task.part_names, "overlong"], means)),
            "pass_rate": (parts[:, 0] >= 1).float().mean().item(),
            "length": lengths.mean().item(),
            "inverse_length": (1 / lengths.clamp(min=1)).mean().item(),
            "truncated": rollout.truncated.float().mean().item(), "dead_groups": 1 - live}


def update_metrics(updates):
    """What the updates of a rollout batch saw: means of losses, clip shares and gradient norms."""
    names = ("loss", "value_loss", "clip_low", "clip_high", "clip_signal", "grad_norm")
    record = {name: sum(u[name] for u in updates) / len(updates) for name in names}
    per_update = ("clip_low", "clip_high", "grad_norm")
    return record | {
        "skipped": int(sum(u["skipped"] for u in updates)),
        "minibatches": [{name: u[name] for name in per_update} for u in updates]}


def policy_metrics(old_logp, new_logp, mask):
    """The old and the new policy on the same responses, all [B, T]: how far they are apart, and
    GSPO's s as a ratio of perplexities and as exp(ΔH)."""
    old, new = perplexity(old_logp, mask), perplexity(new_logp, mask)               # [B]
    delta_h = cross_entropy(old_logp, mask) - cross_entropy(new_logp, mask)         # [B]
    s = sequence_ratio(new_logp, old_logp, mask)                                    # [B]
    stats = {name: x.item() for name, x in ratio_stats(new_logp, old_logp, mask).items()}
    spread = {name: stats[name] for name in ("ratio_max", "log_w_var", "log_s_var")}
    apart = stats["log_w_var"] > ROUNDING
    spread["variance_factor"] = stats["log_s_var"] / stats["log_w_var"] if apart else None
    return {**spread, "perplexity_old": old.mean().item(), "perplexity_new": new.mean().item(),
            "delta_h": delta_h.mean().item(),
            "equivalence_error": (s - old / new).abs().max().item()}


def route_bytes(routes):
    """Memory that recorded routes take, in bytes."""
    return sum(x.numel() * x.element_size() for p in routes.passes for x in p)


def mismatch_kl(old_logp, sampler_logp, mask):
    """KL(sampler || trainer) per token in nats, by the estimator that is never negative:
    e^d - 1 - d, d = log π_old - log π_sampler."""
    d = (old_logp - sampler_logp)[mask]                                             # [loss tokens]
    return (torch.expm1(d) - d).mean().item()


def weight_stats(weights, mask):
    """What importance weights w [B, T] cost, over the n loss tokens: mismatch_ess =
    (Σw)² / (n·Σw²), the share of the sample that counts, and mismatch_chi2 = mean (w - 1)². Of mean
    1, ess = 1 / (1 + chi2)."""
    n, w = mask.sum().clamp(min=1), weights.masked_fill(~mask, 0.0)                 # [B, T]
    return {"mismatch_ess": (w.sum() ** 2 / (n * w.square().sum()).clamp(min=1e-30)).item(),
            "mismatch_chi2": (((w - 1) ** 2 * mask).sum() / n).item()}


def batch_record(args, step, task, parts, updates, batch, mini, new, clock, optimizer, progress):
    """What metrics.jsonl says of a rollout batch. parts [B, K]: of the rewards. mini: the last
    mini-batch, `new` its Forward under the new policy. progress: the run's, brought up to date."""
    rollout, mask, flips, route_cost = batch.rollout, batch.rollout.mask, None, None
    if new.routes is not None and mini.routes is not None:
        old_routes, new_routes = old_and_new(mini, new.routes)
        flips = flip_rate(old_routes.indices, new_routes.indices, mini.rollout.mask).tolist()
    if args.routing_replay != "none" and batch.routes is not None:
        route_cost = route_bytes(batch.routes) / int(mask.sum())
    old_logp, ref_logp, kl, mismatch = batch["old_logp"], batch["ref_logp"], None, None
    if ref_logp is not None:
        kl = kl_penalty(old_logp, ref_logp, mask)[mask].mean().item()
    if args.old_logp == "recompute":
        mismatch = mismatch_kl(old_logp, rollout.sampler_logp, mask)
    weights = {} if batch["mismatch"] is None else weight_stats(batch["mismatch"], mask)
    rewarded = rollout_metrics(rollout, parts, task)
    progress["best_pass_rate"] = max(progress["best_pass_rate"], rewarded["pass_rate"])
    progress["verifier_errors"] += task.new_errors()
    return {"step": step, **rewarded, **update_metrics(updates),
            **policy_metrics(mini["old_logp"], new.logp, mini.rollout.mask),
            "entropy": new.entropy[mini.rollout.mask].mean().item(), "kl": kl,
            "mismatch_kl": mismatch, **weights,
            "compiled": args.torch_compile and bool(buckets()),
            "compiled_buckets": buckets() if args.torch_compile else [],
            "flip_rate": sum(flips) / len(flips) if flips else None, "flip_rate_per_layer": flips,
            "route_bytes_per_token": route_cost, "lr": optimizer.param_groups[0]["lr"],
            "bytes_offloaded": optimizer.moved() if args.optimizer_offload else None,
            "verifier_errors": progress["verifier_errors"], **clock.laps,
            "tokens_per_second": int(mask.sum()) / (time.perf_counter() - clock.began)}


def collapse(record, best_pass_rate):
    """A word if the run has lost what it had, else ''. Announced, never hidden."""
    if best_pass_rate >= 0.2 and record["pass_rate"] < best_pass_rate / 2:
        return "  COLLAPSED? pass rate below half its best"
    if record["entropy"] < 1e-4 and record["pass_rate"] < 0.5:
        return "  COLLAPSED? no entropy left"
    return ""


def line(record, steps, seconds_left, best_pass_rate):
    """One aligned line per rollout batch."""
    def short(x, digits=2):
        return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"

    def small(x):
        return f"{x:.1e}".replace("e-0", "e-")

    parts, flips = record["reward_parts"], record["flip_rate"]
    named = "  ".join(f"{name} {short(mean)}" for name, mean in parts.items())
    low, high = record["clip_low"], record["clip_high"]
    seconds = sum(record[f"seconds_{lap}"] for lap in ("rollout", "logp", "update"))
    words = [
        f"batch {record['step']:{len(str(steps))}}/{steps}", f"reward {short(record['reward'])}",
        f"({named})" if len(parts) > 1 else "", f"pass {short(record['pass_rate'])}",
        f"len {record['length']:5.1f}",
        f"clip {short(low + high)} (low {short(low)} high {short(high)})",
        f"var log w {small(record['log_w_var'])} log s {small(record['log_s_var'])}",
        "" if flips is None else f"flips {flips:5.1%}", f"ppl {short(record['perplexity_new'], 3)}",
        f"|g| {short(record['grad_norm'])}", f"{seconds:.1f} s", f"{seconds_left:.0f} s left"]
    skipped = f"  {record['skipped']} bad update(s) skipped" if record["skipped"] else ""
    return "  ".join(filter(None, words)) + collapse(record, best_pass_rate) + skipped


def log(args, folder, record, rollout, problems, rewards, progress, clock):
    """The record to metrics.jsonl, the first responses to samples.jsonl, a line to the screen."""
    if rank():
        return
    left, G = clock.seconds_left(record["step"]), rollout.group_size
    firsts = [{"prompt": problem.prompt, "response": rollout.texts[i * G],
               "reward": rewards[i * G].item()} for i, problem in enumerate(problems[:2])]
    run.append(folder / "metrics.jsonl", record)
    run.append(folder / "samples.jsonl", {"step": record["step"], "samples": firsts})
    trackers.report(args, folder, record)
    print(line(record, args.steps, left, progress["best_pass_rate"]), flush=True)


def read_metrics(folder):
    """The whole lines of a run's metrics.jsonl; says on the error stream what it skipped.

    Raises ValueError if there is nothing to read.
    """
    file = folder / "metrics.jsonl"
    if not folder.is_dir():
        beside = sorted(f.parent.name for f in folder.parent.glob("*/metrics.jsonl"))[:8]
        others = f"; in {folder.parent}/ there are: {', '.join(beside)}" if beside else ""
        raise ValueError(f"there is no run folder {folder}{others}")
    if not file.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl: it is not a run, or has not finished "
                         "its first rollout batch")
    records, skipped = [], []
    for number, text in enumerate(file.read_text(errors="replace").splitlines(), 1):
        try:
            record = json.loads(text)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError):
            skipped.append(str(number))
    if skipped:
        print(f"eval.py: {file}: skipped {len(skipped)} line(s) that are cut off or are no "
              f"metrics: {', '.join(skipped[:5])}", file=sys.stderr)
    if not records:
        raise ValueError(f"{file} holds no whole line: nothing to draw")
    return records


# -------------------------------------------------------------------------------- before and after

def say(text):
    """To the screen, from one process."""
    if text and rank() == 0:
        print(text)


def plan(args, folder, task, device):
    """What this run will do, in a few lines."""
    model, after = args.model_name_or_path, ""
    if not model:
        model = (f"a tiny Mixture of Experts ({args.num_hidden_layers} layers, {args.num_experts} "
                 f"experts, top-{args.num_experts_per_tok})")
        after = "; the cold start before it takes about half a minute on two CPU cores, once"
    band = ""
    if args.epsilon is not None:
        band = f", band [1 - {args.epsilon:g}, 1 + {args.epsilon_high:g}]"
    return "\n".join([
        f"{args.algorithm} teaches {model}: {task.name} ({len(task.train)} queries, "
        f"{len(task.test)} held out), on {device}{after}",
        f"{args.steps} rollout batches of {args.prompts_per_step} queries x {args.num_generations} "
        f"responses, {args.steps_per_generation} mini-batches each{band}; numbers go to "
        f"{folder}/metrics.jsonl", *task.notes])


def scores(answers):
    """answers: {"sampled": ..., "greedy": ...}, each as eval.evaluate returns it."""
    mean, low, high = answers["sampled"]["pass_at_1"]
    greedy, _, _ = answers["greedy"]["pass_at_1"]
    return f"held-out pass@1 {mean:.3f} [{low:.3f}, {high:.3f}], greedy {greedy:.3f}"


def first_scores(answers, seconds):
    """What is said once the starting policy was evaluated: "" if it was not."""
    return f"before: {scores(answers)}   ({seconds:.0f} s)\n" if answers else ""


def report(args, folder, task, before, after, seconds):
    """Before and after, two transcripts, and what to try next; summary.json."""
    if rank():
        return
    summary, both = {"seconds": seconds, "steps": args.steps}, {"before": before, "after": after}
    if after:
        for when, answers in both.items():
            mean, *interval = answers["sampled"]["pass_at_1"]
            summary |= {f"pass_at_1_{when}": mean, f"interval_{when}": interval,
                        f"greedy_{when}": answers["greedy"]["pass_at_1"][0]}
        for i, problem in enumerate(task.test[:2]):
            print(f"\nquery   {problem.prompt.strip()}   (right: {problem.answer})")
            for when, answers in both.items():
                right = answers["sampled"]["rewards"][i][0] >= 1
                text = answers["sampled"]["texts"][i][0]
                print(f"{when:7} {text!r} {'right' if right else 'wrong'}")
        print(f"\nbefore: {scores(before)}\nafter:  {scores(after)}")
    run.write_text(folder / "summary.json", json.dumps(summary, indent=1))
    view = f"  {f'python eval.py view {folder}':<50}# which tokens does the clip take away?\n"
    same = "the same with" if args.model_name_or_path else "python train.py"
    print(f"{seconds:.0f} s; metrics, samples and the checkpoint are in {folder}/\n\n"
          "worth trying next:\n"
          f"{view if args.save_tokens else ''}"
          f"  {f'python eval.py dashboard {folder}':<50}# the run's curves\n"
          f"  {f'{same} --algorithm grpo':<50}# the token-level relative, from the same start\n"
          f"  {f'{same} --epsilon 0.2 --epsilon_high 0.27':<50}"
          "# GSPO with GRPO's band: what does the narrow one do?")
