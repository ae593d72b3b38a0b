"""What does not fit on a GPU is told before the first batch; trying it changes nothing of a run.

The GPU is a stand-in here: the trial runs on the CPU. tests/speed/test_gpu.py has a pretended one.
python -m pytest tests/run/test_memory.py"""

import pytest
import torch

from plumbing.model.actor import Actor
from session import lifecycle, memory
from session.arguments import Settings
from tiny_run import differences, slow


@pytest.fixture
def gpu(then):
    """gpu(): from now on runs try the longest. Gives a list, to which each adds the shapes of the
    rollout that it tried, and the gradients that it left."""
    def start():
        seen = []

        def made(learner, settings, task, *rest):
            memory.try_longest(learner, task)
            seen.append([p.grad for p in learner.actor.parameters()])
        then(lifecycle, "make_learner", made)
        then(memory, "longest", lambda rollout, *_: seen.append(
            (tuple(rollout.prompt_ids.shape), tuple(rollout.response_ids.shape))))
        return seen
    return start


@pytest.mark.parametrize("flags", [
    "", "--plain", "--algorithm ppo", "--micro_batch_size 2", "--use_peft",
    *map(slow, ["--algorithm rspo", "--entropy_coef 0.01", "--bf16 true",
                "--gradient_checkpointing", "--routing_replay old"])])
def test_trying_the_longest_changes_no_bit(flags, run, gpu):
    if "--use_peft" in flags:
        pytest.importorskip("peft")
    run(f"--steps 2 {flags}", folder="plain")
    tried = gpu()
    run(f"--steps 2 {flags}", folder="tried")
    shapes, gradients = tried
    rows = 2 if "--micro_batch_size" in flags else 8
    assert shapes == ((rows // 4 or 1, 4), (rows, 5))
    assert gradients == [None] * len(gradients)
    assert differences("plain", "tried", 2) == []


def test_what_does_not_fit_is_told_before_the_first_answer_and_leaves_no_folder(
        run, gpu, monkeypatch):
    pytest.importorskip("peft")

    def full(learner, rollout, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")
    gpu()
    monkeypatch.setattr(Actor, "forward", full)
    assert run.refused("--steps 1 --use_peft --output_dir run") == (
        "train.py: out of GPU memory: lower --micro_batch_size (now the whole mini-batch), "
        "--max_completion_length, --prompts_per_step (now 4) or --eval_prompts (now 256), or add "
        "--gradient_checkpointing or --load_in_4bit or --optim adamw_8bit\n")
    assert ", --vllm_gpu_memory_utilization, " in memory.out_of_memory(Settings(sampler="vllm"))
