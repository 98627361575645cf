"""The server that instances call, from the first of them on."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.engines.xllm.info import MAX_PORT
from coordinator.engines.xllm.registry import Registry
from coordinator.engines.xllm.settings import XllmSettings

if TYPE_CHECKING:
    from coordinator.engines.xllm.service import Deliver
    from coordinator.rpc.prpc import PrpcServer

RETRY_S = 1.0


class Inbound:
    """Opens the server once somebody needs it.

    Attributes:
        open: set while it listens.
        address: `host:port` under which instances reach it; empty until it listens.
        on_open: told the address.
    """

    def __init__(self, settings: XllmSettings, registry: Registry, deliver: "Deliver", log: logging.Logger) -> None:
        self._settings = settings
        self._registry = registry
        self._deliver = deliver
        self._log = log
        self._server: PrpcServer | None = None
        self._opening: asyncio.Task[None] | None = None
        self.open = asyncio.Event()
        self.address = ""
        self.on_open: Callable[[str], None] | None = None

    async def listen(self) -> None:
        """Open it here and now.

        Raises:
            OSError: the port cannot be had.
        """
        # protobuf is needed by those alone who have xLLM instances
        from coordinator.engines.xllm.service import services  # noqa: PLC0415
        from coordinator.rpc.prpc import PrpcLimits, PrpcServer  # noqa: PLC0415

        if self._server is not None:
            return
        settings = self._settings
        limits = PrpcLimits(
            max_connections=settings.max_connections,
            max_body_bytes=settings.max_message_bytes,
        )
        server = PrpcServer(services(self._registry, self._deliver), limits, self._log)
        await server.listen(settings.rpc_host, settings.rpc_port)
        self._server = server
        self.address = settings.advertise or _netloc(settings.rpc_host, server.port)
        self._log.info("xLLM instances reach this coordinator at %s", self.address)
        if self.on_open is not None:
            self.on_open(self.address)
        self.open.set()

    def want(self) -> None:
        """Open it soon, and keep trying while the port cannot be had."""
        if self._server is None and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open(), name="open xLLM server")

    async def _open(self) -> None:
        complained = False
        while True:
            try:
                await self.listen()
            except OSError as error:
                if not complained:
                    complained = True
                    where = _netloc(self._settings.rpc_host, self._settings.rpc_port)
                    self._log.error("cannot listen for xLLM instances at %s: %s", where, error.strerror or error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def aclose(self) -> None:
        """Close it."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        server, self._server = self._server, None
        self.open.clear()
        if server is not None:
            await server.aclose()


def _netloc(host: str, port: int) -> str:
    assert 0 <= port <= MAX_PORT
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
