"""Every flag and every metric that a document names exists. python -m pytest tests/house/test_documents.py"""

import re
from pathlib import Path

import pytest

from plumbing.run.arguments import flags

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [file for folder in (".", "features", "plumbing", "tools", "experiments", "benchmarks", "tests/house") for file in (
    (ROOT / folder).glob("*.py") if folder == "." else (ROOT / folder).rglob("*.py"))]
CODE = {file: file.read_text() for file in SOURCES if file != Path(__file__)}

# Flags of other programs (torchrun, git, pip, docker, nsjail, tensorboard, sha256sum), and what stands for any flag.
OTHERS = {"nproc_per_node", "nnodes", "help", "no-deps", "reject", "chroot", "memory", "network", "pids-limit", "really_quiet", "rlimit_as", "rm",
          "time_limit", "flag", "name", "no_name", "learning-rate", "ro-bind", "tmpfs", "proc", "dev", "unshare-all", "die-with-parent",
          "config-path", "config-name", "new-session", "headless", "no-sandbox", "hide-scrollbars", "logdir", "check"}


def flags_of(text):
    """The flags that a text names, without their dashes: --learning_rate, but not --- or <!-- -->."""
    return set(re.findall(r"(?<![\w<-])--([a-zA-Z][\w-]*)", text))


def known_flags():
    ours = {f.name for f in flags()}
    added = {name for text in CODE.values() for call in re.findall(r"add_argument\(([^)]*)", text) for name in re.findall(r'"--([\w-]+)"', call)}
    taken = {name for text in CODE.values() for name in re.findall(r'"--([\w-]+)" in (?:sys\.)?argv', text)}
    return ours | {f"no_{name}" for name in ours} | added | taken | OTHERS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_every_flag_that_a_document_names_exists(document):
    unknown = flags_of(document.read_text()) - known_flags()
    assert not unknown, f"{document.name} names {', '.join(sorted(f'--{name}' for name in unknown))}: no script takes it"


@pytest.mark.parametrize("file", [file for file in CODE if file.parent.name != "house"], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_flag_that_a_message_or_docstring_names_exists(file):
    unknown = {name for name in flags_of(CODE[file]) - known_flags() if not name.endswith("_")}
    assert not unknown, f"{file.name} names {', '.join(sorted(f'--{name}' for name in unknown))}"


def test_a_flag_that_is_gone_is_noticed():
    assert {"max_bad_steps", "learning_rat"} == flags_of("`--max_bad_steps` and --learning_rat, <!-- =bands --> --- a--b") - known_flags()


def rows(text, header):
    lines = text[text.index(header):].split("\n\n")[0].splitlines()[2:]
    return [line.split("|")[1] for line in lines]


@pytest.mark.parametrize("name, header", [("docs/metrics.md", "| metric |"), ("docs/metrics.md", "| field |"), ("README.md", "| metric | healthy")])
def test_every_metric_that_a_table_explains_is_written_by_the_code(name, header):
    named = {word for row in rows((ROOT / name).read_text(), header) for word in re.findall(r"`(\w+)`", row)}
    code = "".join(text for file, text in CODE.items() if "experiments" not in file.parts)
    missing = {word for word in named if f'"{word}"' not in code and f"{word}=" not in code}
    assert named and not missing, f"{name} explains {missing}, which no code writes"
