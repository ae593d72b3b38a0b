"""Whatever way weights are held, training moves them. python -m pytest tests/model/test_what_is_trained_moves.py

A step of 1e-6, the default for a checkpoint, is far below what bfloat16 can show of a weight: a way of holding weights
that loses it trains nothing, without an error. So for every way, from the command line: after the first optimizer steps
nearly all entries that had a gradient have changed; and with given gradients 64 steps add up to those of float32.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from plumbing.model.actor import Actor, trained_policy
from train import make_optimizer
from plumbing.model.adapters import add_adapters, named_adapters
from plumbing.run.arguments import parse
from moe import TinyMoE
from tiny_run import TINY_MODEL, TRAIN

RATE = ["--learning_rate", "1e-6", "--warmup_steps", "0", "--lr_scheduler_type", "constant_with_warmup"]
WAYS = {"float32": [], "bfloat16": ["--bf16", "true"],
        "LoRA": ["--use_peft"], "LoRA in bfloat16": ["--use_peft", "--bf16", "true"],
        "LoRA in bfloat16, the head's too": ["--use_peft", "--bf16", "true", "--lora_target_modules", "q_proj", "lm_head"],
        "not fused": ["--optim", "adamw_torch"]}


@pytest.fixture
def flags(workplace, cold_start):
    """flags(way): those of a run on a checkpoint, the tiny MoE after its cold start."""
    return lambda way: [*TINY_MODEL, *RATE, "--model_name_or_path", str(next(cold_start.iterdir())), *WAYS[way]]


def before_training(args):
    """{name in a checkpoint: weight} of what a run with these arguments trains, as it begins."""
    policy = TinyMoE.from_pretrained(args.model_name_or_path)
    if args.use_peft:
        policy.name_or_path = args.model_name_or_path
        return {name: p.detach() for name, p in named_adapters(add_adapters(policy, args)).items()}
    return {name: p.detach() for name, p in policy.named_parameters()}


def in_file(folder, names):
    """The trained weights of a checkpoint, by TinyMoE's names."""
    files = list(folder.glob("adapter_model.safetensors"))
    if files:
        return load_file(files[0])
    saved = dict(TinyMoE.from_pretrained(folder).named_parameters())
    return {name: saved[name].detach() for name in names}


def shares_moved(args, run):
    """Of each trained tensor with a gradient: the share of the entries with a gradient that have changed."""
    folder = max(Path(run, "checkpoints").glob("step_*"))
    before = before_training(args)
    after = in_file(folder, before)
    moments = torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"]
    shares = {}
    for name, moment in zip(before, moments.values(), strict=True):
        seen = moment["exp_avg"] != 0                        # AdamW's mean of all gradients so far
        assert after[name].dtype == moment["exp_avg"].dtype == torch.float32, (name, after[name].dtype, moment["exp_avg"].dtype)
        if seen.any():
            shares[name] = (after[name] != before[name])[seen].float().mean().item()
    return shares


@pytest.mark.parametrize("way", WAYS)
def test_the_first_steps_change_what_has_a_gradient(way, flags):
    """Two optimizer steps: LoRA's A has a gradient only once B is not 0 any more. Saved weights and moments are float32."""
    if "LoRA" in way:
        pytest.importorskip("peft")
    argv = [*flags(way), "--steps", "1", "--output_dir", "run"]
    train.main(argv)
    shares = shares_moved(parse(argv), "run")
    assert len(shares) > 3 and any("lora_A" in name for name in shares) == ("LoRA" in way)
    assert min(shares.values()) > 0.9, min(shares.items(), key=lambda item: item[1])


def given(parameter, number, step):
    """The gradient of a parameter at a step: the same for every way of holding weights."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    always = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return always + 0.5 * torch.randn(parameter.shape, generator=generator)


def moved_in_64_steps(argv):
    """How far given gradients move each trained tensor in 64 steps of the run's optimizer."""
    args = parse(argv)
    policy, _ = trained_policy(args, None, torch.device("cpu"))
    actor = Actor(policy, args)
    optimizer = make_optimizer(args, actor)
    trained = [p for p in actor.parameters() if p.requires_grad]
    held = [p for group in optimizer.param_groups for p in group["params"]]    # masters, if there are any
    start = [p.detach().clone() for p in held]
    for step in range(64):
        optimizer.zero_grad()
        sum((p * given(p, i, step).to(p.dtype)).sum() for i, p in enumerate(trained)).backward()
        optimizer.step()
    return [(p.detach() - first).float() for p, first in zip(held, start)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "float32"])
def test_sixty_four_steps_add_up_to_those_of_float32(way, flags):
    if "LoRA" in way:
        pytest.importorskip("peft")
    argv = flags(way)
    plain = argv[:argv.index("--optim")] if "--optim" in argv else argv
    plain = plain[:plain.index("--bf16")] + plain[plain.index("--bf16") + 2:] if "--bf16" in plain else plain
    for here, there in zip(moved_in_64_steps(argv), moved_in_64_steps(plain), strict=True):
        assert there.norm() > 0 and (here - there).norm() < 0.01 * there.norm()


@pytest.mark.slow
def test_shards_move_as_one_process_does(flags):
    """Two processes with --shard: the first steps change as much, and 64 steps end where one process's end."""
    argv = [*flags("float32"), "--sampler_dtype", "float32", "--max_completion_length", "6"]
    for steps in ("1", "32"):
        run = [*argv, "--steps", steps, "--output_dir"]
        train.main([*run, f"one{steps}"])
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN, *run,
                               f"two{steps}", "--shard"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
    before = before_training(parse(argv))
    ends = [in_file(Path(run, "checkpoints", f"step_{n}"), before) for n in (1, 32) for run in (f"one{n}", f"two{n}")]
    for name, start in before.items():
        one, two, one_far, two_far = (end[name] - start for end in ends)
        seen = one != 0
        assert seen.sum() == 0 or (two != 0)[seen].float().mean() > 0.9, name
        assert abs(two_far.abs().sum() - one_far.abs().sum()) <= 0.01 * one_far.abs().sum(), name
