"""--sampler vllm: this program's side of the seam, with a stand-in for vLLM (tests/features/fake).
test_vllm_engine.py runs vLLM itself. python -m pytest tests/features/test_vllm.py"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import eval
from models import for_chats, make
from plumbing.data.running_sum import builtin_tokenizer
from features.vllm_engine import RUNNING, VllmSampler, close_engine
from plumbing.refusal import Refusal
from session.arguments import parse
from tiny_run import jsonl, metrics

TOKENIZER = builtin_tokenizer()
PROMPTS = [[1, 10, 2, 11], [3, 11], [4, 10, 4, 10, 4, 11]]


def model(ends=()):
    """A tiny Llama with a tied head, and perhaps further end tokens."""
    return for_chats(make("llama", tie_word_embeddings=True, max_position_embeddings=128,
                          initializer_range=0.3), ends)


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in for vLLM, as `import vllm` finds it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake"))
    sys.modules.pop("vllm", None)
    yield importlib.import_module("vllm")
    close_engine()
    del sys.modules["vllm"]


# ------------------------------------------------------------------------------- the command line

DATA = ("--dataset_name rows.jsonl --verifier exact --max_completion_length 4 "
        "--max_prompt_length 16 ")
OURS = (f"--model_name_or_path model {DATA} --learning_rate 0.003 --algorithm grpo "
        "--warmup_steps 0 --entropy_coef 0.1 ")
VLLM = OURS + "--sampler vllm "


@pytest.fixture
def place(workplace):
    """A checkpoint "model" and rows."""
    model().save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 9)])


def test_vllm_gets_the_weights_after_every_batch(place, run, vllm):
    """One engine for rollouts and evaluations; a transfer where the policy has changed, and nowhere
    else."""
    records = run(VLLM + "--eval_samples 1 --eval_prompts 2 --steps 2 --eval_steps 1")
    push = ["push", "reset", "generate"]
    batch = [*push, "generate", "generate"]
    assert vllm.CALLS == ["load", *batch, *batch, *push, "generate", "shutdown"]
    assert all(record["mismatch_kl"] < 1e-10 for record in records)


def test_weights_that_do_not_arrive_stop_the_run_in_one_line(place, run, vllm):
    """The planted fault: the tied head is not transferred, as with named_parameters()."""
    vllm.FAULTS.append("lm_head")
    with pytest.raises(Refusal, match="does not sample from the weights that are trained"):
        run(VLLM + "--steps 3")
    assert len(metrics("run")) == 1                          # sampled before any update


def test_on_a_gpu_vllm_sleeps_while_the_policy_is_trained(vllm):
    """Simulated: the policy claims to be on a GPU. It has never been run on one."""
    policy = model()
    sampler = VllmSampler(policy, TOKENIZER, 4, prompt_tokens=16, memory_share=0.4)
    sampler.sample(PROMPTS, 2)
    sampler.engine.cpu = False
    vllm.CALLS.clear()
    sampler.sample(PROMPTS, 2)
    with torch.no_grad():
        policy.lm_head.weight.add_(0.1)
    sampler.sample(PROMPTS, 2)
    assert vllm.CALLS == ["wake", "generate", "sleep",
                          "wake", "push", "reset", "generate", "sleep"]


def test_passk_uses_an_engine_in_the_format_that_it_is_given(place, vllm):
    """--sampler_dtype is that of vLLM's copy."""
    for line, loads in (("", 0), ("--sampler vllm", 1),
                        ("--sampler vllm --sampler_dtype bfloat16", 2)):
        eval.main(f"passk model {DATA} --n 2 --k 1 --problems 4 --device cpu {line}".split())
        assert vllm.CALLS.count("load") == loads
        if loads:
            engine, = RUNNING.values()
            dtype = torch.bfloat16 if loads == 2 else torch.float32
            assert engine.llm.model.dtype == dtype


@pytest.mark.parametrize("line, words", [
    ("--sampler vllm", "needs a package that is not installed: vllm"),
    ("--sampler vllm --routing_replay rollout", "only the built-in sampler"),
    ("--sampler vllm --sampler_dtype int8", "is not a format of --sampler vllm")])
def test_flags_that_do_not_go_with_an_engine_are_refused(line, words, request):
    if "needs a package" not in words:
        request.getfixturevalue("vllm")
    with pytest.raises(Refusal, match=words):
        parse(line.split())
