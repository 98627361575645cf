"""The client's side of baidu_std: calls over one connection to one address, as brpc's channels make them."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar, cast

from google.protobuf.message import DecodeError, Message

from instances.faults import Chosen
from instances.xllm.errors import EREQUEST, RpcError, RpcLost
from instances.xllm.frames import BadFrame, BadPayload, Frame, Reader, request
from instances.xllm.wire import Wire

_RETRIES = 3
_PAUSE_S = 0.05
_CONNECT_S = 5.0
_Reply = TypeVar("_Reply", bound=Message)


class Channel:
    """Calls to one address; it connects when there is something to say.

    Args:
        address: `ip:port`.
        shape: gives the faults that hold for frames at the time of a call.
        deadline_s: for one call, all its attempts together.
    """

    def __init__(self, address: str, shape: Callable[[], Chosen], deadline_s: float) -> None:
        self.address = address
        self._shape = shape
        self._deadline_s = deadline_s
        self._ids = itertools.count(1)
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()

    async def call(self, names: tuple[str, str], message: Message, reply: type[_Reply]) -> _Reply:
        """Make a call, again on another connection if one breaks: the peer may get it more than once.

        Args:
            names: full name of the service, name of the method.
            message: what to send.
            reply: what comes back.

        Raises:
            RpcError: the peer answered with an error.
            RpcLost: no answer.
        """
        payload = message.SerializeToString()
        try:
            async with asyncio.timeout(self._deadline_s):
                frame = await self._attempts(names, payload)
        except TimeoutError:
            raise RpcLost(f"{self.address} did not answer {names[1]} in {self._deadline_s:g} s") from None
        if frame.meta.response.error_code:
            raise RpcError(frame.meta.response.error_code, frame.meta.response.error_text)
        try:
            return reply.FromString(frame.message())
        except (DecodeError, BadPayload) as bad:
            raise RpcError(EREQUEST, f"the answer to {names[1]} cannot be read: {bad}") from None

    async def _attempts(self, names: tuple[str, str], payload: bytes) -> Frame:
        for attempt in itertools.count():
            try:
                link = await self._linked()
                chosen, number = self._shape(), next(self._ids)
                return await link.ask(request(*names, number, payload, gzip="gzip_frames" in chosen), chosen)
            except OSError as broken:
                if attempt == _RETRIES:
                    raise RpcLost(f"{self.address}: {str(broken) or type(broken).__name__}") from None
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError

    async def _linked(self) -> "_Link":
        async with self._connecting:
            if self._link is None or self._link.closed:
                host, _, port = self.address.rpartition(":")
                async with asyncio.timeout(_CONNECT_S):
                    loop = asyncio.get_running_loop()
                    _, self._link = await loop.create_connection(_Link, host.strip("[]"), int(port))
            return self._link

    def close(self) -> None:
        """Drop the connection; calls on it fail."""
        if self._link is not None:
            self._link.abort()
            self._link = None


class _Link(asyncio.Protocol):
    """One connection; answers find their calls by correlation id."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._wire: Wire | None = None
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = Wire(cast("asyncio.Transport", transport))  # uvloop's is not a subclass

    async def ask(self, frame: Frame, chosen: Chosen) -> Frame:
        """Send a call and wait for its answer; raises OSError when the connection breaks."""
        if self.closed or self._wire is None:
            raise ConnectionResetError("the connection is closed")
        number = frame.meta.correlation_id
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._wire.send(frame, chosen)
            return await answer
        finally:
            self._asked.pop(number, None)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                answer = self._asked.get(frame.meta.correlation_id)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
        except BadFrame:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError(str(exc or "the peer closed the connection")))

    def abort(self) -> None:
        """Cut the connection."""
        self.closed = True
        if self._wire is not None:
            self._wire.transport.abort()
