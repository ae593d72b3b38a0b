"""What docs/data.md has a reader write: its files, as they stand there.
python -m pytest tests/data/test_documented.py"""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

import train
from chat_server import chat_server
from plumbing.data.tasks import prepare_task
from session.arguments import parse
from tiny_run import SMALL, metrics, write

ROOT = Path(__file__).resolve().parents[2]
DATA = (ROOT / "docs/data.md").read_text(encoding="utf-8")
DATA = DATA.replace("\\\n", "")                             # a command in one line


def section(heading, **places):
    """Write the files of a section of docs/data.md; its commands of train.py, each a list of words,
    with other words in these places."""
    text = DATA.split(f"## {heading}\n")[1].split("\n## ")[0]
    for name, body in re.findall(r"`(\S+\.\w+)`[^\n]*[:.]\n\n((?:    .*\n|\n)+)", text):
        lines = body.rstrip("\n").splitlines()
        assert not any(line.startswith("    python ") for line in lines), (
            f"{name}: Markdown shows the command as a part of the file")
        write(name, "".join(line[4:] + "\n" for line in lines).rstrip("\n") + "\n")
    commands = re.findall(r"^    (python train\.py .*)$", text, re.M)
    return [[places.get(word, word) for word in shlex.split(line)[2:]] for line in commands]


def judged(task, texts, problems):
    """The rewards of the texts."""
    rewards = task.reward_components(texts, problems).squeeze(-1).tolist()
    assert not any(function.errors for function in task.reward_functions)
    return rewards


def asked(task, words):
    """The first problem of a task whose prompt or answer has these words."""
    return next(p for p in task.train + task.test if words in p.prompt or words == p.answer)


@pytest.fixture
def server(monkeypatch):
    """A server with a chat API that gives 7 of 10, and none to answers with a 3; notes the
    questions."""
    asked = []

    def answer(messages):
        asked.append(messages[0]["content"])
        wrong = "3" in asked[-1].split("Answer: ")[1].split("\n")[0]
        return None if wrong else "I say 7."
    with chat_server(answer) as address:
        monkeypatch.setenv("JUDGE", address)
        yield asked


SHORT = [*SMALL, "--max_completion_length", "4"]


def test_the_judge_that_asks_a_server(chat_model, server):
    section("A reward in components")                             # its rows.jsonl
    (argv,) = section("A reward function of a batch: TRL's, or a judge model", DIR="chat")
    train.main([*SHORT, "--steps", "1", *argv, "--output_dir", "run"])
    record, = metrics("run")
    parts = record["reward_parts"]
    assert set(parts) == {"exact", "judge"} and parts["judge"] == pytest.approx(0.7)
    assert record["reward"] == pytest.approx(parts["exact"] + 0.35, abs=0.2)
    questions = [question for question in server if "Answer: " in question]
    assert len(questions) == 16
    assert all(re.match(r"Question: \d\+\d=\nAnswer: ", question) for question in questions)


def test_the_calculator(workplace):
    argv = section("An environment")[0]
    task = prepare_task(parse(argv))
    assert task.prompt_template == ("117+225=<tool>117+225</tool>342\n"
                                    "538+146=<tool>538+146</tool>684\n{prompt}")
    assert task.stop == ("\n", "</tool>")
    step = parse(argv).environment_class({"answer": "948"}).step
    assert step("3=<tool> 2 + 3+-10 ") == ("-5", 0, False)
    assert step("<tool>__import__('os')") == ("error: only sums of whole numbers", 0, False)
    assert [step(words)[1:] for words in ("948", "9480")] == [(1, True), (0, True)]


def test_the_rows_and_the_reward_of_the_whole_task():
    module = runpy.run_path(str(ROOT / "recipes/notes.py"))
    rows, reward = module["rows"](), module["reward"]
    assert len({row["prompt"] for row in rows}) == 200
    assert all(set(json.loads(row["answer"])) == {"name", "city"} for row in rows)
    right = '{"name": "Ana", "city": "Oslo"}'
    cases = {' {"city": "Oslo", "name": "Ana"}': (1, 1), '{"name": "Ana"}': (0, 0), "3": (0, 0),
             '{"name": "Ana", "city": "Rome"}': (0.5, 1)}
    for response, parts in cases.items():
        assert reward(response, right) == dict(zip(("right", "form"), parts))
