"""What each kind of reward function rewards, and that no response can hang, crash or use the
process that asks. python -m pytest tests/data/test_reward_functions.py"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbing.data.reward_functions import RewardFunction
from plumbing.refusal import Refusal
from tiny_run import slow, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maths():
    check = RewardFunction("math", time_limit=20.0)          # generous: these must not time out
    yield check
    check.close()


@pytest.fixture
def own(tmp_path):
    """A reward function from the source text of the user's function `check`."""
    made = []

    def make(source, time_limit=20.0):
        write(tmp_path / "mine.py", source)
        made.append(RewardFunction(f"{tmp_path}/mine.py:check", time_limit))
        return made[-1]
    yield make
    for check in made:
        check.close()


# --------------------------------------------------------------------------------- what is rewarded

@pytest.mark.parametrize("answer, right, wrong", [
    ("42", ["42", "so 6 * 7 = 42.", "42.0", r"\boxed{42}", r"$\frac{84}{2}$", "#### 42",
            "It is 42"], ["41", "", "forty-two"]),
    ("1,125", ["1125", "1,125 grams", r"\boxed{1{,}125}"], ["1", "125"]),
    ("-3", ["-3", r"\boxed{-3}", "it is -3."], ["3"]),
    ("4.5", ["4.5", "9/2", r"\boxed{\frac{9}{2}}"], ["4", "5"]),
    (r"\frac{3}{4}", ["3/4", "0.75", r"$\frac{6}{8}$"], ["4/3", "3"]),      # a bare LaTeX answer
    (r"2\sqrt{3}", [r"$2\sqrt{3}$", r"\boxed{\sqrt{12}}"], ["2", "3", "23"]),
    (r"x^2 + 2x + 1", [r"$(x+1)^2$"], ["$x^2$", "1"]),
    (r"Hence $x = 5$, so \boxed{5}", ["5"], ["4"]),         # a worked solution
    ("42", [r"\boxed{41} no wait \boxed{42}", r"\boxed {42}", r"\boxed{\boxed{42}}", "答案是42",
            "答案是４２。", "答えは42です", r"\boxed{x = 42}", r"\boxed 42"],
     [r"\boxed{42} no wait \boxed{41}", r"42, so \boxed{", r"42, so \boxed{}", r"42, so \boxed",
      r"\boxed{42} or \boxed{4", r"42 is \boxed{\frac{84}{2}", r"\boxed{42}, \boxed{ }"]),
    (r"\{1, 2\}", [r"\boxed{1} and \boxed{2}", r"\boxed{\{2, 1\}}"],
     [r"\boxed{1}", r"\boxed{1} and \boxed{2} and \boxed{"]),
    ("east", [r"\boxed{east}", r"\boxed{\text{East}}", "east.", "not $west$, it is $east$."],
     [r"\boxed{seat}", "eats", "it is $seat$", ""]),
    (r"so \boxed{New York}", [r"it is \boxed{New York}"], [r"\boxed{York New}"]),
    ("ab", [r"\boxed{ba}"], [r"\boxed{a}"]),
    ("6.02e23", ["6.02e23", r"\boxed{6.02e23}", r"6.02 \times 10^{23}", "6.02·10^23",
                 r"so $6.02\cdot10^{23}$"], ["6.02e22", "6.02", "10", r"$10^{23}$"]),
    (r"6.02 \times 10^{23}", ["6.02e23", r"\boxed{6.02 \times 10^{23}}"], ["6.02e22", "10"]),
    ("1 1/2", ["1 1/2", "3/2", "1.5", r"\boxed{1\frac{1}{2}}"], ["1", "2", "11/2", "1/2"]),
    ("10^-3", ["10^-3", "0.001", r"\boxed{10^{-3}}", "10**-3"], ["10", "7", "-3"]),
    ("1 450", ["1450", "1 450", "1,450"], ["450", "1", "451"]),
    ("2024-01-05", ["2024-01-05", r"\boxed{2024-01-05}"], ["2018", "2024", r"\boxed{2024}"]),
    ("1e-7", ["1e-7", "0.0000001", r"\boxed{10^{-7}}"], ["2e-7", "0"])])
def test_math_accepts_equal_values_and_nothing_else(maths, answer, right, wrong):
    assert [r for r in right if maths(r, answer) != 1.0] == []
    assert [r for r in wrong if maths(r, answer) != 0.0] == []
    assert not maths.errors


def test_an_answer_of_which_a_part_is_paid_is_misread(maths):
    assert [maths(None, answer) for answer in ("5 or 6", "between 2 and 3")] == [0.0, 0.0]
    assert [maths(None, answer) for answer in ("12,345", "3/4", "(1,2)", "3x+4")] == [1.0] * 4


def test_exact_accepts_what_is_equal_but_for_white_space_around_it():
    check = RewardFunction("exact")
    assert [check(r, "42 ") for r in (" 42\n", "4 2", "42.")] == [1, 0, 0]


