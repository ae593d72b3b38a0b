"""What a chat template writes around the words of a conversation: the text between two of the
assistant's turns, and the token that ends a turn, which ends a response, too."""

from typing import NamedTuple

from plumbing.refusal import Refusal
from rollout import end_tokens

REPLY = "REPLY"          # stands for the assistant's words in a rendered conversation
WORDS = "WORDS"          # stands for the user's
CHAT = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": REPLY}]


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
    Refusal if the template cannot render the conversation.
    """
    chat = [*CHAT, {"role": role, "content": WORDS}]
    try:
        last = tokenizer.apply_chat_template(CHAT, tokenize=False, **variables)
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True,
                                              **variables)
        _, written = last.split(REPLY)
        _, between = whole.split(REPLY)
        before, after = between.split(WORDS)                 # ValueError: words that are left out
    except Exception as error:                   # of the template, a program of its own
        raise Refusal(f"the chat template cannot render a conversation: {error}") from error
    end, before = split_end(tokenizer, before)
    last_end, _ = split_end(tokenizer, written)
    return Turns(end if last_end is None else last_end, before, after)


def split_end(tokenizer, text):
    """(id, rest) of a text that begins with a special token, white space before it left out, else
    (None, text)."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()
               if token.special}
    for token in sorted(special, key=len, reverse=True):
        if text.lstrip().startswith(token):
            return special[token], text.lstrip().removeprefix(token)
    return None, text


def add_turn_end(policy, tokenizer):
    """Let the token that ends a turn in the chat template end a response, too. A base model with a
    chat template has another eos token and would go on to invent the user's next turn. The token
    is added to the policy's generation config, which all samplers read and checkpoints hold."""
    try:
        end = read_turns(tokenizer).end if tokenizer.chat_template else None
    except Refusal:              # the template cannot write a conversation: there are no turns
        end = None
    ends = end_tokens(policy, tokenizer)
    if end is not None and end not in ends:
        policy.generation_config.eos_token_id = [*ends, end]
