"""--help prints help and does nothing else, for every script.
python -m pytest tests/tools/test_help.py"""

import builtins
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("", "experiments/", "benchmarks/", "tools/", "tests/", "recipes/")
NO_FLAGS = ("ratios.py", "advantages.py", "losses.py", "routes.py", "moe.py", "rollout.py",
            "pair_runs.py")
SCRIPTS = [f"{folder}{file.name}" for folder in FOLDERS
           for file in sorted((ROOT / folder).glob("*.py"))
           if file.name not in NO_FLAGS
           and 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_a_script_prints_help_and_does_nothing(script, tmp_path, monkeypatch, capsys):
    if script == "experiments/view_gif.py":
        pytest.importorskip("selenium")
    if script == "recipes/reasoning.py":
        pytest.importorskip("reasoning_gym")
    if script == "benchmarks/simulate.py":
        pytest.skip("needs a process of its own: it comes before torch; tests/speed/test_gpu.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT / script).rpartition("/")[0], *sys.path])

    def only_read(file, mode="r", *rest, open=io.open, **options):
        assert not set(mode) & set("wax+"), f"{script} --help writes {file}"
        return open(file, mode, *rest, **options)

    def nothing(*words, **options):
        raise AssertionError(f"{script} --help starts {words}")
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", only_read)
    for name in ("run", "Popen", "check_output"):
        monkeypatch.setattr(subprocess, name, nothing)
    monkeypatch.setattr("torch.Tensor.backward", nothing)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    out = capsys.readouterr().out
    assert not stop.value.code and out.strip() and list(tmp_path.iterdir()) == []
    assert len(out.splitlines()) > 1


def test_a_reader_that_closes_the_pipe_sees_no_traceback():
    export = subprocess.Popen([sys.executable, ROOT / "tools/export.py", "trl"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    export.stdout.close()
    assert export.communicate()[1] == b""


def test_the_page_takes_no_flag_for_a_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gspo.py", "--steps", "3"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "gspo.py"), run_name="__main__")
    assert stop.value.code == 1 and "python gspo.py MODEL [ROWS.jsonl]" in capsys.readouterr().out
