"""A server for baidu_std, the protocol in which xLLM instances call the coordinator (xLLM protocol page §2, §5.2)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from coordinator.wire.prpc import (
    INTERNAL,
    NO_METHOD,
    NO_SERVICE,
    Frame,
    PayloadError,
    PrpcError,
    PrpcParser,
    encode_error,
    encode_reply,
)

Method = Callable[[bytes, "Caller"], bytes]
"""Answers one call: payload in, payload out. Called on the event loop, so it must not take long.

Raises:
    PayloadError: the payload is not what the method takes.
"""

SHORTEST_SWEEP_S = 0.05
LONGEST_SWEEP_S = 1.0
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class PrpcLimits:
    """What callers may do.

    Attributes:
        max_connections: further ones are closed at once.
        max_body_bytes: a longer frame, or a payload that expands to more, is refused.
        max_unsent_bytes: replies that may pile up for a caller that does not read; above, its connection is closed.
        frame_s: a frame that has begun must be all there within so many seconds.
    """

    max_connections: int = 1024
    max_body_bytes: int = 64 << 20
    max_unsent_bytes: int = 4 << 20
    frame_s: float = 30.0


class Caller:
    """One connection, as methods see it.

    Attributes:
        name: who is at its other end, once a method has found that out; empty until then.
    """

    def __init__(self) -> None:
        self.name = ""


class PrpcServer:
    """Listens for baidu_std.

    Connections stay open for as long as the caller likes: channels of brpc are kept for the life of a process. Calls of
    one connection are answered in the order in which they came, each under its own correlation id.

    Args:
        services: methods by service and method name.
        limits: what callers may do.
        log: gets one line for each connection that is closed for what it sent, and faults of methods.
        clock: monotonic seconds.

    Attributes:
        port: the real port, once listening.
        closed: no connection is taken any more; one may have been accepted in the turn of the loop before.
    """

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Method]],
        limits: PrpcLimits,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = 0
        self._services = services
        self.limits = limits
        self.log = log
        self.clock = clock
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._empty = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self.closed = False

    async def listen(self, host: str, port: int) -> None:
        """Bind and accept; port 0: the system's choice.

        Raises:
            OSError: it cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host or None, port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweep_later()

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def aclose(self) -> None:
        """Stop listening and close every connection."""
        self.closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            # the transports tell their ends in the next turns of the loop
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._empty.wait()

    # --- for the connections

    def admit(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if len(self._connections) >= self.limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def gone(self, connection: "_Connection") -> None:
        """A connection is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def answer(self, frame: Frame, caller: Caller) -> bytes:
        """Do what one frame asks for; returns the frame of the reply. Hot."""
        meta = frame.meta
        correlation_id = meta.correlation_id
        methods = self._services.get(meta.request.service_name)
        if methods is None:
            return encode_error(correlation_id, NO_SERVICE, "no such service")
        method = methods.get(meta.request.method_name)
        if method is None:
            return encode_error(correlation_id, NO_METHOD, "no such method")
        try:
            return encode_reply(correlation_id, method(frame.expanded(self.limits.max_body_bytes), caller))
        except PayloadError as error:
            return encode_error(correlation_id, error.code, str(error))
        except Exception:  # the border: one call's fault must not end the connection of all others
            self.log.exception("a call of %s failed inside the coordinator", meta.request.method_name)
            return encode_error(correlation_id, INTERNAL, "internal error")

    # --- time

    def _sweep_later(self) -> None:
        delay_s = min(LONGEST_SWEEP_S, max(SHORTEST_SWEEP_S, self.limits.frame_s / 4))
        self._sweep_timer = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_later()
        self.expire(self.clock())

    def expire(self, now_s: float) -> None:
        """Close the connections whose frame is not all there in time."""
        for connection in [c for c in self._connections if now_s - c.frame_since_s > self.limits.frame_s]:
            connection.refuse("a frame is not complete in time")


class _Connection(asyncio.Protocol):
    """One caller.

    Attributes:
        frame_since_s: when the frame that is not yet complete began; infinity: there is none.
    """

    def __init__(self, server: PrpcServer) -> None:
        self._server = server
        self._parser = PrpcParser(server.limits.max_body_bytes)
        self._transport: asyncio.Transport | None = None
        self._caller = Caller()
        self.frame_since_s = float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection if there is room."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by shape, not by descent
        if self._server.closed:
            self.abort()
        elif not self._server.admit(self):
            self.refuse("there are too many connections")

    def data_received(self, data: bytes) -> None:
        """Answer the calls that are complete."""
        try:
            frames = self._parser.feed(data)
        except PrpcError as error:
            self.refuse(str(error))
            return
        transport = self._transport
        if transport is None:
            return
        if frames:
            if any(not frame.meta.HasField("request") for frame in frames):
                self.refuse("a frame is no call")
                return
            transport.write(b"".join([self._server.answer(frame, self._caller) for frame in frames]))
            if transport.get_write_buffer_size() > self._server.limits.max_unsent_bytes:
                self.refuse("replies are not read")
                return
        if self._parser.idle:
            self.frame_since_s = float("inf")
        elif frames or self.frame_since_s == float("inf"):
            self.frame_since_s = self._server.clock()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  # a caller that leaves is no fault
        """Take note of its end."""
        self._transport = None
        self._server.gone(self)

    def refuse(self, reason: str) -> None:
        """Close it for a reason that the log tells."""
        if self._transport is not None:
            self._server.log.warning("a connection of an xLLM instance is closed: %s", reason)
            self.abort()

    def abort(self) -> None:
        """Close it without waiting for what is unsent."""
        self.frame_since_s = float("inf")
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
