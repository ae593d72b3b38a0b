"""Metrics: the record of each rollout batch in metrics.jsonl, its line on the screen, and the
tokens for `eval.py view`.

Old and new log-probs are compared on all loss tokens of the last mini-batch, after its update. At
that point the policy is furthest from the policy that sampled. Clip shares are shares of loss
tokens, averaged over all mini-batches, as in the papers.
"""

import math
import time

import torch

from losses import STATISTICS
from session import checkpoints, screen
from plumbing.parallel import processes
from plumbing.speed.graphs import guard
from ratios import cross_entropy, masked_mean, ratio_stats, sequence_ratio
from routes import flip_rate, router_shift

ROUNDING = 1e-10  # upper bound on Var[log w] of an unchanged policy that is scored twice in float32
MAX_BAD_STEPS = 3                # the run stops after so many updates in a row that are not finite
MAX_EQUAL_BATCHES = 3            # so many batches in a row with equal rewards are reported
# What helps a policy whose responses are all wrong.
NEVER_RIGHT = ("No response is right; what helps: easier rows, a reward in components, or a few "
               "supervised steps before RL (docs/data.md#a-model-that-is-never-right)")


def rollout_metrics(batch, task, settings):
    """Metrics of the rewards, their components and the lengths of all responses that were sampled,
    those of discarded groups too. A response passes if its first component is at least 1. NaN marks
    a component that a response does not have: it is left out of the component's mean, which is 0 if
    no response has it."""
    sampled = batch.sampled
    G = batch.rollout.group_size
    parts = torch.cat([parts for _, parts in sampled])                              # [n, K]
    rewards = task.total(parts, G)                                                  # [n]
    lengths = torch.cat([rollout.mask.sum(-1) for rollout, _ in sampled]).float()   # [n]
    truncated = torch.cat([rollout.truncated for rollout, _ in sampled])            # [n]
    means = parts.nanmean(0).nan_to_num(nan=0.0).tolist()                           # K
    live = 1.0
    if G > 1:
        signal = [task.groups_with_signal(settings, *one) for one in sampled]
        live = torch.cat(signal).float().mean().item()
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(unbiased=False).item(),
            "reward_parts": dict(zip([*task.component_names, *task.penalties], means)),
            "pass_rate": (parts[:, 0] >= 1).float().mean().item(),
            "length": lengths.mean().item(),
            "inverse_length": masked_mean(1 / lengths, lengths > 0),
            "truncated": truncated.float().mean().item(), "zero_variance_groups": 1 - live,
            "discarded_groups": (len(rewards) - len(batch.problems)) // G}


def update_metrics(updates):
    """The statistics of the updates of a rollout batch, combined: the largest value where
    losses.STATISTICS says "max", else the mean over the updates that have what the statistic is
    averaged over (loss tokens, tokens with A not 0), 0 if none has. Entries that losses.STATISTICS
    marks as counts are left out: they are weights for averaging the others."""
    flags = ("skipped", "overflow", "empty")
    before = [name for name in STATISTICS if name.startswith("signal_")]   # each step has its own
    names = [name for name in updates[0] if STATISTICS.get(name) != "count"
             and name not in (*flags, *before)]
    record = {name: over_updates(name, updates) for name in names}
    per_update = ("clip_low", "clip_high", "clip_signal", "grad_norm", *before)
    first = next((u for u in updates if not u["empty"]), updates[0])
    return record | {
        # before the first update the two policies are the same: log s is what rounding makes of 0
        "log_s_noise": math.sqrt(first["log_s_var"] + first["log_s_mean"] ** 2),
        "skipped": sum(u["skipped"] for u in updates),
        "overflows": sum(u["overflow"] for u in updates),
        "empty_minibatches": sum(u["empty"] for u in updates),
        "minibatches": [{name: u[name] for name in per_update} for u in updates]}


def over_updates(name, updates):
    """One statistic of a rollout batch, as update_metrics says."""
    how = STATISTICS.get(name)
    if how == "max":
        return max(u[name] for u in updates)
    count = "signal_tokens" if how == "signal_tokens" else "tokens"
    values = [u[name] for u in updates if u[count]]
    return sum(values) / max(1, len(values))


