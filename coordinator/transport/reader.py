"""Reads one reply: bytes in, calls on a sink out; knows no socket."""

from typing import Final, NamedTuple

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from coordinator.core.gather import Gatherer
from coordinator.wire.chunked import CR, LF, size_lines
from coordinator.wire.head_memory import HeadMemory

from .errors import TransportError
from .expand import IDENTITY, Expander, ExpansionError
from .framing import framing_of
from .sink import ReplySink

FIRST_FINAL = 200
SWITCHING = 101
FRAMING_BYTES: Final = 8  # around a chunk below 64 KiB, at most
END_OF_HEAD = b"\r\n\r\n"
SIZE_LINES: Final = size_lines(1024)  # of usual tokens


class Known(NamedTuple):
    """What a connection knows of the head of its last reply."""

    status: int
    keeps_open: bool


class ReplyReader:
    """The reply to one request, while it is read. `end` and `lost` of the sink are the caller's to call.

    What is known beforehand is read without a parser: a head that came before and the body behind it, and a read that
    is one small chunk, as those of streams usually are.

    Args:
        last: the connection's memory of heads; None: it has none.

    Attributes:
        sink: where the reply goes; another may take over between two calls. None: what still comes is dropped.
        gatherer: who is told where a read holds more than a piece of the body. None: nobody.
        holding: it was told so in this read, and is to be told by `flush` when the read is over.
        fault: why the reply cannot be read; the sink gets nothing after it.
        complete: the reply ended by its own framing.
        until_close: the reply ends when the connection does (RFC 9112 §6.3, rule 8).
        keeps_open: the reply leaves the connection open for another request.
        in_step: no byte came that does not belong to this reply.
        untouched: no byte came at all.
    """

    __slots__ = (
        "_bodiless", "_chunked", "_even", "_expander", "_headers", "_last", "_left", "_max_head_bytes", "_now_s",
        "_parser", "_plain", "_quiet_bytes", "_status", "_straight", "complete", "fault", "gatherer", "holding",
        "in_step", "keeps_open", "sink", "until_close", "untouched",
    )  # fmt: skip

    def __init__(
        self, sink: ReplySink, *, bodiless: bool, max_head_bytes: int, last: HeadMemory[Known] | None = None
    ) -> None:
        self.sink: ReplySink | None = sink
        self.gatherer: Gatherer | None = None
        self.holding = False
        self.fault: TransportError | None = None
        self.complete = False
        self.until_close = False
        self.keeps_open = False
        self.in_step = True
        self.untouched = True
        self._bodiless = bodiless
        self._max_head_bytes = max_head_bytes
        self._last = last
        self._left = -1  # bytes of a body behind a known head; below 0: the parser reads
        self._plain = False
        self._parser: HttpResponseParser | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._status = 0  # 0 until the final reply's head is complete
        self._straight = False  # what the parser finds of the body goes to the sink as it is
        self._chunked = False
        self._even = False  # each read so far was one small chunk: the parser stands between two of them
        self._quiet_bytes = 0  # read since the last body byte: the head, or trailers and the like
        self._expander: Expander | None = None
        self._now_s = 0.0

    @property
    def expands(self) -> bool:
        """Whether the body comes compressed and the sink gets it plain."""
        return self._expander is not None

    def feed(self, data: bytes, now_s: float) -> BaseException | None:
        """Read on; `complete` and `fault` tell what came of it.

        Returns:
            What the sink raised, if it did: a fault of ours that the log must show; `fault` is set as well.
        """
        if self._even and (line := SIZE_LINES.get(len(data))) is not None and data[: len(line)] == line:
            sink = self.sink
            if data[-1] == LF and data[-2] == CR and sink is not None:
                try:
                    sink.data(data[len(line) : -2], now_s)
                except Exception as error:  # noqa: BLE001  # whatever it is: the caller says so
                    self._fail("the reply's sink failed")
                    return error
                return None
        self._even = False
        self._now_s = now_s
        parser = self._parser
        if parser is None:
            return self._feed_plain(data) if self._left >= 0 else self._feed_first(data)
        self._quiet_bytes += len(data)
        try:
            parser.feed_data(data)
        except HttpParserCallbackError as error:
            self._fail("the reply's sink failed")
            return error.__context__ or error
        except (HttpParserError, HttpParserUpgrade) as error:
            self.in_step = False
            if not self.complete:
                self._fail(f"not HTTP: {error}")
        if self._quiet_bytes and self._quiet_bytes > self._max_head_bytes and not self.complete:
            self._fail("head or trailers too long")
        return None

    def _feed_first(self, data: bytes) -> BaseException | None:
        self.untouched = False
        last = self._last
        at = -1 if last is None or self._bodiless else last.find(data)
        if last is not None and 0 <= at <= self._max_head_bytes:
            return self._feed_known(last, data, at)
        self._parser = HttpResponseParser(self)
        end = data.find(END_OF_HEAD) + len(END_OF_HEAD)
        if end < len(END_OF_HEAD):
            return self.feed(data, self._now_s)
        raised = self.feed(data[:end], self._now_s)
        if raised is None and self.fault is None and self._parser is not None:
            self._even = self._chunked and self._straight
            if last is not None and self._plain and data[9:12] == b"%d" % self._status:  # not behind an interim head
                last.learn(data[:end], tuple(self._headers), Known(self._status, self.keeps_open), dated=True)
            if len(data) > end:
                raised = self.feed(data[end:], self._now_s)
        return raised

    def _feed_known(self, last: HeadMemory[Known], data: bytes, at: int) -> BaseException | None:
        assert last.what is not None
        assert self.sink is not None
        self._status, self.keeps_open = last.what
        self._left = last.length
        try:
            self.sink.head(self._status, last.headers)
        except Exception as error:  # noqa: BLE001  # whatever it is: the caller says so
            self._fail("the reply's sink failed")
            return error
        return self._feed_plain(data[at:])

    def _feed_plain(self, data: bytes) -> BaseException | None:
        left = self._left - len(data)
        if left < 0:
            self.in_step = False
            data = data[:left]
        self._left = max(left, 0)
        if data and self.sink is not None:
            try:
                self.sink.data(data, self._now_s)
            except Exception as error:  # noqa: BLE001  # as above
                self._fail("the reply's sink failed")
                return error
        self.complete = left <= 0
        return None

    def close(self) -> None:
        """The connection ended in order: so does the reply, if it is framed that way."""
        if self.until_close:
            self._complete()

    def flush(self) -> None:
        """The read is over: what was held back for its sake goes on."""
        self.holding = False
        if self.gatherer is not None:
            self.gatherer.flush()

    def release(self) -> ReplySink | None:
        """Take the sink away and free the parser, which refers back to this object."""
        sink, self.sink, self._parser = self.sink, None, None
        return sink

    # --- called by httptools

    def on_message_begin(self) -> None:
        """Take note of a reply that begins."""
        if self.complete:
            self.in_step = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header, or a trailer: those are dropped."""
        if not self._status:
            self._headers.append((name.lower(), value.rstrip()))  # httptools leaves trailing space

    def on_headers_complete(self) -> None:
        """Show the head to the sink, unless it is an interim one or one that cannot be served."""
        if self.sink is None or self._parser is None or self._status or self.fault is not None:
            return
        status = self._parser.get_status_code()
        if status < FIRST_FINAL:
            self._headers.clear()
            if status == SWITCHING:
                self._fail("unasked switch of protocols")
            return
        self._status = status
        self.keeps_open = self._parser.should_keep_alive()
        if self._head_fits() and self._body_readable():
            self.sink.head(status, tuple(self._headers))
            if self._bodiless:  # the parser would wait for the body that the head announces
                self.complete = True
            self._straight = self._expander is None and not self.complete

    def on_body(self, data: bytes) -> None:
        """Pass body bytes on."""
        if self._quiet_bytes - len(data) > FRAMING_BYTES:
            self._hold()
        self._quiet_bytes = 0
        sink = self.sink
        if sink is not None and self._straight:
            sink.data(data, self._now_s)
        elif self.complete:
            self.in_step = False
        elif self._expander is not None:
            self._expand(self._expander, data)

    def on_message_complete(self) -> None:
        """Take note of the end; that of an interim reply is none."""
        if self._status and not self.complete:
            self._complete()

    # --- inside

    def _hold(self) -> None:
        if self.gatherer is not None and not self.holding:
            self.holding = True
            self.gatherer.hold()

    def _fail(self, why: str) -> None:
        self._straight = False
        if self.fault is None:
            self.fault = TransportError("bad_reply", why)

    def _complete(self) -> None:
        self._straight = False
        if self._expander is not None and not self._expander.finished:
            self._fail("compressed body is cut")
        self.complete = self.fault is None

    def _head_fits(self) -> bool:
        """Whether the head is within its limit although it came in one piece with the body's start."""
        limit = self._max_head_bytes
        if self._quiet_bytes > limit and sum(len(name) + len(value) for name, value in self._headers) > limit:
            self._fail("head too long")
        return self.fault is None

    def _body_readable(self) -> bool:
        framing = framing_of(self._status, tuple(self._headers), bodiless=self._bodiless)
        self._chunked, self._plain, self.until_close = framing.chunked, framing.measured, framing.until_close
        if framing.odd:
            self._fail("unknown transfer coding")
        elif framing.encoding not in IDENTITY and self.fault is None:
            self._start_expanding(framing.encoding)
        return self.fault is None

    def _start_expanding(self, encoding: bytes) -> None:
        try:
            self._expander = Expander(encoding)
        except ExpansionError as error:
            self._fail(str(error))
        untrue = (b"content-encoding", b"content-length")
        self._headers = [header for header in self._headers if header[0] not in untrue]

    def _expand(self, expander: Expander, data: bytes) -> None:
        try:
            for piece in expander.feed(data):
                if self.sink is None or self.fault is not None:
                    return
                self.sink.data(piece, self._now_s)
        except ExpansionError as error:
            self.fault = TransportError("reply_too_large" if error.bomb else "bad_reply", str(error))
