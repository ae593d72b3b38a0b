"""Batches: a rollout with all that an update needs of it, cut and joined together.

A batch is cut three ways: into mini-batches of whole groups (one optimiser step each), into the
micro-batches that fit into memory, and into the shares of several processes. The weights per token
are made before the cuts (losses.token_weights), so that no cut changes a loss.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from advantages import has_signal
from losses import token_weights
from plumbing.speed import processes
from plumbing.model.actor import Forward
from plumbing.speed.cutting import (cat_routes, concat, cut_routes, prompts_of, response_routes,
                              rows_between, rows_of)
from plumbing.loop.replay import replayed
from rollout import Rollout
from routes import Routes, routers_of


@dataclass
class Batch:
    rollout: Rollout
    tensors: dict            # by name, [B, T] or [B]: old_logp, advantages, ref_logp, weights ...
    routes: Routes | None = None

    def __getitem__(self, name):
        """A tensor by name, None if this batch has none of that name."""
        return self.tensors.get(name)

    def prompts(self, index):
        """The groups of the prompts in `index` [q], in that order."""
        return self.cut(prompts_of(self.rollout, index), rows_of(self.rollout, index))

    def rows(self, start, stop):
        """Rows start:stop: whole groups, or part of one group."""
        return self.cut(rows_between(self.rollout, start, stop), torch.arange(start, stop))

    def cut(self, rollout, rows):
        rows = rows.to(rollout.mask.device, non_blocking=True)
        tensors = {name: tensor[rows] for name, tensor in self.tensors.items()}
        return Batch(rollout, tensors, cut_routes(self.routes, rows, self.rollout))


def micro_batch_rows(args):
    """Rows per forward pass of an update: whole groups, or a part of one."""
    prompts = args.prompts_per_step // args.steps_per_generation // processes.world()
    return args.micro_batch_size or prompts * args.num_generations


def micro_batches(args, batch):
    """This process's share of a mini-batch, in pieces that fit into memory."""
    own, size = processes.share(len(batch.rollout.mask)), micro_batch_rows(args)
    for start in range(own.start, own.stop, size):
        yield batch.rows(start, min(start + size, own.stop))


def with_weights(args, batch):
    """The batch with `weights` (the objective's reduction), `per_token` (a mean over tokens), and
    `factors` of the surrogate alone, if any: mismatch weights, tokens of high entropy."""
    mask = batch.rollout.mask
    weights = token_weights(mask, args.reduction, group_size=args.num_generations,
                            max_length=args.max_completion_length)                  # [B, T]
    per_token = token_weights(mask, "token-mean")                                   # [B, T]
    tensors = batch.tensors | {"weights": weights, "per_token": per_token}
    factors = [batch[name] for name in ("mismatch", "high_entropy") if batch[name] is not None]
    if factors:
        tensors["factors"] = math.prod(factors) * mask.float()                      # [B, T]
    return replace(batch, tensors=tensors)


