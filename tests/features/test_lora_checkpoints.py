"""An adapter's checkpoint computes what was trained: train, save, load, equal, over {tied, untied}
x {base model, adapter's checkpoint}.
python -m pytest tests/features/test_lora_checkpoints.py

References: the policy in memory at the end of the run; transformers and peft, which read the same
folder.
"""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import eval
import models
import train
from plumbing.model.policy import load_policy
from plumbing.refusal import Refusal
from session.arguments import parse
from tiny_run import chance, flags, read_json, slow

peft = pytest.importorskip("peft")
IDS = torch.tensor([[1, 10, 2, 11, 3, 12]])
FULL = ("--dataset_name rows.jsonl --verifier mine.py:reward --max_completion_length 8 "
        "--learning_rate 0.02 --warmup_steps 0")
LORA = f"{FULL} --use_peft --lora_target_modules q_proj down_proj lm_head --lora_r 4"
FIRST = "first/checkpoints/step_2"
CASES = list(itertools.product(("tied", "untied"), ("base", "adapter")))
QUICK = ("tied", "adapter")


@pytest.fixture(autouse=True)
def place(workplace):
    """A tied and an untied dense model, rows and a verifier whose rewards are up to chance."""
    for name in ("tied", "untied"):
        models.saved(name, "qwen2", vocab_size=32, hidden_size=64, head_dim=32,
                     intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                     tie_word_embeddings=name == "tied")
    chance()


@pytest.fixture
def ends(run, monkeypatch):
    """ends(model, folder, more) trains: the policy's logits as it begins and as it ends."""
    loop = train.train

    def both(model, folder, more=""):
        seen = []

        def watched(learner, *others):
            seen.append(learner.policy(input_ids=IDS).logits.detach())
            result = loop(learner, *others)
            seen.append(learner.policy(input_ids=IDS).logits.detach())
            return result
        monkeypatch.setattr(train, "train", watched)
        run(f"--steps 2 --model_name_or_path {model} {LORA} {more}", folder=folder)
        return seen
    return both


def loaded(folder):
    """Its logits as eval.py passk and full fine-tuning load it."""
    args = parse(flags("--model_name_or_path", str(folder), *FULL.split()))
    policy, _ = load_policy(args, None, torch.device("cpu"))
    assert policy.name_or_path == str(folder)
    return policy(input_ids=IDS).logits.detach()


def theirs(folder, base=None):
    """The logits that transformers computes, with peft's adapters if a base model is named."""
    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, folder).eval() if base else model
    return model(input_ids=IDS).logits.detach()


def close(one, other):
    torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("tied, start", [case if case == QUICK else slow(*case) for case in CASES])
def test_trained_saved_loaded_equal(tied, start, ends):
    if start == "adapter":
        _, end = ends(tied, "first")
    begin, final = ends(FIRST if start == "adapter" else tied, "second")
    if start == "adapter":                                   # begins where the first run ended
        close(begin, end)
    assert (final - begin).abs().max() > 0.01                # and learns
    folder = Path("second/checkpoints/step_2")
    close(loaded(folder), final)
    config = read_json(folder / "adapter_config.json")
    assert config["base_model_name_or_path"] == tied         # whatever lies in between
    close(theirs(folder, tied), final)


def test_what_does_not_fit_a_checkpoint_is_refused(ends, run):
    """Other adapters than it has, a reference that is not its start, weights that are missing, a
    base model that is gone."""
    def refused(words, more="", folder=FIRST):
        with pytest.raises(Refusal, match=words):
            run(f"--model_name_or_path {folder} {LORA} {more}", folder="second")
    ends("untied", "first")
    refused(f"--lora_r 8 is not that of the adapters of {FIRST}: 4", "--lora_r 8")
    refused("--lora_alpha 5 .*: 32", "--lora_alpha 5")
    refused("--lora_target_modules q_proj ", "--lora_target_modules q_proj")
    refused("--beta 0.1 .*not the starting policy", "--beta 0.1")
    run(f"--model_name_or_path untied {LORA} --beta 0.1", folder="third")
    eval.main("ask third/checkpoints/step_1 1+2= --n 1 --trust_run_code".split())
    weights = load_file(Path(FIRST, "adapter_model.safetensors"))
    shutil.copytree(FIRST, "edited", ignore=shutil.ignore_patterns("state.pt"))
    save_file(dict(list(weights.items())[1:]), "edited/adapter_model.safetensors")
    refused("edited: its weights are not those that its adapter_config.json describes",
            folder="edited")
    Path("untied").rename("elsewhere")
    refused("untied cannot be loaded")