@pytest.mark.parametrize("parameters, response, noted", [
    ("response, answer", "response", False), ("answer, response", "response", False),
    ("ground_truth, *, completion", "completion", False), ("gold, output, k=2", "output", False),
    ("target, problem, prediction", "prediction", False), ("a, b", "a", True),
    ("answer, gold", "answer", True), ("response, truth, label=3", "response", True),
    ("answer, response, /", "answer", True), ("response, gold, answer=0", "response", True)])
def test_response_and_answer_are_given_by_name_or_the_call_by_position_is_shown(
        parameters, response, noted, own, capfd):
    check = own(f"def check({parameters}):\n    return {{'seven': {response} == '7'}}\n")
    assert [check("7", "8", {}), check("8", "7", {})] == [1, 0]
    said = capfd.readouterr().err
    assert said.count("check('7', '8')") == said.count("note: ") == noted


@pytest.mark.parametrize("parameters", ["", "response", "prompt, response, answer",
                                        "response, answer, row", "a, b, *, problem, more"])
def test_a_function_that_cannot_be_called_is_refused_with_what_it_would_get(parameters, own):
    with pytest.raises(Refusal, match=r"does not load: TypeError: .*; a reward function takes "
                                      r"\(response, answer\), and the row as problem"):
        own(f"def check({parameters}):\n    return 1.0\n")


def test_a_function_of_one_response_may_be_async(own):
    """With a lock that one call makes and the next one uses, in the same event loop."""
    check = own("import asyncio\nlock = None\n"
                "async def check(response, answer):\n    global lock\n"
                "    lock = lock or asyncio.Queue(1)\n"
                "    await asyncio.gather(lock.put(response), lock.get())\n"
                "    return float(response == answer)\n")
    assert [check("7", "7"), check("8", "7")] == [1.0, 0.0] and not check.errors
    check = own("async def check(solution_str, ground_truth):\n    return {'score': 0.5}\n")
    assert check("7", "7") == 0.5


def test_a_users_function_may_give_any_finite_number(own, capfd):
    """It prints to stderr and reads nothing."""
    check = own("import sys\nprint('loading')\n\ndef check(response, answer):\n"
                "    print('checking', response)\n"
                "    return len(response) / len(answer) - sys.stdin.read().count('x')\n")
    assert [check(r, "abcd") for r in ("a", "ab\nc", "\x00é🙂", "")] == [0.25, 1.0, 0.75, 0.0]
    assert not check.errors and "checking ab" in capfd.readouterr().err


# -------------------------------------------------------------------------------- what breaks, is 0

UNLESS_RIGHT = "def check(response, answer):\n    if response == answer:\n        return 1\n    "


@pytest.mark.parametrize("body", [
    "raise KeyError(response)", "raise KeyboardInterrupt", "return check(response, answer)",
    "return None", "return 'good'", "return 10 ** 400", "return float('nan')",
    "return float('inf')", "import sys; sys.exit()", "import os; os._exit(1)",
    "import os; os.abort()"])
def test_a_function_that_crashes_gives_0_is_counted_and_goes_on(own, body):
    check = own(UNLESS_RIGHT + body)
    assert [check(r, "right") for r in ("right", "wrong", "right")] == [1.0, 0.0, 1.0]
    assert check.errors == {"crash": 1}


@pytest.mark.parametrize("body", [
    "while True: pass", slow("import time; time.sleep(1000)"),
    slow("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"),
    "return 9 ** 9 ** 9"])                                   # C code: no signal handler runs
def test_a_function_that_hangs_is_killed_in_time(own, body):
    check = own(UNLESS_RIGHT + body, time_limit=1.0)
    start = time.monotonic()
    assert check("wrong", "right") == 0.0
    assert 1.0 <= time.monotonic() - start < 10.0
    check.time_limit = 20.0
    assert check("right", "right") == 1.0 and check.errors == {"timeout": 1}


