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
            "for name in 'versus_trl memory bfloat16 gpu'.split():\n"
            "    found = json.load(open(f'experiments/results/{name}.json'))\n"
            "    assert __import__(name).texts(found) == found['texts'], name")
    python("-c", code, cwd=ROOT)


def test_ci_runs_the_first_commands_of_the_readme_as_they_stand():
    done = subprocess.run([ROOT / ".ci/run", "commands"], capture_output=True, encoding="utf-8")
    lines = [line.split("   ")[0] for line in done.stdout.splitlines()]
    assert lines == ["python3 -m venv .venv && . .venv/bin/activate",
                     "pip install -r requirements.txt && python train.py", "python -m pytest"]
    assert README.index(done.stdout.splitlines()[-1]) < README.index("## ")


def limits(document, header, metric):
    """(lowest, highest) of the column "normal" of a metric: `below X`, `above X` or `X to Y`."""
    row, = [row for row in table(document, header) if f"`{metric}`" in row[0]]
    number = r"([\d.]+(?: %)?)"
    value = lambda text: float(text.removesuffix(" %")) / (100 if text.endswith("%") else 1)
    if found := re.search(f"(below|above) {number}", row[-2]):
        return (0.0, value(found[2])) if found[1] == "below" else (value(found[2]), float("inf"))
    low, high = re.search(f"{number} to {number}", row[-2]).groups()
    return value(low), value(high)


@pytest.mark.slow
def test_the_default_run_stays_in_the_ranges_that_the_pages_call_normal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main("--device cpu --eval_samples 0 --save_tokens false --output_dir run".split())
    records = metrics("run")
    for document, header, names in (
            ("docs/metrics.md", "| metric |",
             "epsilon_over_std log_w_var grad_norm flip_rate ratio_max"),
            ("README.md", "| metric | healthy", "log_w_var grad_norm")):
        for name in names.split():
            low, high = limits(document, header, name)
            values = [record[name] for record in records if record[name] is not None]
            assert low <= min(values) and max(values) <= high, (document, name)
