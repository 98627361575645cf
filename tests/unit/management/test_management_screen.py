"""Keys of the management plane, and the log of who did what."""

import base64
import logging

import aiohttp
import pytest

from coordinator.cluster import Cluster, HealthSettings
from coordinator.core.instance import Address, Instance, Role
from coordinator.management import Listen, Management
from coordinator.security.keys import Key, new_hash, split_hash
from coordinator.security.proxies import TrustedProxies

OPS = {"Authorization": "Bearer the-key-of-ops-1"}
PROBES = ["/v1/startup", "/v1/health", "/v1/readiness", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"]


class Engine:
    def attach(self, instance, watcher):
        watcher.linked()

    async def detach(self, instance):
        pass

    async def probe(self, instance):
        return None


def make_instance(given):
    return Instance(given["id"], Role.HYBRID, Address("10.0.0.1", 1), "e")


@pytest.fixture
async def plane():
    log = logging.getLogger("test.cluster")
    cluster = Cluster({"e": Engine()}, HealthSettings(), in_flight=lambda _: 0, log=log)
    listen = Listen("127.0.0.1", 0, 0, 0)
    management = Management(listen, cluster, make_instance=make_instance, metrics=lambda: "metrics 1\n")
    management.screen.take([Key(0, "ops", split_hash(new_hash("the-key-of-ops-1"))[1])])
    await cluster.start()
    await management.start()
    yield management
    await management.aclose()
    await cluster.aclose()


@pytest.fixture
async def ask(plane):
    async with aiohttp.ClientSession() as session:

        async def send(path, *, method="GET", at="management", headers=None, **more):
            host, port = plane.addresses[at]
            async with session.request(method, f"http://{host}:{port}{path}", headers=headers, **more) as reply:
                await reply.read()
                return reply

        yield send


async def test_without_the_key_nothing_is_told_and_nothing_done(ask):
    for method, path in (
        ("GET", "/v1/instances"),
        ("POST", "/v1/instances"),
        ("GET", "/nothing"),
        ("PUT", "/v1/health"),
    ):
        reply = await ask(path, method=method)
        assert reply.status == 401, path
        assert reply.headers["WWW-Authenticate"].startswith("Bearer ")
    assert (await ask("/v1/instances", headers={"Authorization": "Bearer wrong"})).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        OPS,
        {"x-api-key": "the-key-of-ops-1"},
        {"Authorization": "Basic " + base64.b64encode(b"x:the-key-of-ops-1").decode()},
    ],
)
async def test_with_it_everything_is_as_ever(ask, headers):
    assert (await ask("/v1/instances", headers=headers)).status == 200


async def test_probes_and_metrics_are_open(ask, plane):
    for path in PROBES:
        assert (await ask(path)).status in (200, 503), path
        assert (await ask(path, at="status")).status in (200, 503), path
    assert (await ask("/metrics", at="metrics")).status == 200
    plane.screen.open_metrics = False
    assert (await ask("/metrics", at="metrics")).status == 401
    assert (await ask("/metrics", at="metrics", headers=OPS)).status == 200
    for path in PROBES:
        assert (await ask(path)).status in (200, 503), path


async def test_what_changes_something_or_is_refused_is_logged_with_who_and_from_where(ask, plane, caplog):
    caplog.set_level(logging.INFO, "pd_coordinator.audit")
    await ask("/v1/instances", method="POST", json={"id": "i1"})
    await ask("/v1/instances", headers=OPS)
    await ask("/v1/instances", method="POST", json={"id": "i1"}, headers=OPS)
    plane.screen.proxies = TrustedProxies(["127.0.0.1"])
    await ask("/v1/instances/i1", method="DELETE", headers={**OPS, "X-Forwarded-For": "10.1.1.1"})
    await ask("/v1/instances/%0Ax", method="DELETE", headers=OPS)
    origin = {**OPS, "Origin": "http://evil.example"}
    await ask("/v1/instances", method="POST", json={"id": "i2"}, headers=origin)
    assert [record.getMessage().removeprefix("management call ") for record in caplog.records] == [
        "key=- client=127.0.0.1 method=POST path=/v1/instances status=401",
        'key=ops client=127.0.0.1 method=POST path=/v1/instances about="i1 http://10.0.0.1:1" status=201',
        "key=ops client=10.1.1.1 method=DELETE path=/v1/instances/i1 status=202",
        'key=ops client=127.0.0.1 method=DELETE path="/v1/instances/\\nx" status=404',
        "key=- client=127.0.0.1 method=POST path=/v1/instances status=403",
    ]


async def test_reading_is_logged_at_debug(ask, caplog):
    caplog.set_level(logging.DEBUG, "pd_coordinator.audit")
    await ask("/v1/health")
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


async def test_keys_that_are_exchanged_count_at_once(ask, plane):
    plane.screen.take([Key(0, "new", split_hash(new_hash("another-key-of-ops"))[1])])
    assert (await ask("/v1/instances", headers=OPS)).status == 401
    plane.screen.take([])
    assert (await ask("/v1/instances", headers=OPS)).status == 401
    plane.screen.take(None)
    assert (await ask("/v1/instances")).status == 200


async def test_whoever_shows_a_key_may_use_any_name(ask):
    named = {**OPS, "Host": "ops.example", "Origin": "http://ops.example"}
    reply = await ask("/v1/instances", method="POST", json={"id": "i1"}, headers=named)
    assert reply.status == 201
    reply = await ask(
        "/v1/instances", method="POST", json={"id": "i2"}, headers={**named, "Origin": "http://evil.test"}
    )
    assert reply.status == 403
