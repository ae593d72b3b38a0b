"""An adapter's checkpoint computes what was trained: train, save, load, equal, over {tied, untied}
x {base model, adapter's checkpoint} x {4 bits, not}.
python -m pytest tests/features/test_lora_checkpoints.py

References: the policy in memory at the end of the run; transformers and peft, which read the same
folder.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import models
import train
from plumbing.model.policy import load_policy
from session.arguments import parse
from tiny_run import chance, flags, read_json, write

peft = pytest.importorskip("peft")
IDS = torch.tensor([[1, 10, 2, 11, 3, 12]])
FULL = ("--dataset_name rows.jsonl --verifier mine.py:reward --max_completion_length 8 "
        "--learning_rate 0.02 --warmup_steps 0")
LORA = f"{FULL} --use_peft --lora_target_modules q_proj down_proj lm_head --lora_r 4"
FIRST = "first/checkpoints/step_2"
CASES = list(itertools.product(("tied", "untied"), ("base", "adapter"), ("plain", "4bit")))
QUICK = {("tied", "adapter", "plain"), ("untied", "adapter", "4bit")}


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

        def watched(args, learner, *others):
            seen.append(learner.policy(input_ids=IDS).logits.detach())
            result = loop(args, learner, *others)
            seen.append(learner.policy(input_ids=IDS).logits.detach())
            return result
        monkeypatch.setattr(train, "train", watched)
        run(f"--steps 2 --model_name_or_path {model} {LORA} {more}", folder=folder)
        return seen
    return both


def loaded(folder):
    """Its logits as eval.py passk, --teacher_model_name_or_path and full fine-tuning load it."""
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


@pytest.mark.parametrize("tied, start, bits", [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case))
    for case in CASES])
def test_trained_saved_loaded_equal(tied, start, bits, ends):
    if bits == "4bit":
        pytest.importorskip("bitsandbytes")
    more = "--load_in_4bit" if bits == "4bit" else ""
    if start == "adapter":
        _, end = ends(tied, "first", more)
    begin, final = ends(FIRST if start == "adapter" else tied, "second", more)
    if start == "adapter":                                   # begins where the first run ended
        close(begin, end)
    assert (final - begin).abs().max() > 0.01                # and learns
    folder = Path("second/checkpoints/step_2")
    close(loaded(folder), final)
    config = read_json(folder / "adapter_config.json")
    assert config["base_model_name_or_path"] == tied         # whatever lies in between
    if not more:
        close(theirs(folder, tied), final)


def test_what_does_not_fit_a_checkpoint_is_refused(ends, run):
    """Other adapters than it has, a reference that is not its start, weights that are missing, a
    base model that is gone, one that is an adapter itself."""
    def said(more="", folder=FIRST):
        words = run.refused(f"--model_name_or_path {folder} {LORA} {more} --output_dir second")
        assert folder in words
        return words
    ends("untied", "first")
    assert "have 4; give --lora_r 4" in said("--lora_r 8")
    assert "give --lora_alpha 32" in said("--lora_alpha 5")
    modules = "--lora_target_modules down_proj lm_head q_proj"
    assert f"give {modules}" in said("--lora_target_modules q_proj")
    assert "not the starting policy" in said("--beta 0.1")
    weights = load_file(Path(FIRST, "adapter_model.safetensors"))
    ignored = shutil.ignore_patterns("state.pt")
    shutil.copytree(FIRST, "edited", ignore=ignored)
    for words, kept in (("not those that its", dict(list(weights.items())[1:])),
                        ("cannot be read", {name: x[:1] for name, x in weights.items()})):
        save_file(kept, "edited/adapter_model.safetensors")
        assert words in said(folder="edited")
    Path("untied").rename("elsewhere")
    assert "untied" in said()
    Path("elsewhere").rename("untied")
    config = read_json(Path(FIRST, "adapter_config.json"))
    write("untied/adapter_config.json",
        json.dumps(config | {"base_model_name_or_path": "x"}))
    assert "an adapter itself" in said()
    write(Path(FIRST, "adapter_config.json"), "{")
    assert "adapter_config.json: Expecting" in said()


def test_adapters_of_4_bit_weights_go_on_beside_4_bit_weights(ends, run):
    pytest.importorskip("bitsandbytes")
    ends("untied", "first", "--load_in_4bit")
    said = run.refused(f"--model_name_or_path {FIRST} {LORA} --output_dir second")
    assert "add --load_in_4bit" in said


@pytest.mark.parametrize("kind, more", [("IA3", ""), (None, "--use_peft")])
def test_adapters_that_are_not_loras_are_refused_by_their_kind(kind, more, run):
    Path("other").mkdir()
    write("other/adapter_config.json", json.dumps({"base_model_name_or_path": "tied",
                                                   "peft_type": kind}))
    said = run.refused(f"--model_name_or_path other {FULL} {more} --output_dir new")
    assert f"its peft_type is {kind}: only LORA is supported" in said
