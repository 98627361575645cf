"""Boards and rules against a real Prometheus that scrapes a coordinator under load: every query has data."""

import asyncio
import hashlib
import itertools
import math
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from clusters import FAST, QUICK_HEALTH
from dialects import BY_NAME, MODEL
from processes import until
from prometheus_process import PROMETHEUS, Prometheus
from raw_client import ask, eventually

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
from boards import BOARDS, filled_in, load, queries
from held_ports import HeldPorts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("prometheus"),
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus (Debian: prometheus) is not installed"),
]
DIALECTS = [BY_NAME[name] for name in ("chat-stream", "chat", "completions-stream")]
ENGINES = ("mindie", "mindie", "vllm", "vllm")
DATA_S = 90.0
FALLBACK = " or on () vector(0)"
KEY = "key-of-a-team"
SENDS_KEY = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def ports():
    with HeldPorts() as held:
        yield held


def sources(folder, instance, port):
    """Two places where instances are looked for: a file with one, and a name server that is not there."""
    folder.mkdir()
    (folder / "more.yaml").write_text(yaml.safe_dump([instance]))
    gone = {"name": "decode.test.", "role": "decode", "port": 1, "nameservers": [f"127.0.0.1:{port}"]}
    return {"files": [str(folder / "*.yaml")], "dns": [{**gone, "timeout_s": 0.3}]}


@pytest.fixture
def cluster(start, tmp_path, ports):
    """A pair of MindIE and a pair of vLLM, and everything on that can be counted."""
    roles = ("prefill", "decode") * 2
    fleet = start.fleet([{"role": r, "engine": e, "timing": FAST} for r, e in zip(roles, ENGINES, strict=True)])
    rows = [
        {"id": f"{engine}-{role}", "role": role, "engine": engine, "url": one.url}
        for role, engine, one in zip(roles, ENGINES, fleet.instances, strict=True)
    ]
    *listed, found = rows
    coordinator = start.coordinator(
        {
            "server": {"port": 0, "management_port": 0},
            "auth": {"keys": [{"name": "team", "hash": f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"}]},
            "cluster": {"model": MODEL, "instances": listed},
            "discovery": sources(tmp_path / "instances.d", found, ports.take()),
            "scheduling": {"policy": "round_robin"},
            "health": QUICK_HEALTH,
            "metrics": {"engines": {"scrape": True, "interval_s": 0.3}},
        }
    )
    coordinator.wait_ready()
    ready = {row["id"]: "ready" for row in rows}
    until(lambda: coordinator.states() == ready, "all are ready, the one of the file as well")
    fleet.instances[1].act("dresult_reset")
    until(lambda: coordinator.metric("pd_coordinator_link_reconnects_total"), "the result stream is opened again")
    until(lambda: coordinator.states() == ready, "all are ready once more")
    return coordinator


@pytest.fixture
def prometheus(start, cluster, tmp_path, ports):
    """Scrapes that coordinator."""
    return start._own(Prometheus(cluster.management_port, ports.take(), tmp_path))


class Load:
    """Requests of several kinds without a pause; a quarter of each client's fail, however long the others take."""

    def __init__(self, port):
        self._port = port
        self._tasks = []

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._run(number), name=f"client {number}") for number in range(4)]

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number):
        for turn in itertools.count(number):
            for dialect in DIALECTS:
                prompt = f"Hello [[length:{8 + number}]]" + (" [[fault:status=500]]" if turn % 4 == 3 else "")
                with suppress(ConnectionError):
                    await ask(self._port, dialect.path, dialect.body(prompt, 20), SENDS_KEY)
                await asyncio.sleep(0.02)
            await ask(self._port, "/nowhere", headers=SENDS_KEY)


def numbers(prometheus, expression):
    """The values of an expression that are numbers."""
    return [value for value in prometheus.values(expression) if not math.isnan(value)]


