"""The HTTP client of the token legs and of all other calls to engines."""

import asyncio
import math
import time
from collections.abc import Callable

from coordinator.core.body import RequestBody
from coordinator.core.instance import Address

from .connect import Connector
from .connection import Connection
from .errors import KEY_REFUSED, TransportError, key_refused
from .peers import Peers
from .pool import Pool
from .reply import Reply
from .request import Call, GivenHeaders, encode_call
from .resolve import Resolver
from .sink import ReplySink
from .stream import SecondChance, Stream, WithKey
from .unary import FutureReply

MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_HEAD_BYTES = 64 << 10


class HttpClient:
    """HTTP/1.1 client with a pool of idle connections per address and no limit to those in use.

    A request goes out on the idle connection that was used last, else on a new one. An idle connection may be closed by
    the engine just as the request is written; unless `retry_stale` is off, the request is then sent once more, on a new
    connection, provided that no byte of a reply came. An engine that dies between reading a request and answering looks
    the same, so a request that must never run twice turns it off.

    Where an address gets a key (`peers`), a reply of 401 or 403 is no reply but a failure, `key_refused`.

    Args:
        connect_s: limit for look-up, TCP connect and TLS handshake together; 0: none.
        idle_s: idle connections are closed after this time.
        max_idle_per_address: connections that are kept idle per address, at most.
        peers: how addresses are spoken to; may be told anew at any time.
        clock: monotonic time.
        resolver: looks names up; None: the system's resolver.
    """

    def __init__(
        self,
        *,
        connect_s: float,
        idle_s: float = 60.0,
        max_idle_per_address: int = 256,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
        resolver: Resolver | None = None,
    ) -> None:
        self._clock = clock
        self.peers = peers or Peers()
        self._connector = Connector(connect_s=connect_s, peers=self.peers, resolver=resolver)
        self._pool = Pool(idle_s=idle_s, max_idle_per_address=max_idle_per_address, clock=clock)
        self._retries: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that this client works on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    @property
    def open_connections(self) -> int:
        """Connections in use or idle."""
        return self._pool.open_count

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return self._pool.idle_count

    async def fetch(  # noqa: PLR0913  # a request has these parts; they are named at the call
        self,
        address: Address,
        method: bytes,
        target: str,
        headers: GivenHeaders,
        body: RequestBody = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        max_error_bytes: int = MAX_ERROR_BYTES,
        keep: bool = False,
        retry_stale: bool = True,
    ) -> Reply:
        """Send a request and return the whole reply, of any status.

        Cancellation closes the connection, which is how an engine learns that nobody waits.

        Args:
            address: where to.
            method: in capitals.
            target: path and query.
            headers: without `host`, framing and hop-by-hop headers.
            body: the request's body.
            deadline_s: absolute monotonic time; infinity: none.
            max_reply_bytes: a longer body, after expansion, is `reply_too_large`.
            max_error_bytes: the body of a reply with status 400 or above is cut there, and the connection closed.
            keep: use the connection again although the reply says `Connection: close`, which a MindIE prefill says
                and does not do (MindIE protocol page §4.2).
            retry_stale: see the class; when it is off, such a failure has `unsent` set.

        Raises:
            TransportError: there is no whole reply.
            ValueError: the request cannot be written down (see `encode_call`).
        """
        head, rest = encode_call(method, target, address, headers, body, self.peers.of(address).key)
        call = Call(head, rest, method == b"HEAD", keep, MAX_HEAD_BYTES)
        limits = (max_reply_bytes, max_error_bytes)
        if deadline_s <= self._clock():
            raise TransportError("timeout", f"{address.netloc}: no time left to ask", unsent=True)
        connection = self._pool.take(address)
        if connection is not None:
            try:
                return await self._exchange(connection, call, limits, deadline_s)
            except TransportError as error:
                if not (retry_stale and error.unsent):
                    raise
        connection = await self._connect(address, deadline_s)
        return await self._exchange(connection, call, limits, deadline_s)

    async def open_stream(  # noqa: PLR0913  # as fetch
        self,
        address: Address,
        method: bytes,
        target: str,
        headers: GivenHeaders,
        body: RequestBody = b"",
        *,
        sink: ReplySink,
        max_head_bytes: int = MAX_HEAD_BYTES,
        retry_stale: bool = True,
    ) -> Stream:
        """Send a request and let the socket drive `sink` with the reply, of any status.

        Returns once the request is handed to the socket. There is no deadline beyond that of connecting: the caller
        closes the stream when it has waited for long enough. Cancellation leaves no connection in use.

        Raises:
            TransportError: there is no connection; the sink was not called.
            ValueError: as `fetch`.
        """
        key = self.peers.of(address).key
        head, rest = encode_call(method, target, address, headers, body, key)
        call = Call(head, rest, method == b"HEAD", keep=False, max_head_bytes=max_head_bytes, flowing=True)
        stream = Stream()
        if key:
            sink = WithKey(stream, sink, address)
        connection = self._pool.take(address)
        if connection is None:
            connection = await self._connect(address)
        elif retry_stale:
            sink = SecondChance(stream, call, sink, address, self._retry)
        stream.run(connection, call, sink)
        return stream

    def limit_connecting(self, connect_s: float) -> None:
        """Connect within this time from here on; 0: no limit."""
        self._connector.limit(connect_s)

    def close_address(self, address: Address) -> None:
        """Close the connections to an instance that was removed: idle ones now, others when their request is over."""
        self._pool.close_address(address)

    async def aclose(self) -> None:
        """Close everything. Requests that still run, and later ones, end with the reason `closed`."""
        self._closed = True
        for task in tuple(self._retries):
            task.cancel()
        await asyncio.gather(*self._retries, return_exceptions=True)
        await self._pool.aclose()

    # --- inside

    async def _exchange(self, connection: Connection, call: Call, limits: tuple[int, int], deadline_s: float) -> Reply:
        loop = self.loop
        future: asyncio.Future[Reply] = loop.create_future()
        claim = connection.begin(call, FutureReply(future, *limits))
        timer = None
        if deadline_s != math.inf:
            timer = loop.call_later(max(0.0, deadline_s - self._clock()), connection.expire, claim)
        try:
            reply = await future
        finally:
            if timer is not None:
                timer.cancel()
            connection.abandon(claim)  # does nothing after a whole reply
            del future  # the error in it knows this frame, which would be a cycle
        if reply.status in KEY_REFUSED and self.peers.of(connection.address).key:
            raise key_refused(reply.status, connection.address.netloc)
        return reply

    async def _connect(self, address: Address, deadline_s: float = math.inf) -> Connection:
        self._demand_open()
        made: list[Connection] = []  # one for each try

        def make() -> Connection:
            made.append(Connection(address, self._pool, self._clock))
            return made[-1]

        try:
            connection = await self._connector.open(address, make, deadline_s - self._clock())
        except BaseException:
            for each in made:
                each.give_up()
            raise
        try:
            self._demand_open()
        except TransportError:
            connection.close()
            raise
        self._pool.add(connection)
        return connection

    def _demand_open(self) -> None:
        if self._closed:
            raise TransportError("closed", "the client was closed", unsent=True)

    def _retry(self, address: Address, stream: Stream, call: Call, sink: ReplySink) -> asyncio.Task[None]:
        work = self._run_anew(address, stream, call, sink)
        task = asyncio.get_running_loop().create_task(work, name="transport-retry")
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)
        return task

    async def _run_anew(self, address: Address, stream: Stream, call: Call, sink: ReplySink) -> None:
        try:
            stream.run(await self._connect(address), call, sink)
        except TransportError as error:
            sink.lost(error.with_traceback(None))  # a sink may keep it, and these frames know the sink
