"""The bootstrap ports of prefill instances (SGLang protocol page §7)."""

from collections.abc import Callable

import msgspec

from coordinator.core.instance import Address, Instance, Role
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.wire.sglang_answers import bootstrap_port

DEFAULT_PORT = 8998
INFO_PATHS = ("/get_server_info", "/server_info")  # the second is what newer versions call it
MAX_INFO_BYTES = 4 << 20
KEY = "bootstrap_port"
Tell = Callable[[int | None, bytes], None]
"""Send bytes to one serving process, or to all of them (None)."""


class _Told(msgspec.Struct, array_like=True):
    """What an instance has told: its port, or None once it is gone."""

    key: tuple[str, Role, Address]
    port: int | None


_DECODER = msgspec.msgpack.Decoder(_Told)


class BootstrapPorts:
    """Knows each prefill instance's port: its key, else what the instance itself has told, else 8998.

    An instance without the key is asked at every health check: one that comes back at the same address with another
    port is known within one interval, whether or not a check has failed in between.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._told: dict[tuple[str, Role, Address], int] = {}
        self._tell: Tell | None = None

    def of(self, instance: Instance) -> int:
        """The port to send in `bootstrap_port`."""
        given = instance.options.get(KEY)
        return given if isinstance(given, int) else self._told.get(instance.key, DEFAULT_PORT)

    async def ask(self, instance: Instance, deadline_s: float) -> None:
        """Ask an instance that has no key; what it does not tell leaves the port as it was.

        All of it ends at `deadline_s`, a monotonic time.
        """
        if KEY in instance.options:
            return
        for path in INFO_PATHS:
            try:
                reply = await self._client.fetch(
                    instance.address, b"GET", path, (), deadline_s=deadline_s, max_reply_bytes=MAX_INFO_BYTES
                )
            except TransportError:
                return
            if reply.status == 200:
                port = bootstrap_port(reply.body)
                if port is not None and port != self._told.get(instance.key):
                    self._told[instance.key] = port
                    self._spread(_Told(instance.key, port))
                return

    def forget(self, instance: Instance) -> None:
        """The instance is gone."""
        if self._told.pop(instance.key, None) is not None:
            self._spread(_Told(instance.key, None))

    # --- over several processes: one makes the health checks, the others serve (core.ports.SplitEngine)

    def own(self, tell: Tell) -> None:
        """Tell the serving processes what instances tell."""
        self._tell = tell

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started what the others know."""
        for key, port in self._told.items():
            self._spread(_Told(key, port), worker)

    def told(self, data: bytes) -> None:
        """Take what the process with the health checks was told."""
        told = _DECODER.decode(data)
        if told.port is None:
            self._told.pop(told.key, None)
        else:
            self._told[told.key] = told.port

    def _spread(self, told: _Told, worker: int | None = None) -> None:
        if self._tell is not None:
            self._tell(worker, msgspec.msgpack.encode(told))
