"""Metrics: the record of each rollout batch in metrics.jsonl, its line on the screen, and the
tokens for `eval.py view`.

Old and new log-probs are compared on all loss tokens of the last mini-batch, after its update. At
that point the policy is furthest from the policy that sampled. Clip shares are shares of loss
tokens, averaged over all mini-batches, as in the papers.
"""

import json
import math

import torch

from advantages import groups_with_signal
from losses import STATISTICS
from plumbing.parallel import processes
from ratios import cross_entropy, masked_mean, ratio_stats
from routes import flip_rate, router_shift

PATIENCE = 3      # rollout batches in a row that teach little, after which a line says so
CUT = 0.3         # share of responses cut off above which a batch teaches little
ROUNDING = 1e-10  # upper bound on Var[log w] of an unchanged policy that is scored twice in float32


# ----------------------------------------------------------------------------- the record's parts

def rollout_metrics(batch, settings, first):
    """Metrics of the rewards, their components and the lengths of all responses that were sampled,
    those of discarded groups too, and KL(sampler || trainer) of the batch, per token in nats: with
    --old_logp sampler by the statistics of the `first` update, over the groups that it scores. NaN
    marks a component that a response does not have: it is left out of the component's mean."""
    task, sampled = batch.task, batch.sampled
    G = settings.num_generations
    parts = torch.cat([parts for _, parts in sampled])                              # [n, K]
    rewards = task.total(parts).float()                                             # [n]
    graded = rewards[~rewards.isnan()]
    lengths = torch.cat([rollout.mask.sum(-1) for rollout, _ in sampled]).float()   # [n]
    truncated = torch.cat([rollout.truncated for rollout, _ in sampled])            # [n]
    means = parts.float().nanmean(0).nan_to_num().tolist()                                  # K
    size = batch.rollout.group_size                          # of those that are trained
    live = 1.0
    if G > 1:
        live = groups_with_signal(settings.advantage, task.total(batch.parts), size,
                                  batch.advantages)
        live = live.float().mean().item()
    kl = -first["log_w_mean"]
    if settings.old_logp == "recompute":
        d = batch.old_logp - batch.rollout.sampler_logp                             # [B, T]
        kl = masked_mean(torch.expm1(d) - d, batch.rollout.mask)     # an estimate that is never < 0
    return {"reward": graded.mean().nan_to_num().item(),
            "reward_std": graded.std(unbiased=False).nan_to_num().item(),
            "reward_parts": dict(
                zip([*task.component_names, *task.penalties], means, strict=True)),
            "pass_rate": task.right(parts, G).float().mean().item(),
            "length": lengths.mean().item(),
            "inverse_length": masked_mean(1 / lengths, lengths > 0),
            "truncated": truncated.float().mean().item(), "zero_variance_groups": 1 - live,
            "discarded_groups": len(rewards) // G - len(batch.problems) // size,
            "mismatch_kl": kl}


def clip_range_metrics(batch, settings):
    """The clip range of the batch, as policy_loss takes it; None: an open end, or no range."""
    ends = zip(("epsilon", "epsilon_high"), settings.row.clip_range(*batch.clip_range))
    return {name: end if end is not None and math.isfinite(end) else None for name, end in ends}


def update_metrics(updates):
    """The statistics of the updates of a rollout batch, combined: the largest value where
    losses.STATISTICS says "max", else the mean over the updates that have loss tokens (clip_signal:
    with A not 0), and some of every update alone ("minibatches")."""
    counts = [name for name, over in STATISTICS.items() if over == "count"]
    per_update = ("clip_low", "clip_high", "clip_signal", "signal_tokens", "log_s_var", "grad_norm")
    record = {}
    for name in [name for name in updates[0] if name not in counts]:
        count = "signal_tokens" if name == "clip_signal" else "tokens"
        values = [u[name] for u in updates if u[count]]
        record[name] = sum(values) / max(1, len(values))
    return record | {
        "ratio_max": max(u["ratio_max"] for u in updates),
        "skipped": sum(u["skipped"] for u in updates),
        "minibatches": [{name: u[name] for name in per_update} for u in updates]}


def policy_metrics(old_logp, new, mask):
    """Compare the old and the new policy on the same responses: how far they are apart, and GSPO's
    s as a ratio of perplexities and as exp(ΔH). old_logp, mask [B, T]; new: Scores."""
    rows = mask.any(-1)                                      # [B] those with loss tokens
    old_h = cross_entropy(old_logp, mask)                                           # [B]
    new_h = cross_entropy(new.logp, mask)                                           # [B]
    stats = {name: x.item() for name, x in ratio_stats(new.logp, old_logp, mask).items()
             if STATISTICS[name] != "count"}
    changed = stats["log_w_var"] > ROUNDING
    return stats | {
        "variance_factor": stats["log_s_var"] / stats["log_w_var"] if changed else None,
        "perplexity_old": masked_mean(old_h.exp(), rows),
        "perplexity_new": masked_mean(new_h.exp(), rows),
        "delta_h": masked_mean(old_h - new_h, rows),
        "entropy": masked_mean(new.entropy, mask)}


