"""--optim: AdamW of torch and of bitsandbytes. python -m pytest tests/run/test_optim.py"""

import shutil
from pathlib import Path

import pytest
import torch

import train
from plumbing.run import checks
from plumbing.run.arguments import parse
from tiny_run import TINY, differences

WIDE = [*TINY, "--hidden_size", "96", "--steps", "3", "--save_steps", "1", "--learning_rate", "0.01"]


def dtypes(state):
    """The dtypes of all tensors in a nest of dicts."""
    if isinstance(state, dict):
        return {name for part in state.values() for name in dtypes(part)}
    return {str(state.dtype)} if isinstance(state, torch.Tensor) else set()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_a_run_resumes_to_the_last_bit_and_is_no_other_optimizers(optim, workplace):
    """Matrices of at least 4,096 numbers have moments in 8 bits."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    run = [*WIDE, "--optim", optim, "--output_dir"]
    train.main([*run, "whole"])
    state = torch.load("whole/checkpoints/step_3/state.pt", weights_only=True)
    assert ("torch.uint8" in dtypes(state["optimizer"])) == (optim == "adamw_8bit")
    train.main([*run, "parts"])
    shutil.rmtree("parts/checkpoints/step_3")
    train.main([*run, "parts", "--resume"])
    assert differences("whole", "parts", 3) == []
    if optim == "adamw_8bit":
        train.main([*WIDE, "--output_dir", "other"])
        files = [Path(name, "checkpoints/step_3/model.safetensors") for name in ("whole", "other")]
        assert len({file.read_bytes() for file in files}) == 2


@pytest.mark.parametrize("optim, name", [
    ("adamw_torch_fused", "AdamW"), ("adamw_torch", "AdamW"), ("adamw_8bit", "AdamW8bit"),
    ("paged_adamw_8bit", "PagedAdamW8bit"), ("paged_adamw_32bit", "PagedAdamW32bit")])
def test_every_name_is_its_class_with_the_settings_of_the_run(optim, name, monkeypatch):
    if "torch" not in optim:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(checks, "kind_of", lambda args: "cuda")
    settings = parse(["--optim", optim, "--learning_rate", "0.3", "--weight_decay", "0.1"])
    made = train.make_optimizer(settings, torch.nn.Linear(2, 2))
    group, = made.param_groups
    assert type(made).__name__ == name
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.3, (0.9, 0.95), 0.1)
    assert group.get("fused") == {"adamw_torch_fused": True, "adamw_torch": False}.get(optim)


@pytest.mark.parametrize("flags, words", [
    ("--optim paged_adamw_8bit", "--optim paged_adamw_8bit needs a CUDA GPU"),
    ("--optim adamw_8bit --shard", "--optim adamw_8bit cannot be combined with --shard"),
    ("--optim sgd", "--optim sgd is unknown"),
    ("--optim adamw_8bit", "pip install bitsandbytes")])
def test_what_cannot_be_is_refused(flags, words, workplace, monkeypatch, capsys):
    there = None if "pip" in words else "there"
    monkeypatch.setattr(checks, "find_spec", lambda name: there)
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, *flags.split(), "--output_dir", "run"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert not Path("run").exists()
