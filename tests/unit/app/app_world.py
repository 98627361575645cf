"""A whole coordinator process in the test's own loop, over fake instances."""

import json
import socket

import aiohttp
from engine_world import until

from coordinator import config
from coordinator.app import App


class Lines:
    """Takes the place of the access log."""

    def __init__(self):
        self.records = []

    def finished(self, record):
        self.records.append(record)


def document(*instances, engine="hybrid", server=None, **sections):
    """A configuration on free ports."""
    return {
        "server": {"port": 0, "management_port": 0} | (server or {}),
        "cluster": {"engine": engine, "model": "m", "instances": list(instances)},
        "health": {"interval_s": 1, "recover_after": 1},
    } | sections


def entry(name, fake=None, role="hybrid", *, port=9):
    """An instance of the configuration."""
    port = fake.address.port if fake is not None else port
    return {"id": name, "role": role, "url": f"http://127.0.0.1:{port}"}


def settings_of(given):
    return config.parse(json.dumps(given), "test")


class Process:
    """An app that was started, and calls to it."""

    def __init__(self, given, path=None):
        self.lines = Lines()
        self.app = App(settings_of(given), self.lines, path=path)

    async def __aenter__(self):
        await self.app.start()
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.app.aclose()

    async def call(self, path, body=None, *, management=False):
        """(status, headers, body) of one call."""
        port = self.app.management.addresses["management"][1] if management else self.app.server.port
        url = f"http://127.0.0.1:{port}{path}"
        method = "GET" if body is None else "POST"
        async with self.session.request(method, url, data=body, timeout=aiohttp.ClientTimeout(30)) as reply:
            return reply.status, reply.headers, await reply.read()

    async def reload(self):
        """Have the file read again; whether it is in force."""
        try:
            await self.app.control.reloader.reload()
        except config.ConfigError:
            return False
        return True

    async def ready(self):
        await until(lambda: self.app.cluster.ready_pair()[0])

    def ids(self):
        return sorted(row["id"] for row in self.app.cluster.describe() if row["state"] != "draining")


def can_listen(port):
    """Whether nobody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
        return True
