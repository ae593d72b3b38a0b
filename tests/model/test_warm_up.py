"""The supervised warm-up of the tiny MoE and the code that makes it.
python -m pytest tests/model/test_warm_up.py"""

import inspect
from pathlib import Path

import pytest

import models
import moe


def test_the_warm_up_is_made_again_for_another_router_and_not_for_another_comment(run, monkeypatch):
    read = inspect.getsource

    def warm_ups(old, new):
        monkeypatch.setattr(inspect, "getsource", lambda module: read(module).replace(old, new))
        run("--cold_start_steps 1", folder=f"run{len(list(Path().iterdir()))}")
        return len(list(Path("runs/cold_start").iterdir()))
    counts = [warm_ups(*edit) for edit in (
        ("", ""), ("# [N, E]", "# scores"), ("logits.softmax", "logits.sigmoid"))]
    assert [count - counts[0] for count in counts] == [0, 0, 1]


def test_weights_that_are_another_model_in_transformers_are_noticed(tmp_path, monkeypatch, recwarn):
    folder = models.saved(tmp_path, "tiny_moe")
    moe.TinyMoE.from_pretrained(folder)
    assert not recwarn
    monkeypatch.setattr(moe, "rotate", lambda x, cos, sin: x)
    with pytest.warns(UserWarning, match="off by"):
        moe.TinyMoE.from_pretrained(folder)
