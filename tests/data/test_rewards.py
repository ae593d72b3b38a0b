"""Rewards in parts: what a verifier may return, how the parts are weighed, and what is logged.

    python -m pytest tests/data/test_rewards.py
"""
import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from advantages import not_all_correct
from plumbing.data.tasks import from_arguments, load_task
from plumbing.data.verifiers import Verifier, in_parallel
from plumbing.run.arguments import parse
from tiny_run import SMALL, TINY, differences, metrics

ROOT = Path(__file__).resolve().parents[2]
SUMS = "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str((a + b) % 10), "largest": max(a, b)}) + "\n"
               for a in range(1, 5) for b in range(1, 5))


@pytest.fixture
def checkpoint(workplace, cold_start):
    """Flags for a run of a checkpoint on rows.jsonl, 16 sums."""
    Path("rows.jsonl").write_text(SUMS)
    return [*SMALL, "--model_name_or_path", str(next(cold_start.iterdir())), "--dataset_name",
            "rows.jsonl", "--max_completion_length", "4"]


@pytest.fixture
def own(tmp_path):
    """A verifier, or a task of 16 sums, from the source text of the user's function `check`."""
    made = []

    def make(source, task=False, **options):
        (tmp_path / "mine.py").write_text(source)
        (tmp_path / "rows.jsonl").write_text(SUMS)
        kind = f"{tmp_path}/mine.py:check"
        if task:
            task = load_task(f"{tmp_path}/rows.jsonl", verifier=[kind], time_limit=20.0, **options)
            made.extend(task.verifiers)
            return task
        made.append(Verifier(kind, 20.0))
        return made[-1]
    yield make
    for verifier in made:
        verifier.close()


# ------------------------------------------------------------------------------------ what may be returned

def test_the_row_is_given_to_a_function_that_asks_for_it(own):
    task = own("def check(response, answer, problem):\n    return problem['largest'] + len(problem) / 10\n",
               task=True)
    for problem in task.train:
        assert task.verify("", problem) == pytest.approx(max(map(int, problem.prompt[:-1].split("+"))) + 0.3)


def test_parts_are_weighed_in_the_order_in_which_they_are_named(own):
    source = "def check(response, answer):\n    return {'right': response == answer, 'short': 0.5, 'a': 3}\n"
    task = own(source, task=True, reward_weights=[1.0, 2.0, -1.0])
    problem = task.train[0]
    assert task.part_names == ["right", "short", "a"] and task.weights(torch.ones(4, 4)) == [1, 2, -1, 1]
    assert task.judge([problem.answer, "no"], [problem, problem]).tolist() == [[1, 0.5, 3], [0, 0.5, 3]]
    assert task.verify(problem.answer, problem) == -1.0
    task.reward_weights = [1.0, 2.0]
    with pytest.raises(ValueError, match="holds 2 numbers, but the reward has 3 parts: right, short, a"):
        task.weights(torch.ones(4, 3))


@pytest.mark.parametrize("bad, words", [
    ("{'right': 1}", "returned right, but right format before"),
    ("{'right': 1, 'format': float('nan')}", "returned nan for format, not a finite number"),
    ("{'right': '1', 'format': 1}", "returned '1' for right, not a finite number"),
    ("{'right': None, 'format': 1}", "returned None for right"), ("{}", "returned no parts"),
    ("{'right': 1, 'format': 1, 'more': 1}", "returned right format more, but"),
    ("1.0", "returned check, but right format before"), ("{'right': 10 ** 400, 'format': 1}", "not a finite"),
    ("{}['right']", "raised KeyError: 'right'")])
def test_a_bad_dict_is_one_line_reward_0_and_counted(own, bad, words, capfd):
    task = own("def check(response, answer):\n    if 'bad' in response:\n"
               f"        return {bad}\n    return {{'right': response == answer, 'format': 1}}\n", task=True)
    problem = task.train[0]
    judged = task.judge([problem.answer, "bad", "bad 2"], [problem] * 3)
    judged = torch.cat([judged, task.judge(["bad", "fine"], [problem] * 2)])
    assert judged.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0], [0, 1]]
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and words in err and "mine.py:check" in err and "the reward is 0" in err
    assert task.verifier_errors == {"crash": 3} and task.new_errors() == 3 and task.new_errors() == 0


