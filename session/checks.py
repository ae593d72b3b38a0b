"""Checks: flags that cannot run are refused in one line, before anything is written.

check_settings calls three: check_values refuses single values that are not allowed;
check_conditions refuses flags that have no effect or contradict each other, by their metadata
`needs` and `without` (features.feature.flag); check_combinations does the rest. The Refusal
names the flag and the values that are allowed.
"""

import difflib
import math
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


def check_choice(settings, name, known):
    value = getattr(settings, name)
    if value not in known:
        refuse(settings, name, f"is unknown{suggest(value, known)}; known: {', '.join(known)}")


def check_settings(settings):
    """Refuse flags that cannot run."""
    check_values(settings)
    check_conditions(settings)
    check_combinations(settings)


def check_values(settings):
    """Refuse a value that is out of range, whatever the other flags are."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        limits = f.metadata
        if isinstance(value, float) and not math.isfinite(value):
            refuse(settings, f.name, "is not a finite number")
        if value is None:
            continue
        if "choices" in limits:
            check_choice(settings, f.name, limits["choices"])
        if "at_least" in limits and value < limits["at_least"]:
            refuse(settings, f.name, f"is not at least {limits['at_least']}")
        if "above" in limits and value <= limits["above"]:
            refuse(settings, f.name, f"is not above {limits['above']}")
        if "at_most" in limits and value > limits["at_most"]:
            refuse(settings, f.name, f"is not between 0 and {limits['at_most']}")
    where = f"--algorithm {settings.algorithm}: objective"
    cap = OBJECTIVES[validate_choice(where, settings.objective, OBJECTIVES)].kind.widest
    for name in ("epsilon", "epsilon_high"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < cap:
            refuse(settings, name, "is not between 0 and 1: the clip range is [1 - epsilon, 1 + "
                               "epsilon_high]; GSPO's paper uses 3e-4 and 4e-4")


def check_conditions(settings, needs="needs"):
    """Refuse a flag with a value other than its default that no other flag makes use of, or that
    another flag contradicts, as its `needs` and `without` say (features.feature.flag). needs: the
    word for the first of the two."""
    usual = type(settings)()
    for f in fields(settings):
        if getattr(settings, f.name) == getattr(usual, f.name):
            continue
        for condition, why in list_conditions(f.metadata.get(needs)):
            if not any(is_met(settings, one) for one in condition.split("|")):
                needed = " or ".join(format_condition(one) for one in condition.split("|"))
                refuse(settings, f.name, f"needs {needed}{why}")
        for condition, why in list_conditions(f.metadata.get("without")):
            for one in condition.split("|"):
                if is_met(settings, one):
                    name = one.partition("=")[0]
                    other = format_condition(name) if getattr(settings, name) is True else (
                        f"--{name} {getattr(settings, name)}")
                    refuse(settings, f.name, f"cannot be combined with {other}{why}")


def list_conditions(conditions):
    """[(condition, its reason as it is printed)] of a flag's `needs` or `without`."""
    reasons = {conditions: None} if isinstance(conditions, str) else conditions or {}
    return [(condition, f": {why}" if why else "") for condition, why in reasons.items()]


def is_met(settings, condition):
    """Whether FLAG is on, or FLAG=VALUE has this value."""
    name, equals, expected = condition.partition("=")
    value = getattr(settings, name, None)        # of a feature that is not there: off
    return str(value) == expected if equals else bool(value)


def format_condition(condition):
    """FLAG or FLAG=VALUE as it is typed on a command line."""
    return f"--{condition.replace('=', ' ')}"


