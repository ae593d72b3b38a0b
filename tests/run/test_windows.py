"""The scripts as Windows runs them, as far as another system can show it: without POSIX modules,
with Windows' fsync, printing in cp1252. python -m pytest tests/run/test_windows.py

Windows opens no folder, deletes no open file, and its fsync needs a file that may be written to.
LC_ALL=C stands for its locale: a file that is opened without an encoding is read as ASCII.
"""

import json
import os
import re

import pytest

from tiny_run import ROOT, TINY, python

pytestmark = pytest.mark.slow

# Runs scripts one after the other, each as `python SCRIPT WORDS`, in a process where this project,
# but no library, misses what Windows does not have.
WINDOWS = """
import builtins, errno, fcntl, json, os, runpy, signal, sys
import matplotlib.pyplot, transformers

ROOT, fsync, opened, imported = sys.argv[1], os.fsync, os.open, builtins.__import__
unlinked, os.unlink = os.unlink, lambda *words, **options: windows_unlink(*words, **options)
POSIX = {"resource", "fcntl", "pwd", "grp", "termios", "pty", "syslog"}

def ours():
    file = sys._getframe(2).f_code.co_filename
    return file.startswith(ROOT) and "site-packages" not in file

def windows_import(name, *rest, **options):
    if name in POSIX and ours():
        raise ModuleNotFoundError(f"No module named {name!r}")
    return imported(name, *rest, **options)

def windows_open(path, *rest, **options):
    if os.path.isdir(path) and ours():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return opened(path, *rest, **options)

def windows_unlink(path, **options):
    held = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    if os.path.realpath(path) in held:
        raise PermissionError(errno.EACCES, "The file is being used", str(path))
    unlinked(path, **options)

def windows_fsync(number):
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    fsync(number)

for module, names in ((os, "O_DIRECTORY sched_getaffinity killpg setsid"),
                      (signal, "SIGALRM SIGHUP SIGPIPE alarm setitimer pause")):
    for name in names.split():
        delattr(module, name)
os.open, os.fsync, builtins.__import__ = windows_open, windows_fsync, windows_import
for script, *words in json.loads(sys.argv[2]):
    sys.stdout.reconfigure(errors="strict")
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, (script, words, stop.code)
"""
LOCALE = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C",
          "PYTHONCOERCECLOCALE": "0"}


def windows(monkeypatch, *commands):
    """What the commands print. Fails unless each exits with 0, without a warning: as CI runs this
    with the newest and the oldest transformers, none reaches a user's screen."""
    for name, value in LOCALE.items():
        monkeypatch.setenv(name, value)
    scripts = [[str(ROOT / script), *words] for script, *words in commands]
    done = python("-c", WINDOWS, ROOT, json.dumps(scripts), encoding="cp1252")
    assert not re.search(r"Warning|\[transformers\]|deprecated", done.stderr), done.stderr
    return done.stdout


def test_a_run_and_what_is_made_of_it(workplace, cold_start, monkeypatch):
    checkpoint = "run/checkpoints/step_1"
    flags = [*TINY, "--steps", "1", "--output_dir", "run", "--eval_prompts", "4"]
    flags += ["--eval_samples", "1"]
    printed = windows(monkeypatch, ["train.py", *flags],
                      ["train.py", "--output_dir", "run", "--resume", "--steps", "2"],
                      ["train.py", *flags, "--output_dir", "dry", "--dry_run"],
                      ["eval.py", "view", "run"], ["eval.py", "dashboard", "run"],
                      ["eval.py", "ask", checkpoint, "1+2=", "--answer", "1,3."])
    assert sorted(os.listdir("run/checkpoints")) == ["step_1", "step_2"]
    assert "dashboard.png" in printed and "temperature 1   reward" in printed


def test_every_worked_example_prints(workplace, monkeypatch):
    """They print π, λ or ▲, which cp1252 does not have: ? instead."""
    concepts = "ratios advantages losses rollout moe routes".split()
    printed = windows(monkeypatch, *([f"{name}.py"] for name in concepts),
                      ["gspo.py", "--help"], ["train.py", "--help"], ["eval.py", "--help"])
    assert printed.count("?") > 10
