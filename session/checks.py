"""Checks: flags that cannot run are refused in one line, before anything is written.

check_values and check_conditions read the rules that stand at a flag (features.feature.flag): the
values that are allowed, and the flags that it needs or contradicts. The functions after them have
the rules that join several flags, by subject. A Refusal names the flag and what is allowed.
"""

import difflib
import math
import operator
import sys
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import torch

from advantages import ADVANTAGES, INPUTS, check_row, estimate_advantages, find_missing
from features import FEATURES
from features.feature import Feature, refuse
from losses import OBJECTIVES, validate_choice, combine_stats, policy_loss
from plumbing.parallel.devices import find_device_type


def suggest(word, known, cutoff=0.6):
    """', did you mean X?' if a known word is spelled similarly, else ''."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f", did you mean {match[0]}?" if match else ""


def check_settings(settings):
    """Refuse flags that cannot run."""
    check_values(settings)
    check_conditions(settings)
    check_objective(settings)
    check_batch(settings)
    check_policy(settings)
    for feature in FEATURES:
        check_hooks(feature)
        feature.check(settings)
    check_loss(settings)
    check_advantage(settings)


RANGES = {"at_least": (operator.ge, "at least"), "above": (operator.gt, "above"),
          "at_most": (operator.le, "at most")}


def check_values(settings):
    """Refuse a value that its flag does not allow, whatever the other flags are."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        limits = f.metadata
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                refuse(settings, f.name, "is not a finite number")
        if value is None:
            continue
        if value not in (known := limits.get("choices", [value])):
            refuse(settings, f.name, f"is unknown{suggest(value, known)}; known: "
                   f"{', '.join(known)}")
        for name in RANGES.keys() & limits.keys():
            holds, words = RANGES[name]
            if not holds(value, limits[name]):
                refuse(settings, f.name, f"is not {words} {limits[name]}")
        if "must" in limits and not limits["must"][0](value):
            refuse(settings, f.name, f"must {limits['must'][1]}")
        package = limits["package"].get(value) if "package" in limits else None
        if package and not find_spec(package):
            refuse(settings, f.name, "needs a package that is not installed: pip install "
                   f"{package}")


def check_conditions(settings, needs="needs"):
    """Refuse a flag with a value other than its default that no other flag makes use of, or that
    another flag contradicts, as its `needs` and `without` say (features.feature.flag). needs: the
    word for the first of the two."""
    usual = type(settings)()
    for f in fields(settings):
        if getattr(settings, f.name) == getattr(usual, f.name):
            continue
        for kind, wanted, words in ((needs, True, "needs"),
                                    ("without", False, "cannot be combined with")):
            for condition, why in f.metadata.get(kind, {}).items():
                options = condition.split("|")
                if any(is_met(settings, one) for one in options) != wanted:
                    named = " or ".join(f"--{one.replace('=', ' ')}" for one in options)
                    refuse(settings, f.name, f"{words} {named}{why}")


def is_met(settings, condition):
    """Whether FLAG is on, or FLAG=VALUE has this value."""
    name, equals, expected = condition.partition("=")
    value = getattr(settings, name, None)        # of a feature that is not there: off
    return str(value) == expected if equals else bool(value)


def check_objective(settings):
    """Refuse an objective, an advantage and rewards that do not fit each other."""
    where = f"--algorithm {settings.algorithm}: objective"
    objective = OBJECTIVES[validate_choice(where, settings.objective, OBJECTIVES)]
    for name in ("epsilon", "epsilon_high"):
        value = getattr(settings, name)
        if value is not None and objective.epsilon is None:
            refuse(settings, name, f"has no effect: {settings.algorithm} has no clip range")
        widest = objective.kind.widest
        if value is not None and not 0 < value < widest:
            bounds = "above 0" if math.isinf(widest) else f"between 0 and {widest:g}"
            refuse(settings, name, f"is not {bounds}; the paper of {settings.objective} has "
                   f"--epsilon {objective.epsilon:g} --epsilon_high {objective.epsilon_high:g}")
    if settings.dual_clip and (objective.ratio, objective.clip) != ("token", "min"):
        refuse(settings, "dual_clip", "needs an objective with the token ratio and PPO's clip, "
               f"such as grpo, which {settings.algorithm} is not")
    advantage = check_row(settings.advantage)
    reads = advantage.reads
    named = f"--advantage {settings.advantage}"
    if advantage.per == "token" and not objective.per_token:
        others = ", ".join(name for name, row in ADVANTAGES.items() if row.per == "response")
        refuse(settings, "advantage", "gives every token its own advantage, and "
               f"{settings.algorithm} takes one per response: use --algorithm gspo_token or grpo, "
               f"or --advantage {others}")
    if settings.num_generations < 2 and "group_size" in reads:
        refuse(settings, "num_generations", f"is too few: {named} compares the responses of a "
               "group and needs at least 2")
    if "scale_rewards" in settings.explicit_flags and "scale" not in reads:
        refuse(settings, "scale_rewards", f"has no effect with {named}, which does not read it: "
               "leave it out")
    lowest = min(settings.reward_weights, default=0)
    if lowest < 0 and settings.scale_rewards == "mean" and "scale" in reads:
        refuse(settings, "reward_weights", "gives rewards below 0, and --scale_rewards mean "
               "(MaxRL) divides by the mean reward of a group: use --scale_rewards group or none")
    if settings.old_logp == "sampler" and settings.router_shift:
        refuse(settings, "old_logp", f"cannot be combined with --algorithm {settings.algorithm}: "
               "the router shift needs the old routers' logits, which are recorded only by "
               "--old_logp recompute")
    if settings.old_logp == "sampler" and {"entropy", "values"} & {*reads}:
        refuse(settings, "old_logp", f"cannot be combined with {named}: the entropies or values "
               "that it reads come from the pass that recomputes log-probs")