def route_metrics(mini, new):
    """How many of the routers' choices the updates have changed; None for a dense model."""
    old_routes, new_routes = free_routes(mini, new)
    flips = None
    if old_routes and new_routes and mini.rollout.mask.any():
        flips = flip_rate(old_routes.indices, new_routes.indices, mini.rollout.mask).tolist()
    return {"flip_rate": flips and sum(flips) / len(flips), "flip_rate_per_layer": flips}


def free_routes(mini, new):
    """(old, new): what the routers choose by themselves under both policies, Pass [L, B, T, ·]
    each, also where a feature forces other experts; None for what was not recorded."""
    return mini.free_routes or mini.routes, mini.new_free_routes or new.routes


# ------------------------------------------------------------------------------------- the record

class Recorder:
    """Records every rollout batch: a line in metrics.jsonl, a line on the screen, the first
    responses in samples.jsonl, and the tokens of one group in tokens.jsonl for `eval.py view`."""

    def __init__(self, folder, learner):
        self.folder = folder
        self.learner = learner
        self.settings = learner.settings
        self.errors = self.count_errors()
        self.poor = 0                    # batches in a row that teach little
        self.writes = processes.rank() == 0

    def count_errors(self):
        """Of the reward functions, in all processes, since the run began or went on."""
        return sum(self.learner.gather([f.errors for f in self.learner.task.reward_functions]))

    def log(self, batch, mini, updates, times, held):
        """Record a completed rollout batch. mini: its last mini-batch; updates: the statistics of
        every optimizer step. times: when the batch began, was sampled, scored and used, in seconds.
        held: the result of eval.held_out after it, or None."""
        new = self.learner.score(mini.rollout, entropy=True)     # under the new policy
        record = self.make_record(batch, mini, new, updates, times) | held_out_record(held)
        if self.writes:
            self.write("samples.jsonl", {"step": batch.step, "samples": first_responses(batch)})
            if self.settings.save_tokens:
                self.write("tokens.jsonl", group_record(mini, new, self.learner))
            for report in self.learner.hooks["report"]:
                report(self.folder, record)
            self.write("metrics.jsonl", record)
            print(format_line(record, self.settings.steps), flush=True)
            reason = explain_poor(record)
            self.poor = self.poor + 1 if reason else 0
            if self.poor == PATIENCE:
                print(f"note: {PATIENCE} batches in a row teach little: {reason}")
            if batch.step % max(1, self.settings.steps // 10) == 0:
                print(" " * 8 + describe(first_responses(batch)[0]), flush=True)

    def make_record(self, batch, mini, new, updates, times):
        """The record of a rollout batch in metrics.jsonl, without held-out scores."""
        tokens = int(batch.rollout.mask.sum())
        errors_before, self.errors = self.errors, self.count_errors()
        phases = ("seconds_rollout", "seconds_logp", "seconds_update")
        record = {"step": batch.step, **rollout_metrics(batch, self.settings, updates[0]),
                  **update_metrics(updates),
                  **clip_range_metrics(batch, self.settings),
                  **policy_metrics(mini.old_logp, new, mini.rollout.mask)}
        for metrics in self.learner.hooks["metrics"]:
            record |= metrics(batch, mini, new)
        return record | route_metrics(mini, new) | {         # after what a feature has recorded
            "lr": self.learner.optimizer.param_groups[0]["lr"],
            "verifier_errors": self.errors - errors_before,
            **{name: end - start for name, start, end in zip(phases, times, times[1:])},
            "tokens_per_second": tokens / (times[-1] - times[0])}

    def write(self, name, record):
        """Append one JSON line to a file of the run."""
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def explain_poor(record):
    """Why a batch teaches little, and the flag to look at; None if it does not."""
    if record["truncated"] > CUT:
        return f"{record['truncated']:.0%} of the responses are cut off (--max_completion_length)"
    if record["zero_variance_groups"] == 1:
        return (f"the rewards of every group are equal, {record['pass_rate']:.0%} of the responses "
                "are right (--verifier, --dataset_name)")


def held_out_record(answers):
    """The entries of metrics.jsonl for what eval.held_out returned; {} for None."""
    if not answers:
        return {}
    sampled = answers["sampled"]
    return {"pass_at_1": sampled["pass_at_1"], "held_out_reward": sampled["reward"],
            "held_out_parts": sampled["reward_parts"]}


def first_responses(batch):
    """The first response of the first two groups, for samples.jsonl."""
    rollout = batch.rollout
    rewards = batch.rewards.tolist()
    samples = []
    for i in range(0, len(batch.problems), rollout.group_size)[:2]:
        samples.append({"prompt": batch.problems[i].prompt, "response": rollout.texts[i],
                        "reward": round(rewards[i], 7)})
        if rollout.games:
            samples[-1]["turns"] = rollout.games[i].messages
    return samples


def describe(sample):
    """A line about a response of first_responses."""
    return (f"{sample['prompt'].strip()[-100:]!r} -> {sample['response'][:200]!r}, reward "
            f"{sample['reward']:g}")


def format_line(record, steps):
    """The line of a rollout batch on the screen."""
    seconds = sum(record[f"seconds_{phase}"] for phase in ("rollout", "logp", "update"))
    columns = [
        f"batch {record['step']:{len(str(steps))}}/{steps}", f"reward {record['reward']:.2f}",
        f"pass {record['pass_rate']:.2f}", f"zero-var {record['zero_variance_groups']:.2f}",
        f"len {record['length']:5.1f} cut {record['truncated']:.2f}",
        f"clip_signal {record['clip_signal']:.2f}",
        f"var log w {record['log_w_var']:.1e} log s {record['log_s_var']:.1e}",
        f"|g| {record['grad_norm']:.2f}", f"{seconds:.1f} s"]
    if record["flip_rate"] is not None:
        columns.append(f"flips {record['flip_rate']:5.1%}")
    if record["skipped"]:
        columns.append(f"{record['skipped']} update(s) not finite, skipped")
    return "  ".join(columns)


# ---------------------------------------------------------------------- one group's tokens

def group_record(mini, new, learner):
    """A line of tokens.jsonl: the G responses of the first group of a mini-batch that has a signal.
    new: the mini-batch's Scores under the policy after the updates; nothing is computed again.

    old_logp, new_logp        [G, T] under the policy before and after the batch's updates
    rewards, advantages       [G]; advantages also [G, T]
    first_error               G token indices: the first wrong step of a response, or None
    old_experts, new_experts  [L, G, T, K] chosen before and after the updates
    router_shift              [G, T] RSPO's γ̃
    factors                   [G, T] what scaled the surrogate

    A response ends at its last loss token; one without any is shown whole. Tokens that were
    inserted before it have mask 0.
    """
    G = mini.group_size
    live = mini.advantages.reshape(len(mini.problems) // G, -1).ne(0).any(-1)       # [Q]
    rows = int(live.int().argmax()) * G + torch.arange(G)                           # [G]
    shown = mini.take(rows)
    rollout = shown.rollout
    mask = rollout.mask.int().tolist()                                              # [G][T]
    ends = [max((t + 1 for t, loss_token in enumerate(row) if loss_token), default=len(row))
            for row in mask]
    decode = learner.tokenizer.decode
    values = {
        "tokens": [[decode([token]) for token in row] for row in rollout.response_ids.tolist()],
        "mask": mask, "old_logp": shown.old_logp, "new_logp": new.logp[rows],
        "factors": shown.factors, "advantages": shown.advantages}
    old_routes, new_routes = free_routes(mini, new)
    if old_routes and new_routes:
        values["old_experts"] = old_routes.indices[:, rows]
        values["new_experts"] = new_routes.indices[:, rows]
        values["router_shift"] = router_shift(
            shown.routes.logits, new.routes.logits[:, rows], shown.routes.indices, rollout.mask)
    for tokens in learner.hooks["tokens"]:
        values |= tokens(rollout)
    record = {"step": mini.step, "prompt": decode(rollout.prompt_ids[0][rollout.prompt_mask[0]]),
              "rewards": shown.rewards.tolist()}
    if mini.task.first_error:
        record["first_error"] = [*map(mini.task.first_error, rollout.texts, shown.problems)]
    return record | {name: cut(x, ends) for name, x in values.items() if x is not None}


def cut(x, ends):
    """What each response has of x up to its end, as lists; one number per response is as it is."""
    if isinstance(x, list):
        return [row[:end] for row, end in zip(x, ends)]
    if x.dim() == 1:
        return x.tolist()
    if x.dim() == 4:
        return [x[:, i, :end].tolist() for i, end in enumerate(ends)]               # [L, t, K] each
    return [[round(value, 7) for value in row] for row in cut(x.tolist(), ends)]
