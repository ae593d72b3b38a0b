"""What each kind of reward function rewards, and that no response can hang, crash or use the
process that asks. python -m pytest tests/data/test_reward_functions.py"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbing.data.datafiles import Problem
from plumbing.data.reward_functions import RewardFunction
from plumbing.refusal import Refusal
from tiny_run import jsonl, load_task, slow, write

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes and limits of Linux")


def judged(check, answer, *responses):
    """The rewards of responses with this reference answer; 0 where the function failed."""
    scores = check.scores(responses, [Problem("", answer)] * len(responses))
    return [sum(parts.values()) for parts in scores]


@pytest.fixture(scope="module")
def maths():
    return RewardFunction("math", time_limit=20.0)           # generous: these must not time out


@pytest.fixture
def own(tmp_path):
    """A reward function from the source text of the user's function `check`."""
    def make(source, time_limit=20.0):
        write(tmp_path / "mine.py", source)
        return RewardFunction(f"{tmp_path}/mine.py:check", time_limit)
    return make


# --------------------------------------------------------------------------------- what is rewarded

@pytest.mark.parametrize("answer, right, wrong", [
    ("42", ["42", "so 6 * 7 = 42.", "42.0", r"\boxed{42}", r"$\frac{84}{2}$", "It is 42"],
     ["41", "", "forty-two"]),
    ("so\n#### 1,125", ["1125", "1,125 grams"], ["1", "125"]),           # as in GSM8K
    ("-5", ["so \N{MINUS SIGN}5", "-5"], ["5"]),
    (r"\frac{3}{4}", ["3/4", "0.75", r"$\frac{6}{8}$"], ["4/3", "3"]),      # a bare LaTeX answer
    (r"x^2 + 2x + 1", [r"$(x+1)^2$"], ["$x^2$", "1"]),
    (r"Hence $x = 5$, so \boxed{5}", ["5"], ["4"]),         # a worked solution
    (r"\$18.90", ["$18.90$", r"\boxed{18.90}", r"\boxed{\$18.9}", r"It costs \$18.90."],
     [r"\boxed{\$18}"]),
    (r"\$32,\!348", [r"\boxed{32348}"], [r"\boxed{32}"]),
    ("43", [], [r"\boxed{42}. The final answer is $43$.", r"\boxed{42}. It is \(43\)"]),
    ("42", [r"\boxed{41} no wait \boxed{42}",               # the last box decides
            r"\boxed{42}. The final answer is $43$.", r"\boxed{42}. It is \(43\)",
            r"\boxed{x = \boxed{42}}", r"\boxed {42}", r"$\boxed{42.}$", r"\boxed{\(42\)}"],
     [r"\boxed{42} no wait \boxed{41}", r"42, so \boxed{", r"\boxed{42} or \boxed{4",
      r"42 \boxed{}"])])
def test_math_accepts_equal_values_and_nothing_else(maths, answer, right, wrong):
    assert judged(maths, answer, *right) == [1.0] * len(right)
    assert judged(maths, answer, *wrong) == [0.0] * len(wrong)
    assert not maths.errors


def test_a_row_that_math_cannot_read_is_counted_and_the_first_one_named(capsys):
    answers = ["4", "½", "N/A", "x²", "east"]
    rows = [Problem("", answer, f"rows.jsonl row {i}") for i, answer in enumerate(answers)]
    check = RewardFunction("math", time_limit=20.0)
    for _ in range(2):
        scores = check.scores([rf"\boxed{{{answer}}}" for answer in answers], rows)
    assert scores == [{"math": 1.0}, {}, {}, {}, {}] and check.errors == 8
    said, = capsys.readouterr().out.splitlines()
    assert "rows.jsonl row 1: no response can be right" in said and "'½'" in said


def test_exact_accepts_what_is_equal_but_for_white_space_around_it():
    assert judged(RewardFunction("exact"), "42 ", " 42\n", "4 2", "42.") == [1, 0, 0]


def test_a_users_function_may_give_any_finite_number(own, capfd):
    """It prints to stderr and reads nothing."""
    check = own("import sys\nprint('loading')\n\ndef check(response, answer):\n"
                "    print('checking', response)\n"
                "    return len(response) / len(answer) - sys.stdin.read().count('x')\n")
    texts = ["a", "ab\nc", "\x00é🙂", ""]
    assert judged(check, "abcd", *texts) == [len(text) / 4 for text in texts]
    assert not check.errors and "checking ab" in capfd.readouterr().err


