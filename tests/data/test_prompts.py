"""Prompts: what stands around them, and what the policy reads in the end.
python -m pytest tests/data/test_prompts.py"""

import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from plumbing.data.datafiles import Problem
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.data.task import Task, encode_prompt
from plumbing.data.tasks import prepare_task
from plumbing.refusal import Refusal
from session.arguments import parse
from tiny_run import jsonl, write

CHARACTERS = "0123456789+=,.:#<>/{}abcdefghijklmnopqrstuvwxyzQA \n"
CHAT = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
ROW = Problem("3+8=", "11", "rows.jsonl row 1")
ROWS = "--model_name_or_path m --dataset_name rows.jsonl "
EXACT = ROWS + "--verifier exact "


def read(tokenizer, chat=True, **around):
    task = Task("", [], [], None, chat_template=chat, max_prompt_length=200, **around)
    return tokenizer.decode(encode_prompt(task, tokenizer, ROW))


def with_template(template=None):
    """A tokenizer with a token for every character, line breaks too."""
    tokenizer = builtin_tokenizer(CHARACTERS)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.chat_template = template
    return tokenizer


LETTERS = with_template()
SHOTS = dict(system_prompt="add.", prompt_template="1+1=2\n{prompt} so")
BRACES = dict(prompt_template="{a} {prompt} {} {prompt}")


@pytest.mark.parametrize("template, chat, around, text", [
    (CHAT, True, SHOTS, "<system>add.</system><user>1+1=2\n3+8= so</user><assistant>"),
    (CHAT, True, {}, "<user>3+8=</user><assistant>"),
    (CHAT, True, dict(system_prompt=""), "<system></system><user>3+8=</user><assistant>"),
    (None, True, SHOTS, "add.\n\n1+1=2\n3+8= so"),
    (CHAT, False, SHOTS, "add.\n\n1+1=2\n3+8= so"),
    (None, True, dict(system_prompt=""), "3+8="),
    (None, True, BRACES, "{a} 3+8= {} 3+8=")])               # every prompt, and braces are text
def test_what_a_chat_model_and_a_base_model_read(template, chat, around, text):
    assert read(with_template(template), chat, **around) == text


@pytest.mark.parametrize("template, variables", [
    ("{{ raise_exception('roles must alternate') }}", {}), (CHAT, dict(tools=3))])
def test_a_chat_template_that_fails_is_refused_with_its_row(template, variables):
    with pytest.raises(Refusal, match="rows.jsonl row 1: the chat template fails"):
        read(with_template(template), system_prompt="add.", chat_template_kwargs=variables)


@pytest.fixture
def rows(workplace):
    return jsonl("rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)])


@pytest.mark.parametrize("line, system, template", [
    ("", None, "{prompt}"),
    ("--prompt_template @shots.txt --system_prompt a\\nb", "a\nb", "1+1=2\n{prompt}\nQ:"),
    ("--stage2_dataset_name rows.jsonl --stage2_step 1 --prompt_template Q{prompt}", None,
     "Q{prompt}")])
def test_flags_take_text_with_line_breaks_or_a_file_without_its_last_one(line, system, template,
                                                                         rows):
    write("shots.txt", "1+1=2\n{prompt}\nQ:\n")
    task = prepare_task(parse((EXACT + line).split()))
    assert (task.system_prompt, task.prompt_template) == (system, template)


def test_what_a_chat_template_opened_is_part_of_the_prompt_and_is_shown(rows, cold_start, run,
                                                                        capsys, calls):
    from transformers import AutoTokenizer
    shutil.copytree(cold_start, "m")
    tokenizer = AutoTokenizer.from_pretrained("m")
    tokenizer.chat_template = ("{% for m in messages %}{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}=<pad>,+{% endif %}")  # <think>
    tokenizer.save_pretrained("m")
    seen = calls(Task, "reward_components")
    run(EXACT + "--max_completion_length 4 --system_prompt 2+2=4. --prompt_template 1+{prompt}")
    out = capsys.readouterr().out
    line, = [line for line in out.splitlines() if line.startswith("first prompt, 16 tokens: ")]
    assert "2+2=4.1+" in line and "=<pad>,+" in line
    (_, responses, problems, *_), *_ = seen[-1]
    assert max(map(len, responses)) <= 4 and problems[0].prompt.endswith("+1=")


def test_no_prompt_ends_with_the_end_token_that_a_tokenizer_appends(rows, cold_start, run, capsys):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer
    shutil.copytree(cold_start, "m")
    tokenizer = AutoTokenizer.from_pretrained("m")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 16), ("<eos>", 15)])
    tokenizer.save_pretrained("m")
    run(EXACT + "--max_completion_length 4")
    assert re.search(r"first prompt, 5 tokens: '<pad>\d\+1='", capsys.readouterr().out)


BOM = b"\xef\xbb\xbf"


def test_a_file_with_a_byte_order_mark_is_read_without_it(rows):
    Path("shots.txt").write_bytes(BOM + b"1+2=3\n{prompt}\n")
    task = prepare_task(parse((EXACT + "--prompt_template @shots.txt --system_prompt @shots.txt"
                               ).split()))
    assert task.prompt_template == task.system_prompt == "1+2=3\n{prompt}"
