"""docs/security.md: every threat names tests, and every test that is named exists and runs."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from coordinator.parts import load_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("\n## Threats\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|")
][2:]
THREATS = [row for row in ROWS if not row[0].startswith("**")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


sys.path.insert(0, str(ROOT / "tests/support"))


@cache
def cases_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions) and not skipped(node)}


def skipped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it never runs; `skipif` for a missing tool is another matter."""
    return any(re.search(r"\bmark\.(skip|xfail)\b", ast.unparse(one)) for one in function.decorator_list)


def test_there_are_threats_from_every_side():
    sides = {row[0].strip("*") for row in ROWS if row[0].startswith("**")}
    for side in ("stranger", "client", "neighbour", "engine", "operator"):
        assert any(side in one for one in sides), side
    assert len(THREATS) > 30


@pytest.mark.parametrize("row", THREATS, ids=lambda row: row[0][:60])
def test_each_threat_says_what_happens_and_names_tests_that_exist(row):
    _, outcome, tests = row
    assert outcome
    named = NAMED.findall(tests)
    assert named
    assert NAMED.sub("", tests).strip(" ,") == "", "only tests stand in the last column"
    for file, name in named:
        assert name in cases_in(file), f"{file} has no {name}"


def test_the_example_of_tls_loads_with_certificates_in_place(tmp_path):
    from certificates import Authority

    (tmp_path / "tls").mkdir()
    example = re.search(r"```yaml\n(# paths begin .*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "cluster.yaml").write_text(example)
    for name in ("server", "coordinator"):
        Authority(tmp_path / "tls", "unused").issue(name)
    for name in ("operators", "engines"):
        Authority(tmp_path / "tls", name)
    settings = load_settings(tmp_path / "cluster.yaml")
    assert settings.tls.management.client_ca_file == str(tmp_path / "tls/operators.pem")