def policy_metrics(old_logp, new, mask):
    """Compare the old and the new policy on the same responses: how far they are apart, and GSPO's
    s as a ratio of perplexities and as exp(ΔH). old_logp, mask [B, T]; new: Scores."""
    rows = mask.any(-1)                                      # [B] those with loss tokens
    old_h = cross_entropy(old_logp, mask)                                           # [B]
    new_h = cross_entropy(new.logp, mask)                                           # [B]
    s = sequence_ratio(new.logp, old_logp, mask)                                    # [B]
    stats = {name: x.item() for name, x in ratio_stats(new.logp, old_logp, mask).items()}
    record = {name: x for name, x in stats.items() if STATISTICS[name] != "count"}
    changed = stats["log_w_var"] > ROUNDING
    record["variance_factor"] = stats["log_s_var"] / stats["log_w_var"] if changed else None
    return {**record, "perplexity_old": masked_mean(old_h.exp(), rows),
            "perplexity_new": masked_mean(new_h.exp(), rows),
            "delta_h": masked_mean(old_h - new_h, rows),
            # 0 for an empty row
            "equivalence_error": (s - old_h.exp() / new_h.exp()).abs().max().item(),
            "entropy": masked_mean(new.entropy, mask)}


def mismatch_kl(old_logp, sampler_logp, mask):
    """KL(sampler || trainer) per token in nats, by the estimator that is never negative:
    e^d - 1 - d, d = log π_old - log π_sampler."""
    d = old_logp - sampler_logp                                                     # [B, T]
    return masked_mean(torch.expm1(d) - d, mask)


def free_routes(mini, new):
    """(old, new): what the routers choose by themselves under both policies, Pass [L, B, T, ·]
    each, also where a feature forces other experts; None for what was not recorded."""
    return mini.free_routes or mini.routes, mini.new_free_routes or new.routes


def batch_record(settings, task, batch, mini, new, updates, metrics_hooks):
    """The record of a rollout batch in metrics.jsonl. mini: its last mini-batch; new: the Scores of
    that mini-batch under the new policy; updates: the statistics of every optimizer step;
    metrics_hooks: the features' `metrics`."""
    rollout = batch.rollout
    mask = rollout.mask
    feature_metrics = {}
    for metrics in metrics_hooks:
        feature_metrics |= metrics(batch, mini, new)
    if tensors := [name for name, x in feature_metrics.items() if isinstance(x, torch.Tensor)]:
        raise ValueError(f"metric {tensors[0]} of a feature is a tensor: return its .item()")
    flips = None
    free = free_routes(mini, new)
    if all(free) and mini.rollout.mask.any():
        flips = flip_rate(*(x.indices for x in free), mini.rollout.mask).tolist()
    mismatch = None
    if settings.old_logp == "recompute":
        mismatch = mismatch_kl(batch.old_logp, rollout.sampler_logp, mask)
    return {"step": batch.step, **rollout_metrics(batch, task, settings),
            **update_metrics(updates),
            **policy_metrics(mini.old_logp, new, mini.rollout.mask),
            "mismatch_kl": mismatch, "cuda_graphs": rollout.replayed, **feature_metrics,
            "flip_rate": sum(flips) / len(flips) if flips else None, "flip_rate_per_layer": flips}


