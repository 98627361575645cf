"""Reading one request: bytes in, a request or the reason to refuse it out; no I/O."""

from collections.abc import Callable

import httptools

from coordinator.core.errors import BadRequest, BodyTooLarge, HeadersTooLarge, RequestError, UnknownExpectation
from coordinator.core.request import Headers
from coordinator.server.body import coding_of
from coordinator.server.chunked import ChunkedBody
from coordinator.server.limits import ServerLimits
from coordinator.server.pieces import Pieces

Gate = Callable[[str, str, Headers], object]
"""Refuses a request by its method, path and headers, before its body is read: raises RequestError.

What it returns is what `Exchange.kept` begins with.
"""

_JUDGED = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"))
_PLAIN = frozenset((b"host", b"content-length"))
_NOTHING: list[bytes] = []
_NO_VERSION = "0.0"
_MAX_LENGTH_DIGITS = 19


class RequestReader:
    """Reads exactly one request and gives back the bytes behind it.

    llhttp reads the head, which is cut out of the data at its empty line first: so no byte of the body or of a further
    request ever gets into that parser, and an upgrade offer cannot make it skip the body.

    Attributes:
        complete: the request is there, or is refused; nothing more may be fed.
        has_head: the head is there; `method` and what follows hold.
        refusal: what is wrong with it, or None. `method` and `path` are empty if it did not get that far.
        plain_head: the head as it came, if nothing in it matters to the reading of a request but its Content-Length:
            another request with this head is read alike. Else empty.
        kept: see `Exchange.kept`.
        unread: a refused request's rest was not read, so the connection cannot carry another one.
        wants_continue: the client waits for `100 Continue` before it sends the body.
        body: as it came; empty where it is so long that it is left in pieces.
        pieces: those of a long body, for the owner to put together; else None.
        coding: how the body is compressed, or None.
        arrived_s: set by the owner when the head is there.
    """

    __slots__ = (
        "_chunked", "_fed_bytes", "_gate", "_head_bytes", "_headers", "_left", "_limits", "_parser", "_plain", "_tail",
        "_url", "arrived_s", "body", "coding", "complete", "has_head", "headers", "http_10", "keep_alive", "kept",
        "method", "path", "pieces", "plain_head", "query", "refusal", "target", "unread", "wants_continue",
    )  # fmt: skip

    def __init__(self, limits: ServerLimits, gate: Gate | None = None) -> None:
        """Args: `gate`: asked about requests whose body is still to come."""
        self.method = self.target = self.path = self.query = ""
        self.headers: Headers = ()
        self.body = self.plain_head = b""
        self.kept: object = None
        self.pieces: Pieces | None = None
        self.refusal: RequestError | None = None
        self.coding: str | None = None
        self.http_10 = self.keep_alive = self.complete = self.has_head = self.unread = self.wants_continue = False
        self.arrived_s = 0.0
        self._limits = limits
        self._gate = gate
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._url = self._tail = b""
        self._head_bytes = self._left = self._fed_bytes = 0
        self._chunked: ChunkedBody | None = None
        self._plain: Pieces | None = None

    @property
    def behind(self) -> bool:
        """Whether there is data left to look at: `feed` must be called again, be it with nothing."""
        return self._chunked is not None and self._chunked.behind

    def due_s(self, now_s: float, fed_bytes: int) -> float:
        """Until when more of the body must come, after so many further bytes (those of the head count, too)."""
        self._fed_bytes += fed_bytes
        limits = self._limits
        return min(now_s, self.arrived_s + self._fed_bytes / limits.body_bytes_per_s) + limits.body_s

    def take(self) -> bytes | Pieces:
        """Hand the body over, so that it is not kept here beside what is made of it."""
        body = self.pieces or self.body
        self.pieces, self.body = None, b""
        return body

    def feed(self, data: bytes) -> bytes:
        """Take what came in; returns the bytes that belong to later requests (always none before `complete`)."""
        if not self.has_head:
            data = self._feed_head(data)
            if self.complete or not data:
                return data
        if self._chunked is not None:
            return self._feed_chunked(self._chunked, data)
        return self._feed_plain(data)

    # --- the head

    def _feed_head(self, data: bytes) -> bytes:
        """Feed the head's part of the data to llhttp; returns what is behind it."""
        parser = self._parser
        assert parser is not None
        at = (self._tail + data).find(b"\r\n\r\n")
        cut = len(data) if at < 0 else at + 4 - len(self._tail)
        allowed = self._limits.max_header_bytes - self._head_bytes
        piece = data[: min(cut, allowed)]
        self._head_bytes += len(piece)
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # an offer that may be ignored (RFC 9110 §7.8)
        except httptools.HttpParserError as error:
            self._refuse_head(parser, BadRequest("the request is not valid HTTP/1.1", detail=str(error)))
            return b""
        if cut > allowed:
            limit = self._limits.max_header_bytes
            self._refuse_head(parser, HeadersTooLarge(f"the request's headers are larger than {limit} bytes"))
            return b""
        if at < 0:
            self._tail = (self._tail + data)[-3:]
            return b""
        version = parser.get_http_version()
        self._parser = None
        try:
            if not self.has_head:
                raise BadRequest("the request is not valid HTTP/1.1", detail="llhttp sees no end of the head")
            if self._judge(version) and len(piece) == self._head_bytes:
                self.plain_head = piece
            if self._gate is not None and not self.complete:
                self.kept = self._gate(self.method, self.path, self.headers)
        except RequestError as error:
            self.has_head = True
            self._refuse(error)
            return b""
        return data[cut:]

    def on_url(self, url: bytes) -> None:
        """Called by llhttp, for each part of the target that it meets."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by llhttp."""
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Called by llhttp at the end of the head, the only moment at which it tells keep-alive."""
        parser = self._parser
        assert parser is not None
        self._read_line(parser)
        self.keep_alive = parser.should_keep_alive()
        self.has_head = True

    def _read_line(self, parser: httptools.HttpRequestParser) -> None:
        self.headers = tuple(self._headers)
        self.method = parser.get_method().decode("ascii")
        self.target = target = self._url.decode("latin-1")
        if target[:1] != "/" and "://" in target:
            target = _origin_form(target)
        self.path, _, self.query = target.partition("?")

    def _refuse_head(self, parser: httptools.HttpRequestParser, error: RequestError) -> None:
        if not self.has_head and parser.get_http_version() != _NO_VERSION:
            self._read_line(parser)
        self._parser = None
        self.has_head = True
        self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        self.refusal = error
        self.complete = self.unread = True
        self.wants_continue = False
        self.plain_head = b""
        self._chunked = self._plain = None

    def _judge(self, version: str) -> bool:
        """Decide how the body is framed (RFC 9112 §6.3) and whether the request is acceptable so far.

        Returns:
            Whether its Content-Length is all that matters to that.
        """
        found: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            if name in _JUDGED:
                found.setdefault(name, []).append(value)
        self.http_10 = version == "1.0"
        if not self.http_10 and version != "1.1":
            raise BadRequest("only HTTP/1.1 and HTTP/1.0 are supported")
        if self.method == "CONNECT":
            self.path = ""
            raise BadRequest("CONNECT is not supported")
        hosts = len(found.get(b"host", _NOTHING))
        if hosts > 1 or not (hosts or self.http_10):
            raise BadRequest("a request must have one Host header")
        lengths = found.get(b"content-length", _NOTHING)
        transfer = found.get(b"transfer-encoding")
        if transfer is not None:
            self._expect_chunks(transfer, lengths)
        else:
            self._left = self._length(lengths) if lengths else 0
            self.complete = not self._left
        self._judge_wishes(found)
        return found.keys() <= _PLAIN

    def _expect_chunks(self, codings: list[bytes], lengths: list[bytes]) -> None:
        if lengths:  # llhttp refuses it as well, but request smuggling must not hang on a setting of a library
            raise BadRequest("a request must not have both Content-Length and Transfer-Encoding")
        if self.http_10 or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadRequest("the only Transfer-Encoding of a request that is supported is chunked")
        self._chunked = ChunkedBody(self._limits.max_body_bytes, self._limits.max_header_bytes)

    def _length(self, lengths: list[bytes]) -> int:
        if len(lengths) > 1 or not lengths[0].isdigit():
            raise BadRequest("the Content-Length of the request is not valid")
        if len(lengths[0]) > _MAX_LENGTH_DIGITS or (length := int(lengths[0])) > self._limits.max_body_bytes:
            raise BodyTooLarge(f"the body is larger than {self._limits.max_body_bytes} bytes")
        return length

    def _judge_wishes(self, found: dict[bytes, list[bytes]]) -> None:
        """Judge `Expect` (RFC 9110 §10.1.1) and `Content-Encoding`, so that what cannot be met is said early."""
        expected = found.get(b"expect")
        if expected is not None and not self.http_10:
            if len(expected) > 1 or expected[0].lower() != b"100-continue":
                raise UnknownExpectation("the only expectation that is supported is 100-continue")
            self.wants_continue = not self.complete
        codings = found.get(b"content-encoding")
        if codings is not None and not self.complete:
            self.coding = coding_of(codings)

    # --- the body

    def _feed_plain(self, data: bytes) -> bytes:
        kept, left = self._plain, self._left
        if len(data) < left:
            if kept is None:
                kept = self._plain = Pieces()
            self._left = left - len(data)
            kept.add(data)
            return b""
        self._plain = None
        self.complete = True
        if kept is None:
            self.body = data[:left]
        else:
            kept.add(data[:left])
            self._put_together(kept)
        return data[left:]

    def _feed_chunked(self, chunked: ChunkedBody, data: bytes) -> bytes:
        try:
            rest = chunked.feed(data)
        except RequestError as error:
            self._refuse(error)
            return b""
        if rest is None:
            return b""
        self._put_together(chunked.body)
        self._chunked = None
        self.complete = True
        return rest

    def _put_together(self, pieces: Pieces) -> None:
        if pieces.long:
            self.pieces = pieces
        else:
            self.body = pieces.whole()


def _origin_form(target: str) -> str:
    """The path and query of a target in absolute form, as clients send it to a proxy (RFC 9112 §3.2.2)."""
    rest = target.partition("://")[2]
    authority = rest.partition("?")[0].partition("/")[0]
    rest = rest[len(authority) :]
    return rest if rest[:1] == "/" else "/" + rest
