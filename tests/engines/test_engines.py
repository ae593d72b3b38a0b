"""Inference engines as samplers, from the command line: vLLM's side of the seam by a stand-in
(tests/engines/fake). test_vllm.py runs vLLM itself. python -m pytest tests/engines/test_engines.py"""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import eval
import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.engines.agreement import check_agreement
from plumbing.engines.responses import as_rollout, ending_tokens, row_seeds
from plumbing.engines.vllm import RUNNING, VllmSampler, close_engine
from rollout import response_logp, sample
from tiny_run import SMALL, TINY, TINY_MODEL, differences, metrics

FAKE = Path(__file__).parent / "fake"


def model(ends=(), seed=0):
    """(policy, tokenizer): a tiny Llama with a tied head, and perhaps further end tokens."""
    torch.manual_seed(seed)
    tokenizer = builtin_tokenizer()
    policy = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=128, initializer_range=0.3)).eval()
    policy.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, *ends], top_k=5, top_p=0.8, repetition_penalty=1.3, do_sample=True)
    return policy, tokenizer


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in for vLLM, as `import vllm` finds it."""
    monkeypatch.syspath_prepend(str(FAKE))
    sys.modules.pop("vllm", None)
    yield importlib.import_module("vllm")
    close_engine()
    del sys.modules["vllm"]


PROMPTS = [[1, 10, 2, 11], [3, 11], [4, 10, 4, 10, 4, 11]]


@pytest.mark.parametrize("ends, stop", [((), ()), ((3, 5), ("2", "1+"))])
def test_an_engine_draws_from_the_policy_and_ends_where_rollout_sample_ends(ends, stop, vllm):
    policy, tokenizer = model(ends)
    uniforms = torch.rand(3 * 64, 10, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    rollout = VllmSampler(policy, tokenizer, 10, 0.7, stop).sample(PROMPTS, 64, uniforms=uniforms)
    assert torch.equal(before, torch.get_rng_state())        # an engine seeds the global generator
    own = response_logp(policy, rollout, 0.7, entropy=False).logp
    assert torch.allclose(own[rollout.mask], rollout.sampler_logp[rollout.mask], atol=1e-5)
    other = sample(policy, tokenizer, PROMPTS, 64, 10, 0.7, uniforms, stop)
    assert abs(rollout.mask.sum(-1).float().mean() - other.mask.sum(-1).float().mean()) < 1
    assert abs(rollout.truncated.float().mean() - other.truncated.float().mean()) < 0.12
    counts = [torch.bincount(r.response_ids[:, 0], minlength=17) / 192 for r in (rollout, other)]
    assert (counts[0] - counts[1]).abs().max() < 0.13        # the same distribution of first tokens
    for text, ids, mask in zip(rollout.texts, rollout.response_ids.tolist(), rollout.mask.tolist()):
        assert not any(string in text for string in stop)
        own = [token for token, loss in zip(ids, mask) if loss]
        assert not {*own[:-1]} & {tokenizer.eos_token_id, *ends}


def test_the_same_random_numbers_draw_the_same_responses_and_zero_is_greedy(vllm):
    policy, tokenizer = model()
    sampler = VllmSampler(policy, tokenizer, 6)
    uniforms = torch.rand(3 * 4, 6, generator=torch.Generator().manual_seed(1))
    one, two = (sampler.sample(PROMPTS, 4, uniforms=uniforms) for _ in range(2))
    other = sampler.sample(PROMPTS, 4, uniforms=1 - uniforms)
    assert torch.equal(one.response_ids, two.response_ids) and one.texts != other.texts
    greedy = sampler.sample(PROMPTS, 4, uniforms=uniforms, temperature=0)
    assert greedy.texts == sample(policy, tokenizer, PROMPTS, 4, 6, 0).texts


# ------------------------------------------------------------------------------------------ pieces

def test_responses_become_a_rollout():
    """Against a loop in Python: cut at the first end, which is a loss token; padding never is one."""
    policy, tokenizer = model(ends=(3,))
    responses = [[1, 2, 3, 4], [1, 2], [15], [1, 1, 1, 1]]
    logps = [[-0.1 * (t + 1) for t in range(len(row))] for row in responses]
    rollout = as_rollout(policy, tokenizer, [[1, 11], [2]], 2, responses, logps)
    assert rollout.mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert rollout.truncated.tolist() == [False, True, False, True]
    for row, expected in zip(rollout.sampler_logp.tolist(), [logps[0][:3] + [0], logps[1] + [0, 0], logps[2] + [0] * 3, logps[3]]):
        assert row == pytest.approx(expected)
    assert rollout.texts == ["123", "12", "", "1111"] and rollout.prompt_mask.tolist() == [[1, 1], [0, 1]]
    cut = as_rollout(policy, tokenizer, [[1, 11]], 4, responses, logps, stop=("12",))
    assert cut.texts == ["", "", "", "1111"] and cut.mask.sum(-1).tolist() == [2, 2, 1, 4]


@pytest.mark.parametrize("responses, logps, words", [
    ([[1]], [[-1.0]], "1 responses"), ([[1], []], [[-1.0], []], "at least one token"), ([[1], [2]], [[-1.0], []], "one log-prob"),
    ([[1], [2]], [[-1.0], [-math.inf]], "not a finite")])
def test_responses_that_do_not_fit_are_refused(responses, logps, words):
    with pytest.raises(ValueError, match=words):
        as_rollout(*model(), [[1]], 2, responses, logps)


def test_tokens_that_end_by_themselves():
    policy, tokenizer = model(ends=(3,))
    assert ending_tokens(policy, tokenizer, ()) == [3, 15] and ending_tokens(policy, tokenizer, ("7", "1+")) == [3, 7, 15]


def test_seeds_differ_between_rows_and_depend_on_nothing_else():
    uniforms = torch.rand(2000, 3)
    seeds = row_seeds(uniforms, 2000)
    assert len({*seeds}) > 1995 and max(seeds) < 2 ** 32 and row_seeds(uniforms[7:9], 2) == seeds[7:9]
    assert len({*row_seeds(None, 100)}) == 100


@pytest.mark.parametrize("dtype, error, stops", [
    (torch.float32, 0.0, False), (torch.float32, 0.01, True), (torch.bfloat16, 0.01, False), (torch.bfloat16, 0.2, True),
    (torch.float32, math.nan, True)])
def test_a_difference_beyond_rounding_stops_the_run(dtype, error, stops):
    policy, tokenizer = model()
    rollout = sample(policy, tokenizer, PROMPTS, 4, 5, 0.7)
    rollout.sampler_logp = rollout.sampler_logp + error
    if not stops:
        return check_agreement("vllm", policy, rollout, 0.7, dtype)
    with pytest.raises(ValueError, match="--sampler vllm: its log-probs differ from the policy's by"):
        check_agreement("vllm", policy, rollout, 0.7, dtype)


# -------------------------------------------------------------------------------- the command line

def save_model(folder):
    policy, tokenizer = model()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(1, 9)))


DATA = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact --max_completion_length 4 --max_prompt_length 16".split()
FAST = "--learning_rate 0.003 --algorithm grpo --warmup_steps 0 --entropy_coef 0.1".split()


def test_vllm_gets_the_weights_after_every_batch(workplace, vllm):
    """One engine for rollouts and evaluations; a transfer where the policy has changed, and nowhere else."""
    save_model("model")
    argv = [*SMALL, *FAST, *DATA, "--sampler", "vllm", "--eval_samples", "1", "--eval_prompts", "2"]
    train.main([*argv, "--steps", "2", "--eval_steps", "1", "--output_dir", "whole"])
    push = ["push", "reset", "generate"]
    assert vllm.CALLS == ["load", *push, "generate", "generate", *push, "generate", "generate", *push, "generate", "shutdown"]
    assert all(record["mismatch_kl"] < 1e-10 for record in metrics("whole"))


def test_vllm_resumes_with_the_same_responses(workplace, vllm):
    save_model("model")
    argv = [*SMALL, *FAST, *DATA, "--sampler", "vllm", "--lr_scheduler_type", "constant_with_warmup"]
    train.main([*argv, "--steps", "2", "--output_dir", "whole"])
    train.main([*argv, "--steps", "1", "--output_dir", "parts"])
    train.main([*argv, "--steps", "2", "--output_dir", "parts", "--resume"])
    assert not differences("whole", "parts", 2)


def test_vllm_gets_merged_adapters_and_the_trained_weights_stay(workplace, vllm):
    pytest.importorskip("peft")
    save_model("model")
    train.main([*SMALL, *FAST, *DATA, "--sampler", "vllm", "--use_peft", "--steps", "3", "--output_dir", "run"])
    assert vllm.CALLS.count("push") == 3 and all(record["mismatch_kl"] < 1e-9 for record in metrics("run"))
    train.main([*SMALL, *FAST, *DATA, "--use_peft", "--steps", "1", "--output_dir", "ours"])
    assert metrics("run")[0]["perplexity_old"] == pytest.approx(metrics("ours")[0]["perplexity_old"], rel=0.5)


def test_weights_that_do_not_arrive_stop_the_run_in_one_line(workplace, vllm, capsys):
    """The planted fault: the tied head is not transferred, as with named_parameters()."""
    save_model("model")
    vllm.FAULTS.append("lm_head")
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, *FAST, *DATA, "--sampler", "vllm", "--steps", "3", "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    assert "--sampler vllm: its log-probs differ from the policy's" in err and "does not sample from the weights" in err
    assert len(metrics("run")) == 1                          # the first batch was sampled before any update


def test_on_a_gpu_vllm_sleeps_while_the_policy_is_trained(vllm, monkeypatch):
    """Simulated: the policy claims to be on a GPU. It has never been run on one."""
    policy, tokenizer = model()
    sampler = VllmSampler(policy, tokenizer, 4, prompt_tokens=16, memory_share=0.4)
    sampler.sample(PROMPTS, 2)
    sampler.engine.cpu = False
    vllm.CALLS.clear()
    sampler.sample(PROMPTS, 2)
    with torch.no_grad():
        policy.lm_head.weight.add_(0.1)
    sampler.sample(PROMPTS, 2)
    assert vllm.CALLS == ["wake", "generate", "sleep", "wake", "push", "reset", "generate", "sleep"]


PASSK = ["passk", "--model_name_or_path", "model", *DATA[2:], "--n", "2", "--k", "1", "--problems", "4", "--device", "cpu"]


def test_passk_uses_an_engine_in_the_format_that_it_is_given(workplace, vllm):
    """Greedy-like at temperature 0.01: every sampler gives the same scores; --sampler_dtype is that of vLLM's copy."""
    save_model("model")
    for sampler in ([], ["--sampler", "vllm"], ["--sampler", "vllm", "--sampler_dtype", "bfloat16"]):
        eval.main([*PASSK, *sampler, "--temperature", "0.01", "--output", "scores.json"])
        found = json.loads(Path("scores.json").read_text())["checkpoints"][0]
        lengths = lengths if sampler else found["mean_length"]
        assert "bfloat16" in sampler or found["mean_length"] == lengths
        if "vllm" in sampler:
            engine, = RUNNING.values()
            assert engine.llm.model.dtype == (torch.bfloat16 if "bfloat16" in sampler else torch.float32)
            assert vllm.CALLS.count("load") == 1 + ("bfloat16" in sampler)


