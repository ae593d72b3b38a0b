"""The hints of --self_distillation are measured in tokens, and those that the policy cannot read
are refused before the first batch. python -m pytest tests/features/test_hints.py"""

import pytest

import models
from tiny_run import jsonl

PLACES = 50
SIZES = dict(num_hidden_layers=1, max_position_embeddings=PLACES)
ROPE = dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
POLICIES = {"gpt2": ("gpt2", {}), "dynamic": ("llama", ROPE), "llama": ("llama", {})}
SIBLING = "--self_distillation sibling --max_completion_length"


def flags(policy, answer, more):
    """Those of a run of a policy of PLACES positions on rows with this answer; a token is a byte
    of UTF-8: three for a Chinese character."""
    family, sizes = POLICIES[policy]
    models.saved("model", family, models.byte_tokenizer([]), **SIZES | sizes)
    jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": answer} for i in range(9)])
    return ("--model_name_or_path model --dataset_name rows.jsonl --verifier exact "
            "--algorithm grpo --advantage distillation --self_distillation answer "
            f"--max_prompt_length 16 --max_completion_length 8 {more}")


@pytest.mark.parametrize("answer, more, said", [
    ("7" * 38, "", "can have 43 tokens, and with --max_completion_length 8 it needs 51 positions"),
    ("答" * 13, "", "can have 44 tokens, and with --max_completion_length 8 it needs 52 positions"),
    ("7", f"{SIBLING} 24",
     "can have 29 tokens, and with --max_completion_length 24 it needs 53 positions")],
    ids=["digits", "chinese", "sibling"])
@pytest.mark.parametrize("policy", ["gpt2", "dynamic"])
def test_a_hint_that_the_policy_cannot_read_is_refused_before_the_start(policy, answer, more, said,
                                                                        run):
    error = run.refused(f"{flags(policy, answer, more)} --output_dir run")
    assert said in error and f"the policy has {PLACES}" in error and "--hint_template" in error


@pytest.mark.parametrize("policy, answer, more", [
    ("gpt2", "7" * 37, ""), ("dynamic", "答" * 12, ""), ("llama", "答" * 17, ""),
    ("llama", "7" * 90, ""), ("gpt2", "7", f"{SIBLING} 22")])
def test_a_hint_that_it_can_read_is_not_limited(policy, answer, more, run):
    assert len(run(flags(policy, answer, more))) == 1
