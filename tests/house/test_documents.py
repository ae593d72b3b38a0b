"""What documents name exists: files, links, functions, flags, metrics, presets, commands.
python -m pytest tests/house/test_documents.py"""

import ast
import re
import shlex
from dataclasses import fields

import pytest
import torch
from markdown_it import MarkdownIt

from documents import ABOVE, COMMANDS, DOCUMENTS, PROGRAM, ROOT, table
from eval import make_parser
from losses import OBJECTIVES
from session.arguments import ALGORITHMS, Settings, parse, parse_flags

EXAMPLES = {"maxrl", "--imitation_coef", "features/imitation.py"}       # CONTRIBUTING's
CONTRIBUTING = DOCUMENTS[".github/CONTRIBUTING.md"]
CODE = PROGRAM | ABOVE
every_document = pytest.mark.parametrize("name", DOCUMENTS)

# flags of torchrun, pip and Chromium, and what stands for any flag
OTHERS = {*"""help nproc_per_node no-deps exclude index-url headless no-sandbox hide-scrollbars
    flag name imitation_coef format no_chat_template clip drift flips game""".split()}


# -------------------------------------------------------------------------------- files and links

def parsed(text):
    """The tokens of a page as GitHub's parser, CommonMark with tables, sees it, flat."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    tokens = [*parsed(text)]
    titles = [after.content for token, after in zip(tokens, tokens[1:])
              if token.type == "heading_open"]
    words = [re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title).lower()) for title in titles]
    return {title.replace(" ", "-") for title in words}


def dead_links(page, text):
    """The targets of links and pictures of a page that do not exist."""
    for token in parsed(text):
        target = token.attrs.get("href") or token.attrs.get("src") or ""
        file, _, anchor = target.partition("#")
        if not target or re.match("https?:", target):
            continue
        path = (page.parent / file).resolve() if file else page
        there = path.exists() and (
            not anchor or path.suffix == ".md"
            and anchor in anchors(text if path == page else path.read_text(encoding="utf-8")))
        if not there:
            yield target


@every_document
def test_the_links_of_a_page_lead_somewhere(name):
    assert not [*dead_links(ROOT / name, DOCUMENTS[name])]


@pytest.mark.parametrize("name", sorted({*re.findall(r"`([^`\s]+)`", CONTRIBUTING)} - EXAMPLES))
def test_contributing_names_files_and_functions_that_exist(name):
    if "/" in name or name.endswith(".py"):
        assert list(ROOT.glob(name)), name
    elif re.fullmatch(r"[A-Za-z_.]+", name):
        word = name.split(".")[-1]
        code = "\n".join(PROGRAM.values())
        assert re.search(rf"\b(def|class) {word}\b|^ *{word}(: \w+)? = ", code, re.M), name


@pytest.mark.parametrize("line", sorted(
    {line for _, line in COMMANDS if not re.search("for arm|…", line)}))
def test_a_command_is_one_line_that_names_files_and_flags_that_exist(line, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)    # a Mac's command
    monkeypatch.syspath_prepend(str(ROOT / "tests/features/fake"))           # vllm
    assert " '" not in line, "cmd does not know it as a quote"
    line = line.replace("@tools.json", "tools=[]")           # which the command before it writes
    words = shlex.split(line.split("&&")[-1])
    if "train.py" in words and not EXAMPLES & {*words}:
        parse(words[words.index("train.py") + 1:])
    if "eval.py" in words:
        _, others = make_parser().parse_known_args(words[words.index("eval.py") + 1:])
        parse_flags(others)
    for word in words:
        if re.fullmatch(r"((tests|experiments|benchmarks|recipes)/)?[^/ ]+\.py", word):
            shown = any(f"`{word}`:" in text for text in DOCUMENTS.values())
            assert (ROOT / word).is_file() or word == "mine.py" or shown, word


# ----------------------------------------------------------------------------------------- flags

def flags_of(text):
    """The flags that a text names, without dashes: --learning_rate, but not --- or <!-- -->."""
    return {*re.findall(r"(?<![\w<-])--([a-zA-Z][\w-]*)", text)}


def known_flags():
    ours = {f.name for f in fields(Settings)}
    house = [file.read_text(encoding="utf-8") for file in ROOT.glob("tests/house/*.py")]
    code = "\n".join([*CODE.values(), *house])
    added = {name for call in re.findall(r"add_argument\(([^)]*)", code)
             for name in re.findall(r'"--([\w-]+)"', call)}
    taken = {*re.findall(r'"--([\w-]+)" in (?:sys\.)?argv', code)}
    return ours | added | taken | OTHERS


@pytest.mark.parametrize("name", [*DOCUMENTS, *CODE])
def test_every_flag_that_a_document_a_message_or_a_docstring_names_exists(name):
    unknown = flags_of((DOCUMENTS | CODE)[name]) - known_flags()
    assert not {flag for flag in unknown if name in DOCUMENTS or not flag.endswith("_")}, name


# ----------------------------------------------------------------------------------------- tables

def named(document, header):
    """What the first column of a table has between `backticks`."""
    return {*re.findall(r"`(\w+)`", " ".join(row[0] for row in table(document, header)))}


@pytest.mark.parametrize("document, header", [
    ("docs/metrics.md", "| metric |"), ("docs/metrics.md", "| field |")])
def test_every_metric_that_a_table_explains_is_written_by_the_code(document, header):
    code = "".join(text for file, text in CODE.items() if not file.startswith("experiments"))
    names = named(document, header)
    assert names
    for name in names:
        assert f'"{name}"' in code or f"{name}=" in code, name


def test_every_metric_of_a_run_is_explained(run):
    explained = named("docs/metrics.md", "| metric |")
    found, = run("--mismatch token_truncate --eval_samples 1 --eval_steps 1")
    assert {*found} <= explained, {*found} - explained


@pytest.mark.parametrize("name", [name for name in CODE if name.startswith("features")])
def test_every_metric_and_loss_term_of_a_feature_is_explained(name):
    """The keys of the dicts that its methods `metrics` and `loss` return."""
    methods = [node for node in ast.walk(ast.parse(CODE[name]))
               if isinstance(node, ast.FunctionDef) and node.name in ("metrics", "loss")]
    keys = {key.value for method in methods for node in ast.walk(method)
            if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    assert keys <= named("docs/metrics.md", "| metric |"), name


def test_family_table_is_the_code():
    rows = {row[0].strip("`"): row for row in table("docs/family.md", "| name | ratio |")}
    assert list(rows) == list(OBJECTIVES)
    for name, objective in OBJECTIVES.items():
        _, ratio, clip, clip_range, reduction, paper = rows[name]
        own = (objective.ratio, objective.clip, objective.reduction)
        assert (ratio, clip, reduction) == own, name
        assert paper.startswith(objective.source or "–"), name
        if objective.epsilon is not None:
            edges = [float(x) for x in clip_range.split(",")]
            assert edges == [objective.epsilon, objective.epsilon_high], name


def test_presets_of_the_documents_are_all_presets():
    """Every algorithm that sets flags or has another row's objective, with exactly what it sets."""
    shown = {}
    for names, objective, filled in table("docs/family.md", "| --algorithm |"):
        for name in re.findall(r"`(\w+)`", names):
            own = name if objective == "the same" else objective.strip("`")
            shown[name] = {"objective": own} | parse_flags(shlex.split(filled.strip("`")))
    assert shown == {name: preset for name, preset in ALGORITHMS.items()
                     if preset != {"objective": name}}