async def with_data(prometheus, expressions):
    """Those that have no data, after as long as they may take."""
    async with asyncio.timeout(DATA_S + 10):
        loop = asyncio.get_running_loop()
        end_s = loop.time() + DATA_S
        missing = dict(expressions)
        while missing and loop.time() < end_s:
            found = await asyncio.to_thread(lambda: [name for name, q in missing.items() if numbers(prometheus, q)])
            for name in found:
                del missing[name]
            await asyncio.sleep(0.3)
    return missing


def asked():
    """Every query of every panel, without the zero that it may fall back to: that would hide that nothing is there."""
    made = {path.stem: load(path) for path in BOARDS}
    return {
        f"{query.board}: {query.panel} #{number}": filled_in(query.expression, made[query.board]).removesuffix(FALLBACK)
        for number, query in enumerate(queries())
    }


async def test_every_panel_and_rule_has_data(cluster, prometheus):
    expressions = asked()
    assert len(expressions) > 60
    assert "pd_coordinator_discovery_up" in str(expressions)
    async with Load(cluster.port):
        assert await with_data(prometheus, expressions) == {}
        records = [name for name, rule in prometheus.rules().items() if rule["type"] == "recording"]
        assert len(records) > 5
        assert await with_data(prometheus, {name: name for name in records}) == {}
    rules = prometheus.rules()
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    await only_real_trouble(prometheus)
    await the_lost_source_is_told(prometheus)
    await labels_are_ours(prometheus)


async def only_real_trouble(prometheus):
    """The failing requests are seen; what is well is not complained of."""
    await eventually(lambda: states(prometheus, "PdCoordinatorRequestsFail") == ["pending"], "the alert", DATA_S)
    allowed = {"PdCoordinatorRequestsFail", "PdCoordinatorInstanceFails", "PdCoordinatorDiscoveryLost"}
    # on a busy machine a scrape may fail, which is real trouble until the next one
    await eventually(lambda: active(prometheus) <= allowed, "nothing else is complained of", DATA_S)
    share = await eventually(lambda: prometheus.values("pd_coordinator:failed:ratio5m"), "the share", DATA_S)
    assert 0.05 < share[0] < 0.6


def active(prometheus):
    """Alerts that are pending or fire."""
    return {name for name, rule in prometheus.rules().items() if rule["type"] == "alerting" and rule["alerts"]}


def states(prometheus, rule):
    """How far the alerts of a rule have come; it is evaluated now and then."""
    return [alert["state"] for alert in prometheus.rules()[rule]["alerts"]]


async def the_lost_source_is_told(prometheus):
    """By its name, on the board and by the alert; the source that is reached is not."""
    found = await eventually(lambda: prometheus.query("pd_coordinator_discovery_up"), "the sources", DATA_S)
    up = {one["metric"]["source"]: one["value"][1] for one in found}
    assert up == {"dns:decode.test.": "0", one_of(up, "files:"): "1"}
    await eventually(lambda: states(prometheus, "PdCoordinatorDiscoveryLost") == ["pending"], "the alert", DATA_S)
    (alert,) = prometheus.rules()["PdCoordinatorDiscoveryLost"]["alerts"]
    assert alert["labels"]["source"] == "dns:decode.test."
    assert "dns:decode.test. of instances is not reached" in alert["annotations"]["summary"]


def one_of(names, start):
    """The one name that begins so."""
    (found,) = [name for name in names if name.startswith(start)]
    return found


async def labels_are_ours(prometheus):
    """`instance` is an engine instance everywhere, and parts make up the whole."""
    expected = {f"{engine}-{role}" for engine in ("mindie", "vllm") for role in ("prefill", "decode")}
    own = '{job="pd-engines", __name__=~"vllm:num_requests_running|num_requests_running"}'
    for asked_for in ("pd_coordinator_instance_up", "pd_coordinator_engine_scrape_age_seconds", own):
        found = await eventually(lambda query=asked_for: prometheus.query(query), asked_for, DATA_S)
        assert {one["metric"]["instance"] for one in found} == expected
    await eventually(lambda: prometheus.values('up{job=~"pd-.*"}') == [1, 1], "both pages are scraped", DATA_S)
