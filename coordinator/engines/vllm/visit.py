"""One call that makes a decode instance take KV on: it is left again as soon as it has (vLLM protocol page §1.5)."""

import asyncio
from enum import Enum

from coordinator.core.body import RequestBody
from coordinator.core.instance import Instance
from coordinator.core.request import Headers
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.request import GivenHeaders
from coordinator.transport.sink import ReplySink
from coordinator.wire.events import find_error

OK = 200
FIRST_REFUSAL, FIRST_FAILURE = 400, 500
ASK_LATER = frozenset({408, 425, 429})
MAX_KEPT_BYTES = 16384


class Said(Enum):
    """What came of a call.

    TAKEN: the instance has taken the request on, and frees prefill's blocks by itself, be it aborted.
    REFUSED: it has looked at the request and cannot get the KV; it would say the same the next time.
    NOTHING: nobody answered, or somebody who had not looked at it.
    """

    TAKEN = "taken"
    REFUSED = "refused"
    NOTHING = "nothing"


async def visit(  # noqa: PLR0913  # a request has these parts; they are named at the call
    client: HttpClient,
    decode: Instance,
    target: str,
    headers: GivenHeaders,
    body: RequestBody,
    *,
    within_s: float,
    linger_s: float,
) -> Said:
    """Send a streaming request, and close its connection once it has ended or `linger_s` after its head.

    Cancellation closes the connection.

    Args:
        client: opens the connection.
        decode: whom to ask.
        target: path and query.
        headers: for the engine.
        body: asks for a stream, so that the head tells that the request was taken on.
        within_s: how long the head may take.
        linger_s: how long the engine gets from its head on.
    """
    reply = _Reply()
    stream = None
    try:
        async with asyncio.timeout(within_s):
            stream = await client.open_stream(decode.address, b"POST", target, headers, body, sink=reply)
            await reply.begun.wait()
        async with asyncio.timeout(linger_s):
            await reply.over.wait()
    except TransportError:
        return Said.NOTHING
    except TimeoutError:
        pass  # the head, or its lack, tells all there is to know
    finally:
        if stream is not None:
            stream.close()
    return reply.said


class _Reply(ReplySink):
    """The sink of the reply.

    Attributes:
        begun: the head is there, or will never be.
        over: nothing more will come.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.over = asyncio.Event()
        self._status = 0
        self._body = b""
        self._lost = False

    @property
    def said(self) -> Said:
        """The verdict, by what has come."""
        status = self._status
        if FIRST_REFUSAL <= status < FIRST_FAILURE and status not in ASK_LATER:
            return Said.REFUSED
        if status != OK or self._lost:
            return Said.NOTHING  # a 5xx in place of a stream's head: the engine has not seen the request
        return Said.TAKEN if find_error(self._body) is None else Said.REFUSED

    def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        """Take the status; only a stream that has begun goes on to tell something."""
        self._status = status
        self.begun.set()
        if status != OK:
            self.over.set()

    def data(self, data: bytes, now_s: float) -> None:  # noqa: ARG002
        """Keep the beginning, where an error would stand."""
        self._body += data[: MAX_KEPT_BYTES - len(self._body)]

    def end(self, now_s: float) -> None:  # noqa: ARG002
        """The answer is whole."""
        self.over.set()

    def lost(self, error: TransportError) -> None:  # noqa: ARG002
        """The connection broke."""
        self._lost = True
        self.begun.set()
        self.over.set()
