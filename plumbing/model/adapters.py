"""LoRA adapters (by peft): a small trained low-rank product added to every frozen matrix.

A frozen matrix needs no gradient and no AdamW moments, and it can be held in bfloat16 (offload.py):
about 2 bytes per parameter instead of 16. The reference of --beta is the same model with its
adapters off. Checkpoints are peft's (`PeftModel.from_pretrained` reads them);
--merge writes a plain one at the end.
"""

import copy
import json
import logging
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.random import fork_rng, manual_seed
from transformers.pytorch_utils import Conv1D

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LINEAR = (nn.Linear, Conv1D)     # layers that can carry an adapter


def adapted_layers(policy):
    """[(name, layer)] of the layers that carry an adapter."""
    return [(name, module) for name, module in policy.named_modules() if hasattr(module, "lora_A")]


def add_adapters(policy, args, folder=None):
    """Freeze the policy and add adapters to it: new ones, which do not change its output yet, or
    those of a checkpoint folder.

    Raises ValueError without peft, for modules that the model does not have, and for a model
    without linear layers.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)    # it warns of missing CPU kernels
    try:
        import peft
    except ImportError:
        raise ValueError("--use_peft needs peft: pip install peft") from None
    linear = {name.split(".")[-1] for name, m in policy.named_modules() if isinstance(m, LINEAR)}
    targets = args.lora_target_modules or sorted(linear - {"lm_head", "embed_out"})
    if not targets:
        raise ValueError(f"--use_peft: {type(policy).__name__} has no linear layer besides its LM "
                         "head, so no layer can carry an adapter")
    transposed = any(isinstance(m, Conv1D) for _, m in policy.named_modules())   # GPT-2: [in, out]
    config = peft.LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets, lora_dropout=0.0,
        task_type="CAUSAL_LM", base_model_name_or_path=str(policy.name_or_path),
        fan_in_fan_out=transposed)
    config = peft.PeftConfig.from_pretrained(folder) if folder else config
    with fork_rng():
        manual_seed(args.seed)                               # the same adapters in every process
        try:
            peft.inject_adapter_in_model(config, policy)
        except ValueError as error:
            flag = "lora_target_modules" if args.lora_target_modules else "use_peft"
            words = " ".join(str(error).split())[:200]
            raise ValueError(f"--{flag}: {words}") from None
    for p in named_adapters(policy).values():
        p.data = p.data.float()      # peft may give them the 16-bit dtype of a 4-bit layer
    policy.adapters = config
    if folder:
        load_adapters(policy, folder)
    return policy


def is_adapter(folder):
    return folder is not None and (Path(folder) / CONFIG).is_file()


def base_of(folder):
    """The name or folder of the checkpoint that an adapter was trained on."""
    return json.loads((Path(folder) / CONFIG).read_text())["base_model_name_or_path"]


def named_adapters(policy):
    """{peft's name in a file: parameter}"""
    return {f"base_model.model.{name.replace('.default', '')}": p
            for name, p in policy.named_parameters() if ".lora_" in name}


def load_adapters(policy, folder):
    saved, own = load_file(Path(folder) / WEIGHTS), named_adapters(policy)
    if {n: p.shape for n, p in saved.items()} != {n: p.shape for n, p in own.items()}:
        raise ValueError(f"{folder}: its weights are not those that its {CONFIG} describes")
    for name, parameter in own.items():
        parameter.data.copy_(saved[name])


@contextmanager
def adapters_off(policy):
    """Inside the block, the policy computes without its adapters."""
    for _, layer in adapted_layers(policy):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in adapted_layers(policy):
            layer.enable_adapters(True)


class Frozen(nn.Module):
    """The reference policy of --beta: an Actor with its adapters off."""

    def __init__(self, actor):
        super().__init__()
        self.actor = [actor]                                 # in a list, so it is no submodule

    policy = property(lambda self: self.actor[0].policy)

    def forward(self, rollout, **options):
        with adapters_off(self.policy):
            return self.actor[0](rollout, **options)


def merged(policy, dtype=torch.float32):
    """A plain copy in `dtype`, with the adapters, if any, added to the matrices.

    Weights are copied one by one, and no buffer is rounded: RoPE's frequencies stay float32.
    """
    copies = {}
    for name, p in policy.named_parameters():
        kind = torch.float32 if ".lora_" in name else dtype
        copies[id(p)] = nn.Parameter(p.detach().to(kind, copy=True), requires_grad=False)
    plain = copy.deepcopy(policy, copies)
    for name, layer in adapted_layers(plain):
        layer.merge()
        plain.set_submodule(name, layer.get_base_layer())
    vars(plain).pop("adapters", None)
    return plain


def save_policy(policy, folder):
    """Write a Hugging Face checkpoint; for a policy with adapters, peft's checkpoint and the
    model's config.json."""
    if not adapted_layers(policy):
        return policy.save_pretrained(folder)
    policy.config.save_pretrained(folder)
    policy.adapters.save_pretrained(folder)
    weights = {name: p.detach().contiguous() for name, p in named_adapters(policy).items()}
    save_file(weights, Path(folder) / WEIGHTS)
