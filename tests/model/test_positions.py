"""Rows longer than a model's table of positions are refused in one line (plumbing/model/policy.py).
python -m pytest tests/model/test_positions.py"""

import pytest
import torch

import models
from plumbing.model.policy import find_max_length
from plumbing.refusal import Refusal
from tiny_run import jsonl

PLACES = 40
TABLE = {  # what the shape of a family needs that has a table of positions
    "gpt2": {}, "gptj": dict(rotary_dim=8), "gpt_bigcode": {}, "biogpt": {},
    "opt": dict(ffn_dim=32, word_embed_proj_dim=32),
    "gpt_neo": dict(num_layers=1, attention_types=[[["global"], 1]])}
NO_TABLE = {"qwen2": {}, "llama": {}, "gpt_neox": {}}


def shape(family):
    more = (TABLE | NO_TABLE)[family]
    return dict(num_hidden_layers=1, max_position_embeddings=PLACES) | more


@pytest.mark.parametrize("family", TABLE | NO_TABLE)
def test_a_limit_is_found_exactly_where_a_longer_row_fails(family):
    """The reference: the model's own forward of PLACES tokens, and of one more."""
    model = models.make(family, **shape(family))
    ids = torch.zeros(1, PLACES + 1, dtype=torch.long)
    model(input_ids=ids[:, :PLACES])
    if family in TABLE:
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids)
    else:
        model(input_ids=ids)
    assert find_max_length(model) == (PLACES if family in TABLE else None)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_run_that_would_pass_its_end_is_refused_and_its_advice_works(family, run):
    models.saved("model", family, **shape(family))
    jsonl("rows.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}])
    flags = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact"
    with pytest.raises(Refusal, match="model has 40 positions: lower --max_prompt_length 1024 or "
                                      "--max_completion_length 16, whose sum may be at most that"):
        run(f"{flags} --max_completion_length 16")
    assert len(run(f"{flags} --max_completion_length 16 --max_prompt_length 24")) == 1
