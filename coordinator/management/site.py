"""A port of the management plane."""

import asyncio
import ssl

from aiohttp import web

BACKLOG = 128
HANDSHAKE_S = 10.0
SHUTDOWN_S = 2.0


class Site(web.BaseSite):
    """Listens on a host and port; with TLS if a context is given, whose handshakes have a deadline."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._host = host
        self._port = port

    @property
    def name(self) -> str:
        """The address as a URL."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen; raises OSError."""
        await super().start()
        server = self._runner.server
        assert server is not None  # the runner is set up
        secure = self._ssl_context is not None
        self._server = await asyncio.get_running_loop().create_server(
            server,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            reuse_address=True,
            ssl_handshake_timeout=HANDSHAKE_S if secure else None,
            ssl_shutdown_timeout=SHUTDOWN_S if secure else None,
        )
