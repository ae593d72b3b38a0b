"""Whatever way weights are held, training moves them.
python -m pytest tests/model/test_what_is_trained_moves.py

A step of 1e-6, the default for a checkpoint, is far below what bfloat16 can show of a weight: a way
of holding weights that loses it trains nothing, without an error. So for every way, from the
command line: after the first optimizer steps nearly all entries that had a gradient have changed;
and with given gradients 64 steps add up to those of float32. Shards: tests/parallel.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_run
from moe import TinyMoE
from plumbing.model.actor import Actor, trained_policy
from features.lora import add_adapters
from features.lora import named_adapters
from plumbing.run.arguments import parse
from train import make_optimizer

WAYS = {"float32": "", "bfloat16": "--bf16 true", "LoRA": "--use_peft",
        "LoRA in bfloat16": "--use_peft --bf16 true", "not fused": "--optim adamw_torch",
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
        return {name: p.detach() for name, p in named_adapters(add_adapters(policy, args)).items()}
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


def given(parameter, number, step):
    """The gradient of a parameter at a step: the same for every way of holding weights."""
    random = lambda seed: torch.randn(parameter.shape,
                                      generator=torch.Generator().manual_seed(seed))
    return random(number) + 0.5 * random(1000 * number + step)


def moved_in_64_steps(flags):
    """How far given gradients move each trained tensor in 64 steps of the run's optimizer."""
    args = arguments(flags)
    policy, _ = trained_policy(args, None, torch.device("cpu"))
    actor = Actor(policy, args)
    optimizer = make_optimizer(args, actor)
    trained = [p for p in actor.parameters() if p.requires_grad]
    held = [p for group in optimizer.param_groups for p in group["params"]]     # masters, if any
    start = [p.detach().clone() for p in held]
    for step in range(64):
        optimizer.zero_grad()
        sum((p * given(p, i, step).to(p.dtype)).sum() for i, p in enumerate(trained)).backward()
        optimizer.step()
    return [(p.detach() - first).float() for p, first in zip(held, start)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "float32"])
def test_sixty_four_steps_add_up_to_those_of_float32(way, flags):
    argv = flags(way)
    plain = argv.replace("--bf16 true", "").replace("--optim adamw_torch", "")
    for here, there in zip(moved_in_64_steps(argv), moved_in_64_steps(plain), strict=True):
        assert there.norm() > 0 and (here - there).norm() < 0.01 * there.norm()