class Recorder:
    """Records every rollout batch: a line in metrics.jsonl, a line on the screen, the first
    responses in samples.jsonl, and the tokens of one group in tokens.jsonl for `eval.py view`."""

    def __init__(self, folder, task, learner, progress, start):
        """progress: the run's Progress, which this object updates; start: number of the last batch
        before this run."""
        self.folder = folder
        self.task = task
        self.learner = learner
        self.settings = learner.settings
        self.clips_s = learner.settings.row.clips_s
        self.progress = progress
        self.start = start
        self.errors = 0                  # of the reward functions, in the batches before
        self.right_noted = False         # whether describe_right was printed
        self.began = time.perf_counter()
        self.first = processes.rank() == 0                   # the process that writes
        if self.settings.cuda_graphs:
            guard.resume(folder / "metrics.jsonl")
        if start == 0:
            self.held_out(0, progress.before)

    def report(self, record):
        """Give a record to the features that change it, or send it elsewhere."""
        for hook in self.learner.features.hooks["report"]:
            hook(self.folder, record)

    def held_out(self, step, answers):
        """Report the result of eval.held_out before or after the run; None: there is none."""
        record = self.held_out_record(step, answers)
        if record and self.first:
            self.report({"step": step, **record})

    def held_out_record(self, step, answers):
        """The entries of metrics.jsonl for what eval.held_out returned after batch `step` (0: the
        policy before training); {} for None. Remembers the first of the batches with the highest
        pass@1; of those with the same pass@1, the one with the highest mean reward."""
        if not answers:
            return {}
        sampled = answers["sampled"]
        score = (sampled["pass_at_1"][0], sampled["reward"][0], -step)
        self.progress.best_score = max(self.progress.best_score, score)
        return {"pass_at_1": sampled["pass_at_1"], "held_out_reward": sampled["reward"],
                "held_out_parts": sampled["reward_parts"]}

    def stop_if_bad(self, step, updates):
        """Stop the run after MAX_BAD_STEPS updates in a row that were not finite."""
        for stats in updates:
            skipped = stats["skipped"] and not stats["overflow"]
            bad = self.progress.bad = self.progress.bad + 1 if skipped else 0
            if bad >= MAX_BAD_STEPS:
                raise SystemExit(
                    f"train.py: {bad} updates in a row had a loss or gradient that is not finite; "
                    f"stopped in batch {step}. The last checkpoint is intact; try a lower "
                    "--learning_rate")

    def log(self, batch, mini, new, updates, times, held):
        """Record a completed rollout batch. updates: what train.update returned for each
        mini-batch. times: when the batch began, was sampled, scored and used, in seconds. held: the
        result of eval.held_out after it, or None."""
        self.stop_if_bad(batch.step, updates)
        settings = self.settings
        progress = self.progress
        hooks = self.learner.features.hooks
        record = batch_record(settings, self.task, batch, mini, new, updates, hooks["metrics"])
        if settings.cuda_graphs:
            guard.watch(record["mismatch_kl"], record["cuda_graphs"])
        if self.clips_s:
            record |= self.clip_range_metrics(record["log_w_var"], record["log_s_var"])
        progress.best_pass_rate = max(progress.best_pass_rate, record["pass_rate"])
        progress.collapsed = describe_collapse(record, progress.best_pass_rate)
        progress.equal = 0 if batch.advantages.any() else progress.equal + 1
        errors = sum(f.errors.total() for f in self.task.reward_functions)   # in this process
        progress.verifier_errors += sum(self.learner.gather([errors - self.errors]))
        self.errors = errors
        tokens = int(batch.rollout.mask.sum())
        phases = ("seconds_rollout", "seconds_logp", "seconds_update")
        record |= {
            "lr": self.learner.optimizer.param_groups[0]["lr"],
            "verifier_errors": progress.verifier_errors,
            **{name: end - start for name, start, end in zip(phases, times, times[1:])},
            "tokens_per_second": tokens / (times[-1] - times[0]),
            "rollout_tokens_per_second": tokens / (times[1] - times[0]),
            **self.held_out_record(batch.step, held)}
        if self.first:
            self.write(record, batch, mini, new)
            if held:
                print(f"after batch {batch.step}: {screen.format_scores(held)}", flush=True)

    def write(self, record, batch, mini, new):
        """Write the record, the samples and the tokens to the run's files, and print the line."""
        settings = self.settings
        step = batch.step
        G = batch.rollout.group_size
        firsts = [{"prompt": problem.prompt, "response": batch.rollout.texts[i * G],
                   "reward": round(batch.rewards[i * G].item(), 7)}
                  for i, problem in enumerate(batch.problems[:2 * G:G])]
        for i, game in enumerate(batch.rollout.games[:2 * G:G]):
            firsts[i] |= {"turns": game.messages, "turn_rewards": game.rewards}
        self.report(record)
        checkpoints.append(self.folder / "metrics.jsonl", record)
        checkpoints.append(self.folder / "samples.jsonl", {"step": step, "samples": firsts})
        if settings.save_tokens:
            group = group_record(mini, new, self.learner, self.task)
            checkpoints.append(self.folder / "tokens.jsonl", group)
        left = (time.perf_counter() - self.began) / (step - self.start) * (settings.steps - step)
        print(format_line(record, settings.steps, left, self.progress.collapsed), flush=True)
        if self.progress.equal == MAX_EQUAL_BATCHES:
            note = explain_equal_rewards(firsts[0], record, what_helps(batch.rollout.games))
            print(note, flush=True)
        if not self.right_noted and (note := describe_right(batch.parts, record["reward_parts"])):
            print(note, flush=True)
            self.right_noted = True

    def clip_range_metrics(self, log_w_var, log_s_var):
        """{"epsilon", "epsilon_over_std"} for an objective that clips s. epsilon is the mean of the
        two ends of the clip range. epsilon_over_std is None if log s has no spread, or only that of
        rounding."""
        epsilon = (self.settings.epsilon + self.settings.epsilon_high) / 2
        std = math.sqrt(log_s_var)
        measured = std > 0 and log_w_var > ROUNDING
        return {"epsilon": epsilon, "epsilon_over_std": epsilon / std if measured else None}


