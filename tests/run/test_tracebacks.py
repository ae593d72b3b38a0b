"""An error in the code keeps its traceback, which ends at the line that raised it, in this project
and in a user's file. What users of the command line can correct: test_bad_arguments.py.
python -m pytest tests/run/test_tracebacks.py"""

from pathlib import Path

import pytest

from moe import TinyMoE
from plumbing.data import task
from plumbing.data.stream import PromptStream
from rollout import Sampler
from tiny_run import ROOT, write


@pytest.mark.parametrize("words, source", [
    ("--verifier mine.py:reward", "def reward(completions, **rest):\n    return [][0]\n"),
    ("--environment mine.py:Play", "class Play:\n    def __init__(self, row): [][0]\n"
     "    def step(self, text):\n        return '', 1.0, True\n"),
    ("--verifier exact --sampler mine.py:Mine", "from rollout import Sampler\n"
     "class Mine(Sampler):\n    def sample(self, *args, **options): [][0]\n")])
def test_an_error_in_a_users_file_keeps_its_traceback(words, source, own, run):
    write("mine.py", source)
    with pytest.raises(IndexError) as error:
        run(f"{own} {words}")
    assert error.traceback[-1].path == Path("mine.py").resolve()


# A function of this project that code of others calls, or that stands beside such code.
@pytest.mark.parametrize("file, owner, name, kind, flags", [
    ("rollout.py", Sampler, "sample", ValueError, "--sampler mine.py:Mine"),
    ("plumbing/data/stream.py", PromptStream, "load_state_dict", KeyError, "--resume --steps 2"),
    ("plumbing/data/task.py", task, "encode_text", TypeError, ""),
    ("moe.py", TinyMoE, "save_pretrained", OSError, "")])
def test_an_error_of_this_project_is_no_refusal(file, owner, name, kind, flags, own, run,
                                                monkeypatch):
    write("mine.py", "from rollout import Sampler\nclass Mine(Sampler):\n    pass\n")
    if "--resume" in flags:
        run()
    else:
        flags = f"{own} --verifier exact {flags}"
    names = {}
    exec(compile(f"def bug(*args, **options):\n    raise {kind.__name__}('planted')\n",
                 str(ROOT / file), "exec"), names)
    monkeypatch.setattr(owner, name, names["bug"])
    with pytest.raises(kind, match="planted") as error:
        run(flags)
    assert error.type is kind and error.traceback[-1].path == ROOT / file