@pytest.mark.parametrize("parameters, sent", [("", None), (", problem", {"tests": "x"})])
def test_a_row_is_sent_only_to_a_function_that_asks_for_it(parameters, sent, own, monkeypatch):
    check = own(f"def check(response, answer{parameters}):\n    return 1.0\n")
    monkeypatch.setattr(check, "start", lambda: None)
    monkeypatch.setattr(check, "ask", lambda worker, question: json.dumps({"row": question[2]}))
    assert check.score("4", Problem("", "4", row={"tests": "x"})) == {"row": sent}


# -------------------------------------------------------------------------------- what breaks, is 0

UNLESS_RIGHT = "def check(response, answer):\n    if response == answer:\n        return 1\n    "


@pytest.mark.parametrize("body", [
    "raise KeyError(response)", "raise KeyboardInterrupt", "return None", "return 'good'",
    "return 10 ** 400", "return float('nan')", "import os; os._exit(1)",
    pytest.param("from plumbing.data.reward_worker import load_math; load_math(); "
                 "return len(bytearray(8 << 30))", marks=linux)])     # 8 GB, where math may have 4
def test_a_function_that_crashes_gives_0_is_counted_and_goes_on(own, body):
    check = own(UNLESS_RIGHT + body)
    assert judged(check, "right", "right", "wrong", "right") == [1.0, 0.0, 1.0]
    assert check.errors == 1


@pytest.mark.parametrize("body", [
    "while True: pass", "return 9 ** 9 ** 9",                # C code: no signal handler runs
    slow("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")])
def test_a_function_that_hangs_is_killed_in_time(own, body):
    check = own(UNLESS_RIGHT + body, time_limit=1.0)
    start = time.monotonic()
    assert judged(check, "right", "wrong") == [0.0]
    assert 1.0 <= time.monotonic() - start < 30.0
    check.time_limit = 20.0
    assert judged(check, "right", "right") == [1.0] and check.errors == 1


def gone_soon(pid):
    """Whether a process ends within five seconds; it may be there still, dead, where nobody
    collects it. It is killed if not."""
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        state = stat.read_text(encoding="utf-8") if stat.exists() else ") Z"
        if state.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


STARTS = ("import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
          "'import time; time.sleep(60)']); open({path!r}, 'w').write(str(child.pid)); "
          "time.sleep(60)")


@linux
def test_what_a_function_started_is_killed_with_it(own, tmp_path):
    path = tmp_path / "pid"
    check = own(UNLESS_RIGHT + STARTS.format(path=str(path)), time_limit=2.0)
    assert judged(check, "right", "wrong") == [0.0]
    assert gone_soon(int(path.read_text(encoding="utf-8")))


@linux
@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(600)", "return 1"])
def test_a_worker_ends_within_5_seconds_of_its_runs_sigkill(tmp_path, body):
    """In a loop, asleep, and without a question."""
    write(tmp_path / "mine.py", f"def check(response, answer):\n    {body}\n")
    code = ("import threading; from plumbing.data.reward_functions import RewardFunction\n"
            f"check = RewardFunction({str(tmp_path / 'mine.py:check')!r}, 600.0)\n"
            "worker = check.start(); print(worker.pid, flush=True)\n"
            "worker.stdin.write('[\"\", \"\", null]\\n'); worker.stdin.flush()\n"
            "threading.Event().wait()")
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                           encoding="utf-8")
    worker = int(run.stdout.readline())
    time.sleep(0.5)
    assert Path(f"/proc/{worker}").exists()
    run.kill()
    run.communicate()
    assert gone_soon(worker)


def test_a_worker_imports_no_torch(own):
    check = own("import sys\ndef check(response, answer):\n    return 'torch' in sys.modules\n")
    assert judged(check, "", "") == [0.0] and not check.errors


# ---------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("source, verifier, words", [
    *(("", name, "is not known") for name in ("maths", "mine.py", "mine.txt:check", "no.py:check")),
    ("def reward(answer, response):\n    return 1", "mine.py:reward",
     r"reads the answer first.*reward\(response, answer\)"),
    ("def reward(response, answer):\n    return 1 // 0", "mine.py:reward",
     "mine.py:reward fails on each of the first 3 reference answers"),
    ("import time\ndef reward(response, answer):\n    time.sleep(9)", "mine.py:reward",
     "or takes longer than --verifier_timeout"),
    ("", "math", "fails on each of the first 3 reference answers [(]rows.jsonl row 1")])
def test_a_reward_that_cannot_work_is_refused_in_one_line(source, verifier, words, sums):
    write("mine.py", source)
    answers = ["N/A", "√2", "east", "½"]
    jsonl("rows.jsonl", [{"prompt": str(i), "answer": text} for i, text in enumerate(answers)])
    with pytest.raises(Refusal, match=words) as refusal:
        load_task("rows.jsonl", verifier=verifier, verifier_timeout=2.0)
    assert "\n" not in str(refusal.value)
