"""train.py is gspo.py grown up: its loop comes first, takes the same steps in the same order, and its docstring says
where each name of gspo.py is found. python -m pytest tests/house/test_grown_up.py"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, GROWN = ((ROOT / name).read_text() for name in ("gspo.py", "train.py"))
TABLE = re.findall(r"^    (\w+) {2,}(.+)$", ast.get_docstring(ast.parse(GROWN), clean=False).split("sections:")[1], re.M)
# The steps of a rollout batch: their names in gspo.py, and in train.py
STEPS = {"sample": "sample", "reward": "reward", "response_logp": "response_logp",
         "group_advantages": "estimate_advantages", "gspo_loss": "policy_loss"}


def definitions(source):
    """{name: node} of the functions and classes of a file, and of the methods of its classes."""
    top = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    inside = [node for one in top if isinstance(one, ast.ClassDef) for node in one.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in [*inside, *top]}


def calls(source, name):
    """The names that a function calls, in the order of the page; a call of a function of the same file is followed by what that calls."""
    known, order = definitions(source), []

    def walk(node, path):
        for call in sorted((n for n in ast.walk(node) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
            for called in (n for n in ast.walk(call.func) if isinstance(n, (ast.Name, ast.Attribute))):
                word = called.id if isinstance(called, ast.Name) else called.attr
                order.append(word)
                if isinstance(known.get(word), ast.FunctionDef) and word not in path:
                    walk(known[word], (*path, word))
    walk(known[name], (name,))
    return order


def top_level(source):
    return [node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def test_the_table_has_every_name_of_gspo_py_in_its_order():
    assert [name for name, _ in TABLE] == top_level(PAGE)


@pytest.mark.parametrize("name, place", TABLE)
def test_each_name_is_found_where_the_table_says(name, place):
    file, _, rest = place.rpartition(".py: ")
    source = (ROOT / f"{file}.py").read_text() if file else GROWN
    there = re.findall(r"(\w+)\(\)", rest) or [rest]
    learner = definitions(GROWN)["Learner"]
    fields = {node.target.id for node in learner.body if isinstance(node, ast.AnnAssign)}
    for one in there:
        assert one in definitions(source) or f"learner.{one}()" in rest and one in fields, f"{name}: no {one} in {file or 'train'}.py"


def test_the_loop_is_the_first_thing_on_the_page():
    assert top_level(GROWN)[0] == "train"


@pytest.mark.parametrize("source, names", [(PAGE, list(STEPS)), (GROWN, list(STEPS.values()))], ids=["gspo.py", "train.py"])
def test_both_loops_take_the_same_steps_in_the_same_order(source, names):
    order = calls(source, "train")
    first = [order.index(name) for name in names]
    assert first == sorted(first), [name for _, name in sorted(zip(first, names))]