# -------------------------------------------------------------------------- a line on the screen

def describe_collapse(record, best_pass_rate):
    """How the run has collapsed, or ''."""
    if best_pass_rate >= 0.2 and record["pass_rate"] < best_pass_rate / 2:
        return "pass rate below half its best"
    entropy = record["entropy"]
    if entropy is not None and entropy < 1e-4 and record["pass_rate"] < 0.5:
        return "no entropy left"
    return ""


def what_helps(games):
    """What helps if no response is right. games: those of the batch, if it has an environment."""
    unheard = [game for game in games if not game.rewards]   # the environment has read no turn
    if 2 * len(unheard) <= len(games):
        return NEVER_RIGHT
    return (f"The first turn used all {max(game.length for game in unheard)} tokens in "
            f"{len(unheard)} of {len(games)} responses: end a turn with --stop, or cut it with "
            "--max_turn_length (docs/data.md#an-environment)")


def describe_right(parts, names):
    """A note if no response is right by the first component of its reward while another component
    reaches 1, else "". parts [B, K]: the components; names: of the K, in this order."""
    first, *others = parts.nan_to_num(0.0).max(0).values.tolist()      # NaN: it has none
    if first >= 1 or max(others, default=0) < 1:
        return ""
    name, *rest = names
    reaches = next(other for other, most in zip(rest, others) if most >= 1)
    return (f"note: no response counts as right: that is decided by the first component of the "
            f"reward, {name}, which stays below 1; {reaches} reaches 1: if it means right, put it "
            "first")


def explain_equal_rewards(first, record, helps):
    """The note after MAX_EQUAL_BATCHES batches with equal rewards. first: a sample of the last one;
    record: its line of metrics.jsonl; helps: what_helps of it."""
    where = "" if record["reward_std"] == 0 else " within every group"
    prompt, response = (first[name].strip() for name in ("prompt", "response"))
    helps = "Are the problems too easy?" if record["pass_rate"] else helps
    return (f"note: in the last {MAX_EQUAL_BATCHES} batches all rewards were equal{where}, so "
            f"nothing is learned; the first response of this batch, with reward "
            f"{first['reward']:g}: {prompt[-100:]!r} -> {response[:200]!r}; does the reward "
            f"function read such responses? {helps}")


def format_line(record, steps, seconds_left, collapsed):
    """The line of a rollout batch on the screen. collapsed: what describe_collapse returned."""
    parts = record["reward_parts"]
    flips = record["flip_rate"]
    perplexity = record["perplexity_new"]
    named = "  ".join(f"{name} {mean:.2f}" for name, mean in parts.items())
    low = record["clip_low"]
    high = record["clip_high"]
    seconds = sum(record[f"seconds_{phase}"] for phase in ("rollout", "logp", "update"))
    bad = record["skipped"] - record["overflows"]
    columns = [
        f"batch {record['step']:{len(str(steps))}}/{steps}", f"reward {record['reward']:.2f}",
        f"({named})" if len(parts) > 1 else "", f"pass {record['pass_rate']:.2f}",
        f"zero-var {record['zero_variance_groups']:.2f}", f"len {record['length']:5.1f}",
        f"clip {low + high:.2f} (low {low:.2f} high {high:.2f})",
        f"var log w {record['log_w_var']:.1e} log s {record['log_s_var']:.1e}",
        "" if flips is None else f"flips {flips:5.1%}",
        "" if perplexity is None else f"ppl {perplexity:.3f}",
        f"|g| {record['grad_norm']:.2f}", f"{seconds:.1f} s", f"{seconds_left:.0f} s left",
        f"COLLAPSED? {collapsed}" if collapsed else "",
        f"{bad} bad update(s) skipped" if bad else ""]
    return "  ".join(filter(None, columns))


