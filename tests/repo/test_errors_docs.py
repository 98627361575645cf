"""docs/errors.md describes exactly the errors that exist, and every reason that is given."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from coordinator.core import errors
from coordinator.core.errors import EngineRefused, RequestError
from coordinator.transport.errors import Reason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\S+) \| `(\w+)` \| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
REASON = re.compile(r"^\| `(\w+)` \| [^|]+ \|$", re.MULTILINE)
CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, RequestError) and value is not RequestError
]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        yield path, ast.parse(path.read_text())


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_each_error_has_its_row(error):
    status = "4xx" if error is EngineRefused else str(error.status)
    assert (error.code, status, error.__name__, str(error.outcome)) in [row[:4] for row in ROW.findall(PAGE)]


def test_nothing_else_is_described():
    assert sorted(row[2] for row in ROW.findall(PAGE)) == sorted(error.__name__ for error in CLASSES)


def test_codes_are_unique():
    codes = [error.code for error in CLASSES]
    assert len(codes) == len(set(codes))


def test_there_is_one_error_tree():
    known = {"RequestError", *(error.__name__ for error in CLASSES)}
    for path, tree in sources():
        if path == ROOT / "coordinator/core/errors.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & known, f"{path.name}: {node.name} belongs into core/errors.py and docs/errors.md"


def test_each_reason_has_its_row():
    described = set(REASON.findall(PAGE))
    assert set(get_args(Reason)) <= described
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "EngineFailed":
                given = node.args[2:3] + [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
                said = {c.value for arg in given for c in literals(arg)}
                assert said <= described, f"{path.name}:{node.lineno}: {said - described} is not in docs/errors.md"


def literals(node: ast.expr) -> Iterator[ast.Constant]:
    """The words that an argument may be: a literal, or the branches of a condition."""
    if isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
