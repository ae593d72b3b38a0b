"""train.py is the full version of gspo.py: its loop comes first, after the Batch, and its docstring
says where each name of gspo.py is found.
python -m pytest tests/house/test_full_loop.py"""

import ast
import re

import pytest

from documents import PROGRAM

SHORT, FULL = PROGRAM["gspo.py"], PROGRAM["train.py"]
LEARNER = PROGRAM["session/learner.py"]
DOCSTRING = ast.get_docstring(ast.parse(FULL), clean=False)
TABLE = re.findall(r"^    (\w+) {2,}(.+)$", DOCSTRING.split("sections:")[1], re.M)


def defined(body):
    return [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def definitions(source):
    """{name: node} of the functions and classes of a file, and of the methods of its classes."""
    top = defined(ast.parse(source).body)
    inside = [node for one in top if isinstance(one, ast.ClassDef) for node in defined(one.body)]
    return {node.name: node for node in [*inside, *top]}


def top_level(source):
    return [node.name for node in defined(ast.parse(source).body)]


def test_the_table_has_every_name_of_gspo_py_in_its_order():
    assert [name for name, _ in TABLE] == top_level(SHORT)


@pytest.mark.parametrize("name, place", TABLE)
def test_each_name_is_found_where_the_table_says(name, place):
    file, _, rest = place.rpartition(".py: ")
    there = {*definitions(PROGRAM[f"{file or 'train'}.py"])}
    learner = definitions(LEARNER)["Learner"].body
    members = {node.target.id for node in learner if isinstance(node, ast.AnnAssign)}
    members |= {node.name for node in defined(learner)}
    for owner, one in re.findall(r"(learner\.)?(\w+)\(\)", rest) or [("", rest)]:
        assert one in (members if owner else there), f"{name}: no {one}"


def test_the_loop_is_the_first_thing_on_the_page():
    assert top_level(FULL)[:2] == ["Batch", "train"]
    assert len(FULL.splitlines()) <= 300