def with_gradient(args, batch):
    """The batch without groups of equal rewards, where that changes no gradient: A = 0 everywhere,
    no other term in the loss. One group stays, so that there is a forward."""
    others = args.beta or args.entropy_coef or args.router_aux_loss_coef
    per_answer = args.advantage in ("group", "leave_one_out")
    mask, G = batch.rollout.mask, args.num_generations
    signal = batch["advantages"].reshape(len(mask), -1).ne(0).any(-1)               # [B]
    # The one time that an update waits before its end: for these, and the loss tokens per response.
    signal, tokens = torch.stack([signal, mask.sum(-1)]).tolist()                   # B ints each
    batch = replace(batch, rollout=replace(batch.rollout, tokens=tokens))
    if args.plain or others or not per_answer or processes.world() > 1:
        return batch
    live = [i // G for i in range(0, len(mask), G) if any(signal[i:i + G])]         # [q]
    return batch.prompts(torch.tensor(live or [0]))


def part_stats(stats, loss, terms):
    """A micro-batch's stats, its losses among them."""
    value_loss = terms.get("critic", torch.zeros_like(loss))
    return stats | {"loss": loss.detach(), "value_loss": value_loss.detach()}


def clip_gradient(optimizer, limit):
    """Clip the norm of the gradient to `limit` (0: do not). Returns what it was, a tensor []."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, limit or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # shards have one


def whole_stats(parts, mask, grad_norm):
    """The stats of a mini-batch from those of the micro-batches of all processes. Clip shares count
    all its loss tokens, mask [B, T]; losses add up; ratios are those of the groups computed. Here,
    once, the end of an update is waited for."""
    parts = [part for process in processes.gather(parts) for part in process]
    stats = combine_stats(parts)
    for name in ("clip_low", "clip_high"):
        stats[name] = stats[name] * stats["tokens"] / mask.sum()
    losses = {name: sum(part[name] for part in parts) for name in ("loss", "value_loss")}
    stats |= losses | {"grad_norm": grad_norm}
    values = [torch.as_tensor(x, dtype=torch.float64, device=mask.device) for x in stats.values()]
    return dict(zip(stats, torch.stack(values).tolist()))


def combine_stats(parts):
    """The stats of a mini-batch from those of its micro-batches, exactly."""
    total = {n: sum(p[n] for p in parts) for n in ("tokens", "signal_tokens", "answers")}

    def mean(of, count):
        return sum(of(p) * p[count] for p in parts) / total[count].clamp(min=1)

    for name, count in (("clip_low", "tokens"), ("clip_high", "tokens"),
                        ("clip_signal", "signal_tokens")):
        total[name] = mean(lambda p: p[name], count)
    for x, count in (("log_w", "tokens"), ("log_s", "answers")):
        total[f"{x}_mean"] = centre = mean(lambda p: p[f"{x}_mean"], count)
        total[f"{x}_var"] = mean(lambda p: p[f"{x}_var"] + (p[f"{x}_mean"] - centre) ** 2, count)
    return total | {"ratio_max": torch.stack([p["ratio_max"] for p in parts]).amax()}


@torch.no_grad()
def score(args, scorer, policy, rollout, entropy=False, record=None, replay=False):
    """A rollout under a policy, as one Forward; every process computes its share. record: routes
    too; None: where there are any, as they are compared, replayed or part of the loss. replay: with
    the sampler's routes, if --routing_replay says so."""
    own = processes.share(len(rollout.mask))
    if record is None:
        record = bool(routers_of(policy)) and args.old_logp == "recompute"
    # Without a backward as many rows fit as while sampling; in bfloat16 they are as many as in an
    # update, to be rounded as there.
    size = micro_batch_rows(args) if args.micro_batch_size or args.bf16 else len(rollout.mask)
    parts = []
    for start in range(own.start, own.stop, size):
        part = rows_between(rollout, start, min(start + size, own.stop))
        with replayed(args, policy, part) if replay else nullcontext():
            parts.append(scorer(part, temperature=args.temperature, entropy=entropy, record=record))
    parts = [part for process in processes.gather(parts) for part in process]
    *tensors, routes = zip(*parts)
    tensors = [None if x[0] is None else torch.cat(x) for x in tensors]             # [B, T]
    return Forward(*tensors, cat_routes(routes) if record else None)


def old_and_new(batch, routes):
    """(old, new) routes that predict the responses of a batch: indices [L, B, T, K], logits
    [L, B, T, E] each."""
    return tuple(response_routes(r, batch.rollout) for r in (batch.routes, routes))


def keep_signal(rounds, wanted, total, last):
    """DAPO's dynamic sampling: of rounds of (rollout, problems, parts [B, K]) the first `wanted`
    groups that hold different rewards total(parts) [B]; None if there are not enough yet, filled up
    with others in the last round."""
    found = []
    for number, (rollout, problems, parts) in enumerate(rounds, 1):
        signal = has_signal(total(parts), rollout.group_size)                       # [Q]
        keep = signal.nonzero().squeeze(-1)                                         # [q]
        if last and number == len(rounds):
            keep = signal.int().argsort(descending=True, stable=True)               # [Q]
        if len(keep):
            rows = rows_of(rollout, keep).cpu()
            found.append((prompts_of(rollout, keep), [problems[i] for i in keep], parts[rows]))
    if sum(len(problems) for _, problems, _ in found) < wanted:
        return None
    rows = wanted * rounds[0][0].group_size
    return (rows_between(concat([f[0] for f in found]), 0, rows),
            [p for f in found for p in f[1]][:wanted], torch.cat([f[2] for f in found])[:rows])
