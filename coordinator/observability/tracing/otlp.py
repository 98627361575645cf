"""Spans as OpenTelemetry has them, sent by OTLP over HTTP with protobuf bodies.

Needs the extra `pd-coordinator[otel]`; whoever sends traces imports this module, and nobody else does.
"""

import logging
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from coordinator.observability.trace import Trace

from .exporter import SEND_S, Finished
from .spans import Span, spans_of

SILENT = logging.CRITICAL + 1
SCOPE = "pd_coordinator"
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where spans go, and what they say of us.

    Attributes:
        endpoint: URL of the receiver, path included.
        headers: sent along, for a receiver that wants a key.
        resource: attributes of this process.
    """

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    resource: Mapping[str, str | int] = field(default_factory=dict)


class OtlpSender:
    """Makes spans of finished requests and sends them; for one thread."""

    def __init__(self, receiver: Receiver) -> None:
        logging.getLogger("opentelemetry").setLevel(SILENT)  # `exporter` says what matters, in our form
        self._exporter = OTLPSpanExporter(
            endpoint=receiver.endpoint,
            headers=dict(receiver.headers),
            timeout=SEND_S,
            compression=Compression.Gzip,
        )
        self._resource = Resource(dict(receiver.resource))
        self._scope = InstrumentationScope(SCOPE, str(receiver.resource.get("service.version", "")))
        self._ids = random.Random(secrets.randbits(128))  # noqa: S311  # ids are no secrets

    def send(self, batch: Sequence[Finished]) -> bool:
        """Send the spans of several requests; tells whether they were taken. Blocks, for `SEND_S` at most."""
        spans = [
            self._made(trace, span, is_request=number == 0)
            for trace, record in batch
            for number, span in enumerate(spans_of(trace, record, self._ids))
        ]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def end(self) -> None:
        """End a `send` that waits to try again; later ones fail at once."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _made(self, trace: Trace, span: Span, *, is_request: bool) -> ReadableSpan:
        wall_s = trace.wall_s
        parent = _context(trace, span.parent_id, is_remote=is_request) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_context(trace, span.span_id, is_remote=False),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, dict(given), _ns(at_s + wall_s)) for at_s, name, given in span.events],
            kind=SpanKind.SERVER if is_request else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_ns(span.start_s + wall_s),
            end_time=_ns(span.end_s + wall_s),
            instrumentation_scope=self._scope,
        )


def _context(trace: Trace, span_id: int, *, is_remote: bool) -> SpanContext:
    state = TraceState.from_header([trace.state.decode("ascii")]) if trace.state else None
    return SpanContext(trace.trace_id, span_id, is_remote, SAMPLED, state)


def _ns(seconds: float) -> int:
    """Nanoseconds since the epoch."""
    return round(seconds * 1e9)
