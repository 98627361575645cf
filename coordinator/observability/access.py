"""One line for each finished request.

A record has no place for a prompt, an output or a header: what is not in it cannot be logged.
"""

import functools
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.core.errors import DeadlineExceeded, EngineFailed, Outcome, RequestError

from .formats import json_line
from .lines import VALUE_LIMIT, Stamper, cut_line, printable, quoted
from .trace import Trace
from .writer import LineWriter

WIRE_IDS_LIMIT = 400
# failures whose detail is in our own words; any other may hold an engine's, and those may quote a prompt or an output
_OWN_WORDS = frozenset(
    (
        "connect_refused", "connect_timeout", "connect_failed", "dns_failed", "tls_failed", "reset", "closed",
        "link_lost", "ended_early", "reply_too_large", "message_too_large", "missing_kv",
    )
)  # fmt: skip
_status = re.compile(r"status \d{3}").match
_known = functools.lru_cache(4096)(quoted)


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request by its end; filled along its way.

    Attributes:
        id: the id that the client knows.
        api: name of the API family; empty where none serves the path.
        path: path as the client gave it; a query is cut off when it is logged.
        client: the client's address; empty where nobody knows it.
        key: name of its API key; empty where it needed none, or had no valid one.
        model: the model name that the client gave.
        status: status that went out; 0 where none did.
        prefill: instance id of the last attempt.
        decode: instance id of the last attempt.
        wire_ids: the ids of all attempts on engines' wires.
        attempts: placements that were made.
        recomputes: how often decode gave the request back.
        events: tokens of a stream, as far as they can be told apart.
        bytes_out: body bytes sent to the client.
        prompt_bytes: size of the prompt.
        queue_s: time spent waiting for an instance.
        prefill_s: time that the last attempt spent in prefill; None: it did not come to that, like the two that follow.
        handoff_s: from there to decode's first output.
        decode_s: from there to the end.
        ttft_s: from arrival to the first token.
        duration_s: from arrival to the end.
        error_code: stable code of the error it ended in (docs/errors.md).
        error_side: who is to blame.
        error_reason: an engine's failure, or the stage of a deadline, in one word.
        error_instance: id of the guilty instance.
        error_detail: text for the log only.
        failed_legs: side, reason and instance id of each attempt in which an engine failed.
        trace: what is noted for its trace, where requests are traced.
    """

    id: str
    api: str
    path: str
    client: str = ""
    key: str = ""
    stream: bool = False
    model: str | None = None
    status: int = 0
    outcome: Outcome = Outcome.OK
    prefill: str | None = None
    decode: str | None = None
    wire_ids: list[str] = field(default_factory=list)
    attempts: int = 0
    recomputes: int = 0
    events: int = 0
    bytes_out: int = 0
    prompt_bytes: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    error_code: str | None = None
    error_side: str | None = None
    error_reason: str | None = None
    error_instance: str | None = None
    error_detail: str = ""
    failed_legs: tuple[tuple[str, str, str], ...] = ()
    trace: Trace | None = None

    def blame(self, error: EngineFailed) -> None:
        """An attempt has failed at an engine; another one may follow."""
        self.failed_legs += ((error.side, error.reason, error.instance_id),)

    def fields(self) -> dict[str, str]:
        """What other lines of the log name it by: its id, and its trace's."""
        named = {"request": self.id}
        return named if self.trace is None else named | {"trace_id": self.trace.id}

    def failed(self, error: RequestError) -> None:
        """Take over how the request failed.

        Not its status, which may be out already, nor the client's message, nor what an engine said.
        """
        self.outcome = error.outcome
        self.error_code = error.code
        self.error_side = error.side
        self.error_detail = error.detail
        if isinstance(error, EngineFailed):
            self.error_reason = error.reason
            self.error_instance = error.instance_id
            if error.reason not in _OWN_WORDS:
                status = _status(error.detail)
                self.error_detail = status.group() if status is not None else ""
        elif isinstance(error, DeadlineExceeded):
            self.error_reason = error.stage


