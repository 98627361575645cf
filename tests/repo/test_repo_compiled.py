"""The modules that may be compiled (docs/adr/0021) hold nothing that means something else when it is compiled."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOK = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
COMPILED = [ROOT / name.removeprefix("/") for name in HOOK["include"]]
SUSPENDS = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def tree(path):
    return ast.parse(path.read_text())


def inside(node):
    """What runs where this node does: not what is only defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield child
            yield from inside(child)


def hazards(source):
    """Line and reason of each thing that compiled code does in another way, and nobody would be told."""
    for node in ast.walk(source):
        if isinstance(node, ast.Try):
            yield from hazards_of_handling(node)
        elif isinstance(node, ast.AsyncWith):
            yield node.lineno, "is left by an await, which may be while an error is handled"
        elif isinstance(node, ast.Raise) and isinstance(node.cause, ast.Constant):
            yield node.lineno, "keeps the context that `from None` shall hide"
        elif isinstance(node, ast.Attribute) and node.attr == "__cause__" and isinstance(node.ctx, ast.Load):
            yield node.lineno, "knows no causes: `raise ... from` sets none"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super" and node.args:
            yield node.lineno, "is given another `self` in a function within a method"
        elif isinstance(node, ast.ClassDef):
            yield from hazards_of_class(node)


def hazards_of_handling(node):
    for part in (*node.handlers, *node.finalbody):
        for each in (part, *inside(part)):
            if isinstance(each, SUSPENDS):
                yield each.lineno, "suspends while an error is handled: whoever runs meanwhile has that error"


def hazards_of_class(node):
    if any(base_name(base) in ("Struct", "BaseModel") for base in node.bases):
        yield node.lineno, "is a class that its library reads"
    if any(base_name(base) in ("Enum", "StrEnum") for base in node.bases):
        return  # its metaclass makes it, as ever
    for each in node.body:
        if isinstance(each, ast.Assign) and "__slots__" not in (getattr(target, "id", "") for target in each.targets):
            yield each.lineno, "is an attribute of the class that has no type"


def base_name(base):
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def test_the_list_is_sorted_and_every_file_is_there():
    assert HOOK["include"] == sorted(set(HOOK["include"]))
    assert [path for path in COMPILED if not path.is_file()] == []


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: str(path.relative_to(ROOT / "coordinator")))
def test_nothing_in_it_differs(path):
    assert sorted(set(hazards(tree(path)))) == []


def test_no_other_class_derives_from_a_compiled_one():
    """Such a class cannot be made, unless the compiled one allows it; their imports tell which names are compiled."""
    closed = [path for path in COMPILED if "@mypyc_attr(allow_interpreted_subclasses=True)" not in path.read_text()]
    ours = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in closed}
    for path in (ROOT / "coordinator").rglob("*.py"):
        if path in COMPILED:
            continue
        source, folder = tree(path), path.relative_to(ROOT).parts[:-1]
        imported = {}
        for node in ast.walk(source):
            if isinstance(node, ast.ImportFrom):
                start = [*folder[: len(folder) - node.level + 1]] if node.level else []
                module = ".".join([*start, *filter(None, [node.module])])
                imported |= {alias.asname or alias.name: module for alias in node.names}
        for node in ast.walk(source):
            if isinstance(node, ast.ClassDef):
                bases = {imported.get(base_name(base)) for base in node.bases}
                assert not bases & ours, f"{path.name}: {node.name}"


@pytest.mark.parametrize(
    "text",
    [
        "async def f():\n try: pass\n except E: await g()\n",
        "async def f():\n try: pass\n finally:\n  for _ in x: await g()\n",
        "def f():\n try: pass\n except E: yield 1\n",
        "async def f():\n async with g(): pass\n",
        "try: pass\nexcept E: raise F from None\n",
        "x = e.__cause__\n",
        "class A(msgspec.Struct): pass\n",
        "class A:\n inner = value\n",
        "class A(B):\n def f(self): return lambda: super(A, self).f()\n",
    ],
)
def test_a_hazard_is_seen(text):
    assert list(hazards(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "async def f():\n try: await g()\n except E: h()\n",
        "async def f():\n try: pass\n except E:\n  async def g(): await h()\n",
        "class A:\n __slots__ = ('a',)\n b: int = 1\n",
        "try: pass\nexcept E as error: raise F from error\n",
        "e.__cause__ = None\n",
    ],
)
def test_what_is_none_is_not(text):
    assert not list(hazards(ast.parse(text)))
