"""README and docs/ keep their promises: a worked example works, what is called normal is, what a
benchmark wrote is what it measured. python -m pytest tests/house/test_readme.py"""

import re
import subprocess

import pytest

import train
from documents import README, ROOT, table
from tiny_run import metrics, python


def test_what_a_benchmark_wrote_for_a_page_is_computed_from_what_it_measured():
    """In a process of its own, whose path has benchmarks/."""
    code = ("import json, sys; sys.path[:0] = ['benchmarks', '.']\n"
            "for name in 'versus_trl bfloat16 gpu'.split():\n"
            "    found = json.load(open(f'experiments/results/{name}.json'))\n"
            "    assert __import__(name).texts(found) == found['texts'], name")
    python("-c", code, cwd=ROOT)


def test_ci_runs_the_first_commands_of_the_readme_as_they_stand():
    done = subprocess.run([ROOT / ".ci/run", "commands"], capture_output=True, encoding="utf-8")
    lines = [line.split("   ")[0] for line in done.stdout.splitlines()]
    assert lines == ["python3 -m venv .venv && . .venv/bin/activate",
                     "pip install -r requirements.txt && python train.py", "python -m pytest"]
    assert README.index(done.stdout.splitlines()[-1]) < README.index("## ")


@pytest.mark.slow
def test_the_default_run_stays_in_the_ranges_that_are_called_normal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main("--device cpu --eval_samples 0 --save_tokens false --output_dir run".split())
    normal = {name: row[2].split(";")[0] for row in table("docs/metrics.md", "| metric |")
              for name in re.findall(r"`(\w+)`", row[0])}
    for name in ("log_w_var", "grad_norm", "flip_rate", "ratio_max"):
        low, high = re.search(r"(?:below|([\d.]+) to) ([\d.]+)", normal[name]).groups()
        values = [record[name] for record in metrics("run")]
        assert float(low or 0) <= min(values) and max(values) <= float(high), name
