"""The two forms of the line about a finished request: text for people, JSON for machines.

What many requests have in common is made once for all of them, and a line is put together from few parts: field by
field it would cost more than twice as much. Both forms have the same fields in the same order; a field that is not
known is left out.
"""

import functools
from collections.abc import Callable
from math import trunc
from typing import Final

import msgspec

from coordinator.core.errors import Outcome

from .formats import json_line
from .lines import LINE_LIMIT_BYTES, VALUE_LIMIT, cut_line, printable, quoted
from .record import RequestRecord

WIRE_IDS_LIMIT: Final = 400
_KEPT: Final = 4096

# to write a number down takes longer than all else that is done for it, and most are small: those are written already
_COUNTED: Final = 2048
_COUNTS: Final = tuple(map(str, range(_COUNTED)))
_TIMED: Final = 8192
_TENTHS: Final = tuple(f"{tenths / 10:.1f}" for tenths in range(_TIMED))
_HEAD: Final = ("time", "level", "logger", "message")
_CUT_AT: Final = VALUE_LIMIT + 1  # what stands behind makes no difference to a value, which is cut before it
_SURE_TO_FIT: Final = LINE_LIMIT_BYTES // 4  # so many characters never make more bytes


class Form:
    """One way to write a line; `TEXT` and `JSON` are the two that there are.

    Args:
        ends: what a line begins and ends with.
        between: what stands before a field's name, and between that and its value.
        quote: what stands around a text that needs no escape.
        words: no and yes.

    Attributes:
        once: what stands between a wire id and the number of events, for one attempt.
        asked: what the client wanted and who it is: API, path, address, name of the key, model.
        served: what came of it: stream, status, outcome, ids of instances, and whether no wire ids follow.
    """

    __slots__ = (
        "_between", "_words", "after_wire", "asked", "attempts", "bytes_out", "duration", "end", "events", "once",
        "prompt_bytes", "queue", "quote", "recomputes", "served", "start", "ttft",
    )  # fmt: skip

    def __init__(self, ends: tuple[str, str], between: tuple[str, str], quote: str, words: tuple[str, str]) -> None:
        self.start, self.end = ends
        self._between = between
        self._words = words
        self.quote = quote
        mark = self.mark
        self.attempts, self.recomputes, self.events = mark("attempts"), mark("recomputes"), mark("events")
        self.bytes_out, self.prompt_bytes = mark("bytes"), mark("prompt_bytes")
        self.after_wire = quote + self.attempts
        self.once = f"{self.after_wire}1{self.events}"
        self.queue, self.ttft, self.duration = mark("queue_ms"), mark("ttft_ms"), mark("duration_ms")
        self.asked: Callable[[str, str, str, str, str | None], str] = functools.lru_cache(_KEPT)(self._asked)
        self.served: Callable[[bool, int, Outcome, str | None, str | None, bool], str]
        self.served = functools.lru_cache(_KEPT)(self._served)

    def head(self, logger: str) -> str:
        """What stands between the time and a request's id."""
        raise NotImplementedError

    def value(self, text: str, limit: int = VALUE_LIMIT) -> str:
        """A text as the value of a field, cut."""
        raise NotImplementedError

    def inner(self, text: str, limit: int = VALUE_LIMIT) -> str:
        """The same without what `quote` adds."""
        raise NotImplementedError

    def shortened(self, line: str) -> str:
        """A line of at most `LINE_LIMIT_BYTES`."""
        raise NotImplementedError

    def mark(self, name: str) -> str:
        """A field up to its value."""
        return f"{self._between[0]}{name}{self._between[1]}"

    def field(self, name: str, text: str) -> str:
        """A whole field."""
        return self.mark(name) + self.value(text)

    def known(self, name: str, text: str) -> str:
        """A field whose text may be empty: JSON leaves it out then."""
        return self.field(name, text) if text or not self.quote else ""

    def error(self, r: RequestRecord) -> str:
        """The fields about how a request failed."""
        fields = (
            ("error", r.error_code), ("side", r.error_side), ("reason", r.error_reason), ("guilty", r.error_instance),
            ("detail", r.error_detail),
        )  # fmt: skip
        return "".join(self.field(name, text) for name, text in fields if text)

    def _asked(self, api: str, path: str, client: str, key: str, model: str | None) -> str:
        fields = [("api", api), ("path", path.partition("?")[0]), ("client", client), ("key", key)]
        told = "".join(self.field(name, text) for name, text in fields if text or name in ("api", "path"))
        return self.quote + told + ("" if model is None else self.known("model", model))

    def _served(
        self,
        stream: bool,  # noqa: FBT001
        status: int,
        outcome: Outcome,
        prefill: str | None,
        decode: str | None,
        bare: bool,  # noqa: FBT001
    ) -> str:
        ends = (
            f"{self.mark('stream')}{self._words[stream]}{self.mark('status')}{status}{self.field('outcome', outcome)}"
        )
        if prefill is None:
            return ends
        where = self.known("prefill", prefill) + self.known("decode", decode or "")
        return ends + where + ("" if bare and self.quote else self.mark("wire") + self.quote)


