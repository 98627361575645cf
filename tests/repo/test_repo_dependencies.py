"""Each dependency has a reason and a pin."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
FOR_PEOPLE = ("dev", "bench")
"""Extras of those who work on the project; every other one brings what the code imports."""
EXTRAS = [text for name, texts in OPTIONAL.items() if name not in FOR_PEOPLE for text in texts]
RUN_TIME = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS)]
DEVELOPMENT = [Requirement(text) for name in FOR_PEOPLE for text in OPTIONAL[name] if text not in EXTRAS]
DECISION = (ROOT / "docs/adr/0008-dependencies.md").read_text()
AT_RUN_TIME, FOR_DEVELOPMENT = DECISION.split("For development")
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}


def reasons(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| (`.+?`) \| (.+) \|$", text, re.MULTILINE)
    return {canonicalize_name(name): why for names, why in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize(("wanted", "text"), [(RUN_TIME, AT_RUN_TIME), (DEVELOPMENT, FOR_DEVELOPMENT)])
def test_each_dependency_has_a_reason_and_nothing_else_has(wanted, text):
    assert set(reasons(text)) == {canonicalize_name(requirement.name) for requirement in wanted}


@pytest.mark.parametrize("requirement", [*RUN_TIME, *DEVELOPMENT], ids=lambda requirement: requirement.name)
def test_each_dependency_is_pinned_within_its_range(requirement):
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_are_exact_and_stand_once():
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in LINES)
    assert len(PINS) == len(LINES)


def test_what_is_imported_is_declared():
    """Third-party imports of the code are dependencies at run time."""
    names = {"yaml": "pyyaml", "prometheus_client": "prometheus-client", "google": "protobuf", "grpc": "grpcio"}
    names |= {"dns": "dnspython", "kubernetes_asyncio": "kubernetes-asyncio"}
    names |= {"opentelemetry": "opentelemetry-sdk", "mypy_extensions": "mypy-extensions"}
    declared = {canonicalize_name(requirement.name) for requirement in RUN_TIME}
    for top in ("coordinator", "instances"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    found = [node.module or ""]
                for module in {name.partition(".")[0] for name in found} - sys.stdlib_module_names:
                    if module not in ("coordinator", "instances"):
                        assert names.get(module, module) in declared, f"{path.name} imports {module}"
