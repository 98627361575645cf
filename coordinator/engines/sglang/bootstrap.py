"""The bootstrap ports of prefill instances (SGLang protocol page §7)."""

from coordinator.core.instance import Instance
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.wire.sglang_answers import bootstrap_port

DEFAULT_PORT = 8998
INFO_PATHS = ("/get_server_info", "/server_info")  # the second is what newer versions call it
MAX_INFO_BYTES = 4 << 20
KEY = "bootstrap_port"


class BootstrapPorts:
    """Knows each prefill instance's port: its key, else what the instance itself has told, else 8998.

    An instance without the key is asked at every health check: one that comes back at the same address with another
    port is known within one interval, whether or not a check has failed in between.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._told: dict[object, int] = {}

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
                if port is not None:
                    self._told[instance.key] = port
                return

    def forget(self, instance: Instance) -> None:
        """The instance is gone."""
        self._told.pop(instance.key, None)