class _Text(Form):
    """`time level logger message key=value ...`."""

    __slots__ = ()

    def head(self, logger: str) -> str:
        return f" INFO {logger} request id="

    def value(self, text: str, limit: int = VALUE_LIMIT) -> str:
        return quoted(text, limit)

    def inner(self, text: str, limit: int = VALUE_LIMIT) -> str:
        return self.value(text, limit)

    def shortened(self, line: str) -> str:
        return cut_line(line)


class _Json(Form):
    """One object."""

    __slots__ = ()

    def head(self, logger: str) -> str:
        return f'","level":"INFO","logger":{self.value(logger)},"message":"request","id":"'

    def value(self, text: str, limit: int = VALUE_LIMIT) -> str:
        return msgspec.json.encode(printable(text, limit)).decode()

    def inner(self, text: str, limit: int = VALUE_LIMIT) -> str:
        return self.value(text, limit)[1:-1]

    def shortened(self, line: str) -> str:
        if len(line.encode()) <= LINE_LIMIT_BYTES:
            return line
        fields = msgspec.json.decode(line)
        return json_line({name: fields.pop(name) for name in _HEAD}, fields)


TEXT: Final[Form] = _Text(("", ""), (" ", "="), "", ("no", "yes"))
JSON: Final[Form] = _Json(('{"time":"', "}"), (',"', '":'), '"', ("false", "true"))


def line(form: Form, stamp: str, head: str, r: RequestRecord) -> str:
    """The line about a request; hot.

    Args:
        form: text or JSON.
        stamp: the form's start and the time.
        head: what the form puts between that and the request's id.
        r: the request.
    """
    ident, wire, prefill, model = r.id, "", r.prefill, r.model
    if prefill is not None:
        wire = r.wire_ids[0] if len(r.wire_ids) == 1 else ",".join(r.wire_ids)
    # ids are letters and digits, hardly ever anything else, and one look at both costs less than one at each
    ids, bare = f"{ident}{wire}", not wire
    if bare or not ident or not ids.isascii() or not ids.encode().isalnum() or len(ids) > VALUE_LIMIT:
        ident = form.inner(ident)
        wire = "" if prefill is None else form.inner(wire, WIRE_IDS_LIMIT)
    path, events, bytes_out, prompt_bytes = r.path, r.events, r.bytes_out, r.prompt_bytes
    if len(path) > VALUE_LIMIT:
        path = path[:_CUT_AT]
    if model is not None and len(model) > VALUE_LIMIT:
        model = model[:_CUT_AT]
    asked, served = form.asked, form.served
    what = asked(r.api, path, r.client, r.key, model)
    came = served(r.stream, r.status, r.outcome, prefill, r.decode, bare)
    tries = form.once if r.attempts == 1 and not r.recomputes and not bare else _tries(form, r, bare=bare)
    end = form.end if r.trace is None and r.error_code is None else _end(form, r)
    text = (
        f"{stamp}{head}{ident}{what}{came}{wire}{tries}{_COUNTS[events] if events < _COUNTED else events}"
        f"{form.bytes_out}{_COUNTS[bytes_out] if bytes_out < _COUNTED else bytes_out}"
        f"{form.prompt_bytes}{_COUNTS[prompt_bytes] if prompt_bytes < _COUNTED else prompt_bytes}{_times(form, r)}{end}"
    )
    return text if len(text) <= _SURE_TO_FIT else form.shortened(text)


def _times(form: Form, r: RequestRecord) -> str:
    """The durations in ms, to the tenth: as far as they are short, from the table."""
    queue_s, ttft_s, duration_s = r.queue_s, r.ttft_s, r.duration_s
    if queue_s is not None and ttft_s is not None:
        queue, ttft, duration = trunc(queue_s * 1e4 + 0.5), trunc(ttft_s * 1e4 + 0.5), trunc(duration_s * 1e4 + 0.5)
        if 0 <= (queue | ttft | duration) < _TIMED:  # a power of two: all three are in the range
            return f"{form.queue}{_TENTHS[queue]}{form.ttft}{_TENTHS[ttft]}{form.duration}{_TENTHS[duration]}"
    queue_ms = "" if queue_s is None else f"{form.queue}{queue_s * 1000:.1f}"
    ttft_ms = "" if ttft_s is None else f"{form.ttft}{ttft_s * 1000:.1f}"
    return f"{queue_ms}{ttft_ms}{form.duration}{duration_s * 1000:.1f}"


def _tries(form: Form, r: RequestRecord, *, bare: bool) -> str:
    recomputes = f"{form.recomputes}{r.recomputes}" if r.recomputes else ""
    return f"{form.attempts if bare else form.after_wire}{r.attempts}{recomputes}{form.events}"


def _end(form: Form, r: RequestRecord) -> str:
    trace = "" if r.trace is None else form.field("trace_id", r.trace.id)
    error = "" if r.error_code is None else form.error(r)
    return trace + error + form.end
