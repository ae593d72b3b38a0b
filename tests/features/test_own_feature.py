"""What CONTRIBUTING.md has a reader write for a feature: its file and two lines, and nothing else.

python -m pytest -m slow tests/features/test_own_feature.py
"""

import re

import pytest

from tiny_run import ROOT, TINY, metrics, program, python


def documented():
    """(name of the file, its text, the two lines, the words of the command)."""
    section = (ROOT / ".github/CONTRIBUTING.md").read_text().split("## A feature, for example\n")[1]
    section = section.split("\n## ")[0]
    name, = re.findall(r"One file, `(\S+)`", section)
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", section, re.M)
    blocks = ["\n".join(line[4:] for line in block.strip("\n").splitlines())
              for block in blocks if block.strip()]
    text, lines, command = blocks
    return name, text + "\n", lines.splitlines(), command.split()[1:]


@pytest.fixture
def call(cold_start, tmp_path):
    """call(*words) runs Python in a copy of the program with the feature, in call.home."""
    home = program(tmp_path / "program", cold_start)
    name, text, lines, _ = documented()
    assert len(lines) == 2 and len(text.splitlines()) <= 36
    (home / name).write_text(text)
    with open(home / "features/__init__.py", "a") as listed:
        listed.write("\n".join(["", *lines, ""]))

    def of(*words):
        return python(*words, cwd=home, code=None)
    of.home = home
    return of


@pytest.mark.slow
def test_a_documented_feature_trains_by_its_file_and_two_lines(call):
    *_, command = documented()
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
