"""--sampler vllm: this program's side of the seam, with a stand-in for vLLM (tests/features/fake).
test_vllm_engine.py runs vLLM itself. python -m pytest tests/features/test_vllm.py"""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import eval
from models import check_ends, for_chats, gap, make
from plumbing.data.datafiles import Problem
from plumbing.data.running_sum import builtin_tokenizer
from features.turns import Environment, TurnSampler
from features.vllm_engine import check_agreement, row_seeds
from features.vllm_engine import RUNNING, VllmSampler, close_engine
from rollout import sample
from tiny_run import differences, jsonl, metrics, read_json

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


@pytest.mark.parametrize("ends, stop", [((), ()), ((3, 5), ("2", "1+"))])
def test_an_engine_draws_from_the_policy_and_ends_where_rollout_sample_ends(ends, stop, vllm):
    policy = model(ends)
    uniforms = torch.rand(3 * 64, 10, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    rollout = VllmSampler(policy, TOKENIZER, 10, 0.7, stop).sample(PROMPTS, 64, uniforms=uniforms)
    assert torch.equal(before, torch.get_rng_state())        # an engine seeds the global generator
    assert gap(policy, rollout, 0.7) < 2e-5
    check_ends(rollout, TOKENIZER, 10, ends, stop)


def test_a_wrong_call_of_vllm_is_a_bug_of_ours_and_keeps_its_traceback(vllm):
    engine = VllmSampler(model(), TOKENIZER, 6).engine
    with pytest.raises(TypeError, match="an unexpected keyword argument 'seeds'"):
        engine.generate([], [{"seeds": 1}])


def test_the_same_random_numbers_draw_the_same_responses_and_zero_is_greedy(vllm):
    sampler = VllmSampler(model(), TOKENIZER, 6)
    uniforms = torch.rand(3 * 4, 6, generator=torch.Generator().manual_seed(1))
    one, two, other = (sampler.sample(PROMPTS, 4, uniforms=u)
                       for u in (uniforms, uniforms, 1 - uniforms))
    assert torch.equal(one.response_ids, two.response_ids) and one.texts != other.texts
    greedy = sampler.sample(PROMPTS, 4, uniforms=uniforms, temperature=0)
    assert greedy.texts == sample(model(), TOKENIZER, PROMPTS, 4, 6, 0).texts


def test_an_engine_plays_the_turns_of_an_environment_up_to_the_limit_of_each_row(vllm, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Play:\n    def __init__(self, row):\n        pass\n"
                    "    def step(self, text):\n        return '1+', 0.5, len(text) > 3\n",
                    encoding="utf-8")
    policy = model()
    engine = VllmSampler(policy, TOKENIZER, 12, 1.0, ("2", "3", "4"))
    sampler = TurnSampler(engine, SimpleNamespace(
        loaded_environment=Environment(f"{file}:Play"), max_turns=None, max_turn_length=None,
        chat_template=True, chat_template_kwargs={}))
    uniforms = torch.rand(3 * 16, 12, generator=torch.Generator().manual_seed(1))
    rollout = sampler.sample(PROMPTS, 16, uniforms, problems=[Problem("", "")] * 3)
    assert gap(policy, rollout, 1.0) < 2e-5
    assert rollout.truncated.any() and not rollout.truncated.all()
    for i, game in enumerate(rollout.games):
        mask = rollout.mask[i, :game.length].tolist()
        runs = sum(own and not (i and mask[i - 1]) for i, own in enumerate(mask))
        assert runs == len(game.turns) and (game.length == 12 if rollout.truncated[i] else mask[-1])
    assert max(len(game.turns) for game in rollout.games) > 2


def test_seeds_differ_between_rows_and_depend_on_nothing_else():
    uniforms = torch.rand(2000, 3)
    seeds = row_seeds(uniforms, 2000)
    assert len({*seeds}) > 1995 and max(seeds) < 2 ** 32
    assert row_seeds(uniforms[7:9], 2) == seeds[7:9] and len({*row_seeds(None, 100)}) == 100


@pytest.mark.parametrize("dtype, error, stops", [
    (torch.float32, 0.0, False), (torch.float32, 0.01, True), (torch.bfloat16, 0.01, False),
    (torch.bfloat16, 0.2, True), (torch.float32, math.nan, True)])
def test_a_difference_beyond_rounding_stops_the_run(dtype, error, stops):
    rollout = sample(model(), TOKENIZER, PROMPTS, 4, 5, 0.7)
    rollout.sampler_logp = rollout.sampler_logp + error
    if not stops:
        return check_agreement(model(), rollout, 0.7, dtype)
    words = "--sampler vllm: its log-probs differ from the policy's by"
    with pytest.raises(ValueError, match=words):
        check_agreement(model(), rollout, 0.7, dtype)


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


def test_vllm_resumes_with_the_same_responses(place, run, vllm):
    line = VLLM + "--lr_scheduler_type constant_with_warmup "
    run(line + "--steps 2", folder="whole")
    run(line, folder="parts")
    run(line + "--steps 2 --resume", folder="parts")
    assert not differences("whole", "parts", 2)


def test_vllm_gets_merged_adapters_and_the_trained_weights_stay(place, run, vllm):
    pytest.importorskip("peft")
    theirs = run(VLLM + "--use_peft --steps 3")
    assert vllm.CALLS.count("push") == 3
    assert all(record["mismatch_kl"] < 1e-9 for record in theirs)
    ours, = run(OURS + "--use_peft", folder="ours")
    assert theirs[0]["perplexity_old"] == pytest.approx(ours["perplexity_old"], rel=0.5)


def test_weights_that_do_not_arrive_stop_the_run_in_one_line(place, refused, vllm):
    """The planted fault: the tied head is not transferred, as with named_parameters()."""
    vllm.FAULTS.append("lm_head")
    err = refused(VLLM + "--steps 3 --output_dir run", begun=True)
    assert "--sampler vllm: its log-probs differ from the policy's" in err
    assert "does not sample from the weights" in err
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


PASSK = f"passk --model_name_or_path model {DATA} --n 2 --k 1 --problems 4 --device cpu "


def test_passk_uses_an_engine_in_the_format_that_it_is_given(place, vllm):
    """Greedy-like at temperature 0.01: every sampler gives the same lengths; --sampler_dtype is
    that of vLLM's copy."""
    lengths = []
    for line, loads in (("", 0), ("--sampler vllm", 1),
                        ("--sampler vllm --sampler_dtype bfloat16", 2)):
        eval.main((PASSK + line + " --temperature 0.01 --output scores.json").split())
        found = read_json("scores.json")["checkpoints"][0]
        lengths.append(found["mean_length"])
        assert vllm.CALLS.count("load") == loads
        if loads:
            engine, = RUNNING.values()
            dtype = torch.bfloat16 if loads == 2 else torch.float32
            assert engine.llm.model.dtype == dtype
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("line, words", [
    ("--sampler vllm", "needs a package that is not installed: vllm"),
    ("--sampler vllm --routing_replay rollout", "only the built-in sampler"),
    ("--sampler vllm --load_in_4bit --use_peft --model_name_or_path model",
     "only the built-in sampler"),
    ("--sampler vllm --sampler_dtype int8", "is not a format of --sampler vllm"),
    ("--vllm_gpu_memory_utilization 0.5", "needs --sampler vllm"),
    ("--vllm_gpu_memory_utilization 1.5", "is not at most 1"),
    ("--vllm_gpu_memory_utilization 0", "above 0"),
    (PASSK + "--sampler_dtype bfloat16", "--sampler_dtype bfloat16 needs --sampler vllm")])
def test_flags_that_do_not_go_with_an_engine_are_refused(line, words, workplace, refused, request):
    if "needs a package" not in words:
        request.getfixturevalue("vllm")
    if "4bit" in line:                                       # refused for its package first
        pytest.importorskip("bitsandbytes")
    assert words in refused(line, main=eval.main if line.startswith("passk") else None)
