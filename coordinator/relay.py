"""The way back: what an engine sends goes to the client's socket as it comes.

The relay alone knows whether anything was sent: before the first byte a failure is a status, after it an error event
and a connection that closes without the last chunk, so that no client takes a broken answer for a whole one.
"""

import math
from collections.abc import Callable
from http import HTTPStatus

from coordinator.core.errors import EngineRefused, InvalidKey, RequestError, SlowClient, WrongMethod
from coordinator.core.out import Out
from coordinator.core.ports import ApiFamily
from coordinator.core.request import Headers
from coordinator.observability.access import RequestRecord
from coordinator.observability.metrics import ApiMetrics
from coordinator.server.exchange import Exchange

STREAM_HEADERS: Headers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
JSON: Headers = ((b"content-type", b"application/json"),)
CHALLENGE = (b"www-authenticate", b'Bearer realm="pd-coordinator"')  # RFC 9110 §15.5.2, RFC 6750 §3
SAY_AGAIN_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Relay(Out):
    """Implements core.ports.Out for one request of one client.

    Args:
        exchange: the client's request and the means to answer it.
        family: whose shapes errors and ends have.
        metrics: the family's cells.
        record: filled with what was sent and when.
        limit_bytes: what may pile up for this client before it is cut off.
        tell_route: whether the answer names the instances that made it.

    Attributes:
        pieces: how often something was sent.
        events: tokens of a stream among them, as far as they can be told apart.
        bytes_out: body bytes sent. The record has these two from `settle` on.
        on_cut: told that the client is too slow to be served.
    """

    __slots__ = (
        "_exchange", "_family", "_itl", "_last_s", "_limit_bytes", "_mark", "_metrics", "_pause", "_paused", "_record",
        "_resume", "_tell_route", "bytes_out", "events", "on_cut", "pieces",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        family: ApiFamily,
        metrics: ApiMetrics,
        record: RequestRecord,
        *,
        limit_bytes: int,
        tell_route: bool,
    ) -> None:
        self._exchange = exchange
        self._family = family
        self._metrics = metrics
        self._itl = metrics.itl
        self._record = record
        self._limit_bytes = limit_bytes
        self._tell_route = tell_route
        self._mark = family.ends_with.rpartition(b" ")[2].strip()
        self._last_s = math.nan  # time of the last token; nan: none yet
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._paused = False
        self.pieces = self.events = self.bytes_out = 0
        self.on_cut: Callable[[RequestError], None] | None = None

    @property
    def started(self) -> bool:
        """Whether anything was sent to the client."""
        return self._exchange.started

    @property
    def last_token_s(self) -> float:
        """Monotonic time of the last token; nan before the first."""
        return self._last_s

    @property
    def family(self) -> ApiFamily:
        """The client's dialect."""
        return self._family

    # --- from the engine

    def piece(self, data: bytes, now_s: float, *, token: bool = True) -> None:
        """Send stream bytes; hot."""
        exchange = self._exchange
        if exchange.started:
            exchange.write(data)
        else:
            exchange.start(HTTPStatus.OK, self._stream_headers(), data)
            self._record.status = HTTPStatus.OK
        self.pieces += 1
        self.bytes_out += len(data)
        if token:
            self._token(now_s)
        if exchange.congested:
            self._congested()

    def finish(self, data: bytes, now_s: float, *, token: bool = True, after: bytes = b"") -> None:
        """Send the last stream bytes and the end."""
        if self._mark and not (after + data).rstrip().endswith(self._mark):
            data += self._family.ends_with
        elif data.strip() == self._family.ends_with.strip():
            token = False
        if not self._exchange.started:
            self._exchange.start(HTTPStatus.OK, self._stream_headers(), b"")
            self._record.status = HTTPStatus.OK
        self.pieces += 1
        self.bytes_out += len(data)
        if token:
            self._token(now_s)
        self._exchange.end(data)

    def whole(self, body: bytes, now_s: float, content_type: bytes = b"application/json") -> None:
        """Send a complete answer that is not a stream."""
        self.pieces += 1
        self._token(now_s)
        self.answer(HTTPStatus.OK, body, content_type)

    def only_opens(self, data: bytes) -> bool:
        """Whether a stream piece opens the stream and says nothing yet."""
        return self._family.only_opens(data)

    def ends(self, data: bytes) -> bool:
        """Whether the last bytes of a stream hold the family's sign of a whole answer."""
        return self._family.ends(data)

    def paced_by(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Slow this request's own source down while the client is slow."""
        self._pause, self._resume = pause, resume

    def hold(self) -> None:
        """See core.gather."""
        self._exchange.hold()

    def flush(self) -> None:
        """See core.gather; how slow the client is shows only here."""
        exchange = self._exchange
        exchange.flush()
        if exchange.congested and not (exchange.finished or exchange.gone):
            self._congested()

    # --- from the front door

    def settle(self) -> None:
        """Write into the record how much was sent."""
        self._record.events, self._record.bytes_out = self.events, self.bytes_out

    def answer(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a complete answer."""
        headers = (*self._common_headers(), (b"content-type", content_type))
        self._record.status = status
        self.bytes_out = len(body)
        self.settle()
        self._exchange.respond(status, headers, body)

    def fail(self, error: RequestError) -> None:
        """Tell the client how its request failed, in the way that is still open."""
        exchange = self._exchange
        if isinstance(error, SlowClient):
            exchange.cut()
        elif exchange.finished:
            return
        elif exchange.started:
            event = self._family.error_event(error)
            self.bytes_out += len(event)
            exchange.break_off(event)
        else:
            body = self._family.error_body(error)
            self._record.status, self.bytes_out = error.status, len(body)
            exchange.respond(error.status, self._error_headers(error), body)
        self.settle()

    # --- inside

    def _token(self, now_s: float) -> None:
        gap_s = now_s - self._last_s
        self._last_s = now_s
        self.events += 1
        if gap_s >= 0:
            self._itl.observe(gap_s)
        elif gap_s != gap_s:  # noqa: PLR0124  # nan: this is the first token
            ttft_s = now_s - self._exchange.arrived_s
            self._record.ttft_s = ttft_s
            self._metrics.ttft.observe(ttft_s)

    def _congested(self) -> None:
        """The client is slow: slow its source down where it has one of its own, and bound what piles up."""
        if self._pause is not None and not self._paused:
            self._paused = True
            self._pause()
            self._exchange.on_writable = self._writable
        if self._exchange.buffered_bytes() > self._limit_bytes and self.on_cut is not None:
            self.on_cut(SlowClient("the client reads too slowly"))

    def _writable(self) -> None:
        self._exchange.on_writable = None
        self._paused = False
        if self._resume is not None:
            self._resume()

    def _common_headers(self) -> Headers:
        record = self._record
        headers: Headers = ((b"x-request-id", record.id.encode()),)
        if self._tell_route and record.prefill is not None:
            headers += (
                (b"x-pd-prefill", record.prefill.encode()),
                (b"x-pd-decode", (record.decode or "").encode()),
                (b"x-pd-attempts", b"%d" % record.attempts),
            )
        return headers

    def _stream_headers(self) -> Headers:
        return (*self._common_headers(), (b"content-type", self._family.stream_type), *STREAM_HEADERS)

    def _error_headers(self, error: RequestError) -> Headers:
        headers: Headers = (*self._common_headers(), *JSON)
        if error.retry_after_s is not None and (error.status in SAY_AGAIN_LATER or isinstance(error, EngineRefused)):
            headers += ((b"retry-after", b"%d" % error.retry_after_s),)
        if error.status == HTTPStatus.GATEWAY_TIMEOUT:
            headers += ((b"x-should-retry", b"false"),)
        if error.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            headers += ((b"accept-encoding", b"gzip, deflate"),)
        if isinstance(error, WrongMethod):
            headers += ((b"allow", error.allow.encode()),)
        if isinstance(error, InvalidKey):
            headers += (CHALLENGE,)
        return headers
