"""docs/api.md lists exactly the routes that there are."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from coordinator.api.families import FAMILIES
from coordinator.app import App
from coordinator.config import parse

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
DATA, MANAGEMENT = PAGE.split("## Management plane")
ROW = re.compile(r"^\| ([A-Z]+) \| `([^`]+)` \| (.*) \|$", re.MULTILINE)


def documented(text: str) -> list[tuple[str, str]]:
    return [(method, path) for method, path, _ in ROW.findall(text)]


def served() -> set[tuple[str, str]]:
    return {(route.method, route.template) for family in FAMILIES for route in family.routes}


def managed() -> set[tuple[str, str]]:
    """Routes of the management plane as `serve` has them, `{name:pattern}` written as `{name}`."""
    app = App(parse("cluster:\n  engine: mindie\n"), Mock())
    ((_, _, routes),) = app.management._plan
    return {(route.method, re.sub(r":[^}]+}", "}", route.path)) for route in routes}


def test_each_route_of_the_data_plane_has_its_row():
    assert served() - set(documented(DATA)) == set()


def test_nothing_else_of_the_data_plane_is_described():
    assert set(documented(DATA)) - served() == set()


def test_each_route_of_the_management_plane_has_its_row():
    assert managed() - set(documented(MANAGEMENT)) == set()


def test_nothing_else_of_the_management_plane_is_described():
    assert set(documented(MANAGEMENT)) - managed() == set()


@pytest.mark.parametrize("text", [DATA, MANAGEMENT])
def test_no_route_stands_twice(text):
    rows = documented(text)
    assert len(rows) == len(set(rows))


def test_families_of_the_rows_are_those_that_serve_them():
    names = {}
    for family in FAMILIES:
        for route in family.routes:
            names.setdefault((route.method, route.template), set()).add(family.name)
    for method, path, cells in ROW.findall(DATA):
        told = cells.partition(" | ")[0].lower()
        for name in names[method, path]:
            assert re.search(rf"\b{name}\b", told), f"{method} {path} is {name}'s too"
