"""A receiver of traces: OTLP over HTTP with protobuf bodies, on a port of its own, in a thread of its own."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto
from opentelemetry.proto.trace.v1.trace_pb2 import Status

PATH = "/v1/traces"


def plain(value):
    """An attribute's value."""
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes_of(pairs):
    return {pair.key: plain(pair.value) for pair in pairs}


class Span:
    """One span as it arrived."""

    def __init__(self, proto, resource, scope):
        self.name = proto.name
        self.trace_id, self.id, self.parent = proto.trace_id.hex(), proto.span_id.hex(), proto.parent_span_id.hex()
        self.state = proto.trace_state
        self.kind = Proto.SpanKind.Name(proto.kind).removeprefix("SPAN_KIND_")
        self.start_s, self.end_s = proto.start_time_unix_nano / 1e9, proto.end_time_unix_nano / 1e9
        self.attributes = attributes_of(proto.attributes)
        self.events = [(event.name, attributes_of(event.attributes)) for event in proto.events]
        self.error = proto.status.message if proto.status.code == Status.STATUS_CODE_ERROR else None
        self.resource = attributes_of(resource.attributes)
        self.scope = scope.name
        self.raw = proto.SerializeToString()

    def __repr__(self):
        return f"{self.name} {self.attributes} {self.error or ''}"


class Receiver:
    """Keeps what comes.

    Attributes:
        status: of the answers.
        hold: while it is cleared, no request is answered.
    """

    def __init__(self):
        self.spans = []
        self.requests = []
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        self.arrived = threading.Event()
        self.leaving = False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.arrived.set()
                while not receiver.leaving and not receiver.hold.wait(0.1):
                    pass
                if receiver.leaving:
                    self.close_connection = True
                    return
                receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}{PATH}"

    def take(self, path, headers, body):
        self.requests.append((path, headers))
        if self.status != 200:
            return
        raw = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        message = ExportTraceServiceRequest.FromString(raw)
        for group in message.resource_spans:
            for scoped in group.scope_spans:
                self.spans += [Span(proto, group.resource, scoped.scope) for proto in scoped.spans]

    def of(self, trace_id):
        """The spans of a trace, in the order in which they began."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: (span.start_s, span.name != "request"))

    def close(self):
        self.leaving = True
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
