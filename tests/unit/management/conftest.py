"""A management plane on real ports, over a cluster whose engine always does well."""

import asyncio
import io
import logging
from collections import defaultdict

import aiohttp
import pytest

from coordinator.cluster import Cluster, HealthSettings
from coordinator.core.instance import Address, Instance, Role
from coordinator.management import Controller, Listen, Management, Traffic


class GoodEngine:
    def attach(self, instance, watcher):
        watcher.linked()

    async def detach(self, instance):
        pass

    async def probe(self, instance):
        return None


class Loads:
    def __init__(self):
        self.of = defaultdict(lambda: (0, 0))
        self.pairs = defaultdict(int)

    def allocated(self, instance_id, /):
        return self.of[instance_id]

    def running(self, instance_id, /):
        return self.of[instance_id][0]

    def pair_running(self, prefill_id, decode_id, /):
        return self.pairs[prefill_id, decode_id]

    def live(self):
        return sum(slots for slots, _ in self.of.values())


def make_instance(given):
    """As the configuration does it, in small."""
    for key in given:
        if key not in ("id", "role", "url", "engine", "model", "inter_comm_port"):
            raise ValueError(f"unknown key {key!r}, did you mean 'url'?")
    if given.get("model") == "odd":
        raise ValueError("model must not be odd")
    host, _, port = str(given["url"]).partition("://")[2].rpartition(":")
    options = {"inter_comm_port": given["inter_comm_port"]} if "inter_comm_port" in given else {}
    return Instance(
        given.get("id", f"{given['role']}-{host}"),
        Role(given["role"]),
        Address(host.strip("[]"), int(port)),
        given.get("engine", "mindie"),
        model=given.get("model"),
        options=options,
    )


@pytest.fixture
def loads():
    return Loads()


@pytest.fixture
def cluster(loads):
    return Cluster(
        {"mindie": GoodEngine(), "hybrid": GoodEngine()},
        HealthSettings(interval_s=60),
        in_flight=lambda instance: loads.of[instance.id][0],
        log=logging.getLogger("test"),
    )


@pytest.fixture
def traffic():
    return Traffic()


@pytest.fixture
def controller(cluster, loads, traffic):
    return Controller(cluster, make_instance, loads, traffic)


@pytest.fixture
def entry():
    """One instance as the controller describes it; static and dynamic keys may be given by name."""

    def make(ident, role, **changed):
        static = {
            "group_id": 0,
            "role": role,
            "p_percentage": 0,
            "max_seq_len": 4096,
            "max_output_len": 1024,
            "total_slots_num": 200,
            "total_block_num": 1024,
            "block_size": 128,
            "label": 2 if role == 80 else 3,
            "virtual_id": ident,
        }
        dynamic = {"avail_slots_num": 200, "avail_block_num": 1000, "peers": [], "prefix_hash": []}
        top = {
            "id": ident,
            "ip": f"10.0.0.{ident % 250}",
            "port": "1025",
            "metric_port": "1027",
            "inter_comm_port": "",
            "model_name": "m",
        }
        for key, value in changed.items():
            part = next(part for part in (static, dynamic, top) if key in part)
            if value is None:
                del part[key]
            else:
                part[key] = value
        return {**top, "static_info": static, "dynamic_info": dynamic}

    return make


class Client:
    """Calls on one port: `await call("GET", "/path")` gives status, JSON (or None) and headers."""

    def __init__(self, session, management):
        self._session = session
        self._management = management

    async def __call__(self, method, path, body=None, *, port="management", headers=None):
        host, number = self._management.addresses[port]
        data = io.BytesIO(body) if isinstance(body, bytes) else None if body is None else aiohttp.JsonPayload(body)
        url = f"http://{host}:{number}{path}"
        async with self._session.request(method, url, data=data, headers=headers) as reply:
            raw = await reply.read()
            is_json = reply.content_type == "application/json" and raw
            return reply.status, (await reply.json() if is_json else raw), reply.headers


@pytest.fixture
async def serve(cluster, controller):
    """Start a management plane; gives it and a client for it."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        started = []

        async def start(**changed):
            ports = {"port": 0, "metrics_port": None, "status_port": None}
            listen = Listen("127.0.0.1", **{key: changed.pop(key, value) for key, value in ports.items()})
            given = {"make_instance": make_instance, "metrics": lambda: "up 1\n", "controller": controller}
            management = Management(listen, cluster, **{**given, **changed})
            started.append(management)
            await cluster.start()
            await management.start()
            return management, Client(session, management)

        yield start
        for management in started:
            await management.aclose()
        await cluster.aclose()


@pytest.fixture
def settled(cluster):
    """Wait until so many instances are ready, checks being immediate."""

    async def wait(count):
        there = asyncio.Event()
        cluster.subscribe(lambda view: there.set() if len(view.ready) == count else None)
        async with asyncio.timeout(5):
            await there.wait()

    return wait
