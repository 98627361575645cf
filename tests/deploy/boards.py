"""What stands in the boards for Grafana."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yaml"
PROMTOOL = shutil.which("promtool")
BOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
VARIABLES = {"$__rate_interval": "10s", "$__interval": "10s", "$__range": "1h"}


class Query(NamedTuple):
    """One query of one panel."""

    board: str
    panel: str
    expression: str


def load(path: Path) -> dict[str, Any]:
    """A board as it is."""
    board: dict[str, Any] = json.loads(path.read_text())
    return board


def queries() -> Iterator[Query]:
    """Every query of every panel, as it is written."""
    for path in BOARDS:
        for panel in load(path)["panels"]:
            for target in panel.get("targets", ()):
                yield Query(path.stem, panel["title"], target["expr"])


def filled_in(expression: str, board: dict[str, Any]) -> str:
    """A query as Grafana would send it, with every variable at `All`."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    for variable in board["templating"]["list"]:
        expression = re.sub(rf"\${variable['name']}\b", variable.get("allValue", ""), expression)
    assert "$" not in expression, expression
    return expression
