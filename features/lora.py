"""LoRA (2106.09685, by peft): small trained low-rank products beside frozen matrices.

A frozen matrix needs no gradient and no AdamW moments, and with --bf16 or --fp16 it is held in 16
bits (plumbing/model/frozen.py): about 2 bytes per parameter instead of 16. The policy is the base
model of a PeftModel, policy.peft_model, which saves, merges and switches off the adapters. The
reference of --beta is the model without adapters. Checkpoints are peft's. A run that starts from an
adapter's checkpoint continues to train that adapter.
"""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from features.feature import Feature, flag, refuse
from plumbing.model.adapters import (CONFIG, check_lora, import_peft, insert_adapters,
                                     is_adapter, load_adapters, read_json, read_peft_config,
                                     trained_in_4bit)
from plumbing.refusal import Refusal

FOUR_BITS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                 bnb_4bit_use_double_quant=True)     # the format of four_bit.py
UNMOVED = "without adapters the model is the base model, whose weights do not move"


@dataclass(frozen=True)
class Flags:
    use_peft: bool = flag(
        False, "train LoRA adapters and freeze the weights of the model, with about ten times the "
               "--learning_rate of full training; if --model_name_or_path is an adapter's "
               "checkpoint, continue to train its adapters (needs pip install peft)",
        section="adapters", fixed=True, also="lora qlora",
        without={"shard": "", "sync_ref_model": UNMOVED,
                 "teacher_update_rate": f"{UNMOVED}; use --teacher_update_rate 0"})
    lora_r: int = flag(16, "LoRA rank", at_least=1, needs="use_peft", fixed=True,
                      also="rank r lora_rank")
    lora_alpha: int = flag(
        32, "LoRA alpha; LoRA scaling is lora_alpha / lora_r", at_least=1, needs="use_peft",
        fixed=True)
    lora_target_modules: list[str] = flag([], "modules that get a LoRA adapter",
                                          unset="every linear layer", needs="use_peft",
                                          fixed=True)


class LoRA(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.use_peft

    @classmethod
    def check(cls, settings):
        start = settings.model_name_or_path
        if not settings.use_peft or not is_adapter(start):
            return
        if getattr(settings, "beta", 0):
            refuse(settings, "beta", f"cannot be combined with continuing the adapters of {start}: "
                   "its reference policy is the model without adapters, which is not the starting "
                   "policy; start from their merged weights (docs/data.md)")
        if trained_in_4bit(start) and not getattr(settings, "load_in_4bit", False):
            raise Refusal(f"--model_name_or_path {start}: its adapters were trained beside 4-bit"
                          " weights; add --load_in_4bit, or start from their merged weights "
                          "(docs/data.md)")
        check_same_adapters(settings, start)

    @classmethod
    def load(cls, settings, policy, folder):
        start = settings.model_name_or_path
        add_adapters(policy, settings, start if is_adapter(start) else None)
        policy.save_pretrained = partial(save_adapters, policy)
        if folder:                           # of this run: its tokens that end a response, too
            from transformers import GenerationConfig        # train.py --help does not wait for it
            generation = GenerationConfig.from_pretrained(folder)
            policy.generation_config.eos_token_id = generation.eos_token_id
            load_adapters(policy, folder)
        return policy

    def __init__(self, run):
        run.reference = WithoutAdapters(run.actor)


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
    checkpoint folder. Raises Refusal without peft, and if they do not fit the model."""
    try:
        if folder:
            config = read_peft_config(folder)
            return load_adapters(insert_adapters(policy, config), folder)
        return insert_adapters(policy, new_config(policy, settings), settings.seed)
    except Refusal as error:
        if str(error).startswith("--"):
            raise
        name = "lora_target_modules" if settings.lora_target_modules else "use_peft"
        raise Refusal(f"--{name}: {error}") from None


def new_config(policy, settings):
    """peft's configuration of the adapters that the flags describe."""
    from transformers.pytorch_utils import Conv1D
    layers = (nn.Linear, Conv1D)                             # that can carry an adapter
    linear = {name.split(".")[-1] for name, m in policy.named_modules() if isinstance(m, layers)}
    targets = settings.lora_target_modules or sorted(linear - {"lm_head", "embed_out"})
    if not targets:
        raise Refusal(f"--use_peft: {type(policy).__name__} has no linear layer besides its LM "
                      "head, so no layer can carry an adapter")
    return import_peft().LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=targets,
        task_type="CAUSAL_LM", base_model_name_or_path=str(policy.name_or_path))


def check_same_adapters(settings, folder):
    """Raise Refusal unless the flags describe the adapters in `folder`, which the run will
    continue to train."""
    check_lora(folder)
    saved = read_json(Path(folder) / CONFIG)
    for flag_name, name in (("lora_r", "r"), ("lora_alpha", "lora_alpha"),
                            ("lora_target_modules", "target_modules")):
        ours, theirs = (" ".join(sorted(value)) if isinstance(value, list) else str(value)
                        for value in (getattr(settings, flag_name), saved[name]))
        if ours and ours != theirs:
            raise Refusal(f"--{flag_name} {ours}: the adapters of {folder}, which this run would"
                          f" continue to train, have {theirs}; give --{flag_name} {theirs}, or "
                          "start from their merged weights (docs/data.md) to train new ones")


def save_adapters(policy, folder):
    """Write peft's checkpoint of the adapters, and the model's config.json."""
    config = copy.deepcopy(policy.config)
    if getattr(policy, "is_loaded_in_4bit", False):
        config.quantization_config = FOUR_BITS
    config.save_pretrained(folder)
    policy.generation_config.save_pretrained(folder)         # which tokens end a response
    policy.peft_model.save_pretrained(folder, save_embedding_layers=False)
