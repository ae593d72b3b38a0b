"""Adapters of peft beside a model: the files of their checkpoint, inserting and reading them.
features/lora.py trains them.
"""

import json
import logging
import warnings
from pathlib import Path

from torch.random import fork_rng, manual_seed

from plumbing.model.copies import merge_adapters
from plumbing.model.nf4 import round_to_4bit
from plumbing.refusal import Refusal, refuse_os_errors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)    # it warns of missing CPU kernels


def read_adapters(policy, folder):
    """The base model `policy` of an adapter's checkpoint, with its adapters merged into it. A base
    model that was in 4 bits while they were trained is rounded first."""
    if trained_in_4bit(folder):
        round_to_4bit(policy)
    config = read_peft_config(folder)
    return merge_adapters(load_adapters(insert_adapters(policy, config), folder))


def import_peft():
    """The module peft. Raises Refusal without it."""
    try:
        import peft
    except ImportError:
        raise Refusal("--use_peft needs peft: pip install peft") from None
    return peft


def check_lora(folder):
    """Refuse the adapters of a checkpoint unless they are LoRA's."""
    peft_type = read_json(Path(folder) / CONFIG).get("peft_type")
    if peft_type != "LORA":
        raise Refusal(f"{folder}/{CONFIG}: its peft_type is {peft_type}: only LORA is supported; "
                      "merge the adapters into their base model first")


def read_peft_config(folder):
    """peft's configuration of a checkpoint's adapters. Raises Refusal unless they are LoRA's."""
    check_lora(folder)
    peft = import_peft()
    try:
        return peft.PeftConfig.from_pretrained(folder)
    except Exception as error:                               # peft raises several kinds
        raise Refusal(f"{folder}/{CONFIG}: {' '.join(str(error).split())[:200]}") from None


def insert_adapters(policy, config, seed=0):
    """Freeze the policy and insert new adapters, which do not change its output yet. Raises
    Refusal for modules that the model does not have."""
    for message in ("Model has `tie_word_embeddings=True`",          # merge_adapters unties
                    "fan_in_fan_out is set to False",                # GPT-2's layers: peft sets it
                    "`is_gradient_checkpointing` is deprecated"):    # peft's call of transformers
        warnings.filterwarnings("ignore", message)
    config.inference_mode = False                            # peft would freeze its weights
    with fork_rng():
        manual_seed(seed)                                    # the same adapters in every process
        try:
            model = import_peft().PeftModel(policy, config)
        except ValueError as error:
            raise Refusal(" ".join(str(error).split())[:200]) from None
    vars(policy)["peft_model"] = model                       # no submodule: it contains the policy
    return policy


def load_adapters(policy, folder):
    """Copy the adapters of a checkpoint into those of the policy, which it returns. Raises
    Refusal if they do not fit."""
    if not (Path(folder) / WEIGHTS).is_file():
        raise Refusal(f"{folder} has no {WEIGHTS}")
    try:
        result = policy.peft_model.load_adapter(folder, "default", torch_device="cpu")
    except Exception as error:                               # safetensors' and torch's kinds
        raise Refusal(f"{folder}/{WEIGHTS} cannot be read: "
                      f"{' '.join(str(error).split())[:200]}") from None
    if result.missing_keys or result.unexpected_keys:
        raise Refusal(f"{folder}: its weights are not those that its {CONFIG} describes")
    return policy


def is_adapter(folder):
    return folder is not None and (Path(folder) / CONFIG).is_file()


@refuse_os_errors()
def read_json(file):
    """What a JSON file holds. Raises Refusal, which names the file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal(f"{file}: {error}") from None


def find_base_model(folder):
    """The name or folder of the checkpoint that an adapter was trained on. Raises Refusal if
    there is none, or if that is an adapter, too."""
    base = read_json(Path(folder) / CONFIG).get("base_model_name_or_path")
    if not base:
        raise Refusal(f"{folder}/{CONFIG} names no base model")
    if is_adapter(base):
        raise Refusal(f"{folder} is an adapter of {base}, which is an adapter itself: merge "
                      "that one into its own base model")
    return base


def trained_in_4bit(folder):
    """Whether the adapters of a checkpoint were trained beside 4-bit weights: its config.json then
    records how they were quantized."""
    file = Path(folder) / "config.json"
    return file.is_file() and "quantization_config" in read_json(file)
