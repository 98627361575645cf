"""Boards and rules: well formed, documented, and each alert fires when it should and not before."""

import json
import re
import subprocess
from dataclasses import dataclass, field
from itertools import combinations, product

import pytest
import yaml
from boards import BOARDS, PROMTOOL, ROOT, RULES, filled_in, load, queries

METRICS_PAGE = (ROOT / "docs/metrics.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
EACH_RULE = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in EACH_RULE if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in EACH_RULE if "record" in rule}
KINDS = {"timeseries", "stat", "heatmap", "table", "state-timeline"}
UNITS = {"short", "s", "ops", "reqps", "percentunit", "bytes"}

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
each_board = pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)


def metrics_in(text: str) -> set[str]:
    """Names of our metrics, without what histograms put behind them."""
    found = re.findall(r"\bpd_coordinator_\w+", text)
    return {re.sub("_(bucket|sum|count)$", "", name) for name in found}


def documented() -> set[str]:
    return set(re.findall(r"^\| `(pd_coordinator_\w+)` \|", METRICS_PAGE, re.MULTILINE))


# --- boards


def test_there_are_three_boards():
    assert [path.stem for path in BOARDS] == ["instances", "latency", "overview"]
    assert len({load(path)["uid"] for path in BOARDS}) == len(BOARDS)
    assert len({load(path)["title"] for path in BOARDS}) == len(BOARDS)


@each_board
def test_what_grafana_asks_of_a_board(path):
    board = load(path)
    assert {key for key in ("uid", "title", "description") if not board[key]} == set()
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert (board["schemaVersion"], board["version"]) == (39, 1)
    assert "pd-coordinator" in board["tags"]
    assert board.keys().isdisjoint({"__inputs", "id"})  # what only an export for another Grafana has
    ids = [panel["id"] for panel in board["panels"]]
    assert sorted(ids) == sorted(set(ids))


@each_board
def test_the_data_source_is_a_variable(path):
    board = load(path)
    source, *others = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    expected = {"type": "prometheus", "uid": "${datasource}"}
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    holders = [*others, *targets, *(panel for panel in board["panels"] if panel["type"] != "row")]
    assert targets
    assert all(holder["datasource"] == expected for holder in holders)


@each_board
def test_variables_are_used_and_used_ones_exist(path):
    board = load(path)
    text = json.dumps([board["panels"], [v["query"] for v in board["templating"]["list"]]])
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == {variable["name"] for variable in board["templating"]["list"]}
    for variable in board["templating"]["list"][1:]:
        assert variable["includeAll"]
        assert variable["allValue"] == ".+"
        assert metrics_in(variable["query"]["query"]) <= documented()


@each_board
def test_panels_lie_side_by_side(path):
    cells = {}
    for panel in load(path)["panels"]:
        box = panel["gridPos"]
        assert 0 <= box["x"] < box["x"] + box["w"] <= 24
        for cell in product(range(box["x"], box["x"] + box["w"]), range(box["y"], box["y"] + box["h"])):
            assert cells.setdefault(cell, panel["title"]) == panel["title"]


@each_board
def test_panels_have_what_they_need(path):
    for panel in load(path)["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["type"] in KINDS
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)


@each_board
def test_titles_of_panels_of_one_kind_are_told_apart(path):
    panels = load(path)["panels"]
    for one, other in combinations(panels, 2):
        assert (one["type"], one["title"]) != (other["type"], other["title"])


def test_each_metric_of_boards_and_rules_is_documented():
    used = {name for query in queries() for name in metrics_in(query.expression)}
    used |= {name for rule in EACH_RULE for name in metrics_in(rule["expr"])}
    used |= {name for rule in ALERTS.values() for name in metrics_in(rule["annotations"]["description"])}
    assert used <= documented()


def test_each_metric_that_is_not_seen_by_its_sum_alone_is_on_a_board():
    """An operator who imports the boards misses none of our metrics."""
    shown = {name for query in queries() for name in metrics_in(query.expression)}
    assert documented() - shown == NOT_ON_A_BOARD


NOT_ON_A_BOARD = {"pd_coordinator_late_frames_total"}
"""Of use to those who look into the protocol alone."""


