"""Whatever way weights are held, training moves them.
python -m pytest tests/model/test_what_is_trained_moves.py

A step of 1e-6, the default for a checkpoint, is far below what bfloat16 can show of a weight: a way
of holding weights that loses it trains nothing, without an error. So for every way, from the
command line: after the first optimizer steps nearly all entries that had a gradient have changed.
Shards: tests/parallel.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_run
from moe import TinyMoE
from features.lora import add_adapters
from session.arguments import parse

WAYS = {"float32": "", "bfloat16": "--bf16 true", "LoRA": "--use_peft",
        "LoRA in bfloat16": "--use_peft --bf16 true",
        "LoRA in bfloat16, the head's too":
            "--use_peft --bf16 true --lora_target_modules q_proj lm_head"}


@pytest.fixture
def flags(workplace, cold_start):
    """flags(way): those of a run on a checkpoint, the tiny MoE after its cold start."""
    model = (f"--model_name_or_path {cold_start} --learning_rate 1e-6 "
             "--warmup_steps 0 --lr_scheduler_type constant_with_warmup")

    def of(way):
        if "LoRA" in way:
            pytest.importorskip("peft")
        return f"{model} {WAYS[way]}"
    return of


def arguments(flags):
    return parse(tiny_run.flags(*flags.split()))


def before_training(args):
    """{name: weight} of what a run with these arguments trains, as it begins."""
    policy = TinyMoE.from_pretrained(args.model_name_or_path)
    if args.use_peft:
        policy.name_or_path = args.model_name_or_path
        names = {f"base_model.model.{name.replace('.default', '')}": p
                 for name, p in add_adapters(policy, args).named_parameters() if p.requires_grad}
        return {name: p.detach() for name, p in names.items()}
    return {name: p.detach() for name, p in policy.named_parameters()}


def in_file(folder, names):
    """The trained weights of a checkpoint, by TinyMoE's names."""
    for file in folder.glob("adapter_model.safetensors"):
        return load_file(file)
    saved = dict(TinyMoE.from_pretrained(folder).named_parameters())
    return {name: saved[name].detach() for name in names}


@pytest.mark.parametrize("way", WAYS)
def test_the_first_steps_change_what_has_a_gradient(way, flags, run):
    """Two optimizer steps: LoRA's A has a gradient only once B is not 0 any more. Saved weights and
    moments are float32."""
    run(flags(way))
    before = before_training(arguments(flags(way)))
    folder = Path("run/checkpoints/step_1")
    after = in_file(folder, before)
    state = torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"]
    shares = {}                                              # of each tensor: how much has changed
    for name, moment in zip(before, state.values(), strict=True):
        mean = moment["exp_avg"]                             # AdamW's, of all gradients so far
        assert after[name].dtype == mean.dtype == torch.float32, name
        if mean.any():
            shares[name] = (after[name] != before[name])[mean != 0].float().mean().item()
    assert len(shares) > 3 and any("lora_A" in name for name in shares) == ("LoRA" in way)
    assert min(shares.values()) > 0.9, min(shares.items(), key=lambda item: item[1])
