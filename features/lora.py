"""LoRA (2106.09685, by peft): small trained low-rank products beside frozen matrices.

A frozen matrix needs no gradient and no AdamW moments, and with --bf16 or --fp16 it is held in 16
bits (plumbing/model/halves.py): about 2 bytes per parameter instead of 16. The reference of --beta
is the same model with the adapters that the run started from. Checkpoints are peft's
(`PeftModel.from_pretrained` reads them). A run that starts from an adapter's checkpoint goes on
with that adapter, so every checkpoint holds all that was trained since the base model.
"""

import copy
import json
import logging
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.random import fork_rng, manual_seed

from features.copies import merged
from features.feature import Feature, flag
from features.nf4 import round_to_4bit

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FOUR_BITS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                 bnb_4bit_use_double_quant=True)     # the format of four_bit.py


@dataclass(frozen=True)
class Flags:
    use_peft: bool = flag(
        False, "train LoRA adapters and freeze the weights of the model, with about ten times the "
               "--learning_rate of full training; if --model_name_or_path is an adapter's "
               "checkpoint, go on training its adapters (needs pip install peft)",
        section="adapters", without="shard", saves_memory=True, also="lora qlora")
    lora_r: int = flag(16, "LoRA rank", at_least=1, needs="use_peft", also="rank r")
    lora_alpha: int = flag(
        32, "LoRA alpha; LoRA scaling is lora_alpha / lora_r", at_least=1, needs="use_peft")
    lora_target_modules: list[str] = flag([], "modules that get a LoRA adapter", text=True,
                                          unset="every linear layer", needs="use_peft")


class LoRA(Feature):
    flags = Flags
    apart = True

    @classmethod
    def on(cls, settings):
        return settings.use_peft

    @classmethod
    def base_of(cls, folder):
        return base_of(folder) if is_adapter(folder) else None

    @classmethod
    def read(cls, policy, folder):
        """The base model, or what it is after 4-bit quantization, with the adapters that were
        trained beside these weights added to them."""
        if in_4bit(folder):
            round_to_4bit(policy)
        return merged(put_in(policy, folder=folder).to(policy.device))

    @classmethod
    def following(cls, settings, checkpoint):
        """The two lines that load the adapters elsewhere."""
        if not settings.model_name_or_path:
            return None
        return (f"load: base = AutoModelForCausalLM.from_pretrained({base_of(checkpoint)!r}); "
                f"model = PeftModel.from_pretrained(base, {checkpoint!r})")

    @classmethod
    def policy(cls, settings, policy, saved):
        start = settings.model_name_or_path
        start = start if is_adapter(start) else None
        if start and in_4bit(start) and not getattr(settings, "load_in_4bit", False):
            raise ValueError(f"--model_name_or_path {start}: its adapters were trained beside 4-bit"
                             " weights; add --load_in_4bit, or start from their merged weights "
                             "(docs/data.md)")
        if start:
            check_continues(policy, settings, start)
        add_adapters(policy, settings, start)
        policy.first_adapters = [p.detach().clone() for p in named_adapters(policy).values()]
        policy.save_pretrained = partial(save_policy, policy)
        if saved:
            load_adapters(policy, saved)
        return policy

    def __init__(self, run):
        policy = run.actor.policy
        policy.first_adapters = [x.to(run.device) for x in policy.first_adapters]
        run.frozen = lambda: Frozen(run.actor)


def add_adapters(policy, settings, folder=None):
    """Freeze the policy and add adapters to it: new ones, as the flags say, or those of a
    checkpoint folder."""
    config = None if folder else new_config(policy, settings)
    try:
        return put_in(policy, config, folder, settings.seed)
    except ValueError as error:
        words = " ".join(str(error).split())[:200]
        if words.startswith("--"):
            raise
        name = "lora_target_modules" if settings.lora_target_modules else "use_peft"
        raise ValueError(f"--{name}: {words}") from None


def new_config(policy, settings):
    """peft's configuration of the adapters that the flags describe."""
    from transformers.pytorch_utils import Conv1D
    layers = (nn.Linear, Conv1D)                             # that can carry an adapter
    linear = {name.split(".")[-1] for name, m in policy.named_modules() if isinstance(m, layers)}
    targets = settings.lora_target_modules or sorted(linear - {"lm_head", "embed_out"})
    if not targets:
        raise ValueError(f"--use_peft: {type(policy).__name__} has no linear layer besides its LM "
                         "head, so no layer can carry an adapter")
    transposed = any(isinstance(m, Conv1D) for _, m in policy.named_modules())   # GPT-2: [in, out]
    return package().LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=targets, lora_dropout=0.0,
        task_type="CAUSAL_LM", base_model_name_or_path=str(policy.name_or_path),
        fan_in_fan_out=transposed)


def check_continues(policy, settings, folder):
    """Raise ValueError unless the flags describe the adapters in `folder`, which the run will go on
    training. policy: their base model, without adapters."""
    saved = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    asked = new_config(policy, settings)
    for own, name in (("lora_r", "r"), ("lora_alpha", "lora_alpha"),
                      ("lora_target_modules", "target_modules")):
        theirs = spelled(saved[name])
        now = spelled(getattr(asked, name))
        if theirs != now:
            raise ValueError(f"--{own} {now}: the adapters of {folder}, which this run would go "
                             f"on training, have {theirs}; give --{own} {theirs}, or start from "
                             "their merged weights (docs/data.md) to train new ones")


def spelled(value):
    """A value of peft's configuration as on the command line."""
    return " ".join(sorted(value)) if isinstance(value, (list, set)) else str(value)


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

    def pairs(self):
        """[(weight of the reference, weight of the policy)]."""
        now = named_adapters(self.policy).values()
        return list(zip(self.policy.first_adapters, now, strict=True))

    def forward(self, rollout, **options):
        with adapters_at(self.policy, self.policy.first_adapters):
            return self.actor[0](rollout, **options)


def save_policy(policy, folder):
    """Write peft's checkpoint of the adapters, and the model's config.json."""
    config = copy.deepcopy(policy.config)
    if getattr(policy, "is_loaded_in_4bit", False):
        config.quantization_config = FOUR_BITS
    config.save_pretrained(folder)
    policy.adapters.save_pretrained(folder)
    weights = {name: p.detach().contiguous() for name, p in named_adapters(policy).items()}
    save_file(weights, Path(folder) / WEIGHTS)


# --------------------------------------------------------------------------- adapters, by peft

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
    config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder}/{CONFIG} names no base model")
    if is_adapter(base):
        raise ValueError(f"{folder} is an adapter of {base}, which is an adapter itself: merge "
                         "that one into its own base model")
    return base


def in_4bit(folder):
    """Whether the adapters of a checkpoint were trained beside 4-bit weights: its config.json then
    says how they were quantized."""
    file = Path(folder) / "config.json"
    return file.is_file() and "quantization_config" in json.loads(file.read_text(encoding="utf-8"))


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
