"""Checkpoints as users have them: what loads is trained rightly, what does not is refused in one
line (plumbing/model/policy.py, chat.py). python -m pytest tests/model/test_loading.py"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText,
                          AutoTokenizer, PreTrainedTokenizerFast)

import models
import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model import policy
from models import CHATML, chat_tokenizer
from tiny_run import SUMS, jsonl, read_json, write

ROWS = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact "


@pytest.fixture
def rows(run):
    """The fixture run, in a folder with rows.jsonl."""
    jsonl("rows.jsonl", SUMS)
    return run


def edit(file, **values):
    """Change values of a JSON file in the folder `model`; None removes one."""
    path = Path("model") / file
    changed = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {name: value for name, value in changed.items() if value is not None}
    write(path, json.dumps(kept))


# ------------------------------------------------------------- a turn that ends with another token

@pytest.fixture
def chat(rows):
    """A base model with a chat template, whose turns end with another token than its eos ->
    (run, flags, eos, the token that ends a turn)."""
    tokenizer = chat_tokenizer(CHATML)
    models.saved("model", tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return rows, ROWS + "--max_completion_length 48 ", tokenizer.eos_token_id, end


def test_the_end_of_a_turn_ends_a_response_and_the_screen_names_it(chat, calls, capsys):
    run, flags, eos, end = chat
    drawn = calls(train, "sample")
    run(flags)
    assert "a response ends with <eos> or <|im_end|>\n" in capsys.readouterr().out
    (_, _, rollout), = drawn
    models.check_ends(rollout, AutoTokenizer.from_pretrained("model"), 48, ends=(end,))
    assert (rollout.response_ids[rollout.mask] == end).any()
    for folder in ("model", "run/checkpoints/step_1"):
        ends = read_json(f"{folder}/generation_config.json")["eos_token_id"]
        assert ends == (eos if folder == "model" else [eos, end])


@pytest.mark.parametrize("begun, flags", [("before", ""), ("before", "--use_peft"),
                                          ("now", "--use_peft")])
def test_a_resumed_run_keeps_the_ends_that_it_began_with(begun, flags, chat, monkeypatch):
    if flags:
        pytest.importorskip("peft")
    run, model, eos, end = chat
    with monkeypatch.context() as patch:
        if begun == "before":
            patch.setattr(policy, "add_turn_end", lambda *given: None)
        run(model + flags)
    run("--resume --steps 2")
    ends = read_json("run/checkpoints/step_2/generation_config.json")["eos_token_id"]
    assert ends == (eos if begun == "before" else [eos, end])


def test_without_the_chat_template_its_end_ends_nothing(chat):
    run, flags, eos, _ = chat
    run(flags + "--no_chat_template")
    assert read_json("run/checkpoints/step_1/generation_config.json")["eos_token_id"] == eos


# ------------------------------------------------------------------------------- what does not load

def quantize(method):
    edit("config.json", quantization_config=dict(quant_method=method, bits=4, group_size=32))


def damage_tokenizer():
    file = Path("model/tokenizer.json")
    text = file.read_text(encoding="utf-8").replace('"WordLevel"', '"OfAnotherVersion"')
    write(file, text)


def sentencepiece_alone():
    Path("model/tokenizer.json").unlink()
    Path("model/tokenizer.model").write_bytes(b"\x0a\x0b\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")


def tokenizer_without_ends():
    tokenizer = builtin_tokenizer()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained("model")


CAUSES = {  # (what is done to the checkpoint, what the line says)
    "gptq": (lambda: quantize("gptq"), "ImportError: Loading a GPTQ quantized model requires"),
    "torchao": (lambda: quantize("torchao"), "Error: "),
    "hqq": (lambda: quantize("hqq"), "ImportError: A valid HQQ version"),
    "attention": (lambda: edit("config.json", _attn_implementation="flash_attention_2"),
                  "ImportError: FlashAttention2 has been toggled on"),
    "config": (lambda: edit("config.json", hidden_size="32"),
               "StrictDataclassFieldValidationError: Validation error for field 'hidden_size'"),
    "shape": (lambda: edit("config.json", intermediate_size=52),
              "its weight model.layers.0.mlp.down_proj.weight has the shape [32, 48], its "
              "config.json needs [32, 52]"),
    "tokenizer": (damage_tokenizer, "Exception: data did not match any variant"),
    "sentencepiece": (sentencepiece_alone, "pip install sentencepiece"),
    "no ends": (tokenizer_without_ends, "neither an eos token, which ends a response, nor a pad"),
}
PACKAGES = {"gptq": "optimum", "torchao": "torchao", "hqq": "hqq", "attention": "flash_attn",
            "sentencepiece": "sentencepiece"}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_checkpoint_that_does_not_load_is_refused_in_one_line(cause, rows):
    if cause in PACKAGES and importlib.util.find_spec(PACKAGES[cause]):
        pytest.skip(f"{PACKAGES[cause]} is installed")
    models.saved("model")
    spoil, words = CAUSES[cause]
    spoil()
    message = rows.refused(ROWS + "--max_completion_length 4 --output_dir run")
    assert message.startswith("train.py: --model_name_or_path model cannot be loaded: ")
    assert words in message


def test_quantized_weights_are_refused(rows):
    pytest.importorskip("bitsandbytes")
    models.saved("model")
    edit("config.json", quantization_config=dict(quant_method="bitsandbytes", load_in_8bit=True))
    message = rows.refused(ROWS + "--max_completion_length 4 --output_dir run")
    assert "its weights are quantized, which cannot be trained" in message


def test_the_whole_traceback_is_there_if_the_environment_asks_for_it(rows, monkeypatch):
    models.saved("model")
    damage_tokenizer()
    monkeypatch.setenv("GSPO_TRACEBACK", "1")
    with pytest.raises(ValueError) as error:
        train.main((ROWS + "--max_completion_length 4 --output_dir run").split())
    causes = [error.value, error.value.__cause__, error.value.__cause__.__cause__]
    assert "any variant" in str(causes[2]) and type(causes[2]) is Exception


# --------------------------------------------------------------------------- multimodal checkpoints

TEXT = models.SIZES | dict(max_position_embeddings=64)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)      # a table of four positions
MULTIMODAL = {
    "gemma3": dict(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4,
                   image_token_index=14, boi_token_index=13, eoi_token_index=12),
    "gemma4": dict(text_config=TEXT | dict(hidden_size_per_layer_input=8, global_head_dim=16,
                                           vocab_size_per_layer_input=17),
                   vision_config=VISION | dict(head_dim=8, num_key_value_heads=2)),
    "fuyu": TEXT | dict(text_config=TEXT | dict(model_type="persimmon"), patch_size=4),
    "llava": dict(text_config=TEXT | dict(model_type="llama"), image_token_index=14,
                  vision_config=VISION | dict(model_type="clip_vision_model", projection_dim=16)),
}


def save_multimodal(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **MULTIMODAL[family])
    kind = AutoModelForCausalLM if family == "fuyu" else AutoModelForImageTextToText
    model = kind.from_config(config).eval()
    model.save_pretrained("model")
    builtin_tokenizer().save_pretrained("model")
    return model


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "fuyu"])
def test_the_text_part_of_a_multimodal_checkpoint_is_trained(family, rows):
    whole = save_multimodal(family)
    ids = torch.arange(5)[None]
    record, = rows(ROWS + "--max_completion_length 8 --max_prompt_length 16 --learning_rate 1e-9")
    assert record["mismatch_kl"] < 1e-8
    text = AutoModelForCausalLM.from_pretrained("run/checkpoints/step_1").eval()
    assert not any("vision" in name for name, _ in text.named_modules())
    torch.testing.assert_close(text(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_multimodal_checkpoint_without_a_class_for_text_is_refused_in_one_line(rows):
    save_multimodal("llava")
    message = rows.refused(ROWS + "--max_completion_length 8 --output_dir run")
    assert "model cannot be loaded: ValueError: Unrecognized configuration class" in message


def test_a_gpu_without_room_for_the_policy_is_no_model_that_is_unsupported(rows, monkeypatch,
                                                                           capsys):
    """The first forward, which compares log-probs, may find the memory full."""
    def full(*inputs, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")
    models.saved("model", tokenizer=chat_tokenizer(CHATML))
    monkeypatch.setattr(policy, "fast_sample", full)
    with pytest.raises(SystemExit):
        train.main([*ROWS.split(), "--output_dir", "run", "--device", "cpu"])
    err = capsys.readouterr().err
    assert "out of GPU memory: lower --micro_batch_size" in err and "not supported" not in err
