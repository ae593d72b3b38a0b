"""An adapter's checkpoint computes what was trained: train, save, load, equal, over {tied, untied}
x {base model, adapter's checkpoint} x {4 bits, not}.
python -m pytest tests/features/test_lora_checkpoints.py

References: the policy in memory at the end of the run; transformers and peft, which read the same
folder.
"""

import itertools
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import models
import train
from plumbing.data.running_sum import builtin_tokenizer
from features.sampler_format import sampling_copy
from plumbing.model.copies import plain_copy
from features.lora import add_adapters
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


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_lines_of_the_page_make_a_plain_checkpoint(name, ends):
    """docs/data.md's merge.py on the default modules: transformers computes what was trained."""
    _, final = ends(name, "run", "--lora_target_modules q_proj down_proj")
    page = (Path(train.__file__).parent / "docs/data.md").read_text(encoding="utf-8")
    lines = re.match(r"(?:(?:    .*)?\n)+", page.split("`merge.py`:\n\n")[1])[0]
    for there, here in {"runs/notes/checkpoints/step_40": "run/checkpoints/step_2",
                        "checkpoints/SmolLM2-135M-Instruct": name}.items():
        lines = lines.replace(there, here)
    exec(textwrap.dedent(lines), {})
    close(theirs("runs/notes/merged"), final)
    assert not Path("runs/notes/merged/adapter_config.json").exists()


@pytest.mark.parametrize("modules", ["lm_head", "embed_tokens", "lm_head embed_tokens"])
def test_an_adapter_of_a_tied_matrix_changes_one_of_its_two_uses(modules):
    args = parse(flags("--model_name_or_path", "tied", *LORA.split(), "--lora_target_modules",
                       *modules.split()))
    policy, _ = load_policy(args, None, torch.device("cpu"))
    add_adapters(policy, args)
    for p in policy.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.3)
    want = policy(input_ids=IDS).logits
    plain = plain_copy(policy)
    close(plain(input_ids=IDS).logits, want)
    rounded = sampling_copy(policy, "bfloat16").float()(input_ids=IDS).logits
    assert (rounded - want).abs().max() < 0.02 * want.abs().max()
    assert policy.config.tie_word_embeddings and not plain.config.tie_word_embeddings
    plain.save_pretrained("out")
    builtin_tokenizer().save_pretrained("out")
    close(loaded("out"), want)


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


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_without_use_peft_the_merged_weights_of_an_adapters_checkpoint_are_trained(
        model, ends, run):
    """References: peft, for what the run starts from; transformers, which reads what it writes."""
    ends(model, "first")
    start = theirs(FIRST, model)
    flags = f"--model_name_or_path {FIRST} {FULL}"
    assert run(flags, folder="full")[0]["grad_norm"] > 0
    assert (theirs("full/checkpoints/step_1") - start).abs().max() > 1e-3
    run(f"{flags} --learning_rate 1e-12", folder="still")
    torch.testing.assert_close(theirs("still/checkpoints/step_1"), start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING", "UNKNOWN", None])
@pytest.mark.parametrize("more", ["", "--use_peft"])
def test_adapters_that_are_not_loras_are_refused_by_their_kind(kind, more, run):
    Path("other").mkdir()
    write("other/adapter_config.json", json.dumps({"base_model_name_or_path": "tied",
                                                   "peft_type": kind}))
    said = run.refused(f"--model_name_or_path other {FULL} {more} --output_dir new")
    assert f"its peft_type is {kind}: only LORA is supported" in said
