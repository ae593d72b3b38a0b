"""A tool: a function whose output is inserted into a response where the policy asks for it.

    response   three and four are <tool>3+4</tool> 7, so …
                                                  ^^ inserted: read by the policy, no loss token
"""

import inspect
import sys
from pathlib import Path

from plumbing.data.reward_functions import load_here
from rollout import StopStrings

CLOSING = "</tool>"              # the default of --tool_stop: after this text the tool is called


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
            self.closes = StopStrings(tokenizer, [self.stop])
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