class AccessLog:
    """Writes the line of a finished request at INFO; where that level is off, it costs nothing.

    The line is put together by hand and goes past `logging`, which would take longer than all the rest of it.

    Args:
        log: decides by its level, and names the line.
        writer: takes the line.
        as_json: one JSON object instead of text.
        wall: seconds since the epoch.
    """

    def __init__(
        self, log: logging.Logger, writer: LineWriter, *, as_json: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._name = log.name
        self._writer = writer
        self.as_json = as_json
        self._wall = wall
        self._stamp = Stamper()

    def finished(self, record: RequestRecord) -> None:
        """Log one request; call it once, when nothing more will happen to it."""
        if not self._log.isEnabledFor(logging.INFO):
            return
        stamp = self._stamp(self._wall())
        if self.as_json:
            head: dict[str, object] = {"time": stamp, "level": "INFO", "logger": self._name, "message": "request"}
            self._writer.write(json_line(head, _data(record)))
        else:
            self._writer.write(cut_line(f"{stamp} INFO {self._name} request {_text(record)}"))


def _name(text: str) -> str:
    """`quoted`, for what many requests have in common."""
    return _known(text) if len(text) <= VALUE_LIMIT else quoted(text)


def _text(r: RequestRecord) -> str:
    path = r.path.partition("?")[0]
    client = f" client={_name(r.client)}" if r.client else ""
    key = f" key={_name(r.key)}" if r.key else ""
    model = "" if r.model is None else f" model={_name(r.model)}"
    where = "" if r.prefill is None else _where_text(r, r.prefill)
    queue = "" if r.queue_s is None else f" queue_ms={r.queue_s * 1000:.1f}"
    trace = "" if r.trace is None else f" trace_id={r.trace.id}"
    ttft = "" if r.ttft_s is None else f" ttft_ms={r.ttft_s * 1000:.1f}"
    recomputes = f" recomputes={r.recomputes}" if r.recomputes else ""
    return (
        f"id={quoted(r.id)} api={_name(r.api)} path={_name(path)}{client}{key}{model}"
        f" stream={'yes' if r.stream else 'no'} status={r.status} outcome={r.outcome!s}{where}"
        f" attempts={r.attempts}{recomputes} events={r.events}"
        f" bytes={r.bytes_out} prompt_bytes={r.prompt_bytes}{queue}{ttft} duration_ms={r.duration_s * 1000:.1f}{trace}"
        f"{'' if r.error_code is None else _error_text(r)}"
    )


def _where_text(r: RequestRecord, prefill: str) -> str:
    wire = quoted(",".join(r.wire_ids), WIRE_IDS_LIMIT)
    return f" prefill={_name(prefill)} decode={_name(r.decode or '')} wire={wire}"


def _error_text(r: RequestRecord) -> str:
    parts = [f" error={quoted(r.error_code or '')}"]
    for key, value in (("side", r.error_side), ("reason", r.error_reason), ("guilty", r.error_instance)):
        if value:
            parts.append(f" {key}={quoted(value)}")
    if r.error_detail:
        parts.append(f" detail={quoted(r.error_detail)}")
    return "".join(parts)


def _data(r: RequestRecord) -> dict[str, object]:
    """The same fields under the same names; those that are not known are left out."""
    fields: dict[str, object] = {
        "id": printable(r.id),
        "api": r.api,
        "path": printable(r.path.partition("?")[0]),
        "client": printable(r.client) or None,
        "key": printable(r.key) or None,
        "model": printable(r.model or "") or None,
        "trace_id": None if r.trace is None else r.trace.id,
        "stream": r.stream,
        "status": r.status,
        "outcome": r.outcome,
        "prefill": printable(r.prefill or "") or None,
        "decode": printable(r.decode or "") or None,
        "wire": printable(",".join(r.wire_ids), WIRE_IDS_LIMIT) or None,
        "attempts": r.attempts,
        "recomputes": r.recomputes or None,
        "events": r.events,
        "bytes": r.bytes_out,
        "prompt_bytes": r.prompt_bytes,
        "queue_ms": None if r.queue_s is None else round(r.queue_s * 1000, 1),
        "ttft_ms": None if r.ttft_s is None else round(r.ttft_s * 1000, 1),
        "duration_ms": round(r.duration_s * 1000, 1),
        "error": r.error_code,
        "side": r.error_side,
        "reason": r.error_reason,
        "guilty": printable(r.error_instance or "") or None,
        "detail": printable(r.error_detail) or None,
    }
    return {key: value for key, value in fields.items() if value is not None}