def gone(pid):
    """Whether a process has ended; it may be there still, dead, where nobody collects it."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        if not state.exists():
            return False
        return state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True


STARTS = {                                                   # a process that outlives the function
    "Process": "import multiprocessing\n    p = multiprocessing.Process(target=sleep)\n"
               "    p.start()\n    p.join()",
    "daemon": "import multiprocessing\n    p = multiprocessing.Process(target=sleep, daemon=True)\n"
              "    p.start()\n    p.join()",
    "fork": "import os\n    sleep() if os.fork() == 0 else os._exit(0)",
    "session": "import os\n    os.fork() or (os.setsid(), sleep())\n    os.wait()",
    "program": "import subprocess, sys\n"
               "    subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'])",
    "ProcessPoolExecutor": "from concurrent.futures import ProcessPoolExecutor\n"
                           "    with ProcessPoolExecutor(1) as pool:\n"
                           "        return pool.submit(sleep).result()"}
SLEEP = """
import os, time
def sleep():
    with open({path!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(30)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
@pytest.mark.parametrize("kind", STARTS)
def test_a_function_that_starts_a_process_without_an_end_is_killed_with_it(own, kind, tmp_path):
    """All but a process that has a session of its own, which does not hold up the run either."""
    path = tmp_path / "pid"
    check = own(SLEEP.format(path=str(path)) + UNLESS_RIGHT + STARTS[kind], time_limit=2.0)
    start = time.monotonic()
    assert check("wrong", "right") == 0.0
    assert time.monotonic() - start < 10.0
    assert check("right", "right") == 1.0 and check.errors.total() == 1
    if kind == "session":
        os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL)
    elif kind != "program":
        assert gone_soon(int(path.read_text(encoding="utf-8")))


def gone_soon(pid):
    """Whether a process ends within ten seconds; it is killed if not."""
    for _ in range(100):
        if gone(pid):
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("body", ["while True: pass", STARTS["Process"]])
def test_workers_do_not_outlive_a_run_that_is_killed(tmp_path, body):
    path = tmp_path / "pid"
    write(tmp_path / "mine.py", SLEEP.format(path=str(path)) +
          f"def check(response, answer):\n    {body}\n")
    code = ("import threading; from plumbing.data.reward_functions import RewardFunction\n"
            f"check = RewardFunction('{tmp_path}/mine.py:check', 1.0); worker = check.idle[0]\n"
            "print(worker.pid, flush=True)\n"
            "worker.stdin.write(b'[\"\", \"\", null]\\n'); worker.stdin.flush()\n"
            "threading.Event().wait()")
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                           encoding="utf-8")
    pids = [int(run.stdout.readline())]
    time.sleep(1)
    assert not gone(pids[0])                                 # it waits
    pids += [int(path.read_text(encoding="utf-8"))] if path.exists() else []
    assert len(pids) == 1 + ("start" in body)
    run.kill()
    run.communicate()
    assert all(map(gone_soon, pids))


HOSTILE = [
    "__import__('os').system('touch {0}')", "open('{0}', 'w')", "__import__('os').mkdir('{0}')",
    "exec(\"open('{0}', 'w')\")", "__import__('pathlib').Path('{0}').touch()",
    "__import__('shutil').copyfile('README.md', '{0}')",
    "__import__('subprocess').run(['touch', '{0}'])",
    "__import__('os').symlink('README.md', '{0}')"]


def test_the_guard_rail_stops_what_sympys_parser_would_run(tmp_path):
    """Expressions that make a file when sympy parses them: all do without the guard rail, none with
    it; sympy still works, and files can be read (as a late import does)."""
    code = ("import sys; from sympy.parsing.sympy_parser import parse_expr\n"
            "from plumbing.data.reward_functions import guard_rail; parse_expr('1+1')\n"
            "for line in sys.stdin:\n    if line == 'guard\\n': sys.addaudithook(guard_rail)\n"
            "    try: parse_expr(line.strip())\n    except Exception as error: pass\n"
            "assert parse_expr('(x+1)**2 - x*x').expand() == parse_expr('2*x + 1')\n"
            "assert open('README.md').read()\n")
    free, guarded = ([tmp_path / f"{name}{i}" for i in range(len(HOSTILE))]
                     for name in ("free", "guarded"))
    lines = [expression.format(trap) for expression, trap in zip(HOSTILE * 2, free + guarded)]
    lines.insert(len(HOSTILE), "guard")
    run = subprocess.run([sys.executable, "-c", code], input="\n".join(lines), cwd=ROOT,
                         capture_output=True, encoding="utf-8", timeout=120)
    assert run.returncode == 0, run.stderr
    assert all(map(os.path.lexists, free)) and not any(map(os.path.lexists, guarded))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_librarys_function_gets_four_gigabytes_and_a_users_own_what_there_is(maths, own):
    resource = pytest.importorskip("resource")
    checks = maths, own("def check(response, answer):\n    return 1\n")
    limits = [resource.prlimit(check.idle[0].pid, resource.RLIMIT_AS) for check in checks]
    assert limits == [(4 * 2 ** 30,) * 2, resource.getrlimit(resource.RLIMIT_AS)]


# ---------------------------------------------------------------------------------- what is refused

UNKNOWN = "not known: use math, exact or file.py:function"


@pytest.mark.parametrize("kind, words", [
    *((kind, UNKNOWN) for kind in ("maths", "mine.py", "mine.py:", "mine.txt:check", "")),
    ("nowhere.py:check", "there is no file nowhere.py")])
def test_an_unknown_kind_is_refused(kind, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        RewardFunction(kind)


@pytest.mark.parametrize("source, words", [
    ("def other(): pass", "no attribute 'check'"), ("def check(:", "SyntaxError"),
    ("import nosuchthing", "ModuleNotFoundError"),
    ("raise SystemExit(3)", "SystemExit"), ("import os; os._exit(0)", "its process ended"),
    ("raise Exception('x' * 999)", r"Exception: x{189} \(mine.py:1\)$")])    # 200 characters
def test_a_file_that_does_not_load_is_refused_in_one_line(own, source, words):
    with pytest.raises(ValueError, match=words) as refusal:
        own(source)
    assert "\n" not in str(refusal.value) and "mine.py:check" in str(refusal.value)
