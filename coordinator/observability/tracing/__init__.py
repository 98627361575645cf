"""Traces of requests: W3C trace context in and out, spans for an OTLP receiver.

Nothing here is on a request's way unless tracing is on, and OpenTelemetry (the extra `pd-coordinator[otel]`) is
imported then and not before. On the way only moments are noted; spans are made of them in a thread, after the end.
"""

from .exporter import TraceExporter, missing_extra
from .tracer import Tracer

__all__ = ["TraceExporter", "Tracer", "missing_extra"]
