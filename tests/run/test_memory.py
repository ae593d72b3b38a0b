"""What does not fit on a GPU is told before the first batch, and trying it changes nothing of a run.

The GPU is a stand-in here: the trial runs on the CPU. tests/speed/test_gpu.py has a pretended one.
python -m pytest tests/run/test_memory.py"""

from pathlib import Path

import pytest
import torch

import train
from plumbing.model.actor import Actor
from plumbing.run import memory
from tiny_run import TINY, differences


def as_on_a_gpu(monkeypatch):
    """From now on runs try the longest. Gives a list, to which each adds the shapes of the rollout
    that it tried, and its random numbers, weights and gradients before and after."""
    seen = []
    make = train.make_learner
    longest = memory.longest

    def state(learner):
        weights = {name: p.detach().clone() for name, p in learner.actor.named_parameters()}
        grads = [p.grad for p in learner.actor.parameters()]
        return torch.get_rng_state(), weights, grads

    def made(settings, task, *rest):
        learner = make(settings, task, *rest)
        before = state(learner)
        memory.try_longest(learner, task)
        seen.append((before, state(learner)))
        return learner

    def noted(*args):
        rollout = longest(*args)
        seen.append((tuple(rollout.prompt_ids.shape), tuple(rollout.response_ids.shape)))
        return rollout
    monkeypatch.setattr(train, "make_learner", made)
    monkeypatch.setattr(memory, "longest", noted)
    return seen


@pytest.mark.parametrize("flags", [
    "", "--plain", "--algorithm ppo", "--algorithm rspo", "--entropy_coef 0.01", "--bf16 true",
    "--gradient_checkpointing", "--routing_replay old", "--micro_batch_size 2", "--use_peft"])
def test_trying_the_longest_changes_no_bit(flags, workplace, monkeypatch):
    if "--use_peft" in flags:
        pytest.importorskip("peft")
    argv = [*TINY, *flags.split(), "--steps", "2", "--output_dir"]
    train.main([*argv, "plain"])
    tried = as_on_a_gpu(monkeypatch)
    train.main([*argv, "tried"])
    shapes, (before, after) = tried
    rows = 2 if "--micro_batch_size" in flags else 8
    assert shapes == ((rows // 4 or 1, 4), (rows, 5))
    assert torch.equal(before[0], after[0]) and after[2] == before[2] == [None] * len(before[2])
    assert all(torch.equal(weight, after[1][name]) for name, weight in before[1].items())
    weights = "adapter_model.safetensors" if "--use_peft" in flags else "model.safetensors"
    assert differences("plain", "tried", 2, weights) == []


def test_what_does_not_fit_is_told_before_the_first_answer_and_leaves_no_folder(
        workplace, monkeypatch, capsys):
    pytest.importorskip("peft")

    def full(learner, rollout, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Actor, "forward", full)
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--steps", "1", "--use_peft", "--output_dir", "run"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error == (
        "train.py: out of GPU memory: lower --micro_batch_size (now the whole mini-batch), "
        "--max_completion_length, --prompts_per_step (now 4) or --eval_prompts (now 256), or add "
        "--gradient_checkpointing or --load_in_4bit or --optim adamw_8bit\n")
    assert not Path("run").exists()
