"""What the tests of the house read: the documents, their tables and code blocks, the sources."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def texts(files):
    """{path within the project: text}."""
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


PAGES = (ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
DOCUMENTS = texts(PAGES)
README = DOCUMENTS["README.md"]
FOLDERS = ("features", "plumbing", "session", "tools")
PROGRAM = texts(sorted([*ROOT.glob("*.py"),
                        *(f for x in FOLDERS for f in (ROOT / x).rglob("*.py"))]))
ABOVE = texts(f for x in ("experiments", "benchmarks") for f in sorted((ROOT / x).rglob("*.py")))
COMMAND = re.compile(r"(OMP_NUM_THREADS=\d+ )?(python|torchrun|pip|tensorboard|for arm in|export) ")
# code between ``` and ```, code that is indented, a paragraph
BLOCK = re.compile(r"^```.*\n((?s:.*?))^```$|((?:^(?: {4}.*)?\n)+)|((?:^(?!```).+\n?)+)", re.M)
FILE = re.compile(r".*`(\w+\.(?:py|jsonl|txt))`.*:$")        # the last one that a paragraph names


def table(document, header):
    """Rows of the table whose header line begins so, as lists of cells."""
    text = DOCUMENTS[document]
    lines = text[text.index(header):].split("\n\n")[0].splitlines()[2:]
    return [cells(line) for line in lines if line.startswith("|")]


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def blocks(document):
    """(the paragraph before it, its lines) of every code block: what stands indented by four
    columns, or between ``` and ```."""
    found, paragraph = [], ""
    for fenced, indented, text in BLOCK.findall(DOCUMENTS[document]):
        if text:
            paragraph = " ".join(text.splitlines())
        elif code := fenced or re.sub("^    ", "", indented, flags=re.M).strip("\n"):
            found.append((paragraph, code.splitlines()))
    return found


def pieces(document):
    """The document as ("file", name, text) and ("command", line, "") in its order. A block behind
    the name of a file (`mine.py`:) is that file; lines that begin with a program are commands;
    other blocks (formulas, rules, quotes) are left out."""
    found = []
    for before, lines in blocks(document):
        lines = "\n".join(lines).rstrip().split("\n")
        start = next((i for i, line in enumerate(lines) if COMMAND.match(line)), len(lines))
        name = FILE.match(before)
        if name and "".join(lines[:start]) and not (ROOT / name[1]).exists():
            found.append(("file", name[1], "\n".join(lines[:start]).rstrip() + "\n"))
        found += [("command", line.split("   #")[0].strip(), "") for line in lines[start:]
                  if COMMAND.match(line)]
    return found


COMMANDS = [(document, line) for document in DOCUMENTS for kind, line, _ in pieces(document)
            if kind == "command"]
