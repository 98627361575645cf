"""An xLLM instance: what belongs to it, and the way of a request to its role."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from instances.batch import Batch
from instances.faults import Menu
from instances.server import Instance
from instances.xllm import http
from instances.xllm.blocks import BlockIds, TellingCache
from instances.xllm.calls import Calls
from instances.xllm.channel import Channel
from instances.xllm.decode import Decode
from instances.xllm.errors import RpcLost, code_of
from instances.xllm.http import Http
from instances.xllm.intake import Intake
from instances.xllm.kv import KvTransfer, Links
from instances.xllm.outbox import Outbox
from instances.xllm.plain import Plain
from instances.xllm.prefill import Prefill
from instances.xllm.presence import Presence
from instances.xllm.registration import Registration
from instances.xllm.services import Services
from instances.xllm.serving import Connections
from instances.xllm.settings import MENU, Settings

_NOTES_KEPT = 100


class XllmEngine:
    """The xLLM part of an instance.

    Attributes:
        type: PREFILL, DECODE, DEFAULT or MIX.
        pd_port: of DisaggPDService; 0: not open yet.
        aborts: why the process died, each time.
        notes: the newest lines of its log.
    """

    menu: Menu = MENU
    health_paths = frozenset({"/health"})
    aborts_on_disconnect = True

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        options = instance.options
        self.settings = Settings.read(options.settings)
        self.type = self.settings.type_for(options.role)
        self.pd_port = 0
        self.created = int(time.time())
        self.aborts: list[str] = []
        self.notes: deque[str] = deque(maxlen=_NOTES_KEPT)
        self._channels: dict[str, Channel] = {}
        self.block_ids = BlockIds()
        tells = bool(self.settings.cache_events)
        self.cache = TellingCache(instance.prefix, options.prefix_blocks, options.block_tokens, tells=tells)
        self.links = Links(self)
        self.kv = KvTransfer(self)
        self.outbox = Outbox(self)
        self.prefill = Prefill(self)
        self.decode = Decode(self)
        self.batch = Batch(instance.clockwork, options.max_running, self.outbox.room, self.decode.flush)
        self.plain = Plain(self)
        self.intake = Intake(self)
        self.services = Services(self)
        self.presence = (Registration if self.settings.etcd else Presence)(self)
        self.connections = Connections(instance.tasks, Calls(self).serve)
        self._http = Http(self)

    # --- what the server asks for

    def routes(self) -> Iterable[web.RouteDef]:
        """All paths."""
        return self._http.routes()

    def infers(self, method: str, path: str) -> bool:
        """Whether this is an inference request."""
        return method == "POST" and http.is_inference(path)

    def error(self, status: int, text: str) -> web.Response:
        """An error as brpc gives it."""
        return http.error(status, code_of(status), text)

    def accept(self, make_http: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """A new connection: its first bytes decide what it speaks."""
        return self.connections.accept(make_http)

    async def start(self) -> None:
        """Start the loops, and make the instance known."""
        tasks, name = self.instance.tasks, self.instance.name
        tasks.spawn(self.batch.run(), f"{name} decodes")
        tasks.spawn(self.prefill.run(), f"{name} hands over")
        tasks.spawn(self.outbox.run(), f"{name} tells the service")
        tasks.spawn(self.plain.serving.batch.run(), f"{name} infers")
        await self.presence.start()

    def went_down(self) -> None:
        """Cut everything, as when a process dies."""
        self.presence.ready = False
        for transport in list(self.connections.open):
            transport.abort()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.links.clear()
        self.cache.clear()
        self.instance.tasks.spawn(self.presence.stop(), f"{self.instance.name} is gone")

    def came_up(self) -> None:
        """Another incarnation."""
        self.instance.tasks.spawn(self.presence.start(), f"{self.instance.name} is back")

    def forget(self) -> None:
        """Lose all requests."""
        self.prefill.forget()
        self.decode.forget()
        self.batch.clear()
        self.outbox.clear()
        self.plain.serving.forget()

    async def aclose(self) -> None:
        """Leave, and end everything that waits."""
        await self.presence.leave()
        self.forget()
        for transport in list(self.connections.open):
            transport.abort()
        for channel in self._channels.values():
            channel.close()
        await asyncio.sleep(0)

    def announce(self) -> str:
        """The port of DisaggPDService, once it is open."""
        return f"pd_port {self.pd_port}" if self.pd_port else ""

    def state(self) -> dict[str, Any]:
        """What is going on, as JSON."""
        return {
            "type": self.type,
            "pd_port": self.pd_port,
            "presence": self.presence.state(),
            "links": {"peers": self.links.names(), "asked": self.links.asked, "failed": self.links.failed,
                      "implicit": self.links.implicit, "unlinked": self.services.unlinks},
            "kv_transfer": self.kv.state(),
            **self.prefill.state(),
            **self.decode.state(),
            "batch": {"running": self.batch.running, "waiting": self.batch.waiting},
            "generations": self.outbox.state(),
            "rpc_connections": len(self.connections.open),
            "bad_frames": self.connections.bad_frames,
            "other_ids": self.intake.other_ids,
            "asleep": self.intake.asleep,
            "aborts": self.aborts,
            "log": list(self.notes),
        }  # fmt: skip

    def act(self, name: str, value: str) -> None:
        """service (`ip:port`, without etcd), lose_key (with etcd), sleep, wake, abort (the reason)."""
        if name == "service" and not self.settings.etcd:
            self.presence.master = value
        elif name in ("sleep", "wake") and not value:
            self.intake.asleep = name == "sleep"
        elif name == "lose_key" and isinstance(self.presence, Registration):
            self.instance.tasks.spawn(self.presence.lose_key(), f"{self.instance.name} loses its key")
        elif name == "abort":
            self.abort(value or "on request")
        else:
            raise ValueError(f"cannot do {name!r}")

    # --- who it is

    @property
    def name(self) -> str:
        """Its name in the cluster, which is the address of its API."""
        return f"{self.instance.host}:{self.instance.port}"

    @property
    def cluster_ids(self) -> list[int]:
        """One for each worker."""
        first = self.instance.port << 8
        return [first + number for number in range(self.settings.dp_size * self.settings.tp_size)]

    @property
    def addrs(self) -> list[str]:
        """Where the workers' links are."""
        return [self.instance.host for _ in self.cluster_ids]

    @property
    def link_ports(self) -> list[int]:
        """Ports of the workers' links."""
        return [(20_000 + number) for number in range(len(self.cluster_ids))]

    def is_other(self, described: dict[str, Any]) -> bool:
        """Whether a peer was told values that are not ours; without etcd nobody can know them, so nothing is."""
        own = {"cluster_ids": self.cluster_ids, "addrs": self.addrs, "ports": self.link_ports}
        return bool(self.settings.etcd) and any(described[key] != value for key, value in own.items())

    async def open_pd_port(self) -> None:
        """Listen for prefill instances, from the first start on."""
        if not self.pd_port and self.type != "DEFAULT":
            self.pd_port = await self.instance.listen_too(self.settings.pd_port)

    def channel(self, address: str) -> Channel:
        """Calls to an address; raises RpcLost if it is none."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise RpcLost(f"{address!r} is not ip:port")
        if address not in self._channels:
            self._channels[address] = Channel(address, self.instance.faults.always, self.settings.rpc_timeout_s)
        return self._channels[address]

    # --- requests

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self.prefill.waiting + self.batch.waiting + self.instance.ledger.waiting

    # --- troubles

    def note(self, text: str) -> None:
        """A line for the log."""
        self.notes.append(text)

    def abort(self, why: str) -> None:
        """A check fails that the real engine does not survive: the process dies."""
        self.aborts.append(why)
        sys.stderr.write(f"{self.instance.name}: {why}: the process dies\n")
        self.instance.crash(self.settings.restart_s if self.settings.restart_s >= 0 else None)
