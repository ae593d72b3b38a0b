"""Adapters of peft beside a model: the files of their checkpoint, inserting and reading them.
features/lora.py trains them.
"""

import logging
import warnings
from pathlib import Path

from torch.random import fork_rng, manual_seed

from plumbing.model.copies import merge_adapters
from plumbing.refusal import Refusal

CONFIG = "adapter_config.json"
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)    # it warns of missing CPU kernels


def read_adapters(policy, folder):
    """The base model `policy` of an adapter's checkpoint, with its adapters merged into it."""
    return merge_adapters(load_adapters(insert_adapters(policy, read_peft_config(folder)), folder))


def read_peft_config(folder):
    """peft's configuration of a checkpoint's adapters."""
    import peft
    return peft.PeftConfig.from_pretrained(folder)


def insert_adapters(policy, config, seed=0):
    """Freeze the policy and insert new adapters, which do not change its output yet. Raises
    Refusal for modules that the model does not have."""
    import peft
    for message in ("Model has `tie_word_embeddings=True`",          # merge_adapters unties
                    "fan_in_fan_out is set to False",                # GPT-2's layers: peft sets it
                    "`is_gradient_checkpointing` is deprecated"):    # peft's call of transformers
        warnings.filterwarnings("ignore", message)
    config.inference_mode = False                            # peft would freeze its weights
    with fork_rng():
        manual_seed(seed)                                    # the same adapters in every process
        try:
            model = peft.PeftModel(policy, config)
        except ValueError as error:
            raise Refusal(" ".join(str(error).split())[:200]) from None
    vars(policy)["peft_model"] = model                       # no submodule: it contains the policy
    return policy


def load_adapters(policy, folder):
    """Copy the adapters of a checkpoint into those of the policy, which it returns. Raises
    Refusal if they do not fit."""
    result = policy.peft_model.load_adapter(folder, "default", torch_device="cpu")
    if result.missing_keys or result.unexpected_keys:
        raise Refusal(f"{folder}: its weights are not those that its {CONFIG} describes")
    return policy


def is_adapter(folder):
    return folder is not None and (Path(folder) / CONFIG).is_file()


def find_base_model(folder):
    """The name or folder of the checkpoint that an adapter was trained on."""
    return read_peft_config(folder).base_model_name_or_path
