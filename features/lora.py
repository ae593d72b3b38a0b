"""LoRA (2106.09685, by peft): small trained low-rank products beside frozen matrices.

A frozen matrix needs no gradient and no AdamW moments, and with --bf16 or --fp16 it is held in 16
bits (round_frozen): about 2 bytes per parameter instead of 16. The policy is the base model of a
PeftModel, policy.peft_model, which saves, merges and switches off the adapters. The reference of
--beta is the model without adapters. Checkpoints are peft's. A run that starts from an adapter's
checkpoint continues to train that adapter.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from features.feature import Feature, flag, refuse
from plumbing.model.adapters import insert_adapters, is_adapter, load_adapters, read_peft_config
from plumbing.refusal import Refusal


@dataclass(frozen=True)
class Flags:
    use_peft: bool = flag(
        False, "train LoRA adapters and freeze the weights of the model, with about ten times the "
               "--learning_rate of full training; if --model_name_or_path is an adapter's "
               "checkpoint, continue to train its adapters (needs pip install peft)",
        section="adapters", without="shard")
    lora_r: int = flag(16, "LoRA rank", at_least=1)
    lora_alpha: int = flag(
        32, "LoRA alpha; LoRA scaling is lora_alpha / lora_r", at_least=1)
    lora_target_modules: list[str] = flag([], "modules that get a LoRA adapter",
                                          unset="every linear layer")


class LoRA(Feature):
    flags = Flags

    @classmethod
    def load(cls, settings, policy, folder):
        start = settings.model_name_or_path
        if is_adapter(start):
            check_adapters(settings, start)
        add_adapters(policy, settings, start if is_adapter(start) else None)
        policy.save_pretrained = partial(save_adapters, policy)
        if folder:                           # of this run: its tokens that end a response, too
            from transformers import GenerationConfig        # train.py --help does not wait for it
            generation = GenerationConfig.from_pretrained(folder)
            policy.generation_config.eos_token_id = generation.eos_token_id
            load_adapters(policy, folder)
        return policy

    def __init__(self, learner):
        super().__init__(learner)
        learner.reference = WithoutAdapters(learner.actor)
        if self.settings.autocast_dtype:
            round_frozen(learner.policy, self.settings.autocast_dtype)


def check_adapters(settings, start):
    """Refuse flags that do not fit the adapters of a checkpoint that are trained further: they have
    their own rank, alpha and modules."""
    if getattr(settings, "beta", 0):
        refuse(settings, "beta", f"cannot be combined with continuing the adapters of {start}: "
               "its reference policy is the model without adapters, which is not the starting "
               "policy; start from their merged weights (docs/data.md)")
    saved = read_peft_config(start)
    modules = sorted(saved.target_modules)
    pairs = dict(lora_r=(settings.lora_r, saved.r),
                 lora_alpha=(settings.lora_alpha, saved.lora_alpha),
                 lora_target_modules=(sorted(settings.lora_target_modules) or modules, modules))
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            refuse(settings, name, f"is not that of the adapters of {start}: {theirs}; start "
                   "from their merged weights (docs/data.md) to train new ones")


@torch.no_grad()
def round_frozen(policy, dtype=torch.bfloat16):
    """Convert the frozen weights that autocast rounds at every use to `dtype`: those of linear
    layers and of the tiny MoE's experts. The LM head (computed in float32), embeddings, norms and
    routers stay float32, and so does what is trained, such as LoRA's matrices. Forward and backward
    are bit-equal: autocast would round the same."""
    from transformers.pytorch_utils import Conv1D            # train.py --help does not wait for it

    from moe import Experts
    head = policy.get_output_embeddings()
    head = getattr(head, "base_layer", head)                 # of a head that carries an adapter
    for module in policy.modules():
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        matrix = isinstance(module, (nn.Linear, Conv1D, Experts)) and module is not head
        if matrix and not trained:
            module.to(dtype)


class WithoutAdapters:
    """The reference policy of --beta: a Scorer whose adapters are switched off."""

    def __init__(self, actor):
        self.actor = actor
        self.policy = actor.policy
        self.routed = actor.routed

    def __call__(self, rollout, **options):
        with self.policy.peft_model.disable_adapter():
            return self.actor(rollout, **options)


def add_adapters(policy, settings, folder=None):
    """Freeze the policy and insert adapters: new ones, as the flags describe them, or those of a
    checkpoint folder. Raises Refusal if they do not fit the model."""
    config = read_peft_config(folder) if folder else new_config(policy, settings)
    insert_adapters(policy, config, settings.seed)
    return load_adapters(policy, folder) if folder else policy


def new_config(policy, settings):
    """peft's configuration of the adapters that the flags describe."""
    from transformers.pytorch_utils import Conv1D
    layers = (nn.Linear, Conv1D)                             # that can carry an adapter
    linear = {name.split(".")[-1] for name, m in policy.named_modules() if isinstance(m, layers)}
    targets = settings.lora_target_modules or sorted(linear - {"lm_head", "embed_out"})
    if not targets:
        raise Refusal(f"--use_peft: {type(policy).__name__} has no linear layer besides its LM "
                      "head, so no layer can carry an adapter")
    from peft import LoraConfig
    return LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=targets,
        task_type="CAUSAL_LM", base_model_name_or_path=str(policy.name_or_path))


def save_adapters(policy, folder):
    """Write peft's checkpoint of the adapters, and the model's config.json."""
    policy.config.save_pretrained(folder)
    policy.generation_config.save_pretrained(folder)         # which tokens end a response
    policy.peft_model.save_pretrained(folder, save_embedding_layers=False)