# ---------------------------------------------------------------------- one group's tokens

def group_record(mini, new, learner, task):
    """A line of tokens.jsonl: the G responses of the first group of a mini-batch in which not all
    advantages are 0. new: the mini-batch's Scores under the policy after the updates; nothing is
    computed again.

    old_logp, new_logp        [G, T] under the policy before and after the batch's updates
    rewards, advantages       [G]; advantages also [G, T]
    first_error               G token indices: the first wrong step of a response, or None
    old_experts, new_experts  [L, G, T, K] chosen before and after the updates
    router_shift              [G, T] RSPO's γ̃
    factors                   [G, T] mismatch weights and high-entropy mask
    kept                      [G][T] lists of texts: the tokens that top-p and top-k left
    cut_off                   [G] whether a response has no loss token

    A response ends at its last loss token. Tokens that were inserted before it have mask 0.
    Numbers are rounded to 1e-7, far less than GSPO's clip range of 3e-4. Numbers that are not
    finite become null.
    """
    rows = find_first_group(mini)                                                   # [G]
    shown = mini.take(rows)
    rollout = shown.rollout
    ends = response_ends(rollout)
    mask = rollout.mask.tolist()                                                    # [G][T]
    ids = cut(rollout.response_ids.tolist(), ends)
    decode = learner.tokenizer.decode
    prompts = [decode(ids[mask].tolist())                    # equal, unless reset makes them differ
               for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]
    A = shown.advantages
    record = {
        "step": mini.step, "prompt": "\n".join(dict.fromkeys(prompts)),
        "ids": ids, "tokens": [[decode([token]) for token in row] for row in ids],
        "mask": [[int(m) for m in row] for row in cut(mask, ends)],
        "rewards": rounded(shown.rewards.tolist()),
        "advantages": rounded(A.tolist()) if A.dim() == 1 else cut(A, ends),
        "cut_off": [not any(row) for row in mask]}
    if task.first_error:
        record["first_error"] = [*map(task.first_error, rollout.texts, shown.problems)]
    values = token_values(mini, new, rows, shown)
    for tokens in learner.features.hooks["tokens"]:
        values |= tokens(rollout)
    return record | {name: cut(x, ends) for name, x in values.items()}


def find_first_group(mini):
    """The responses [G] of the first group of a mini-batch in which not all advantages are 0, or
    of its first group."""
    G = mini.rollout.group_size
    moves = mini.advantages.reshape(len(mini.problems) // G, -1).ne(0).any(-1)      # [Q]
    group = int(moves.int().argmax())
    return torch.arange(group * G, (group + 1) * G)


def token_values(mini, new, rows, shown):
    """{name: [G, T], experts [L, G, T, K]} of the responses `rows` [G] of a mini-batch, which are
    `shown`."""
    values = {"old_logp": shown.old_logp, "new_logp": new.logp[rows],
              "sampler_logp": shown.rollout.sampler_logp}
    free = free_routes(mini, new)
    if all(free):
        values["old_experts"], values["new_experts"] = (x.indices[:, rows] for x in free)
        values["router_shift"] = router_shift(
            shown.routes.logits, new.routes.logits[:, rows], shown.routes.indices,
            shown.rollout.mask)
    if shown.factors is not None:
        values["factors"] = shown.factors
    return values


def response_ends(rollout):
    """The place after the last loss token of each response; T for one that reached the length
    limit, even if its tokens left the loss."""
    rows = zip(rollout.mask.tolist(), rollout.truncated.tolist())
    return [len(row) - row[::-1].index(True) if any(row) else len(row) if cut_off else 0
            for row, cut_off in rows]


def cut(x, ends):
    """What each response has of x up to its end, as lists."""
    if isinstance(x, list):
        return [row[:end] for row, end in zip(x, ends)]
    if x.dim() == 4:
        return [x[:, i, :end].tolist() for i, end in enumerate(ends)]               # [L, t, K] each
    return [rounded(row) for row in cut(x.tolist(), ends)]


def rounded(values):
    return [round(x, 7) if math.isfinite(x) else None for x in values]
