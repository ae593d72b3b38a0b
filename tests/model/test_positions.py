"""A table of position embeddings that is too short for prompt and response is refused in a line: plumbing/model/policy.py.

python -m pytest tests/model/test_positions.py
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.policy import positions_in_table
from tiny_run import SMALL, metrics

TOKENIZER = builtin_tokenizer()
ENDS = dict(vocab_size=len(TOKENIZER), bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id)
PLACES = 40
# kind: (its configuration, whether it has a table of PLACES positions)
KINDS = {
    "GPT2": (dict(n_embd=32, n_layer=1, n_head=2, n_positions=PLACES), True),
    "OPT": (dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32,
                 max_position_embeddings=PLACES), True),
    "GPTNeo": (dict(hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], max_position_embeddings=PLACES), True),
    "GPTJ": (dict(n_embd=32, n_layer=1, n_head=2, n_positions=PLACES, rotary_dim=8), True),
    "GPTBigCode": (dict(n_embd=32, n_layer=1, n_head=2, n_positions=PLACES), True),
    "BioGpt": (dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=PLACES), True),
    "Qwen2": (dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
                   max_position_embeddings=PLACES), False),
    "Llama": (dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
                   max_position_embeddings=PLACES), False),
    "Bloom": (dict(hidden_size=32, n_layer=1, n_head=2), False),
    "GPTNeoX": (dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=PLACES), False),
}


def make(kind):
    torch.manual_seed(0)
    sizes, _ = KINDS[kind]
    name = {"GPTBigCode": "GPTBigCodeForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    name = "GPT2LMHeadModel" if kind == "GPT2" else name
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes, **ENDS)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_found_exactly_where_a_longer_row_fails(kind):
    """The reference: the model's own forward of PLACES tokens, and of one more."""
    model, ids = make(kind), torch.zeros(1, PLACES + 1, dtype=torch.long)
    model(input_ids=ids[:, :PLACES])
    try:
        model(input_ids=ids)
        fails = False
    except (IndexError, RuntimeError):
        fails = True
    assert fails == KINDS[kind][1]
    assert positions_in_table(model) == (PLACES if fails else None)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("OPT", "GPT2"):
        make(kind).save_pretrained(kind)
        TOKENIZER.save_pretrained(kind)
    rows = ["+".join(["1"] * n) + "=" for n in range(1, 16)]                            # up to 30 tokens
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": row, "answer": "4"}) + "\n" for row in rows))


def flags(kind, *more):
    return [*SMALL, "--model_name_or_path", kind, "--dataset_name", "rows.jsonl", "--verifier", "exact", "--steps", "1", "--output_dir", "run", *more]


@pytest.mark.parametrize("kind", ["OPT", "GPT2"])
def test_a_run_that_would_pass_its_end_is_refused_and_its_advice_works(kind, place, capsys):
    for length, words in (("16", "add --max_prompt_length 24"), ("40", "--max_completion_length 40 leaves none"), ("99", "leaves none")):
        with pytest.raises(SystemExit) as stop:
            train.main(flags(kind, "--max_completion_length", length))
        err = capsys.readouterr().err
        assert stop.value.code == 2 and err.count("\n") == 1 and f"{kind}: it has embeddings for 40 positions" in err and words in err
        assert not Path("run").exists()
    train.main(flags(kind, "--max_completion_length", "16", "--max_prompt_length", "24"))
    assert len(metrics("run")) == 1
    train.main(flags(kind, "--max_completion_length", "10", "--overwrite_output_dir"))  # 30 + 10: no refusal of what fits
