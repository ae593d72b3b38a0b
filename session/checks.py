"""Checks: flags that cannot run are refused in one line, before anything is written.

check_values and check_conditions read the rules that stand at a flag (features.feature.flag): the
values that are allowed, and the flags that it needs or contradicts. check_settings has the rules
that join several flags. A Refusal names the flag and what is allowed.
"""

import operator
from dataclasses import fields

import torch

from advantages import ADVANTAGES
from features import FEATURES
from features.feature import refuse
from losses import OBJECTIVES, check_clip_range
from plumbing.refusal import Refusal

RANGES = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}


def check_settings(settings):
    """Refuse flags that cannot run."""
    check_values(settings)
    check_conditions(settings)
    check_objective(settings)
    check_batch(settings)
    for feature in FEATURES:
        feature.check_off(settings)
        feature.check(settings)


def check_values(settings):
    """Refuse a value that its flag does not allow, whatever the other flags are."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if value is None:
            continue
        for name in RANGES.keys() & f.metadata.keys():
            if not RANGES[name](value, f.metadata[name]):
                refuse(settings, f.name, f"is not {name.replace('_', ' ')} {f.metadata[name]}")
        if "must" in f.metadata and not f.metadata["must"][0](value):
            refuse(settings, f.name, f"must {f.metadata['must'][1]}")


def check_conditions(settings):
    """Refuse a flag that no other flag makes use of, or that another flag contradicts, as its
    `needs` and `without` say (features.feature.flag)."""
    for f in fields(settings):
        if getattr(settings, f.name) == getattr(type(settings)(), f.name):
            continue
        for condition, why in f.metadata.get("needs", {}).items():
            if not is_met(settings, condition):
                refuse(settings, f.name, f"needs --{condition}{why}")
        for condition, why in f.metadata.get("without", {}).items():
            if is_met(settings, condition):
                refuse(settings, f.name, f"cannot be combined with --{condition}{why}")


def is_met(settings, condition):
    """Whether FLAG is on, or FLAG=VALUE has this value; of FLAG|FLAG one of the two."""
    for option in condition.split("|"):
        name, _, expected = option.partition("=")
        value = getattr(settings, name, None)        # of a feature that is not there: off
        if str(value) == expected if expected else value:
            return True
    return False


def check_objective(settings):
    """Refuse an objective, its constants, an advantage and log-probs that do not fit each other."""
    known = OBJECTIVES[settings.objective].constants
    if settings.constants.keys() - known:
        refuse(settings, "constants", f"must be of --algorithm {settings.algorithm}, which has "
               f"{', '.join(known) or 'none'}")
    advantage = ADVANTAGES[settings.advantage]
    mask = torch.ones(2, 3, dtype=torch.bool)                                       # [B, T]
    A = mask if advantage.per == "token" else mask[:, 0]                            # [B, T] or [B]
    try:
        check_clip_range(settings.row, A, mask, settings.epsilon, settings.epsilon_high, mask)
    except ValueError as error:
        raise Refusal(f"--algorithm {settings.algorithm}: {error}") from None
    if settings.num_generations < 2 and "group_size" in advantage.reads:
        refuse(settings, "num_generations", f"is too few: --advantage {settings.advantage} "
               "compares the responses of a group")
    recomputed = settings.router_shift or {"entropy", "values"} & {*advantage.reads}
    if settings.old_logp == "sampler" and recomputed:
        refuse(settings, "old_logp", "gives no routers' logits, entropies and values, which "
               f"--algorithm {settings.algorithm} or --advantage {settings.advantage} reads")


def check_batch(settings):
    """Refuse a rollout batch that cannot be cut into mini-batches and micro-batches, a sampler that
    there is not, and numbers of the built-in task and policy that do not fit each other."""
    G = settings.num_generations
    rows = settings.micro_batch_size or G
    if settings.prompts_per_step % settings.steps_per_generation:
        refuse(settings, "steps_per_generation", "does not divide --prompts_per_step "
               f"{settings.prompts_per_step}")
    if rows % G and G % rows:
        refuse(settings, "micro_batch_size", f"must divide --num_generations {G} or be a multiple "
               "of it")
    engines = ["vllm"] * hasattr(settings, "vllm_gpu_memory_utilization")    # features/vllm.py
    if settings.sampler not in (None, *engines) and ".py:" not in settings.sampler:
        refuse(settings, "sampler", f"must be {' or '.join([*engines, 'FILE.py:CLASS'])}")
    if settings.max_terms < settings.min_terms:
        refuse(settings, "max_terms", f"is below --min_terms {settings.min_terms}")
    if settings.num_experts_per_tok > settings.num_experts:
        refuse(settings, "num_experts_per_tok", f"is above --num_experts {settings.num_experts}")
