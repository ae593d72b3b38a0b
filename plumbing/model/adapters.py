"""LoRA adapters (by peft): a small trained low-rank product added to every frozen matrix.

A frozen matrix needs no gradient and no AdamW moments, and it can be held in bfloat16 (halves.py):
about 2 bytes per parameter instead of 16. The reference of --beta is the same model with the
adapters that the run started from. Checkpoints are peft's (`PeftModel.from_pretrained` reads them).
A run that starts from an adapter's checkpoint goes on with
that adapter, so every checkpoint holds all that was trained since the base model.
"""

import copy
import json
import logging
import warnings
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.random import fork_rng, manual_seed
from transformers.pytorch_utils import Conv1D

from plumbing.model.copies import adapted_layers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LINEAR = (nn.Linear, Conv1D)     # layers that can carry an adapter
FOUR_BITS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                 bnb_4bit_use_double_quant=True)     # the format of fourbit.py


def add_adapters(policy, args, folder=None):
    """Freeze the policy and add adapters to it: new ones, which do not change its output yet, or
    those of a checkpoint folder.

    Raises ValueError without peft, for modules that the model does not have, and for a model
    without linear layers.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)    # it warns of missing CPU kernels
    warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")   # `merged` unties
    try:
        import peft
    except ImportError:
        raise ValueError("--use_peft needs peft: pip install peft") from None
    config = peft.PeftConfig.from_pretrained(folder) if folder else new_config(policy, args)
    config.inference_mode = False                            # peft would freeze its weights
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


def new_config(policy, args):
    """peft's configuration of the adapters that the flags describe."""
    import peft
    linear = {name.split(".")[-1] for name, m in policy.named_modules() if isinstance(m, LINEAR)}
    targets = args.lora_target_modules or sorted(linear - {"lm_head", "embed_out"})
    if not targets:
        raise ValueError(f"--use_peft: {type(policy).__name__} has no linear layer besides its LM "
                         "head, so no layer can carry an adapter")
    transposed = any(isinstance(m, Conv1D) for _, m in policy.named_modules())   # GPT-2: [in, out]
    return peft.LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=targets, lora_dropout=0.0,
        task_type="CAUSAL_LM", base_model_name_or_path=str(policy.name_or_path),
        fan_in_fan_out=transposed)


def check_continues(policy, args, folder):
    """Raise ValueError unless the flags describe the adapters in `folder`, which the run will go on
    training. policy: their base model, without adapters."""
    saved = json.loads((Path(folder) / CONFIG).read_text())
    asked = new_config(policy, args)
    for flag, name in (("lora_r", "r"), ("lora_alpha", "lora_alpha"),
                       ("lora_target_modules", "target_modules")):
        theirs = spelled(saved[name])
        now = spelled(getattr(asked, name))
        if theirs != now:
            raise ValueError(f"--{flag} {now}: the adapters of {folder}, which this run would go "
                             f"on training, have {theirs}; give --{flag} {theirs}, or start from "
                             "their merged weights (docs/data.md) to train new ones")


def spelled(value):
    """A value of peft's configuration as on the command line."""
    return " ".join(sorted(value)) if isinstance(value, (list, set)) else str(value)


def is_adapter(folder):
    return folder is not None and (Path(folder) / CONFIG).is_file()


def base_of(folder):
    """The name or folder of the checkpoint that an adapter was trained on. Raises ValueError if
    there is none, or if that is an adapter, too."""
    base = json.loads((Path(folder) / CONFIG).read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder}/{CONFIG} names no base model")
    if is_adapter(base):
        raise ValueError(f"{base} is an adapter itself: merge that one into its own base model")
    return base


def in_4bit(folder):
    """Whether the adapters of a checkpoint were trained beside 4-bit weights: its config.json then
    says how they were quantized."""
    file = Path(folder) / "config.json"
    return file.is_file() and "quantization_config" in json.loads(file.read_text())


def named_adapters(policy):
    """{peft's name in a file: parameter}"""
    return {f"base_model.model.{name.replace('.default', '')}": p
            for name, p in policy.named_parameters() if ".lora_" in name}


def load_adapters(policy, folder):
    """Copy the adapters of a checkpoint into the policy's."""
    try:
        saved = load_file(Path(folder) / WEIGHTS)
        own = named_adapters(policy)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}/{WEIGHTS} cannot be read: {error}") from None
    if {n: p.shape for n, p in saved.items()} != {n: p.shape for n, p in own.items()}:
        raise ValueError(f"{folder}: its weights are not those that its {CONFIG} describes")
    for name, parameter in own.items():
        parameter.data.copy_(saved[name])


@contextmanager
def adapters_at(policy, values):
    """Inside the block, the policy computes with other adapters. values: one tensor for each of
    named_adapters, in their order."""
    own = list(named_adapters(policy).values())
    held = [parameter.data for parameter in own]
    for parameter, value in zip(own, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, data in zip(own, held):
            parameter.data = data


class Frozen(nn.Module):
    """The reference policy of --beta: an Actor with the adapters that the run started from."""

    def __init__(self, actor):
        super().__init__()
        self.actor = [actor]                                 # in a list, so it is no submodule

    policy = property(lambda self: self.actor[0].policy)
    routed = property(lambda self: self.actor[0].routed)

    def forward(self, rollout, **options):
        with adapters_at(self.policy, self.policy.first_adapters):
            return self.actor[0](rollout, **options)


def save_policy(policy, folder):
    """Write a Hugging Face checkpoint; for a policy with adapters, peft's checkpoint and the
    model's config.json."""
    if not adapted_layers(policy):
        return policy.save_pretrained(folder)
    config = copy.deepcopy(policy.config)
    if getattr(policy, "is_loaded_in_4bit", False):
        config.quantization_config = FOUR_BITS
    config.save_pretrained(folder)
    policy.adapters.save_pretrained(folder)
    weights = {name: p.detach().contiguous() for name, p in named_adapters(policy).items()}
    save_file(weights, Path(folder) / WEIGHTS)