def test_a_function_that_fails_on_each_reference_answer_is_refused_before_the_run(checkpoint, capsys):
    Path("mine.py").write_text("def tag(response, answer):\n    return response.split('<answer>')[1] == answer\n")
    with pytest.raises(SystemExit) as stop:
        train.main([*checkpoint, "--verifier", "mine.py:tag", "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and not Path("run").exists() and err.count("\n") == 1
    assert "mine.py:tag: raised IndexError" in err and "each of the first 8 reference answers" in err


def test_a_function_that_fails_on_some_reference_answers_is_kept_and_they_are_not_counted(own):
    task = own("def check(response, answer):\n    return {'right': 1 / (answer != '2'), 'a': 0}\n", task=True)
    assert task.part_names == ["right", "a"] and not task.verifier_errors


@pytest.mark.parametrize("ranks", [([None, ["b", "a"]]), ([["a", "b"], ["b", "a"]])])
def test_the_names_of_the_parts_are_those_of_the_first_process_that_has_them(ranks, own, monkeypatch):
    from plumbing.parallel import processes
    gathered = [(names, "" if names else "mine.py:check: raised ValueError") for names in ranks]
    monkeypatch.setattr(processes, "gather", lambda part: gathered)
    task = own("def check(response, answer):\n    return {'b': 1, 'a': 2}\n", task=True)
    assert task.part_names == next(names for names in ranks if names)
    monkeypatch.undo()
    judged = dict(zip(task.part_names, task.judge(["1"], task.train[:1])[0].tolist()))
    assert judged == {"b": 1, "a": 2}
    task.verifiers[0].names = None                             # a verifier that has not answered yet
    task.reward_weights = (1, 0.2)
    with pytest.raises(ValueError, match="how many parts the reward has is not known: verifier .*mine.py:check"):
        task.weights(torch.zeros(1, 1))


def test_a_verifier_with_penalties_and_maxrl_is_one_line(checkpoint, capsys):
    Path("mine.py").write_text("def reward(response, answer):\n    return 1.0 if response == answer else -0.5\n")
    with pytest.raises(SystemExit) as stop:
        train.main([*checkpoint, "--algorithm", "maxrl", "--verifier", "mine.py:reward", "--output_dir", "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "a reward is -0.5: scale_rewards mean (MaxRL)" in err


# two processes: verifiers that fail on some texts, change the order of parts, leave one out; seeds that fail on
# the reference answers, each, too
ROUGH = """
import zlib
def check(response, answer):
    r = zlib.crc32(f"{{response}} {{answer}} {seed}".encode())
    parts = {{"right": float(response[:1] == answer[:1]), "short": 0.1 * (len(response) < 3), "odd": r % 2 / 10}}
    if response == answer and {all_fail}:
        raise ValueError("a reference answer")
    if r % 7 == 3:
        raise ValueError("no")
    if r % 7 == 4:
        del parts["odd"]
    return dict(reversed(parts.items())) if r % 7 < 3 else parts
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed, all_fail", [(0, False), (1, False), (2, True)])
def test_two_processes_name_and_count_the_parts_as_one_does(seed, all_fail, checkpoint):
    import subprocess
    import sys
    from tiny_run import TRAIN
    Path("mine.py").write_text(ROUGH.format(seed=seed, all_fail=all_fail))
    argv = [*checkpoint, "--steps", "2", "--verifier", "mine.py:check", "--reward_weights", "1", "0.5", "-0.25"]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    found = []
    for name, start in (("one", [sys.executable]), ("two", two)):
        done = subprocess.run([*start, TRAIN, *argv, "--output_dir", name], capture_output=True, text=True, timeout=300)
        said = {line for line in done.stderr.splitlines() if line.startswith("train.py: ") and "warning" not in line}
        rows = metrics(name) if (Path(name) / "metrics.jsonl").exists() else []
        rewards = [(row["reward"], row["reward_parts"], row["pass_rate"], row["verifier_errors"]) for row in rows]
        found.append((done.returncode == 0, said, rewards))
    assert found[0] == found[1]
    assert found[0][0] != all_fail and len(found[0][2]) == (0 if all_fail else 2)


# ------------------------------------------------------------------------------------------------ equal sums

USUAL = [0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 1.0, 100.1, -0.1]


def test_equal_sums_are_equal_rewards_and_dead_groups_stay_dead(own):
    from fractions import Fraction
    from advantages import group_advantages, has_signal
    task = own("def check(response, answer):\n    return {'a': 0, 'b': 0, 'c': 0}\n", task=True)
    rows = [(a, b, c) for a in USUAL for b in USUAL for c in USUAL]
    totals, exact = task.total(torch.tensor(rows)).tolist(), {}
    for row, total in zip(rows, totals):
        exact.setdefault(sum(Fraction(str(x)) for x in row), set()).add(total)
    assert [key for key, values in exact.items() if len(values) > 1] == []
    assert all(float(key) == pytest.approx(*values, rel=1e-6, abs=1e-12) for key, values in exact.items())
    rewards = task.total(torch.tensor([[0, 0, 0.7], [0, 0.1, 0.6], [0.7, 0, 0], [0.5, 0.2, 0]]))
    assert not has_signal(rewards, 4) and group_advantages(rewards, 4).tolist() == [0] * 4


def test_a_single_part_is_the_reward_to_the_last_bit():
    from plumbing.data.running_sum import running_sum
    task, part = running_sum(1, 2, train_size=20, test_size=4), torch.rand(64, 1)
    penalty = -torch.rand(64, 1)
    assert torch.equal(task.total(part), part[:, 0])
    assert torch.equal(task.total(torch.cat([part, penalty], 1)), part[:, 0] + penalty[:, 0])


def test_parts_of_several_verifiers_stand_side_by_side(own, tmp_path):
    (tmp_path / "form.py").write_text("def form(response, answer):\n    return len(response) == 1\n")
    (tmp_path / "rows.jsonl").write_text(SUMS)
    task = load_task(f"{tmp_path}/rows.jsonl", verifier=["exact", f"{tmp_path}/form.py:form"], reward_weights=[1, 0.5])
    problem = task.train[0]
    assert task.part_names == ["exact", "form"]
    assert [task.verify(r, problem) for r in (problem.answer, "x", "xy")] == [1.5, 0.5, 0.0]
    with pytest.raises(ValueError, match="two parts of the reward have the same name"):
        load_task(f"{tmp_path}/rows.jsonl", verifier=[f"{tmp_path}/form.py:form"] * 2)
    for verifier in task.verifiers:
        verifier.close()


# -------------------------------------------------------------------------------------------- in parallel

def test_parallel_verifiers_give_the_same_rewards_in_the_same_order(own, tmp_path):
    source = ("import os, time\ndef check(response, answer):\n    n = int(response)\n    time.sleep(n % 3 / 500)\n"
              "    if n % 7 == 3: raise ValueError\n    if n % 31 == 5: os._exit(1)\n    return n / 1000\n")
    texts, rewards, errors = [str(n) for n in range(100)], [], []
    for workers in (1, 4):
        check = own(source)
        rewards.append(in_parallel(check, texts, [""] * 100, workers=workers))
        errors.append(dict(check.errors))
        assert len(check.idle) <= workers
    expected = [0.0 if n % 7 == 3 or n % 31 == 5 else n / 1000 for n in range(100)]
    assert rewards == [expected, expected] and errors[0] == errors[1] == {"crash": expected[1:].count(0.0)}


def test_four_workers_wait_at_the_same_time(own):
    check = own("import time\ndef check(response, answer):\n    time.sleep(0.2)\n    return 1\n")
    in_parallel(check, [""] * 4, [""] * 4, workers=4)        # their processes start
    began = time.monotonic()
    assert in_parallel(check, [""] * 16, [""] * 16, workers=4) == [1.0] * 16
    assert 0.8 <= time.monotonic() - began < 2.4             # 3.2 s one after the other


# ------------------------------------------------------------------------ through train.py

def test_parts_are_logged_weighed_and_shown(checkpoint, capsys):
    Path("mine.py").write_text("def reward(response, answer, problem):\n    return {'right': response == answer, "
                               "'short': len(response) < 3, 'row': problem['largest'] / 4}\n")
    train.main([*checkpoint, "--steps", "2", "--verifier", "mine.py:reward", "--reward_weights", "1", "0.5", "-2",
                "--output_dir", "run"])
    for record in metrics("run"):
        parts = record["reward_parts"]
        assert list(parts) == ["right", "short", "row"] and record["pass_rate"] == parts["right"]
        expected = parts["right"] + 0.5 * parts["short"] - 2 * parts["row"]
        assert record["reward"] == pytest.approx(expected, abs=1e-5) and record["verifier_errors"] == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch ")]
    assert all(re.search(r"reward \S+  \(right \S+  short \S+  row \S+\)  pass", line) for line in lines)


def test_gdpo_takes_the_parts_apart_and_group_advantages_do_not(checkpoint, monkeypatch):
    """One part that is the same for all answers of a group, one that differs: what reaches the estimators."""
    from advantages import gdpo
    import advantages
    seen = []
    row = replace(advantages.ADVANTAGES["gdpo"],
                  function=lambda parts, part_weights, group_size: (
                      seen.append((parts, part_weights, group_size)), gdpo(parts, part_weights, group_size))[1])
    monkeypatch.setitem(advantages.ADVANTAGES, "gdpo", row)
    Path("mine.py").write_text("def reward(response, answer):\n    return {'right': response == answer, 'length': len(response)}\n")
    argv = [*checkpoint, "--steps", "1", "--verifier", "mine.py:reward", "exact", "--reward_weights", "1", "0.1", "0"]
    train.main([*argv, "--advantage", "gdpo", "--output_dir", "run"])
    *_, (parts, weights, group_size) = seen                  # the last; the command line is checked with made-up ones
    calls = len(seen)
    assert parts.shape == (16, 3) and weights == [1.0, 0.1, 0.0] and group_size == 4
    assert torch.equal(parts[:, 0], parts[:, 2]) and parts[:, 1].max() > 1
    train.main([*argv, "--output_dir", "other"])
    assert len(seen) == calls and metrics("run")[0]["reward"] == metrics("other")[0]["reward"]


def test_a_wrong_number_of_weights_is_refused_before_the_run(checkpoint, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([*checkpoint, "--verifier", "exact", "--reward_weights", "1", "2", "--output_dir", "run"])
    assert stop.value.code == 2 and not Path("run").exists()
    assert capsys.readouterr().err == "train.py: --reward_weights holds 2 numbers, but the reward has 1 parts: exact\n"


def test_verifier_errors_go_on_over_a_resume_and_count_bad_dicts(checkpoint, monkeypatch, capfd):
    Path("mine.py").write_text("def reward(response, answer):\n    return {'right': response == answer, "
                               "'form': 1} if len(response) % 2 else {'right': 1}\n")
    argv = [*checkpoint, "--steps", "3", "--save_steps", "1", "--verifier", "mine.py:reward"]
    train.main([*argv, "--output_dir", "whole"])
    from plumbing.run import checkpoints
    append = checkpoints.append

    class Killed(BaseException):
        pass

    def fail(path, record):
        append(path, record)
        if path.name == "metrics.jsonl" and record["step"] == 2:
            raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "append", fail)
        train.main([*argv, "--output_dir", "resumed"])
    train.main([*argv, "--output_dir", "resumed", "--resume"])
    counts = [record["verifier_errors"] for record in metrics("whole")]
    assert 0 < counts[0] < counts[1] < counts[2] and differences("whole", "resumed", 3) == []
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning: verifier" in line]
    assert len(warnings) == 3 and all("returned right, but right form before" in w for w in warnings)


def test_the_walk_of_the_documentation(checkpoint, capsys):
    """docs/data.md, "A reward in parts": its files and its command, with a tiny checkpoint for DIR."""
    section = (ROOT / "docs/data.md").read_text().split("## A reward in parts")[1].split("\n## ")[0]
    for name, text in re.findall(r"`(\S+\.\w+)`:\n\n((?:    .*\n|\n)+)", section):
        Path(name).write_text("".join(line[4:] or "\n" for line in text.rstrip("\n").splitlines(keepends=True)) + "\n")
    command = re.search(r"^    python train\.py (.*)$", section, re.M).group(1)
    argv = shlex.split(command)
    argv[argv.index("DIR")] = checkpoint[checkpoint.index("--model_name_or_path") + 1]
    train.main([*SMALL, "--steps", "2", "--max_completion_length", "4", *argv, "--output_dir", "run"])
    assert {"right", "digit", "small"} == set(metrics("run")[0]["reward_parts"])
    assert metrics("run")[1]["verifier_errors"] == 0 and "right" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- trackers

def test_tensorboard_gets_the_metrics_and_the_parts_of_the_reward(checkpoint, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    Path("mine.py").write_text("def reward(response, answer):\n    return {'right': response == answer, 'length': len(response)}\n")
    argv = [*checkpoint, "--steps", "2", "--verifier", "mine.py:reward", "--output_dir", "run"]
    train.main([*argv, "--report_to", "tensorboard"])
    events = EventAccumulator("run/tensorboard").Reload()
    for name in ("reward", "loss", "reward_parts/length", "flip_rate_per_layer/0", "lr"):
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        outer, _, inner = name.partition("/")
        values = [record[outer] for record in metrics("run")]
        values = [value[int(inner) if inner.isdigit() else inner] if inner else value for value in values]
        assert logged == [(1, pytest.approx(values[0], rel=1e-6)), (2, pytest.approx(values[1], rel=1e-6))], name


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_them_too(name, workplace, monkeypatch):
    """A module that stands in for the package and notes what it is given."""
    import sys
    from types import ModuleType
    calls, package = [], ModuleType(name)
    package.__spec__ = object()
    package.init = lambda **options: calls.append(options)
    package.log = lambda numbers, step: calls.append((step, numbers))
    package.finish = lambda: None
    monkeypatch.setitem(sys.modules, name, package)
    train.main([*TINY, "--steps", "2", "--report_to", name, "--output_dir", "run", "--eval_steps", "1", "--eval_samples", "1",
                "--eval_prompts", "3"])
    assert calls[0]["name"] == "run" and calls[0]["config"]["steps"] == 2
    assert [step for step, _ in calls[1:]] == [0, 1, 2, 2]           # before, two batches, after
    batch = calls[2][1]
    held_out = [batch[f"pass_at_1/{i}"] for i in range(3)]           # the mean and its interval
    assert held_out == metrics("run")[0]["pass_at_1"]
    assert calls[3][1]["reward"] == metrics("run")[1]["reward"] and calls[3][1]["reward_parts/correct"] >= 0


def test_a_tracker_that_is_not_installed_is_one_line_before_the_run(workplace, monkeypatch, capsys):
    from importlib import util
    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "trackio" else find(name, *rest))
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--report_to", "trackio", "--output_dir", "run"])
    assert stop.value.code == 2 and not Path("run").exists()
    assert capsys.readouterr().err == "train.py: --report_to trackio needs a package that is not installed: pip install trackio\n"


# ------------------------------------------------------------------------------ two sources, SRPO

def two_sources(weights=()):
    """The task of a generator first and a file second, as the flags name it."""
    pytest.importorskip("reasoning_gym")
    Path("second.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(1, 21)))
    flags = ["--model_name_or_path", "m", "--dataset_name", "reasoning_gym:chain_sum?size=30", "--stage2_dataset_name", "second.jsonl",
             "--stage2_step", "1", "--verifier", "exact", *weights]
    return from_arguments(parse(flags))


@pytest.mark.slow
def test_right_answers_of_the_second_source_pass_as_those_of_the_first_do(workplace):
    """Held-out problems are of both sources, in turns. Its workers take seconds to start."""
    task = two_sources()
    second = {f"{i}+1=" for i in range(1, 21)}
    assert len(task.test) == 5 and [p.prompt in second for p in task.test] == [False, True, False, True, False]
    first, second = task.train[0], task.train[-1]
    parts = task.judge([first.answer, "no", second.answer, "no"], [first, second])
    assert task.part_names == ["reasoning_gym or exact", "exact"]
    assert parts[0].tolist() == [1, 1] and parts[1, 0] < 1 and parts[:, 0].tolist()[2:] == [1, 0]
    assert parts[2:, 1].isnan().all() and task.total(parts)[[0, 2, 3]].tolist() == [2, 1, 0]
    assert task.verify(second.answer, second) == 1 and task.verify("no", second) == 0
    assert not_all_correct(parts[[0, 0, 2, 2], 0], 2).tolist() == [False, False]     # SRPO drops both
    weighted = two_sources(["--reward_weights", "1", "0.5"])
    assert weighted.total(parts[[0, 2]]).tolist() == [1.5, 1]
    with pytest.raises(ValueError, match="holds 1 numbers, but the reward has 2 parts: reasoning_gym or exact, exact"):
        two_sources(["--reward_weights", "1"])
    for verifier in task.verifiers + weighted.verifiers:
        verifier.close()
