"""Samplers: a class of the user's own, from the command line. python -m pytest tests/engines/test_samplers.py"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import eval
import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.engines.samplers import load_class
from rollout import response_logp
from tiny_run import SMALL, metrics

ROOT = Path(__file__).parents[2]
DATA = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact --max_completion_length 4".split()


def save_model(folder, ends=()):
    """A tiny checkpoint of transformers; ends: further end tokens, in the generation config, beside settings for chats."""
    torch.manual_seed(0)
    tokenizer = builtin_tokenizer()
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, intermediate_size=48, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    if ends:
        model.generation_config = GenerationConfig(
            eos_token_id=[tokenizer.eos_token_id, *ends], pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=5,
            top_p=0.8, repetition_penalty=1.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def place(workplace):
    """A tiny checkpoint of transformers, rows, and the sampler to which docs/data.md leads."""
    save_model("model")
    rows = [{"prompt": "+".join("1" * n) + "=", "answer": str(n % 10)} for n in range(1, 30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(ROOT / "tests/engines/generate.py", "generate.py")
    return workplace


def test_the_sampler_of_the_documentation_trains_on_the_log_probs_that_it_recorded(place):
    """generate's own log-probs are those of the policy: recomputed, they are the same to rounding."""
    argv = [*SMALL, *DATA, "--steps", "2", "--sampler", "generate.py:GenerateSampler"]
    train.main([*argv, "--output_dir", "recomputed"])
    assert all(0 <= record["mismatch_kl"] < 1e-9 for record in metrics("recomputed"))
    train.main([*argv, "--old_logp", "sampler", "--output_dir", "trusted"])
    first, = (metrics(name)[0] for name in ("trusted",))
    assert first["mismatch_kl"] is None and first["length"] > 0
    train.main([*argv, "--mismatch", "token_truncate", "--output_dir", "weighted"])
    assert metrics("weighted")[0]["mismatch_ess"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("ends, stop", [((), ()), ((3, 5), ()), ((), ("2", "1+")), ((3, 5), ("2", "1+"))])
def test_the_sampler_of_the_documentation_ends_at_every_end_token_and_trains_on_no_padding(ends, stop, place):
    """Llama 3, Gemma and Qwen have several end tokens, and settings for chats that must not change the distribution."""
    save_model("model", ends)
    policy, tokenizer = Qwen3ForCausalLM.from_pretrained("model"), builtin_tokenizer()
    rollout = load_class("generate.py:GenerateSampler")(policy, tokenizer, 12, 0.7, stop).sample([[1, 10, 2, 11]] * 4, 16)
    own = response_logp(policy, rollout, 0.7, entropy=False).logp
    assert torch.allclose(own[rollout.mask], rollout.sampler_logp[rollout.mask], atol=1e-5)
    ended = 0
    for ids, mask, truncated in zip(rollout.response_ids.tolist(), rollout.mask.tolist(), rollout.truncated.tolist()):
        own = [token for token, loss in zip(ids, mask) if loss]
        ends_here = [n for n in range(1, len(own) + 1) if own[n - 1] in (tokenizer.eos_token_id, *ends)
                     or any(tokenizer.decode(own[:n]).endswith(string) for string in stop)]
        assert ends_here == ([] if truncated else [len(own)]) and (len(own) == 12 or not truncated)
        ended += not truncated
    assert ended > 16
    greedy = load_class("generate.py:GenerateSampler")(policy, tokenizer, 12, 0.7).sample([[1, 10, 2, 11]], 4, temperature=0)
    assert len({*greedy.texts}) == 1


@pytest.mark.parametrize("sampler, words", [
    ("nowhere.py:Sampler", "the file must exist"), ("generate.py:Nothing", "has no class Nothing with a method sample"),
    ("broken.py:Sampler", "does not load: ZeroDivisionError"), ("generate", "must be vllm or FILE.py:CLASS")])
def test_what_is_no_sampler_is_refused_in_one_line(sampler, words, place, capsys):
    Path("broken.py").write_text("1 / 0\n")
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, *DATA, "--steps", "1", "--sampler", sampler, "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1 and not Path("run").exists()


def test_routing_replay_does_not_go_with_another_sampler(place, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, *DATA, "--sampler", "generate.py:GenerateSampler", "--routing_replay", "rollout"])
    assert stop.value.code == 2 and "built-in sampler" in capsys.readouterr().err


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


@pytest.mark.parametrize("rounding", [[], ["--sampler_dtype", "bfloat16"]])
def test_an_evaluation_uses_the_runs_own_sampler_on_the_unrounded_policy(rounding, workplace, cold_start):
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "2"}) + "\n" for i in range(1, 9)))
    Path("answers.py").write_text(ANSWERS)
    model = next(path for path in cold_start.iterdir())
    flags = ["--dataset_name", "rows.jsonl", "--verifier", "exact", "--sampler", "answers.py:Answers", "--max_completion_length", "4"]
    train.main([*SMALL, "--model_name_or_path", str(model), *flags, *rounding, "--steps", "1", "--eval_samples", "2", "--output_dir", "run"])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["pass_at_1_before"] == summary["greedy_before"] == summary["pass_at_1_after"] == 1
    sampler = sys.modules["verifier_answers"].Answers
    assert sampler.temperatures == [1.0, 0.0, None, 1.0, 0.0]
    assert sampler.scale == [torch.float32] * 2 + [torch.bfloat16 if rounding else torch.float32] + [torch.float32] * 2
    eval.main(["passk", "--model_name_or_path", str(model), *flags, "--n", "2", "--k", "1", "--device", "cpu", "--output", "passk.json"])
    assert json.loads(Path("passk.json").read_text())["checkpoints"][0]["pass@1"][0] == 1
