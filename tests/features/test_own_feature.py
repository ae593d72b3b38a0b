"""What CONTRIBUTING.md has a reader write for a feature: its file and two lines, and nothing else.

python -m pytest -m slow tests/features/test_own_feature.py
"""

import re

import pytest

from tiny_run import TINY, documented, metrics, program, python


SECTION, (TEXT, LINES, COMMAND) = documented("A feature, for example")


@pytest.fixture
def call(cold_start, tmp_path):
    """call(*words) runs Python in a copy of the program with the feature, in call.home."""
    home = program(tmp_path / "program", cold_start)
    name, = re.findall(r"One file, `(\S+)`", SECTION)
    assert len(LINES.splitlines()) == 2 and len(TEXT.splitlines()) <= 36
    (home / name).write_text(TEXT + "\n", encoding="utf-8")
    with open(home / "features/__init__.py", "a", encoding="utf-8") as listed:
        listed.write(f"\n{LINES}\n")

    def of(*words):
        return python(*words, cwd=home, code=None)
    of.home = home
    return of


@pytest.mark.slow
def test_a_documented_feature_trains_by_its_file_and_two_lines(call):
    _, *command = COMMAND.split()
    flag, value = command[1:3]
    done = call(*command, *TINY, "--warmup_steps", "0")
    assert done.returncode == 0, done.stderr
    folder = command[-1]
    limits = [record["advantage_limit"] for record in metrics(call.home / folder)]
    assert len(limits) == 3 and all(0 < limit < 3 for limit in limits)
    assert call("train.py", *TINY, "--warmup_steps", "0", "--steps", "3", "--output_dir",
                   "plain").returncode == 0
    limited, plain = (metrics(call.home / one) for one in (folder, "plain"))
    assert "advantage_limit" not in plain[0] and limited[0]["reward"] == plain[0]["reward"]
    assert limited[0]["grad_norm"] < plain[0]["grad_norm"], "the largest advantages are smaller"
    help = " ".join(call("train.py", "--help").stdout.split())
    assert f"{flag} float limit advantages" in help and "the size of advantages:" in help
    said = call("train.py", flag, "2")
    assert said.returncode == 2 and said.stderr.count("\n") == 1 and f"{flag} 2.0" in said.stderr
    said = call("tools/export.py", "trl", "--algorithm", "grpo", flag, value).stdout
    assert f"{flag} {value}" in said.split("trl.GRPOConfig(")[0]
