"""What a chat template writes between two turns (plumbing/model/chat.py).
python -m pytest tests/model/test_chat.py"""

import pytest

from models import CHATML, chat_tokenizer
from plumbing.model.chat import read_turns
from plumbing.refusal import Refusal

EACH = "{% for m in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {  # (template, the token that ends a turn, before, after)
    "ChatML": (CHATML, "<|im_end|>", "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "the next role ends a turn": (EACH + "<|{{ m.role }}|>\n{{ m.content }}" + ASK
                                  + "<|assistant|>\n{% endif %}",
                                  "<|user|>", "\n", "<|assistant|>\n"),
    "white space before the end": (
        EACH + "{% if m.role == 'user' %}<|user|>[ {{ m.content }} ]{% else %} {{ m.content }} "
        "<eos>{% endif %}{% endfor %}", "<eos>", "<|user|>[ ", " ]"),
    "another end for the last turn": (
        EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.last and m.role != 'user' %}"
        "<|return|>{% else %}<|im_end|>{% endif %}" + ASK + "<|im_start|>assistant\n{% endif %}",
        "<|return|>", "<|im_start|>user\n", "<|im_end|><|im_start|>assistant\n"),
    "text alone": (EACH + "{{ m.role }}: {{ m.content }}\n" + ASK + "assistant:{% endif %}",
                   None, "\nuser: ", "\nassistant:")}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_and_the_text_between_two_turns(name):
    template, end, before, after = TEMPLATES[name]
    tokenizer = chat_tokenizer(template)
    turns = read_turns(tokenizer)
    assert turns.end == (end and tokenizer.convert_tokens_to_ids(end))
    assert (turns.before, turns.after) == (before, after)


def test_variables_of_the_template_reach_it():
    template = CHATML.removesuffix("{% endif %}") + "{{ think }}{% endif %}"
    assert read_turns(chat_tokenizer(template), think="<think>").after.endswith("\n<think>")


@pytest.mark.parametrize("template", [None, "{{ raise_exception('one question only') }}",
                                      "{{ messages[-1].content }}"])     # no assistant's words
def test_a_template_without_turns_is_refused(template):
    with pytest.raises(Refusal, match="the chat template cannot render a conversation: "):
        read_turns(chat_tokenizer(template))
