"""vLLM itself as the sampler, on a CPU, where it is installed (tests/requirements-vllm.txt; .ci/run
makes its environment).
python -m pytest tests/features/test_vllm_engine.py -m slow"""

from importlib.util import find_spec

import pytest
import torch

from models import check_ends, for_chats, gap, make
from plumbing.data.running_sum import builtin_tokenizer
from features import vllm_engine as engine
from rollout import response_logp
from tiny_run import TRAIN, differences, flags, jsonl, metrics, python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: tests/requirements-vllm.txt")]

LINE = ("--sampler vllm --learning_rate 0.003 --algorithm grpo --warmup_steps 0 "
        "--lr_scheduler_type constant_with_warmup ")
MOE = LINE + "--hidden_size 128 "
DATA = LINE + ("--model_name_or_path model --dataset_name rows.jsonl --verifier exact "
               "--max_completion_length 6 --max_prompt_length 16 --entropy_coef 0.1 ")
TOKENIZER = builtin_tokenizer()


def model():
    """A tiny Llama with heads of 32, a tied LM head, two end tokens and settings for chats."""
    return for_chats(make("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
                          head_dim=32, intermediate_size=64, tie_word_embeddings=True,
                          max_position_embeddings=128, initializer_range=0.2), ends=(3,))


@pytest.fixture
def place(workplace):
    model().save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 9)])
    yield workplace
    engine.close_engine()


def test_samples_of_the_policy_after_each_of_ten_updates(place):
    """Also: more prompt tokens than vLLM takes at once, stop strings, two end tokens, seeds, the
    generators of torch."""
    policy = model()
    prompts = [[1, 10] * 12 + [11], [2, 10, 3, 11]]
    uniforms = torch.rand(2 * 100, 8, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    sampler = engine.VllmSampler(policy, TOKENIZER, 8, 0.7, ("2", "1+"), prompt_tokens=32)
    rollout = sampler.sample(prompts, 100, uniforms=uniforms)
    assert torch.equal(before, torch.get_rng_state())
    assert gap(policy, rollout, 0.7) < 1e-4
    again = sampler.sample(prompts, 100, uniforms=uniforms)
    assert torch.equal(rollout.response_ids, again.response_ids)
    seen = {*rollout.texts}
    check_ends(rollout, TOKENIZER, 8, (3,), ("2", "1+"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    for _ in range(10):
        loss = response_logp(policy, rollout, 0.7).logp.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rollout = sampler.sample(prompts, 100, uniforms=uniforms)
        assert gap(policy, rollout, 0.7) < 1e-4
    assert {*rollout.texts} != seen
    greedy = sampler.sample(prompts, 2, temperature=0)
    assert greedy.texts[0] == greedy.texts[1]


def test_a_mixture_trains_evaluates_and_resumes_with_the_same_responses(place, run):
    whole = run(MOE + "--steps 2 --eval_samples 1 --eval_prompts 4", folder="whole")
    assert all(record["mismatch_kl"] < 1e-10 for record in whole)
    run(MOE, folder="parts")
    parts = run(MOE + "--steps 2 --resume", folder="parts")
    assert [r["reward"] for r in whole] == [r["reward"] for r in parts]
    run(MOE + "--steps 2", folder="again")
    assert not differences("again", "parts", 2)


def test_two_processes_have_an_engine_each_and_draw_the_same(place, run):
    words = f"{MOE} --steps 2 --output_dir two".split()
    python(TRAIN, *flags(*words), processes=2)
    one, two = run(MOE + "--steps 2", folder="one"), metrics("two")
    assert [r["reward"] for r in two] == [r["reward"] for r in one]
    assert all(record["mismatch_kl"] < 1e-10 for record in two)
