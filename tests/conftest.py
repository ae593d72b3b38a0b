"""A folder to run train.py in, where the cold start of tests/tiny_run.py has been made."""

import functools
import itertools
import os
import shlex
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")    # tensors are tiny; scripts that tests start, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")     # a missing checkpoint fails at once, without a hub
os.environ.setdefault("PYTHONIOENCODING", "utf-8")     # what tests read from scripts they start

import pytest  # noqa: E402

from tiny_run import ROOT, SUMS, TINY, flags, jsonl, metrics  # noqa: E402

os.fsync = lambda number: None                   # no test pulls the plug: it would only wait


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite on two cores, where pytest-xdist is installed; what is named on the command
    line, in one process. A worker, and what a test starts, asks for no workers of its own."""
    options, inside = config.option, "PYTEST_XDIST_WORKER" in os.environ
    named = (options.file_or_dir or options.keyword or options.collectonly or options.usepdb
             or options.capture == "no")
    able = config.pluginmanager.has_plugin("xdist") and options.numprocesses is None
    if able and not named and not inside:
        options.numprocesses, options.dist = min(2, os.cpu_count()), "worksteal"


@pytest.fixture(scope="session")
def task_once():
    """The built-in task of some size is made once from now on: a quarter of a tiny run."""
    from plumbing.data import running_sum, tasks
    made = functools.cache(running_sum.running_sum)

    def sums(*args, **kwargs):
        task = made(*args, **kwargs)
        return replace(task, train=list(task.train), test=list(task.test), notes=list(task.notes),
                       ids={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "running_sum", sums)
        yield


@pytest.fixture(scope="session")
def cold_start(task_once, tmp_path_factory):
    """The checkpoint of the tiny policy, right about 70 % of the time; made once, in seconds."""
    import train
    home = tmp_path_factory.mktemp("cold_start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train.main([*TINY, "--steps", "1", "--output_dir", "unused"])
    folder, = (home / "runs/cold_start").iterdir()
    return folder


def link(cold_start, home):
    """runs/cold_start in a folder: the cold start is there, others are this folder's own."""
    (home / "runs/cold_start").mkdir(parents=True)
    (home / "runs/cold_start" / cold_start.name).symlink_to(cold_start)


@pytest.fixture(scope="session")
def whole(cold_start, tmp_path_factory):
    """whole(*flags): the folder of a run of four batches that nothing interrupted, made once."""
    import train

    @functools.cache
    def run(*flags):
        home = tmp_path_factory.mktemp("whole")
        link(cold_start, home)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(home)
            train.main([*TINY, "--steps", "4", *flags, "--output_dir", "run"])
        return home / "run"
    return run


@pytest.fixture
def workplace(cold_start, tmp_path, monkeypatch):
    """The current folder, empty but for the cold start."""
    link(cold_start, tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    os.chdir(ROOT)                               # pytest deletes the folder of a test that passed


@pytest.fixture
def own(workplace, cold_start):
    """Flags of a run on data of one's own: the sums in rows.jsonl, the policy of the cold start."""
    jsonl("rows.jsonl", SUMS)
    return f"--model_name_or_path {cold_start} --dataset_name rows.jsonl --max_completion_length 5 "


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """refused("--beta -1") is the one line in which a command ends with exit code 2. Nothing is
    left behind, unless the run had begun=True. Further words are given as they are."""
    monkeypatch.chdir(tmp_path)

    def refuse(line, *words, main=None, begun=False):
        import train
        main = main or train.main
        # some versions of filelock touch their file
        tree = lambda: {path: path.is_dir() or path.stat().st_mtime_ns
                        for path in Path().rglob("*") if path.name != ".lock"}
        before = tree()
        with pytest.raises(SystemExit) as stop:
            words = [*shlex.split(line), *map(str, words)]
            main(flags(*words) if main is train.main else words)
        said = str(stop.value)
        assert stop.value.code == 2 and said and "\n" not in said, said
        assert begun or before == tree(), f"left behind: {before.keys() ^ tree()}"
        return said
    return refuse


@pytest.fixture
def run(workplace, refused):
    """run("--steps 2 --beta 0.1") trains in the folder "run" (folder= another one), one step unless
    the flags say more, and gives the lines of its metrics. Further words are given as they are.
    run("--resume") gives no other flag. run.refused is the fixture refused."""
    import train

    def trained(line="", *words, folder="run"):
        steps = [] if "--resume" in line else ["--steps", "1"]
        given = flags(*steps, *shlex.split(line), *map(str, words))
        train.main([*given, "--output_dir", folder])
        return metrics(folder)
    trained.refused = refused
    return trained


@pytest.fixture
def judge(monkeypatch):
    """judge(lambda n, right, problem: reward) gives the rewards of the built-in task from now on:
    n counts responses, right is the reward of the task itself."""
    from plumbing.data import tasks
    make = tasks.running_sum

    def use(rule):
        count = itertools.count()

        def judged(*args, **kwargs):
            task = make(*args, **kwargs)
            return replace(task, verify=lambda response, problem: float(
                rule(next(count), task.verify(response, problem), problem)))
        monkeypatch.setattr(tasks, "running_sum", judged)
    return use


class Killed(BaseException):
    """What stands in for SIGKILL inside one process: nothing in train.py catches it."""


@pytest.fixture
def killed(run):
    """killed(3, "--steps 4") is a run that the power leaves just after the metrics of batch 3."""
    from session.metrics import Recorder

    def start(step, line, **options):
        write = Recorder.write

        def writing(recorder, name, record):
            write(recorder, name, record)
            if name == "metrics.jsonl" and record["step"] == step:
                raise Killed
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Recorder, "write", writing)
            run(line, **options)
    return start


@pytest.fixture
def then(monkeypatch):
    """then(train, "update", act): act(result, ...) is called after each train.update(...). What it
    returns, unless it is None, takes the place of the result."""
    def patch(owner, name, act, before=lambda *args, **options: None):
        call = getattr(owner, name)

        def both(*args, **options):
            before(*args, **options)
            result = call(*args, **options)
            changed = act(result, *args, **options)
            return result if changed is None else changed
        monkeypatch.setattr(owner, name, both)
    return patch


@pytest.fixture
def first(then):
    """first(train, "update", act): act(...) is called before each train.update(...) from now on."""
    return lambda owner, name, act: then(owner, name, lambda *args, **options: None, act)


@pytest.fixture
def calls(then):
    """calls(train, "update") is a list to which every train.update(...) from now on adds
    (arguments, options, result)."""
    def of(owner, name):
        seen = []
        then(owner, name, lambda result, *args, **options: seen.append((args, options, result)))
        return seen
    return of
