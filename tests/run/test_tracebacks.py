"""An error in the code keeps its traceback, which ends at the line that raised it; what users of
the command line can correct is one line, with the line of their own file where they have one.
python -m pytest tests/run/test_tracebacks.py"""

import re

import pytest

from moe import TinyMoE
from plumbing.data import task
from plumbing.data.stream import PromptStream
from rollout import Sampler
from tiny_run import ROOT, TINY, program, python, slow, write

PLANTED = 'raise ValueError("planted")'
PLACES = [  # a file, the line before the planted one, flags
    ("losses.py", "def low_ratio(logp, old_logp, mask):", "--algorithm own"),
    ("advantages.py", "def own(rewards):", "--advantage own"),
    slow("train.py", "def mini_batches(settings, task, batch):", ""),
    slow("features/entropy.py", "    def loss(self, micro, scores, mini):", "--entropy_coef 1"),
    slow("routes.py", "def flip_rate(old_indices, new_indices, mask):", ""),
    slow("moe.py", "    def forward(self, x, gates, indices):", ""),
    slow("session/metrics.py", "    def log(self", ""),
    slow("plumbing/data/stream.py", "    def next(self", ""),
]
ROWS = {                                         # new ones, at the end of the file
    "losses.py": """
def low_ratio(logp, old_logp, mask):
    return logp

RATIOS["low"] = low_ratio
OBJECTIVES["own"] = Objective("low", "min", 0.2, 0.2, "sequence-mean")
""",
    "advantages.py": """
def own(rewards):
    return rewards

ADVANTAGES["own"] = Advantage(own, "response")
"""}


@pytest.mark.parametrize("file, line, flags", PLACES)
def test_a_planted_error_keeps_its_traceback(file, line, flags, tmp_path, cold_start):
    place = program(tmp_path / "copy", cold_start)
    text = (place / file).read_text(encoding="utf-8")
    if file in ROWS:
        text = text.replace('\nif __name__ == "__main__":', f"{ROWS[file]}\nif False:", 1)
    start = re.search(rf"^{re.escape(line)}", text, re.M).start()
    end = text.index(":\n", start) + 2
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    write(place / file, f"{text[:end]}{indent}{PLANTED}\n{text[end:]}")
    number = text[:end].count("\n") + 1
    done = python("train.py", *TINY, "--steps", 1, "--output_dir", "run", *flags.split(), cwd=place,
                  code=1)
    lines = done.stderr.rstrip().splitlines()
    assert lines[-1] == "ValueError: planted" and lines[-2].strip() == PLANTED
    assert f"{file}\", line {number}" in lines[-3]
    if flags.split()[-1:] == ["own"]:                        # found before a run begins
        assert f"train.py: {flags} fails on " in done.stderr


@pytest.mark.parametrize("words, source", [
    ("--verifier mine.py:reward",
     "def reward(completions, **rest):\n    scores = []\n    return scores[0]\n"),
    ("--verifier mine.py:reward --verifier_timeout 5",
     "def reward(response, answer):\n    scores = []\n    return scores[0]\n"),
    ("--environment mine.py:Play", "class Play:\n    def __init__(self, row):\n        [][0]\n"
     "    def step(self, text):\n        return '', 1.0, True\n"),
    ("--verifier exact --sampler mine.py:Mine", "from rollout import Sampler\n"
     "class Mine(Sampler):\n    def sample(self, *args, **options): [][0]\n")])
def test_an_error_in_a_users_file_is_one_line_that_names_the_line(words, source, own, refused):
    write("mine.py", source)
    assert "IndexError: list index out of range (mine.py:3)" in refused(
        f"{own} {words} --steps 1 --output_dir run", begun=True)


# A function of this project that code of others calls, or that stands beside such code.
@pytest.mark.parametrize("file, owner, name, kind, flags", [
    ("rollout.py", Sampler, "sample", ValueError, "--sampler mine.py:Mine"),
    ("plumbing/data/stream.py", PromptStream, "load_state_dict", KeyError, "--resume --steps 2"),
    ("plumbing/data/task.py", task, "encode_text", TypeError, ""),
    ("moe.py", TinyMoE, "from_pretrained", IndexError, ""),
    ("moe.py", TinyMoE, "save_pretrained", RuntimeError, "")])
def test_an_error_of_this_project_is_not_put_down_to_others(file, owner, name, kind, flags, own,
                                                            run, monkeypatch):
    write("mine.py", "from rollout import Sampler\nclass Mine(Sampler):\n    pass\n")
    if flags == "--resume --steps 2":
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


def test_a_file_that_a_reader_opens_in_the_loop_is_no_refusal(run, then):
    import train
    then(train, "collect", lambda *_, **__: open("nowhere", encoding="utf-8"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run()