def check_batch(settings):
    """Refuse a rollout batch that cannot be cut into mini-batches and micro-batches, and a task
    without numbers of terms."""
    G = settings.num_generations
    if settings.prompts_per_step % settings.steps_per_generation:
        refuse(settings, "steps_per_generation", "does not divide --prompts_per_step "
               f"{settings.prompts_per_step}: every mini-batch must have the same number of whole "
               "groups")
    for name in ("micro_batch_size", "scoring_batch_size"):
        rows = getattr(settings, name)
        if rows and rows % G and G % rows:
            refuse(settings, name, f"must divide --num_generations {G} or be a multiple of it")
    if settings.scoring_batch_size and settings.autocast_dtype:
        refuse(settings, "scoring_batch_size", f"cannot be combined with {settings.arithmetic}, "
               "whose rounding depends on the number of rows: scoring uses the passes of the "
               "update, so that the first ratio is 1")
    if settings.max_terms < settings.min_terms:
        refuse(settings, "max_terms", f"is below --min_terms {settings.min_terms}")


def check_policy(settings):
    """Refuse a policy, a sampler and an optimizer that cannot be made."""
    if settings.num_experts_per_tok > settings.num_experts:
        refuse(settings, "num_experts_per_tok", "is more than --num_experts "
               f"{settings.num_experts}")
    engines = ["vllm"] * hasattr(settings, "vllm_gpu_memory_utilization")    # features/vllm.py
    if settings.sampler and not (settings.sampler in engines or is_user_file(settings.sampler)):
        refuse(settings, "sampler", f"must be {' or '.join([*engines, 'FILE.py:CLASS'])}, and the "
               "file must exist")
    if settings.shard and not settings.optim.startswith("adamw_torch"):
        refuse(settings, "optim", "cannot be combined with --shard: use adamw_torch_fused")
    if settings.tf32 and find_device_type(settings) != "cuda":
        refuse(settings, "tf32", "needs a CUDA GPU, whose tensor cores it uses")
    if "paged" in settings.optim and find_device_type(settings) != "cuda":
        refuse(settings, "optim", "needs a CUDA GPU, whose pages it moves: use adamw_8bit or "
               "adamw_torch_fused")


# names of hooks that are gone, and what is in their place
MOVED_HOOKS = {"needs_entropy": "run.needs_old_entropy or run.needs_new_entropy in __init__",
               "needs_routes": "run.needs_new_routes in __init__",
               "head_start": "run.frozen_batches in __init__"}


def check_hooks(feature):
    """Raise ValueError for a name in a feature that features.feature.Feature does not have: a
    misspelled hook would never be called."""
    for name in vars(feature):
        if not name.startswith("_") and not hasattr(Feature, name):
            now = f", it is {MOVED_HOOKS[name]} now" if name in MOVED_HOOKS else (
                suggest(name, vars(Feature)))
            raise ValueError(f"{name} of the feature {feature.__name__} is no hook{now} "
                             "(features/feature.py has them all; the name of a helper begins "
                             "with _)")


def is_user_file(name):
    """Whether FILE.py:NAME names a file that exists."""
    path = name.rpartition(":")[0]
    return path.endswith(".py") and Path(path).is_file()


@contextmanager
def explain_errors(what):
    """Before the traceback of an error in the block, print what failed: a row or a function that
    somebody has changed does not fit the rest."""
    try:
        yield
    except Exception:
        sys.stderr.write(f"train.py: {what}\n")
        raise


def check_advantage(settings):
    """Compute the advantages of three groups: a row of ADVANTAGES may not fit its function, and a
    function may not expect a zero-variance group."""
    G = max(2, settings.num_generations)
    rewards = torch.cat([torch.arange(G) % 2.0, torch.zeros(G), torch.ones(G)])     # [B]
    zeros = torch.zeros(3 * G, 3)                                                   # [B, T]
    parts = torch.stack([torch.zeros_like(rewards), rewards], 1)                    # [B, K]
    shapes = {"": 1.0, "B": rewards, "B T": zeros, "B K": parts}
    examples = {name: torch.as_tensor(shapes[INPUTS[name].shape], dtype=INPUTS[name].dtype)
                for f in settings.features for name in f.provides}
    examples |= dict(parts=parts, part_weights=[1.0, 1.0], mask=zeros == 0, old_logp=zeros,
                     entropy=zeros)
    for name in find_missing(check_row(settings.advantage), examples):
        refuse(settings, "advantage", f"reads {name}, which is missing: {INPUTS[name].meaning}")
    where = f"on three groups of {G} rewards (0 and 1 in turn, all 0, all 1)"
    with explain_errors(f"--advantage {settings.advantage} fails {where}"):
        A = estimate_advantages(settings.advantage, rewards, G, settings.scale_rewards, **examples)
    if not A.isfinite().all():
        refuse(settings, "advantage", f"returns a number that is not finite {where}: fix its "
               "function in advantages.py; zero-variance groups occur in every run, and 0 is "
               "their usual advantage")


def check_loss(settings):
    """Compute the loss of two responses of three tokens: a new row, clip or statistic may not fit
    the rest."""
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    one = torch.ones(2, 3)
    with explain_errors(f"--algorithm {settings.algorithm} fails on two responses of three tokens"):
        _, stats = policy_loss(
            settings.row, logp, -one, torch.tensor([1.0, -1.0]), one.bool(), weights=one,
            epsilon=settings.epsilon, epsilon_high=settings.epsilon_high,
            router_shift=one if settings.router_shift else None)
        combine_stats([stats])