def test_passk_refuses_a_format_that_its_sampler_would_not_have(workplace, capsys):
    with pytest.raises(SystemExit) as stop:
        eval.main([*PASSK, "--sampler_dtype", "bfloat16"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "--sampler_dtype needs --sampler vllm" in err


@pytest.mark.parametrize("flags, words", [
    ("--sampler vllm", "needs a package that is not installed: vllm"),
    ("--sampler vllm --routing_replay rollout", "only the built-in sampler"),
    ("--sampler vllm --load_in_4bit --use_peft --model_name_or_path model", "only the built-in sampler"),
    ("--sampler vllm --tool t.py:f --dataset_name rows.jsonl --model_name_or_path model", "only the built-in sampler"),
    ("--vllm_gpu_memory_utilization 0.5", "needs --sampler vllm"),
    ("--vllm_gpu_memory_utilization 1.5", "not between 0 and 1"), ("--vllm_gpu_memory_utilization 0", "above 0")])
def test_flags_that_do_not_go_with_an_engine_are_refused(flags, words, workplace, request, capsys):
    if "needs a package" not in words:
        request.getfixturevalue("vllm")
    with pytest.raises(SystemExit) as stop:
        train.main([*(SMALL if "dataset" in flags else TINY_MODEL if "model" in flags else TINY), *flags.split(), "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1 and not Path("run").exists()


def test_formats_that_vllm_does_not_have_are_refused(workplace, vllm, capsys):
    with pytest.raises(SystemExit):
        train.main([*TINY, "--sampler", "vllm", "--sampler_dtype", "int8"])
    assert "is not a format of --sampler vllm" in capsys.readouterr().err
