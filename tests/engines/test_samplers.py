"""Samplers: a class of the user's own, from the command line.
python -m pytest tests/engines/test_samplers.py"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

import eval
from models import check_ends, for_chats, gap, make, saved
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.engines.responses import as_rollout
from plumbing.data.reward_worker import load_function
from plumbing.refusal import Refusal
from tiny_run import jsonl, read_json, write

ROOT = Path(__file__).parents[2]
DATA = ("--model_name_or_path model --dataset_name rows.jsonl --verifier exact "
        "--max_completion_length 4 ")
TOKENIZER, GENERATE = builtin_tokenizer(), "generate.py:GenerateSampler"
ONE = dict(num_hidden_layers=1, num_key_value_heads=4, initializer_range=0.02)


def made(ends=()):
    """A tiny Qwen3, perhaps with further end tokens."""
    return for_chats(make(**ONE), ends)


@pytest.fixture
def place(workplace):
    """A tiny checkpoint of transformers, rows, and the sampler to which docs/data.md leads."""
    saved("model", **ONE)
    jsonl("rows.jsonl", [{"prompt": "+".join("1" * n) + "=", "answer": str(n % 10)}
                         for n in range(1, 30)])
    shutil.copy(ROOT / "tests/engines/generate.py", "generate.py")


def test_the_documented_sampler_trains_on_the_log_probs_that_it_recorded(place, run):
    """generate's own log-probs are those of the policy: recomputed, they are the same to
    rounding."""
    line = DATA + f"--steps 2 --sampler {GENERATE} "
    assert all(0 <= record["mismatch_kl"] < 1e-9 for record in run(line))
    trusted = run(line + "--old_logp sampler", folder="trusted")[0]
    assert abs(trusted["mismatch_kl"]) < 1e-6 and trusted["length"] > 0
    weighted = run(line + "--mismatch token_truncate", folder="weighted")[0]
    assert weighted["mismatch_ess"] == pytest.approx(1, abs=1e-6)


def test_a_sampler_may_change_the_prompts_that_it_gets(place, run):
    with open("generate.py", "a", encoding="utf-8") as file:
        file.write("""
class Careless(GenerateSampler):
    def sample(self, prompts, *others, **options):
        rollout = super().sample(prompts, *others, **options)
        prompts[0].append(1)
        return rollout
""")
    line = DATA + "--steps 9 --eval_samples 1 --sampler generate.py:"
    assert run(line + "GenerateSampler") == run(line + "Careless", folder="careless")


@pytest.mark.parametrize("stop", [(), ("2", "1+")])
@pytest.mark.parametrize("ends", [(), (3, 5)])
def test_the_documented_sampler_ends_at_every_end_token_and_trains_on_no_padding(ends, stop, place):
    """Llama 3, Gemma and Qwen have several end tokens, and settings for chats that must not change
    the distribution."""
    if ends:
        made(ends).save_pretrained("model")
    policy = Qwen3ForCausalLM.from_pretrained("model")
    sampler = load_function(GENERATE)(policy, TOKENIZER, 12, 0.7, stop)
    rollout = sampler.sample([[1, 10, 2, 11]] * 4, 16)
    assert gap(policy, rollout, 0.7) < 2e-5
    check_ends(rollout, TOKENIZER, 12, ends, stop)
    assert (~rollout.truncated).sum() > 16
    greedy = load_function(GENERATE)(policy, TOKENIZER, 12, 0.7)
    assert len({*greedy.sample([[1, 10, 2, 11]], 4, temperature=0).texts}) == 1


ANSWERS = """
import torch

from rollout import Sampler


class Answers(Sampler):
    temperatures, scale = [], []

    def sample(self, prompts, group_size, uniforms=None, temperature=None):
        self.temperatures.append(temperature)
        self.scale.append(next(self.policy.parameters()).dtype)
        rollout = super().sample(prompts, group_size, uniforms, temperature)
        rollout.texts = ["2"] * len(rollout.texts)
        return rollout
"""


@pytest.mark.parametrize("rounding, dtype", [
    ("", torch.float32), ("--sampler_dtype bfloat16", torch.bfloat16)])
def test_an_evaluation_uses_the_runs_own_sampler_on_the_unrounded_policy(rounding, dtype, place,
                                                                         run, capsys):
    jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": "2"} for i in range(1, 9)])
    write("answers.py", ANSWERS)
    line = DATA + "--sampler answers.py:Answers "
    run(line + rounding + " --eval_samples 2")
    summary = read_json("run/summary.json")
    for name in ("pass_at_1_before", "greedy_before", "pass_at_1_after"):
        assert summary[name] == 1
    sampler = sys.modules[str(Path.cwd() / "answers.py").replace(".", "_")].Answers
    assert sampler.temperatures == [1.0, 0.0, None, 1.0, 0.0]
    whole = [torch.float32] * 2
    assert sampler.scale == [*whole, dtype, *whole]
    flags = line.partition(" model ")[2]
    eval.main(f"passk model {flags} --n 2 --k 1 --device cpu".split())
    assert "pass@1       1.000" in capsys.readouterr().out


# ------------------------------------------------------------------------- responses of an engine

def test_responses_become_a_rollout():
    """Cut at the first end, which is a loss token; padding never is one."""
    responses = [[1, 2, 3, 4], [1, 2], [15], [1, 1, 1, 1]]
    logps = [[-0.1 * (t + 1) for t in range(len(row))] for row in responses]
    rollout = as_rollout(made((3,)), TOKENIZER, [[1, 11], [2]], 2, responses, logps)
    lengths = [3, 2, 1, 4]
    assert rollout.mask.tolist() == [[t < n for t in range(4)] for n in lengths]
    assert rollout.truncated.tolist() == [False, True, False, True]
    for row, logp, n in zip(rollout.sampler_logp.tolist(), logps, lengths):
        assert row == pytest.approx(logp[:n] + [0] * (4 - n))
    assert rollout.texts == ["123", "12", "", "1111"]
    assert rollout.prompt_mask.tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]
    cut = as_rollout(made((3,)), TOKENIZER, [[1, 11]], 4, responses, logps, stop=("12",))
    assert cut.texts == ["", "", "", "1111"] and cut.mask.sum(-1).tolist() == [2, 2, 1, 4]
    sure = as_rollout(made(), TOKENIZER, [[1]], 2, [[1], [2]], [[0], [-0.5]])    # 0, not 0.0
    assert sure.sampler_logp.tolist() == [[0.0], [-0.5]]


@pytest.mark.parametrize("responses, logps", [
    ([[1], []], [[-1.0], []]), ([[1], [2]], [[-1.0], []])])
def test_responses_that_do_not_fit_are_refused(responses, logps):
    with pytest.raises(Refusal, match="at least one token"):
        as_rollout(made(), TOKENIZER, [[1]], 2, responses, logps)
