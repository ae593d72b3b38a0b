"""Checkpoints of LoRA adapters, as peft writes them: a small low-rank product for every frozen
matrix of a base model, which their config names. features/lora.py trains adapters.
"""

import json
import logging
import warnings
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.random import fork_rng, manual_seed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def put_in(policy, config=None, folder=None, seed=0):
    """Freeze the policy and add adapters to it: new ones as peft's config says, which do not change
    its output yet, or those of a checkpoint folder.

    Raises ValueError without peft, and for modules that the model does not have.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)    # it warns of missing CPU kernels
    warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")   # `merged` unties
    peft = package()
    config = peft.PeftConfig.from_pretrained(folder) if folder else config
    config.inference_mode = False                            # peft would freeze its weights
    with fork_rng():
        manual_seed(seed)                                    # the same adapters in every process
        peft.inject_adapter_in_model(config, policy)
    for p in named_adapters(policy).values():
        p.data = p.data.float()      # peft may give them the 16-bit dtype of a 4-bit layer
    policy.adapters = config
    if folder:
        load_adapters(policy, folder)
    return policy


def package():
    """The module peft. Raises ValueError without it."""
    try:
        import peft
    except ImportError:
        raise ValueError("--use_peft needs peft: pip install peft") from None
    return peft


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