def check_combinations(settings):
    """Refuse what a flag's metadata cannot express: relations between numbers, and what a row of
    OBJECTIVES or ADVANTAGES reads."""
    objective = OBJECTIVES[settings.objective]
    advantage = check_row(settings.advantage)
    per_token = advantage.per == "token"
    reads = advantage.reads
    G = settings.num_generations
    micro = settings.micro_batch_size
    scoring = settings.scoring_batch_size
    minibatches = settings.steps_per_generation
    per_response = [name for name, row in ADVANTAGES.items() if row.per == "response"]
    sampler = settings.old_logp == "sampler"
    engines = ["vllm"] * hasattr(settings, "vllm_gpu_memory_utilization")    # features/vllm.py
    bits = not settings.optim.startswith("adamw_torch")          # bitsandbytes'
    for name, wrong, must in (
        ("num_generations", G < 2 and "group_size" in reads,
         f"is too few: --advantage {settings.advantage} compares the responses of a group and "
         "needs at least 2"),
        ("steps_per_generation", settings.prompts_per_step % minibatches,
         f"does not divide --prompts_per_step {settings.prompts_per_step}: every mini-batch must "
         "have the same number of whole groups"),
        ("micro_batch_size", micro and micro % G and G % micro,
         f"must divide --num_generations {G} or be a multiple of it"),
        ("scoring_batch_size", scoring and scoring % G and G % scoring,
         f"must divide --num_generations {G} or be a multiple of it"),
        ("scoring_batch_size", scoring and settings.half,
         f"cannot be combined with {settings.arithmetic}, whose rounding depends on the number of "
         "rows: scoring uses the passes of the update, so that the first ratio is 1"),
        ("tf32", settings.tf32 and find_device_type(settings) != "cuda",
         "needs a CUDA GPU, whose tensor cores it uses"),
        ("num_experts_per_tok", settings.num_experts_per_tok > settings.num_experts,
         f"is more than --num_experts {settings.num_experts}"),
        ("hidden_size", settings.hidden_size % 8,
         "is not a multiple of 8: the tiny MoE has 4 attention heads, each of an even width"),
        *((name, objective.epsilon is None and getattr(settings, name) is not None,
           f"has no effect: {settings.algorithm} has no clip range")
          for name in ("epsilon", "epsilon_high")),
        ("max_terms", settings.max_terms < settings.min_terms,
         f"is below --min_terms {settings.min_terms}"),
        ("reward_weights", min(settings.reward_weights, default=0) < 0
         and settings.scale_rewards == "mean" and "scale" in reads,
         "gives rewards below 0, and --scale_rewards mean (MaxRL) divides by the mean reward of a "
         "group: use --scale_rewards group or none"),
        ("scale_rewards", "scale_rewards" in settings.explicit_flags and "scale" not in reads,
         f"has no effect with --advantage {settings.advantage}, which does not read it: leave it "
         "out"),
        ("stop", "" in settings.stop, "must not be empty: give the text that ends a response"),
        ("columns", len(settings.columns) not in (0, 2),
         "must be two names: the prompt column and the answer column"),
        ("advantage", per_token and not objective.per_token,
         f"gives every token its own advantage, and {settings.algorithm} takes one per response: "
         f"use --algorithm gspo_token or grpo, or --advantage {', '.join(per_response)}"),
        ("old_logp", sampler and settings.router_shift,
         f"cannot be combined with --algorithm {settings.algorithm}: the router shift needs the "
         "old routers' logits, which are recorded only by --old_logp recompute"),
        ("old_logp", sampler and "entropy" in reads,
         f"cannot be combined with --advantage {settings.advantage}: the entropies that it reads "
         "come from the pass that recomputes log-probs"),
        ("sampler",
         settings.sampler and settings.sampler not in engines
         and not is_user_file(settings.sampler),
         f"must be {' or '.join([*engines, 'FILE.py:CLASS'])}, and the file must exist"),
        ("optim", bits and not find_spec("bitsandbytes"),
         "needs a package that is not installed: pip install bitsandbytes"),
        ("optim", bits and settings.shard,
         "cannot be combined with --shard: use adamw_torch_fused"),
        ("optim", "paged" in settings.optim and find_device_type(settings) != "cuda",
         "needs a CUDA GPU, whose pages it moves: use adamw_8bit or adamw_torch_fused"),
    ):
        if wrong:
            refuse(settings, name, must)
    for feature in FEATURES:
        check_hooks(feature)
        feature.check(settings)
    check_loss(settings)
    check_advantage(settings)


MOVED_HOOKS = {"before_updates": "after_scoring", "in_loss": "loss", "collect": "resample",
               "gives": "provides", "base_sampler": "wrap_sampler", "sampler": "wrap_sampler"}


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
    if lacks := find_missing(check_row(settings.advantage), examples):
        refuse(settings, "advantage", f"reads {', '.join(lacks)}, which is missing: no feature of "
               "this run provides it")
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
