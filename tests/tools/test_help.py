"""--help prints help and does nothing else, for every script.
python -m pytest tests/tools/test_help.py"""

import runpy
import sys

import pytest

from tiny_run import ROOT

FOLDERS = ("", "experiments/", "benchmarks/", "tools/", "tests/", "recipes/")
NO_FLAGS = ("ratios.py", "advantages.py", "losses.py", "routes.py", "moe.py", "rollout.py",
            "pair_runs.py", "tools.py",          # of recipes/, which takes a file
            "simulate.py")                       # which is a process of its own: tests/speed
SCRIPTS = [f"{folder}{file.name}" for folder in FOLDERS
           for file in sorted((ROOT / folder).glob("*.py"))
           if file.name not in NO_FLAGS
           and 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_a_script_prints_help_and_does_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT / script).rpartition("/")[0], *sys.path])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out = capsys.readouterr().out
    assert not stop.value.code and list(tmp_path.iterdir()) == []
    assert len(out.splitlines()) > 1


def test_the_page_takes_no_flag_for_a_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gspo.py", "--steps", "3"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "gspo.py"), run_name="__main__")
    assert stop.value.code == 1 and "python gspo.py MODEL [ROWS.jsonl]" in capsys.readouterr().out
