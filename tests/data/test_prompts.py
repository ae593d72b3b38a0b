"""Prompts: what stands around them, and what the policy reads in the end. python -m pytest tests/data/test_prompts.py"""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

import train
from plumbing.data.datafiles import Problem, read_rows
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.task import encode_prompt, shown
from plumbing.data.tasks import from_arguments
from plumbing.run.arguments import parse
from tiny_run import SMALL

CHARACTERS = "0123456789+=,.:#<>/{}abcdefghijklmnopqrstuvwxyzQA \n"
CHAT = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
ROW = Problem("3+8=", "11", "rows.jsonl line 1")


def read(tokenizer, chat=True, **around):
    ids = encode_prompt(tokenizer, ROW, chat, 200, **around)
    return tokenizer.decode(ids)


def with_template(template=None):
    """A tokenizer with a token for every character, line breaks too."""
    tokenizer = builtin_tokenizer(CHARACTERS)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.chat_template = template
    return tokenizer


LETTERS = with_template()


def test_a_chat_model_and_a_base_model_read_the_instructions():
    chat, around = with_template(CHAT), dict(system="add.", template="1+1=2\n{prompt} so")
    assert read(chat, **around) == "<system>add.</system><user>1+1=2\n3+8= so</user><assistant>"
    assert read(chat) == "<user>3+8=</user><assistant>"
    assert read(LETTERS, **around) == read(chat, chat=False, **around) == "add.\n\n1+1=2\n3+8= so"
    assert read(LETTERS, system="") == "3+8=" and read(chat, system="").startswith("<system></system>")


def test_braces_in_a_template_are_text_and_every_prompt_stands_in_it():
    assert read(LETTERS, template="{a} {prompt} {} {prompt}") == "{a} 3+8= {} 3+8="


@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('System role not supported') }}", "takes no system message .*System role"),
    ("{{ messages[1].content }}", "drops the system message")])
def test_a_chat_template_that_knows_no_system_message_is_refused(template, words):
    with pytest.raises(ValueError, match=f"rows.jsonl line 1: .*{words}.*--prompt_template instead"):
        read(with_template(template), system="add.")


def test_flags_take_text_with_line_breaks_or_a_file_without_its_last_one(workplace):
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(9)))
    Path("shots.txt").write_text("1+1=2\n{prompt}\nQ:\n")
    argv = "--model_name_or_path m --dataset_name rows.jsonl --verifier exact".split()
    task = from_arguments(parse([*argv, "--prompt_template", "@shots.txt", "--system_prompt", "a\\nb"]))
    assert (task.system_prompt, task.prompt_template) == ("a\nb", "1+1=2\n{prompt}\nQ:")
    plain = from_arguments(parse(argv))
    assert (plain.system_prompt, plain.prompt_template) == (None, "{prompt}")
    both = from_arguments(parse([*argv, "--stage2_dataset_name", "rows.jsonl", "--stage2_step", "1", "--prompt_template",
                                 "Q{prompt}"]))
    assert both.prompt_template == "Q{prompt}"


@pytest.fixture
def chat_model(workplace, cold_start):
    """Flags of a run on rows.jsonl by a checkpoint with a chat template that opens <think>; its tokenizer knows it."""
    shutil.copytree(next(cold_start.iterdir()), "model")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(9)))
    return [*SMALL, "--model_name_or_path", "model", "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward",
            "--max_completion_length", "4", "--steps", "1", "--output_dir", "run"]


def test_what_a_chat_template_opened_is_part_of_the_prompt_and_is_shown_once(chat_model, capsys):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = ("{% for m in messages %}{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}=<pad>,+{% endif %}")       # , + play <think>
    tokenizer.save_pretrained("model")
    Path("mine.py").write_text("def reward(response, answer):\n    open('seen', 'a').write(response + '\\n')\n    return 1\n")
    train.main([*chat_model, "--system_prompt", "2+2=4.", "--prompt_template", "1+{prompt}"])
    out = capsys.readouterr().out
    shown_line = [line for line in out.splitlines() if line.startswith("first prompt")]
    assert len(shown_line) == 1 and "2+2=4.1+" in shown_line[0] and "=<pad>,+" in shown_line[0]
    assert shown_line[0].startswith("first prompt, 16 tokens: ") and out.index("first prompt") < out.index("batch 1/1")
    responses = Path("seen").read_text().splitlines()
    assert responses and max(map(len, responses)) <= 4         # as long as the limit: the template's part is not in it
    sampled = json.loads(Path("run/samples.jsonl").read_text())["samples"]
    assert all(len(s["response"]) <= 4 and s["prompt"].endswith("+1=") for s in sampled)


def test_a_prefilled_think_is_pointed_at_and_a_long_prompt_is_cut():
    tokenizer = with_template(CHAT + "<think>{{ '\\n' }}")
    ids = encode_prompt(tokenizer, ROW, True, 200)
    assert shown(tokenizer, ids).endswith("<assistant><think>\\n'\nthe chat template opens <think>: this is part of the "
                                          "prompt, and a response, as a verifier reads it, begins inside")
    text = shown(LETTERS, LETTERS("1+1=" * 1000)["input_ids"])
    assert text.startswith("first prompt, 4000 tokens: '1+1=") and " … " in text and len(text) < 1200


def test_a_file_with_a_byte_order_mark_is_read_without_it(workplace):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for name in ("shots.txt", "mine.py"):
        Path(name).write_bytes(b"\xef\xbb\xbf" + {"shots.txt": b"1+2=3\n{prompt}\n", "mine.py": b"def reward(completions):\n    return [1]\n"}[name])
    task = from_arguments(parse(["--model_name_or_path", "m", "--dataset_name", "rows.jsonl", "--prompt_template", "@shots.txt",
                                 "--system_prompt", "@shots.txt", "--verifier", "mine.py:reward"]))
    assert task.prompt_template == task.system_prompt == "1+2=3\n{prompt}" and task.verifiers[0].whole


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_a_data_file_with_a_byte_order_mark_has_no_odd_column(suffix, tmp_path):
    text = {".csv": "prompt,answer\n2+2=,4\n", ".jsonl": '{"prompt": "2+2=", "answer": "4"}\n', ".json": '[{"prompt": "2+2=", "answer": "4"}]'}
    (tmp_path / f"x{suffix}").write_bytes(b"\xef\xbb\xbf" + text[suffix].encode())
    (_, row), = read_rows(tmp_path / f"x{suffix}")
    assert row == {"prompt": "2+2=", "answer": "4"}


def test_a_backslash_n_is_a_line_break_in_every_flag_that_takes_a_text():
    args = parse(["--model_name_or_path", "m", "--dataset_name", "rows.jsonl", "--stop", "a\\n", "--tool", "mine.py:tool",
                  "--tool_stop", "\\n", "--self_distillation", "--distillation_coef", "1", "--algorithm", "grpo", "--hint_template",
                  "{answer}\\n{prompt}"])
    assert (args.stop, args.tool_stop, args.hint_template) == (["a\n"], "\n", "{answer}\n{prompt}")
