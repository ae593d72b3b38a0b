"""The house keeps its order: who imports whom, and how wide a file is. python -m pytest tests/house/test_house.py

At the root stand the concepts, one per file; plumbing/ holds what a reader may skip, in rooms; tools/ looks at runs;
train.py and eval.py stand on top of them all. Imports are read from the source, nothing is run.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONCEPTS = ["ratios", "advantages", "losses", "routes", "moe", "rollout"]     # each may import those before it
TOP = ["train", "eval"]
ROOMS = ("data", "engines", "loop", "model", "parallel", "run", "speed")
PLUMBING = sorted(f"plumbing.{file.parent.name}.{file.stem}" for file in (ROOT / "plumbing").glob("*/*.py"))
TOOLS = sorted(f"tools.{file.stem}" for file in (ROOT / "tools").glob("*.py"))
FEATURES = sorted(f"features.{file.stem}" for file in (ROOT / "features").glob("*.py") if file.stem != "__init__")
MODULES = CONCEPTS + TOP + PLUMBING + TOOLS + ["features", *FEATURES]

WIDTH = 100

# What is not in order yet, by its key below; an entry goes when it is.
OWED = set()


def hold(in_order, what, key):
    """The assertion, an expected failure as long as it is owed."""
    if not in_order and key in OWED:
        pytest.xfail(what)
    assert in_order, what


def file_of(module):
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source(module):
    return file_of(module).read_text()


def imports(module):
    """(what is imported, the names asked of it, whether inside a function, whether only in the demo) of every import."""
    found = []

    def walk(node, inside, demo):
        for child in ast.iter_child_nodes(node):
            main = isinstance(child, ast.If) and "__name__" in ast.unparse(child.test)
            if isinstance(child, ast.Import):
                found.extend((alias.name, (), inside, demo) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                for name in names:                           # `from plumbing import fast` imports plumbing.speed.fast
                    whole = f"{child.module}.{name}"
                    found.append((whole, (), inside, demo) if whole in MODULES else (child.module, (name,), inside, demo))
            walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)), demo or main)
    walk(ast.parse(source(module)), False, False)
    return found


def defined(module):
    """The names that a file itself defines."""
    names = set()
    for node in ast.parse(source(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target is not None else set()
    return names


@pytest.mark.parametrize("module", CONCEPTS)
def test_a_concept_imports_torch_transformers_and_the_concepts_below_it(module):
    below = CONCEPTS[:CONCEPTS.index(module)]
    for name, _, _, demo in imports(module):
        package = name.split(".")[0]
        allowed = package in ("torch", "transformers") or package in sys.stdlib_module_names or name in below
        assert allowed or demo and package == "tokenizers", f"{module}.py imports {name}"


@pytest.mark.parametrize("module", PLUMBING + TOOLS)
def test_plumbing_imports_nothing_that_stands_on_it(module):
    tools = () if module in TOOLS else ("tools",)
    for name, *_ in imports(module):
        above = name.split(".")[0] in (*TOP, *tools, "experiments", "benchmarks", "tests")
        hold(not above, f"{module} imports {name}", f"on top of {module}")


def test_plumbing_is_sorted_into_rooms():
    assert {file.parent.name for file in (ROOT / "plumbing").glob("*/*.py")} == set(ROOMS)
    assert not list((ROOT / "plumbing").glob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_no_import_of_ours_waits_inside_a_function(module):
    # eval.py draws with tools/ only when it is asked to: training stands without that folder
    lazy = [name for name, _, inside, demo in imports(module) if inside and not demo and name in MODULES
            and not (module == "eval" and name.startswith("tools."))]
    hold(not lazy, f"{module} imports {lazy} inside a function", f"lazy {module}")


@pytest.mark.parametrize("module", MODULES)
def test_a_name_is_imported_from_the_file_that_defines_it(module):
    for name, names, *_ in imports(module):
        if name in MODULES:
            assert set(names) <= defined(name), f"{module} imports {set(names) - defined(name)} from {name}, which has it from elsewhere"


def test_no_circle():
    below = {module: {name for name, *_ in imports(module) if name in MODULES} for module in MODULES}
    while below:
        free = [module for module, names in below.items() if not names & below.keys()]
        hold(free, f"a circle among {sorted(below)}", "circle")
        below = {module: names for module, names in below.items() if module not in free}


def test_contributing_says_which_way_imports_point():
    """Every import of ours leads to the same place of the chain or to a later one."""
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("\n", " ")
    chain = text.split("point one way: ")[1].split(". gspo.py")[0].split(" → ")
    assert chain == ["experiments, benchmarks", "train.py", "eval.py", "tools", "plumbing/run", "features", "plumbing",
                     "the concept files", "torch and transformers"]
    order = ("experiments", "benchmarks"), ("train",), ("eval",), ("tools",), ("plumbing.run",), ("features",), ("plumbing",), CONCEPTS

    def place(module):
        word = "plumbing.run" if f"{module}.".startswith("plumbing.run.") else module.split(".")[0]
        return next((at for at, names in enumerate(order) if word in names), None)
    above = [file.relative_to(ROOT).with_suffix("") for folder in ("experiments", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    for module in MODULES + [str(file).replace("/", ".") for file in above]:
        for name in [name for name, *_ in imports(module) if name]:     # None: of the same folder
            here, there = place(module), place(name)
            assert there is None or here <= there, f"{module} imports {name}"


def room(module):
    """The folder of a file; a file at the root stands for itself."""
    return module.rsplit(".", 1)[0] if "." in module else module


def test_no_folder_imports_a_folder_that_imports_it():
    arrows = {(room(module), room(name)) for module in MODULES for name, *_ in imports(module) if name in MODULES}
    below = {here: {there for one, there in arrows if one == here and there != here} for here in map(room, MODULES)}
    while below:
        free = [here for here, names in below.items() if not names & below.keys()]
        assert free, f"folders that import each other, in a circle: {below}"
        below = {here: names for here, names in below.items() if here not in free}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_is_not_wide(module):
    wide = [number for number, line in enumerate(source(module).splitlines(), 1) if len(line) > WIDTH]
    hold(not wide, f"{module}: lines {wide} are over {WIDTH} columns", f"size of {module}")


@pytest.mark.parametrize("module", MODULES)
def test_a_line_makes_one_assignment(module):
    """`a, b = b, a` exchanges two values and stays; `a, b = 1, 2` is two lines."""
    double = []
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            names = {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
            double += [] if names & {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)} else [node.lineno]
    assert not double, f"{module}: lines {double} make two assignments at once"


@pytest.mark.parametrize("file", sorted([*(ROOT / "experiments").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]), ids=lambda file: file.stem)
def test_an_experiment_or_a_benchmark_is_not_wide(file):
    assert not [n for n, line in enumerate(file.read_text().splitlines(), 1) if len(line) > WIDTH]


@pytest.mark.parametrize("module", CONCEPTS + TOP)
def test_one_statement_per_line(module):
    starts = [node.lineno for node in ast.walk(ast.parse(source(module))) if isinstance(node, ast.stmt)]
    twice = sorted({line for line in starts if starts.count(line) > 1})
    assert not twice, f"{module}: two statements in lines {twice}"
