"""A tool: a function whose output is inserted into a response where the policy asks for it.

    response   three and four are <tool>3+4</tool> 7, so …
                                                  ^^ inserted: read by the policy, no loss token

The output of a tool is no loss token, so it is in no ratio and no length. A stop string ends a
response, and its text, only where the policy wrote the last token of the string.
"""

import inspect
import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path

import torch

from features.feature import Feature, flag, refuse, with_breaks
from plumbing.data.reward_functions import load_here
from plumbing.engines.wrapper import Wrapper

CLOSING = "</tool>"              # the default of --tool_stop: after this text the tool is called


@dataclass(frozen=True)
class Flags:
    tool: str | None = flag(
        None, "FILE.py:FUNCTION, called with the text of the response so far after each "
              "--tool_stop; its result is inserted into the response", unset="no tool",
        needs={"dataset_name": "the built-in task has its own prompts and its own verifier"},
        without={"sampler": "only the built-in sampler stops within a response"},
        evaluation="kept", section="a tool")
    tool_stop: str | None = flag(
        None, "string with which the policy calls the --tool; \\n stands for a line break",
        unset=CLOSING, kind=with_breaks, text=True, needs="tool", evaluation="kept")

    @cached_property
    def loaded_tool(self):
        """The Tool, loaded once: rollouts and evaluations call the same function."""
        return Tool(self.tool, self.tool_stop or CLOSING)


class Tools(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return bool(settings.tool)

    @classmethod
    def check(cls, settings):
        if settings.tool_stop == "":
            refuse(settings, "tool_stop", "is empty: give the text with which the policy calls the "
                   "tool")

    @classmethod
    def task(cls, settings, task, load):
        """The same task; a function that does not load is refused before a run begins."""
        _ = settings.loaded_tool
        return task

    @classmethod
    def base_sampler(cls, settings, sampler):
        return InsertingSampler(sampler, settings.loaded_tool)


class InsertingSampler(Wrapper):
    """Lets a tool write into what it samples."""

    def __init__(self, sampler, tool):
        super().__init__(sampler)
        self.insert = partial(insert, tool, self.tokenizer)

    def sample(self, *inputs, **options):
        rollout = self.sampler.sample(*inputs, insert=self.insert, **options)
        rows = zip(rollout.token_lists(), rollout.mask.tolist(), rollout.texts)
        return replace(rollout, texts=[
            text if all(own[:len(ids)]) else before_stop(self.tokenizer, ids, own, self.stop)
            for ids, own, text in rows])


def insert(tool, tokenizer, response, inserted, ready):
    """Call the tool on those of the responses so far [B, t] that are `ready` [B] and have just
    asked for it. Its output is written into inserted [B, T] from position t on, cut at T."""
    asked = ready & tool.asked(tokenizer, response)                                 # [B]
    start = response.shape[1]
    for row in asked.nonzero().flatten().tolist():
        said = tool(tokenizer.decode(response[row]))
        if said:
            room = inserted.shape[1] - start
            try:
                ids = tokenizer(said, add_special_tokens=False)["input_ids"][:room]
            except Exception as error:                       # tokenizers raises nothing narrower
                raise ValueError(f"--tool returned {said[:40]!r}, which the tokenizer cannot "
                                 f"encode: {error}") from error
            inserted[row, start:start + len(ids)] = torch.tensor(ids, device=inserted.device)


def before_stop(tokenizer, ids, own, stop):
    """The text of the tokens `ids` up to the first stop string that the policy completed. own:
    which of them the policy wrote; a stop string in the output of a tool does not count."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for string in stop:
        at = text.find(string)
        while at >= 0 and not own[last_token(tokenizer, ids, at + len(string))]:
            at = text.find(string, at + 1)
        text = text if at < 0 else text[:at]
    return text


def last_token(tokenizer, ids, characters):
    """The index in ids of the token that completes the first `characters` characters of the text.
    """
    size = lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=True))
    return next((i for i in range(len(ids)) if size(i + 1) >= characters), len(ids) - 1)


class Tool:
    """A function of file.py, called with the text of a response so far whenever the policy has just
    written `stop`. The text that it returns is inserted; '' or None inserts nothing.

    The function runs in the training process on text that a language model wrote: it must not
    evaluate or execute that text. If it raises, `error: …` is inserted (the policy may have asked
    for something invalid) and the first such error is printed on stderr. Raises ValueError or
    FileNotFoundError if there is no such function.
    """

    def __init__(self, kind, stop=CLOSING):
        path, _, name = kind.rpartition(":")
        if not (path.endswith(".py") and name.isidentifier()):
            raise ValueError(f"--tool {kind}: file.py:function is needed")
        if not Path(path).is_file():
            raise FileNotFoundError(f"--tool {kind}: there is no file {path}")
        try:
            self.function = load_here(kind)
            inspect.signature(self.function).bind("text")
        except BaseException as error:                       # a user's file may call sys.exit()
            raise ValueError(f"--tool {kind} does not load as a function of the text: "
                             f"{type(error).__name__}: {error}")
        self.kind = kind
        self.stop = stop
        self.complained = False
        self.tokenizer = self.closes = None

    def asked(self, tokenizer, response):
        """Token ids of the responses so far [B, t] -> [B] bool: whether the last token completes
        `stop`."""
        if self.tokenizer is not tokenizer:
            self.tokenizer = tokenizer
            stops = import_module("rollout").StopStrings     # transformers: --help does not wait
            self.closes = stops(tokenizer, [self.stop])
        return self.closes(response, None)                                          # [B]

    def __call__(self, text):
        try:
            said = self.function(text)
        except Exception as error:                           # whatever the user's function raises
            said = f"error: {error or type(error).__name__}"
            if not self.complained:
                self.complained = True
                sys.stderr.write(f"train.py: warning: --tool {self.kind} raised "
                                 f"{type(error).__name__}: {error}, after {text[-40:]!r}; such "
                                 "errors are inserted as its output\n")
        return "" if said is None else str(said)