# --- rules


def test_rules_have_names_like_others():
    assert all(re.fullmatch(r"pd_coordinator(:[a-z0-9_]+){2}", name) for name in RECORDS)
    assert all(re.fullmatch(r"PdCoordinator[A-Za-z]+", name) for name in ALERTS)
    assert len(RECORDS) + len(ALERTS) == len(EACH_RULE)
    known = {name for name in RECORDS if any(name in rule["expr"] for rule in ALERTS.values())}
    used = set(re.findall(r"pd_coordinator:[a-z0-9_:]+", "".join(rule["expr"] for rule in ALERTS.values())))
    assert used == known


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_and_where_to_look(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    summary, description = rule["annotations"]["summary"], rule["annotations"]["description"]
    assert summary.endswith(".")
    assert description.endswith(".")
    assert f"`{name}`" in OPERATIONS


def test_no_other_alert_is_described():
    assert set(re.findall(r"`(PdCoordinator\w+)`", OPERATIONS)) == set(ALERTS)


@needs_promtool
def test_promtool_takes_the_rules():
    done = subprocess.run([PROMTOOL, "check", "rules", RULES], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(EACH_RULE)} rules found" in done.stdout


@dataclass
class Case:
    """One alert: what is seen, when it fires and when it does not yet.

    `series`: input by series, in promtool's notation, one sample a minute. `labels`: of the alert beyond its severity.
    `value`: how `$value` is written out in the annotations.
    """

    alert: str
    series: dict[str, str]
    fires: str
    quiet: str
    labels: dict[str, str]
    value: str = ""
    more: dict[str, str] = field(default_factory=dict)


JOB = {"job": "j"}
OK = 'pd_coordinator_requests_total{job="j",outcome="ok"}'
CASES = [
    Case("PdCoordinatorAbsent", {"pd_coordinator_requests_in_flight": "0x5 stale"}, "9m", "4m", {}),
    Case(
        "PdCoordinatorNothingServes",
        {
            'pd_coordinator_instance_up{job="j",role="prefill",instance="p0"}': "1x20",
            'pd_coordinator_instance_up{job="j",role="decode",instance="d0"}': "1x5 0x15",
            'pd_coordinator_requests_in_flight{job="j"}': "0x20",
        },
        "10m", "5m", JOB,
    ),
    Case(
        "PdCoordinatorNothingServes",
        {
            'pd_coordinator_instance_up{job="j",role="prefill",instance="p0"}': "0x20",
            'pd_coordinator_instance_up{job="j",role="decode",instance="d0"}': "0x20",
            'pd_coordinator_instance_up{job="j",role="hybrid",instance="h0"}': "1x5 0x15",
            'pd_coordinator_requests_in_flight{job="j"}': "0x20",
        },
        "10m", "5m", JOB,
    ),
    Case("PdCoordinatorNothingServes", {'pd_coordinator_requests_in_flight{job="j"}': "_x5 0x15"}, "10m", "4m", JOB),
    Case(
        "PdCoordinatorInstanceDown",
        {'pd_coordinator_instance_up{job="j",role="decode",instance="d0"}': "1x5 0x10"},
        "9m", "6m", {**JOB, "role": "decode", "instance": "d0"},
    ),
    Case(
        "PdCoordinatorRequestsFail",
        {OK: "0+30x40", 'pd_coordinator_requests_total{job="j",outcome="engine_error"}': "0x10 10+10x30"},
        "30m", "10m", JOB, "25%",
    ),
    Case(
        "PdCoordinatorInstanceFails",
        {
            'pd_coordinator_engine_failures_total{job="j",instance="d0",side="decode",reason="reset"}': "0x10 12+12x30",
        },
        "30m", "10m", {**JOB, "instance": "d0", "side": "decode", "reason": "reset"},
    ),
    Case(
        "PdCoordinatorRejects",
        {OK: "0+30x40", 'pd_coordinator_requests_total{job="j",outcome="rejected"}': "0x10 1+1x30"},
        "30m", "10m", JOB,
    ),
    Case("PdCoordinatorQueue", {'pd_coordinator_requests_queued{job="j"}': "0x5 3x30"}, "20m", "11m", JOB),
    Case(
        "PdCoordinatorSlowFirstToken",
        {
            'pd_coordinator_time_to_first_token_seconds_bucket{job="j",api="openai",le="10.0"}': "0x60",
            'pd_coordinator_time_to_first_token_seconds_bucket{job="j",api="openai",le="20.0"}': "0+60x60",
            'pd_coordinator_time_to_first_token_seconds_bucket{job="j",api="openai",le="+Inf"}': "0+60x60",
        },
        "30m", "9m", JOB, "19.5s",
    ),
    Case(
        "PdCoordinatorKvPilesUp",
        {'pd_coordinator_kv_pinned_requests{job="j",instance="p0"}': "0x5 150x40"},
        "30m", "12m", {**JOB, "instance": "p0"},
    ),
    Case(
        "PdCoordinatorKvAbandoned",
        {'pd_coordinator_handoffs_abandoned_total{job="j"}': "0x10 30+30x40"},
        "40m", "12m", JOB,
    ),
    Case(
        "PdCoordinatorKvDoesNotMove",
        {'pd_coordinator_missing_kv_total{job="j",engine="vllm"}': "0x10 30+30x40"},
        "40m", "12m", {**JOB, "engine": "vllm"},
    ),
    Case(
        "PdCoordinatorLinkFlaps",
        {'pd_coordinator_link_reconnects_total{job="j",instance="d0"}': "0x10 1+1x20"},
        "20m", "10m", {**JOB, "instance": "d0"},
    ),
    Case(
        "PdCoordinatorConfigurationInvalid",
        {
            'pd_coordinator_config_reloads_total{job="j",result="invalid"}': "0x5 1x20",
            'pd_coordinator_config_reloads_total{job="j",result="ok"}': "0x12 1x13",
        },
        "8m", "14m", JOB,
    ),
    Case(
        "PdCoordinatorDiscoveryLost",
        {'pd_coordinator_discovery_up{job="j",source="pods"}': "1x5 0x15"},
        "12m", "9m", {**JOB, "source": "pods"},
    ),
    Case(
        "PdCoordinatorOpenFiles",
        {
            'process_open_fds{job="j"}': "10x5 900x20",
            'process_max_fds{job="j"}': "1000x25",
            'pd_coordinator_requests_in_flight{job="j"}': "0x25",
        },
        "15m", "8m", JOB,
    ),
    Case(
        "PdCoordinatorEngineMetricsOld",
        {'pd_coordinator_engine_scrape_age_seconds{job="j",instance="d0",role="decode"}': "5x5 150x5"},
        "7m", "4m", {**JOB, "instance": "d0", "role": "decode"},
    ),
    Case(
        "PdCoordinatorTracesLost",
        {
            'pd_coordinator_traces_total{job="j",result="dropped"}': "0x10 5x10",
            'pd_coordinator_traces_total{job="j",result="exported"}': "0+9x20",
        },
        "15m", "9m", {**JOB, "result": "dropped"},
    ),
]  # fmt: skip


def written_out(text: str, case: Case) -> str:
    """An annotation as Prometheus makes it from its template."""
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.labels[found[1]], text)
    return re.sub(r"{{ \$value[^}]*}}", case.value, text)


def promtool_test(case: Case) -> dict:
    rule = ALERTS[case.alert]
    expected = {
        "exp_labels": {"severity": rule["labels"]["severity"], **case.labels},
        "exp_annotations": {name: written_out(text, case) for name, text in rule["annotations"].items()},
    }
    return {
        "name": case.alert,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"alertname": case.alert, "eval_time": case.fires, "exp_alerts": [expected]},
            {"alertname": case.alert, "eval_time": case.quiet, "exp_alerts": []},
        ],
    }


def test_each_alert_has_its_case():
    assert {case.alert for case in CASES} == set(ALERTS)


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    file = tmp_path / "test.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [promtool_test(c) for c in CASES]}
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_every_query_of_the_boards(tmp_path):
    """As rules, which it parses without a server."""
    rules = [
        {"record": f"q{number}", "expr": filled_in(query.expression, load(ROOT / f"deploy/grafana/{query.board}.json"))}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    done = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
