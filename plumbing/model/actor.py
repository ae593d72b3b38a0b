"""The trained module, policy and critic: how it is loaded and scored."""

from dataclasses import replace
from functools import partial

import torch

from plumbing.model.policy import load_policy
from plumbing.parallel import processes
from plumbing.parallel.devices import autocast
from plumbing.refusal import Refusal
from plumbing.speed.fast import fast_response_logp
from rollout import Scorer
from routes import find_routers, has_sigmoid


class Actor(Scorer):
    """The policy and, if a feature adds one, its critic: everything that is trained, in the one
    module that DDP or FSDP2 wraps. It is a Scorer with 16-bit autocast, gradient checkpointing and
    the fast response_logp."""

    def __init__(self, policy, settings):
        super().__init__(policy)
        self.autocast_dtype = settings.autocast_dtype
        self.plain = settings.plain
        self.critic = None                                   # hidden [B, T, D] -> values [B, T]
        self.checkpointed = checkpoint_layers(policy) if settings.gradient_checkpointing else []

    def forward(self, rollout, temperature=1.0, entropy=False, record=False):
        """A rollout -> its Scores under the policy. record: also return the routes."""
        for layer in self.checkpointed:
            layer.training = torch.is_grad_enabled()  # its submodules stay in eval mode: no dropout
        way = super().forward if self.plain else partial(fast_response_logp, self.policy)
        with autocast(self.policy.device, self.autocast_dtype):
            scores = way(rollout, temperature, entropy, record=record)
        values = None if self.critic is None else self.critic(scores.hidden)        # [B, T]
        return replace(scores, hidden=None, values=values)


def make_scorer(settings, policy, critic=False):
    """The Scorer of a run: the plain one of rollout.py if nothing needs more, else an Actor.
    critic: whether a critic is added to it."""
    needs = (critic, not settings.plain, settings.autocast_dtype, settings.gradient_checkpointing,
             processes.world() > 1)
    return Actor(policy, settings) if any(needs) else Scorer(policy)


def checkpoint_layers(policy):
    """Turn on gradient checkpointing -> the modules that recompute in backward while they are in
    training mode."""
    checkpoint_activations(policy)
    layers = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        for name, value in list(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)  # some layers call dropout as a function, not a module
    return layers


def checkpoint_activations(policy):
    """Turn on transformers' gradient checkpointing, which has another name before 5.23."""
    enable = getattr(policy, "activation_checkpointing_enable", None)
    (enable or policy.gradient_checkpointing_enable)()


def load_trained_policy(settings, task, device, saved=None):
    """(policy, tokenizer): load_policy's, made ready for training; saved: a checkpoint of this run
    to go on from."""
    def transform(policy):
        policy.requires_grad_(True)     # an adapter's checkpoint comes merged, and is frozen
        for feature in settings.features:
            policy = feature.load(settings, policy, saved)
        return policy

    adapters = getattr(settings, "use_peft", False)          # features/lora.py loads those of saved
    start = None if adapters else saved
    policy, tokenizer = load_policy(settings, task, device, start, transform, base_only=adapters)
    if settings.router_shift:
        check_router_shift(policy, settings.algorithm)
    return policy, tokenizer


def check_router_shift(policy, algorithm):
    """Refuse a policy for which RSPO's router shift is not defined."""
    if not find_routers(policy) or has_sigmoid(policy):
        raise Refusal(f"--algorithm {algorithm} compares the softmax of routers, and "
                      f"{type(policy).__name__} has none: use another --algorithm")
