"""Checks: what cannot run is refused in one line before anything is written.

check_values refuses what is impossible by itself, check_combinations what does not go together.
ValueError names the flag and says what would be right.
"""

import difflib
import math
from dataclasses import fields

import torch

from losses import OBJECTIVES, policy_loss
from plumbing.run import trackers


def nearest(word, known):
    """', did you mean X?' if something known is close."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {match[0]}?" if match else ""


def refuse(args, name, must):
    raise ValueError(f"--{name} {getattr(args, name)} {must}")


def check_choice(args, name, known):
    value = getattr(args, name)
    if value not in known:
        refuse(args, name, f"is unknown{nearest(value, known)}; known: {', '.join(known)}")


def check_values(args):
    """Refuse a value that is out of range by itself."""
    for f in fields(args):
        value, limits = getattr(args, f.name), f.metadata
        if isinstance(value, float) and not math.isfinite(value):
            refuse(args, f.name, "is not a finite number")
        if value is None:
            continue
        if "choices" in limits:
            check_choice(args, f.name, limits["choices"])
        if value < limits.get("at_least", value):
            refuse(args, f.name, f"is not at least {limits['at_least']}")
        if "above" in limits and value <= limits["above"]:
            refuse(args, f.name, f"is not above {limits['above']}")
    for name in ("overlong_cache", "entropy_quantile"):
        if getattr(args, name) > 1:
            refuse(args, name, "is not between 0 and 1")
    if args.seed >= 2 ** 32:
        refuse(args, "seed", "is not below 2^32, as NumPy's must be")
    cap = math.inf if OBJECTIVES[args.objective].clip == "weight" else 1     # CISPO's may be wide
    for name in ("epsilon", "epsilon_high"):
        value = getattr(args, name)
        if value is not None and not 0 < value < cap:
            refuse(args, name, "is not between 0 and 1: the band is [1 - epsilon, 1 + "
                               "epsilon_high]; GSPO's paper uses 3e-4 and 4e-4")


def ordered(bounds):
    return len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < math.inf


def check_combinations(args):
    """Refuse flags that do not go together, before anything is written."""
    trackers.check(args.report_to)
    G, micro, minibatches = args.num_generations, args.micro_batch_size, args.steps_per_generation
    compares = args.advantage not in ("gae", "reinforce_plus_plus")
    per_token = args.advantage not in ("group", "leave_one_out", "gdpo")
    own_data, sampler = bool(args.dataset_name), args.old_logp == "sampler"
    for name, wrong, must in (
        ("num_generations", G < 2 and compares,
         f"is too few: --advantage {args.advantage} compares the responses of a group, so at "
         "least 2"),
        ("steps_per_generation", args.prompts_per_step % minibatches,
         f"does not divide --prompts_per_step {args.prompts_per_step}: mini-batches are made of "
         "whole groups"),
        ("micro_batch_size", micro and micro % G and G % micro,
         f"must divide --num_generations {G} or be a multiple of it"),
        ("num_experts_per_tok", args.num_experts_per_tok > args.num_experts,
         f"is more than --num_experts {args.num_experts}"),
        ("hidden_size", args.hidden_size % 8,
         "is not a multiple of 8 (4 attention heads of an even width)"),
        ("max_terms", args.max_terms < args.min_terms, f"is below --min_terms {args.min_terms}"),
        ("dataset_name", own_data and not args.model_name_or_path,
         "needs --model_name_or_path: the built-in tiny MoE knows only the characters of its own "
         "task"),
        ("test_dataset_name", args.test_dataset_name and not own_data,
         "needs --dataset_name: the built-in task makes its own"),
        ("stage2_dataset_name", args.stage2_dataset_name and not own_data,
         "needs --dataset_name: the built-in task makes its own"),
        ("stage2_dataset_name", args.stage2_dataset_name and not args.stage2_step,
         "needs --stage2_step: the rollout batch at which it joins"),
        ("stage2_step", args.stage2_step and own_data and not args.stage2_dataset_name,
         "needs --stage2_dataset_name: the problems that join then"),
        ("stage2_step", args.stage2_step and not own_data and args.max_terms == args.min_terms,
         f"needs --max_terms above --min_terms {args.min_terms}: the longer half of the built-in "
         "sums joins then"),
        ("mismatch_mask_bounds", not ordered(args.mismatch_mask_bounds),
         "must be two numbers, the first at least 0 and the second not below it"),
        ("columns", len(args.columns) not in (0, 2), "must be two, of the query and of the answer"),
        ("advantage", args.advantage == "token_credit" and (own_data or args.model_name_or_path),
         "needs the built-in task, whose verifier marks the first wrong step"),
        ("old_logp", sampler and args.objective == "rspo",
         "cannot serve rspo: the router shift needs the old routers' logits, which only recompute "
         "records"),
        ("old_logp", sampler and args.routing_replay == "old",
         "cannot serve --routing_replay old, which takes the routes of the recomputation; rollout "
         "takes the sampler's"),
        ("routing_replay", args.routing_replay == "rollout" and args.torch_compile,
         "cannot be combined with --torch_compile: compiled routers record nothing"),
        ("old_logp", sampler and args.router_aux_loss_coef,
         "cannot serve --router_aux_loss_coef: experts' shares come from the recomputed routes"),
        ("old_logp", sampler and args.advantage == "gae",
         "cannot serve gae: the critic's old values come from the pass that recomputes log-probs"),
        ("kl_estimator", args.advantage == "reinforce_plus_plus" and args.kl_estimator != "k3",
         "has no effect on --advantage reinforce_plus_plus, which takes k1 off the rewards"),
        *((name, sampler and getattr(args, name), "compares recomputed with sampling log-probs: it "
           "needs --old_logp recompute") for name in ("mismatch", "mismatch_mask")),
        ("torch_compile", args.torch_compile and args.plain,
         "cannot be combined with --plain, which samples without it"),
        ("entropy_quantile", sampler and args.entropy_quantile,
         "needs --old_logp recompute, which computes entropies"),
        ("torch_compile", args.torch_compile and args.shard,
         "cannot be combined with --shard: the gathered weights that sample lie elsewhere at every "
         "batch"),
        *((name, getattr(args, name) and not args.use_peft, "needs --use_peft")
          for name in ("merge", "lora_target_modules")),
        *((name, getattr(args, name) and args.shard, "cannot be combined with --shard")
          for name in ("use_peft", "optimizer_offload")),
        ("optimizer_offload", args.optimizer_offload and args.use_peft,
         "keeps the masters and moments of all weights: it does not go with --use_peft"),
        ("resume", args.resume and args.overwrite_output_dir,
         "contradicts --overwrite_output_dir: go on with the run, or replace it"),
        *((name, getattr(args, name) and not args.output_dir, "needs --output_dir: which run?")
          for name in ("resume", "overwrite_output_dir")),
    ):
        if wrong:
            refuse(args, name, must)
    probe = torch.zeros(2, 2)    # what the loss itself refuses, before the run begins
    advantages = probe if per_token else probe[0]
    try:
        policy_loss(args.objective, probe, probe, advantages, probe == 0, weights=probe,
                    epsilon=args.epsilon, epsilon_high=args.epsilon_high, dual_clip=args.dual_clip,
                    router_shift=probe + 1 if args.objective == "rspo" else None)
    except ValueError as error:
        raise ValueError(f"--algorithm {args.algorithm}: {error}") from None
