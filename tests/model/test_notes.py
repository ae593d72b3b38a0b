"""What is said once, before training, about prompts, rows and checkpoints that are read otherwise
than their author may think. python -m pytest tests/model/test_notes.py"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

import models
from models import CHATML, chat_tokenizer
from tiny_run import SUMS, jsonl

ROWS = "--model_name_or_path model --dataset_name rows.jsonl --verifier exact "


def talk(*texts, **more):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} | more for role, text in zip(roles, texts)]


@pytest.fixture
def said(workplace, run, capsys):
    """said(template, *rows) -> the notes of a run of a chat model with these rows."""
    def start(template, *rows, flags=""):
        models.saved("model", tokenizer=chat_tokenizer(template))
        jsonl("rows.jsonl", [{"answer": "1"} | row for row in rows])
        run(ROWS + f"--max_completion_length 4 {flags}")
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    return start


PLAIN = [{"prompt": "3+4="}, {"prompt": "5+6="}]
WRAPPED = [{"prompt": f"<|im_start|>user\n{row['prompt']}<|im_end|>\n"} for row in PLAIN]
UNOPENED = CHATML.partition("{% if add_generation_prompt")[0]
LLAMA2 = ("{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
          "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}")
DROPS = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
CONTROL = ("note: 2 of 2 prompts contain control tokens, such as <|im_start|> (rows.jsonl line "
           "{}): the chat template renders them once more; --no_chat_template takes them as they "
           "are")
UNREAD = "note: what rows have and their prompts do not show: "


@pytest.mark.parametrize("template, rows, flags, notes", [
    (CHATML, PLAIN, "", []),
    (LLAMA2, PLAIN, "", []),                                 # nothing stands before its words
    (CHATML, WRAPPED, "", [CONTROL]), (CHATML, WRAPPED, "--no_chat_template", []),
    (UNOPENED, PLAIN, "", ["note: the chat template has no generation prompt: the policy itself "
                           "has to write '<|im_start|>assistant' first"]),
    (CHATML, [row | {"tools": [{"name": "f"}], "images": []} for row in PLAIN], "",
     [UNREAD + "tools (2 rows)"]),
    (CHATML + "{{ tools }}", [row | {"tools": [{"name": "f"}]} for row in PLAIN],
     "--chat_template_kwargs '{\"tools\": [{\"name\": \"f\"}]}'", []),
    (CHATML, [{"prompt": talk("1", "<think>so</think>2", "3", tool_calls=[{"name": "f"}], name="")},
              {"prompt": talk("4")}], "", [UNREAD + "tool_calls (1 rows)"]),
    (DROPS, [{"prompt": talk("1", "<think>so</think>2", "3")}, {"prompt": talk("4")}], "",
     [UNREAD + "<think> (1 rows)"]),
    (CHATML, [PLAIN[0], PLAIN[1], PLAIN[1] | {"answer": "2"}, {"prompt": "1"}], "",
     ["note: 1 prompt(s) have different answers, such as rows.jsonl line 2 and rows.jsonl line "
      "3"])])
def test_what_is_said_about_prompts(template, rows, flags, notes, said):
    got = said(template, *rows, flags=flags)
    assert got in ([note.format(line) for note in notes] for line in (1, 2))


def test_two_bos_are_said(workplace, run, capsys):
    tokenizer = chat_tokenizer(None)
    tokenizer.bos_token = "<|im_start|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    models.saved("model", tokenizer=tokenizer)
    jsonl("rows.jsonl", [{"prompt": f"{'<|im_start|>' * (i < 3)}{i}+1=", "answer": "1"}
                         for i in range(5)])
    run(ROWS + "--max_completion_length 4")
    assert "note: 3 of 5 prompts begin with <|im_start|> twice" in capsys.readouterr().out


@pytest.mark.parametrize("rope, longest", [
    ({}, 16), ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 32)])
def test_unused_weights_and_rows_longer_than_the_positions_are_said(rope, longest, workplace, run,
                                                                    capsys):
    jsonl("rows.jsonl", SUMS)
    sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | rope}
    models.saved("model", max_position_embeddings=16, **sizes)
    run(ROWS + f"--max_completion_length {longest - 4}")    # 1+2= and its response
    assert "note: " not in capsys.readouterr().out
    weights = load_file("model/model.safetensors")
    save_file(weights | {"v_head.weight": torch.ones(2)}, "model/model.safetensors",
              metadata={"format": "pt"})
    run(ROWS + f"--max_completion_length {longest - 3}", folder="longer")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == ["note: Qwen3ForCausalLM does not use 1 weight(s) of the checkpoint, such as "
                     "v_head.weight",
                     f"note: rows can have {longest + 1} tokens, more than the model's "
                     f"max_position_embeddings of {longest}"]
