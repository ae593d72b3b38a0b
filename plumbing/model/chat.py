"""What a chat template writes around the words of a conversation: the text between two of the
assistant's turns, and the token that ends a turn, which ends a response, too."""

import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from plumbing.refusal import Refusal
from rollout import end_tokens

REPLY = "REPLY"          # stands for the assistant's words in a rendered conversation
WORDS = "WORDS"          # stands for the user's
THOUGHT = "THOUGHT"      # stands for what the assistant thought before its words
CHAT = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": REPLY}]
PROBE = ' "`\n'          # words that templates change: `trim` the white space, `tojson` the quote


class Turns(NamedTuple):
    """What stands between two turns of the assistant: <its words><end><before><the user's
    words><after><its words>."""

    end: int | None      # the token that ends the assistant's turn; None: it is no special token
    before: str          # from there to the user's words
    after: str           # from the user's words to the assistant's first token


def read_turns(tokenizer, role="user", **variables):
    """Render a conversation with the chat template -> Turns.

    A template may end the last turn with another token than an earlier one (gpt-oss does): `end` is
    that of the last turn, with which a model ends its response. role: of the message between the
    two turns, user or tool. variables: the template's own, such as enable_thinking=False. Raises
    Refusal if the tokenizer has no chat template or the template cannot render the conversation.
    """
    last = render(tokenizer, CHAT, **variables)
    whole = render(tokenizer, [*CHAT, {"role": role, "content": WORDS}],
                   add_generation_prompt=True, **variables)
    if REPLY not in last or REPLY not in whole:
        raise Refusal("the chat template leaves out the assistant's words")
    before, separator, after = whole.rpartition(REPLY)[2].partition(WORDS)
    if not separator:
        raise Refusal("the chat template leaves out the user's words")
    end, before = split_end(tokenizer, before)
    last_end, _ = split_end(tokenizer, last.rpartition(REPLY)[2])
    return Turns(end if last_end is None else last_end, before, after)


def changed_words(tokenizer, turns, role="user", **variables):
    """What the chat template writes for PROBE between two turns of the assistant, if it is not
    PROBE; turns: what read_turns has found."""
    whole = render(tokenizer, [*CHAT, {"role": role, "content": PROBE}],
                   add_generation_prompt=True, **variables)
    _, words = split_end(tokenizer, whole.rpartition(REPLY)[2])
    words = words.removeprefix(turns.before).removesuffix(turns.after)
    return None if words == PROBE else words


def drops_thinking(tokenizer, **variables):
    """Whether the chat template leaves out what the assistant thought in an earlier turn."""
    thought = f"<think>\n{THOUGHT}\n</think>\n\n{REPLY}"
    chat = [CHAT[0], {"role": "assistant", "content": thought}, CHAT[0]]
    return THOUGHT not in render(tokenizer, chat, **variables)


def missing_opening(tokenizer, **variables):
    """What stands before the assistant's words in a conversation and not at the end of a prompt,
    because the chat template has no generation prompt; "" if nothing is missing."""
    before, found, _ = render(tokenizer, CHAT, **variables).partition(REPLY)
    prompt = render(tokenizer, CHAT[:1], add_generation_prompt=True, **variables)
    same = prompt == render(tokenizer, CHAT[:1], **variables)
    return before.removeprefix(prompt).strip() if same and found else ""


def render(tokenizer, messages, **options):
    """The text of a conversation. Raises Refusal if it has none."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:                               # a template may raise anything
        raise Refusal(f"the chat template cannot render a conversation: {error}") from None


def control_tokens(tokenizer):
    """A pattern that finds the text of the tokenizer's special tokens."""
    texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")             # (?!) finds nothing


def split_control_tokens(special, text):
    """A text in pieces, each control token cut after its first character: the tokenizer reads it as
    text then. special: the pattern of control_tokens."""
    places = [match.start() + 1 for match in re.finditer(f"(?={special.pattern})", text)]
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)])]


def split_end(tokenizer, text):
    """(id, rest) of a text that begins with a special token, white space before it left out, else
    (None, text)."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()
               if token.special}
    for token in sorted(special, key=len, reverse=True):
        if text.lstrip().startswith(token):
            return special[token], text.lstrip().removeprefix(token)
    return None, text


def describe_prompts(task, tokenizer):
    """[notes] on prompts that begin with two BOS tokens or were rendered before the chat template
    renders them, and on what their rows have and they do not show."""
    problems = task.train + task.test
    notes = []
    bos = tokenizer.bos_token_id
    twice = sum(ids[:2] == [bos, bos] for ids in task.encode(tokenizer, problems))
    if twice:
        notes.append(f"note: {twice} of {len(problems)} prompts begin with {tokenizer.bos_token} "
                     "twice: the tokenizer adds it, so leave it out of the text")
    unread = Counter(name for p in problems for name in p.unread)
    if task.uses_chat(tokenizer):
        special = control_tokens(tokenizer)
        texts = ["\n".join([*(text for _, text in p.earlier or ()), p.prompt]) for p in problems]
        found = [(match[0], p.where) for p, text in zip(problems, texts)
                 if (match := special.search(text))]
        if found:
            notes.append(f"note: {len(found)} of {len(problems)} prompts contain control tokens, "
                         f"such as {' ('.join(found[0])}): the chat template renders them once "
                         "more; --no_chat_template takes them as they are")
        with suppress(Refusal):          # of a template that renders single prompts alone
            unread["<think>"] = sum("</think>" in text for text in texts) * drops_thinking(
                tokenizer, **task.chat_template_kwargs)
            if opening := missing_opening(tokenizer, **task.chat_template_kwargs):
                notes.append("note: the chat template has no generation prompt: the policy itself "
                             f"has to write {opening!r} first")
    names = [f"{name} ({n} rows)" for name, n in unread.items()
             if n and name not in task.chat_template_kwargs]
    if names:
        notes.append(f"note: what rows have and their prompts do not show: {', '.join(names)}")
    return notes


# ------------------------------------------------------------------ the tokens that end a response

def add_turn_end(policy, tokenizer):
    """Let the token that ends a turn in the chat template end a response, too. A base model with a
    chat template has another eos token and would go on to invent the user's next turn. The token
    is added to the policy's generation config, which all samplers read and checkpoints hold."""
    end = find_turn_end(tokenizer)
    ends = end_tokens(policy, tokenizer)
    if end is not None and end not in ends:
        policy.generation_config.eos_token_id = [*ends, end]


def find_turn_end(tokenizer):
    """The token that ends the assistant's turn in the chat template; None if there is none."""
    try:
        return read_turns(tokenizer).end if tokenizer.chat_template else None
    except Refusal:               # the template cannot write a conversation: there are no turns
        return None


def name_ends(policy, tokenizer):
    """A line that names the tokens which end a response to a chat; "" without a chat template."""
    if not tokenizer.chat_template:
        return ""
    ends = tokenizer.convert_ids_to_tokens(end_tokens(policy, tokenizer))
    return f"a response ends with {' or '.join(ends)}"
