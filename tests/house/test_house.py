"""The house keeps its order: who imports whom, and how a line looks.
python -m pytest tests/house/test_house.py

At the root stand the concepts, one per file; plumbing/ holds what a reader may skip, in rooms;
tools/ looks at runs; train.py and eval.py stand on top of them all. Imports are read from the
source, nothing is run.
"""

import ast
import functools
import re
import sys
from graphlib import TopologicalSorter

import pytest

from documents import ABOVE, DOCUMENTS, PROGRAM

CONCEPTS = "ratios advantages losses routes moe rollout".split()     # each imports those before it
TOP = ["train", "eval"]
dotted = lambda file: file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
SOURCES = {dotted(file): text for file, text in PROGRAM.items()
           if "/" in file or dotted(file) in CONCEPTS + TOP}
OTHERS = {dotted(file): text for file, text in ABOVE.items()}


@functools.cache
def imports(module):
    """(what is imported, the name asked of it or None) of every import of a module, also of those
    inside a function, which --help or a GPU waits for."""
    found = []
    for node in ast.walk(ast.parse((SOURCES | OTHERS)[module])):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:             # from plumbing.speed import fast: a module
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None) if whole in SOURCES else (node.module, alias.name))
    return found


def defined(module):
    """The names that a file itself defines."""
    names = set()
    for node in ast.parse(SOURCES[module]).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {n.id for n in ast.walk(target or ast.Pass()) if isinstance(n, ast.Name)}
    return names


@pytest.mark.parametrize("module", CONCEPTS)
def test_a_concept_imports_torch_transformers_and_the_concepts_below_it(module):
    """And tokenizers, for its worked example."""
    allowed = {"torch", "transformers", "tokenizers", *sys.stdlib_module_names,
               *CONCEPTS[:CONCEPTS.index(module)]}
    for name, _ in imports(module):
        assert name.split(".")[0] in allowed, f"{module}.py imports {name}"


@pytest.mark.parametrize("module", SOURCES)
def test_a_name_is_imported_from_the_file_that_defines_it(module):
    for name, asked in imports(module):
        assert name.split(".")[0] != "tests", f"{module} imports {name}"
        if asked and name in SOURCES:
            assert asked in defined(name), f"{module} has {asked} from {name}, not its own"


def room(module):
    """The folder of a file; a file at the root stands for itself."""
    return module.rsplit(".", 1)[0] if "." in module else module


@pytest.mark.parametrize("of", [str, room], ids=["files", "folders"])
def test_no_circle(of):
    below = {}
    for module in SOURCES:
        late = re.findall(r'import_module\("([\w.]+)"\)', SOURCES[module])
        names = [name for name, _ in imports(module)] + late
        there = {of(name) for name in names if name in SOURCES}
        below.setdefault(of(module), set()).update(there - {of(module)})
    TopologicalSorter(below).prepare()                       # raises CycleError, which names it


def test_contributing_says_which_way_imports_point():
    """Every import of ours leads to the same place of the chain or to a later one."""
    text = DOCUMENTS[".github/CONTRIBUTING.md"].replace("\n", " ")
    chain = text.split("point one way: ")[1].split(". gspo.py")[0].split(" → ")
    order = {"experiments, benchmarks": ("experiments", "benchmarks"), "train.py": ("train",),
             "eval.py": ("eval",), "tools": ("tools",), "session": ("session",),
             "features": ("features",), "plumbing": ("plumbing",), "the concept files": CONCEPTS}
    assert chain == [*order, "torch and transformers"]

    def place(module):
        word = module.split(".")[0]
        return next((at for at, names in enumerate(order.values()) if word in names), None)
    for module in SOURCES | OTHERS:
        for name, _ in imports(module):
            there = place(name or "")                # None: of the same folder
            assert there is None or place(module) <= there, f"{module} imports {name}"
