"""--optim: AdamW of torch and of bitsandbytes. python -m pytest tests/run/test_optim.py"""

import shutil

import pytest
import torch

import session.learner
from session.arguments import parse
from tiny_run import differences, state

WIDE = ("--hidden_size 96 --cold_start_steps 1 --steps 3 --save_steps 1 --learning_rate 0.01 "
        "--algorithm grpo --entropy_coef 0.1")               # no reward to learn from


def test_a_run_with_moments_in_8_bits_resumes_exactly(run):
    """Matrices of at least 4,096 numbers have them. torch's: tests/run/test_resume.py."""
    pytest.importorskip("bitsandbytes")
    run(f"{WIDE} --optim adamw_8bit", folder="whole")
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step_3")
    run("--resume")
    assert differences("whole", "run", 3) == []
    assert "torch.uint8" in str(state("run", 3)["optimizer"])


@pytest.mark.parametrize("optim, name", [
    ("adamw_torch_fused", "AdamW"), ("adamw_8bit", "AdamW8bit")])
def test_every_name_is_its_class_with_the_settings_of_the_run(optim, name):
    if "8bit" in optim:
        pytest.importorskip("bitsandbytes")
    settings = parse(["--optim", optim, "--learning_rate", "0.3", "--weight_decay", "0.1"])
    made = session.learner.make_optimizer(settings, torch.nn.Linear(2, 2))
    group, = made.param_groups
    assert type(made).__name__ == name
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.3, (0.9, 0.95), 0.1)
