"""The data of a run: 16 sums, and the policy of the cold start as a checkpoint."""

import shutil

import pytest

from tiny_run import SUMS, jsonl


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """The rows of rows.jsonl in the current folder."""
    monkeypatch.chdir(tmp_path)
    jsonl("rows.jsonl", SUMS)
    return SUMS


@pytest.fixture
def model(workplace, cold_start):
    """The checkpoint "model" in the current folder: the policy of the cold start, 17 characters."""
    (workplace / "model").symlink_to(cold_start)
    return "model"


@pytest.fixture
def chat_model(workplace, cold_start):
    """The checkpoint "chat" in the current folder: that policy with a chat template. Its
    tokenizer."""
    from transformers import AutoTokenizer
    shutil.copytree(cold_start, "chat")
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")
    tokenizer.save_pretrained("chat")
    return tokenizer
