"""Checkpoints as users have them: what loads is trained rightly, what does not is refused in one
line (plumbing/model/policy.py, chat.py). python -m pytest tests/model/test_loading.py"""

import json
import os
from pathlib import Path

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import models
import train
from models import CHATML, chat_tokenizer
from plumbing.model import policy
from plumbing.refusal import Refusal
from tiny_run import SUMS, jsonl, read_json, write

ROWS = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact "


@pytest.fixture
def rows(run):
    """The fixture run, in a folder with rows.jsonl."""
    jsonl("rows.jsonl", SUMS)
    return run


# ------------------------------------------------------------- a turn that ends with another token

@pytest.fixture
def chat(rows):
    """A base model with a chat template, whose turns end with another token than its eos ->
    (run, flags, eos, the token that ends a turn)."""
    tokenizer = chat_tokenizer(CHATML)
    models.saved("model", tokenizer=tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return rows, ROWS + "--max_completion_length 48 ", tokenizer.eos_token_id, end


def test_the_end_of_a_turn_ends_a_response(chat, calls):
    run, flags, eos, end = chat
    drawn = calls(train, "sample")
    run(flags)
    (_, _, (rollout, _)), = drawn
    models.check_ends(rollout, AutoTokenizer.from_pretrained("model"), 48, ends=(end,))
    assert (rollout.response_ids[rollout.mask] == end).any()
    for folder in ("model", "run/checkpoints/step_1"):
        ends = read_json(f"{folder}/generation_config.json")["eos_token_id"]
        assert ends == (eos if folder == "model" else [eos, end])


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("flags", ["", "--use_peft"])
def test_a_resumed_run_keeps_the_ends_that_it_began_with(saved, flags, chat):
    """Also before its first checkpoint."""
    if flags:
        pytest.importorskip("peft")
    run, model, eos, end = chat
    run(model + flags)
    if not saved:
        shutil.rmtree("run/checkpoints")
    run("--resume --steps 2")
    ends = read_json("run/checkpoints/step_2/generation_config.json")["eos_token_id"]
    assert ends == [eos, end]


def test_without_the_chat_template_its_end_ends_nothing(chat):
    run, flags, eos, _ = chat
    run(flags + "--chat_template false")
    assert read_json("run/checkpoints/step_1/generation_config.json")["eos_token_id"] == eos


# ------------------------------------------------------------------------------- what does not load

def without_a_weight():
    weights = load_file("model/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})


def pickled():
    torch.save(load_file("model/model.safetensors"), "model/pytorch_model.bin")
    Path("model/model.safetensors").unlink()


CAUSES = {  # (what is done to the checkpoint, what the line says)
    "nothing there": (lambda: Path("model").rename("elsewhere"), "model cannot be loaded: "),
    "cut off": (lambda: os.truncate("model/model.safetensors", 5000), "cannot be loaded: "),
    "pickled": (pickled, "cannot be loaded: .*safetensors"),
    "code of its own": (lambda: write("model/config.json", json.dumps(
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})), "cannot be loaded: "),
    "no tokenizer": (lambda: Path("model/tokenizer.json").unlink(), "cannot be loaded: "),
    "a weight": (without_a_weight, "its weights lack model.layers.1.mlp.up_proj.weight")}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_checkpoint_that_does_not_load_is_refused_in_one_line(cause, rows):
    models.saved("model")
    spoil, words = CAUSES[cause]
    spoil()
    with pytest.raises(Refusal, match=words) as refusal:
        rows(ROWS + "--max_completion_length 4")
    assert "\n" not in str(refusal.value) and not Path("run").exists()


def test_a_gpu_without_room_for_the_policy_is_no_model_that_is_unsupported(rows, monkeypatch):
    """The first forward, which compares log-probs, may find the memory full."""
    def full(*inputs, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")
    models.saved("model")
    monkeypatch.setattr(policy, "fast_sample", full)
    with pytest.raises(Refusal, match="out of GPU memory: lower --micro_batch_size"):
        rows(ROWS)
