"""--optim: AdamW of torch and of bitsandbytes. python -m pytest tests/run/test_optim.py"""

import shutil

import pytest
import torch

import session.learner
from session import checks
from session.arguments import parse
from tiny_run import differences, state

WIDE = ("--hidden_size 96 --cold_start_steps 1 --steps 3 --save_steps 1 --learning_rate 0.01 "
        "--algorithm grpo --entropy_coef 0.1")               # no reward to learn from


def dtypes(state):
    """The dtypes of all tensors in a nest of dicts."""
    if isinstance(state, dict):
        return {name for part in state.values() for name in dtypes(part)}
    return {str(state.dtype)} if isinstance(state, torch.Tensor) else set()


def test_a_run_with_moments_in_8_bits_resumes_exactly_and_is_no_other_optimizers(run):
    """Matrices of at least 4,096 numbers have them. torch's: tests/run/test_resume.py."""
    pytest.importorskip("bitsandbytes")
    run(f"{WIDE} --optim adamw_8bit", folder="whole")
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step_3")
    run("--resume")
    assert differences("whole", "run", 3) == []
    run(WIDE, folder="other")
    assert differences("whole", "other", 3) != []
    found = [dtypes(state(folder, 3)["optimizer"]) for folder in ("whole", "other")]
    assert ["torch.uint8" in each for each in found] == [True, False]


@pytest.mark.parametrize("optim, name", [
    ("adamw_torch_fused", "AdamW"), ("adamw_torch", "AdamW"), ("adamw_8bit", "AdamW8bit"),
    ("paged_adamw_8bit", "PagedAdamW8bit"), ("paged_adamw_32bit", "PagedAdamW32bit")])
def test_every_name_is_its_class_with_the_settings_of_the_run(optim, name, monkeypatch):
    if "torch" not in optim:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(checks, "find_device_type", lambda args: "cuda")
    settings = parse(["--optim", optim, "--learning_rate", "0.3", "--weight_decay", "0.1"])
    made = session.learner.make_optimizer(settings, torch.nn.Linear(2, 2))
    group, = made.param_groups
    assert type(made).__name__ == name
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.3, (0.9, 0.95), 0.1)
    assert group.get("fused") == {"adamw_torch_fused": True, "adamw_torch": False}.get(optim)


@pytest.mark.parametrize("flags, words", [
    ("--optim paged_adamw_8bit", "--optim paged_adamw_8bit needs a CUDA GPU"),
    ("--optim adamw_8bit --shard", "--optim adamw_8bit cannot be combined with --shard"),
    ("--optim sgd", "--optim sgd is unknown"),
    ("--optim adamw_8bit", "pip install bitsandbytes")])
def test_what_cannot_be_is_refused(flags, words, refused, monkeypatch):
    there = None if "pip" in words else "there"
    monkeypatch.setattr(checks, "find_spec", lambda name: there)
    assert words in refused(flags)
