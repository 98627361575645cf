"""docs/metrics.md describes exactly the metrics that are declared."""

import inspect
import json
import re
from pathlib import Path

import pytest

from coordinator.api.families import FAMILIES
from coordinator.core.errors import Outcome
from coordinator.core.instance import Role
from coordinator.observability.access import RequestRecord
from coordinator.observability.forms import JSON, line
from coordinator.observability.instruments import AnyInstrument, Counter, Histogram
from coordinator.observability.metrics import (
    ABORT_RESULTS,
    SCRAPE_RESULTS,
    STAGES,
    TRACE_RESULTS,
    TTFT_STAGES,
    WAITING_STAGES,
    Metrics,
)
from coordinator.observability.trace import Trace

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `(pd_coordinator_\w+)` \| (\w+) \|([^|]*)\| (.+) \|$", re.MULTILINE)
INSTRUMENTS = Metrics([family.name for family in FAMILIES]).instruments


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(PAGE)}


def declared(instrument: AnyInstrument) -> tuple[str, tuple[str, ...]]:
    kind = (
        "counter" if isinstance(instrument, Counter) else "histogram" if isinstance(instrument, Histogram) else "gauge"
    )
    return kind, instrument.label_names


def label_row(label: str) -> set[str]:
    row = re.search(rf"^\| {re.escape(label)} \| (.+) \|$", PAGE, re.MULTILINE)
    assert row, f"no row for the label {label}"
    return set(re.findall(r"`(\w+)`", row[1]))


@pytest.mark.parametrize("instrument", INSTRUMENTS, ids=lambda instrument: instrument.name)
def test_each_metric_has_its_row(instrument):
    assert documented().get(instrument.name) == declared(instrument)


def test_nothing_else_is_described():
    assert set(documented()) == {instrument.name for instrument in INSTRUMENTS}
    assert len(ROW.findall(PAGE)) == len(INSTRUMENTS)


def test_queries_use_metrics_that_exist():
    known = {instrument.name for instrument in INSTRUMENTS}
    for name in re.findall(r"pd_coordinator_\w+", PAGE):
        assert re.sub("_(bucket|sum|count)$", "", name) in known or name in known


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("`api`", {family.name for family in FAMILIES}),
        ("`outcome`", {str(outcome) for outcome in Outcome}),
        ("`stage`", set(STAGES)),
        ("`role`", {str(role) for role in Role}),
        ("`result` of aborts", set(ABORT_RESULTS)),
        ("`result` of scrapes", set(SCRAPE_RESULTS)),
        ("`result` of traces", set(TRACE_RESULTS)),
        ("`stage` of the bottleneck", set(WAITING_STAGES)),
        ("`stage` of requests", set(STAGES)),
        ("`stage` of the time to first token", {*TTFT_STAGES, "instance"}),
    ],
)
def test_label_values(label, values):
    assert label_row(label) == values


def test_each_label_has_a_row():
    for name in {name for instrument in INSTRUMENTS for name in instrument.label_names}:
        assert re.search(rf"^\| `{name}`( of \w+)? \| ", PAGE, re.MULTILINE), name


def test_each_field_of_the_request_line_has_a_row():
    fields = re.search(r"\| field \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    assert fields
    rows = {name for row in fields[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    record = RequestRecord(id="i", api="a", path="/")
    for name, parameter in inspect.signature(RequestRecord).parameters.items():
        kept = getattr(record, name)
        if kept in (None, "", 0, []) and name != "outcome":
            number = name[-2:] == "_s" or isinstance(kept, int)
            setattr(record, name, ["1"] if "list" in str(parameter.annotation) else 1 if number else "1")
    record.trace = Trace(1, 1, 0, True, b"", 0.0, 0.0, "POST")
    fields = json.loads(line(JSON, JSON.start, JSON.head(""), record))
    assert set(fields) - {"time", "level", "logger", "message"} == rows
