"""Sends what is finished in batches, in a thread of its own: whatever the receiver does, no request waits for it."""

import asyncio
import contextlib
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from coordinator.observability.access import RequestRecord
from coordinator.observability.logs import LimitedLog
from coordinator.observability.metrics import Metrics
from coordinator.observability.trace import Trace

LOG = LimitedLog(logging.getLogger("pd_coordinator.tracing"), interval_s=30.0)
QUEUE = 4096
BATCH = 256
EVERY_S = 1.0
SEND_S = 10.0
FLUSH_S = 1.5
EXTRA = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

Finished = tuple[Trace, RequestRecord]
Send = Callable[[Sequence[Finished]], bool]


def missing_extra() -> str | None:
    """What to install where OpenTelemetry is not there; None where it is."""
    with contextlib.suppress(ImportError):
        if importlib.util.find_spec(EXTRA) and importlib.util.find_spec("opentelemetry.sdk"):
            return None
    return "traces need OpenTelemetry: pip install 'pd-coordinator[otel]'"


class TraceExporter:
    """Takes finished requests and sends their spans.

    At most `QUEUE` of them wait; further ones are dropped and counted. A batch that the receiver does not take within
    `SEND_S`, repetitions included, is given up and counted.

    Args:
        metrics: counts what becomes of them.
        send: sends the spans of several and tells whether they were taken; runs in the thread and may block.
        end: makes a `send` that blocks come to an end.
    """

    def __init__(self, metrics: Metrics, send: Send, end: Callable[[], None] = lambda: None) -> None:
        self._send = send
        self._end = end
        self._waiting: deque[Finished] = deque()
        self._wake = threading.Event()
        self._closing = False
        # each cell has one writer: the event loop drops, the thread sends
        self._exported, self._failed, self._dropped = map(metrics.traces.labels, ("exported", "failed", "dropped"))
        self._thread: threading.Thread | None = None
        self._over: Callable[[], None] = lambda: None

    def put(self, trace: Trace, record: RequestRecord) -> None:
        """See `tracer.Taker`."""
        waiting = self._waiting
        if len(waiting) >= QUEUE or self._closing:
            self._dropped.inc()
            return
        waiting.append((trace, record))
        if len(waiting) == BATCH:
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    async def aclose(self) -> None:
        """Send what is there, for at most `FLUSH_S`; the rest is dropped and counted."""
        self._closing = True
        thread = self._thread
        if thread is not None:
            loop = asyncio.get_running_loop()
            over = asyncio.Event()
            self._over = lambda: _tell(loop, over)
            self._wake.set()
            if not thread.is_alive():
                over.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await over.wait()
        left, self._waiting = self._waiting, deque()
        self._dropped.inc(len(left))
        self._end()

    def _run(self) -> None:
        while True:
            closing = self._closing
            while self._waiting:
                self._send_some()
            if closing:
                break
            self._wake.wait(EVERY_S)
            self._wake.clear()
        self._over()

    def _send_some(self) -> None:
        waiting = self._waiting
        batch: list[Finished] = []
        with contextlib.suppress(IndexError):  # whoever closes takes what is left
            while len(batch) < BATCH:
                batch.append(waiting.popleft())
        if not batch:
            return
        try:
            taken = self._send(batch)
        except Exception as error:  # noqa: BLE001  # the border to a library
            LOG.warning("traces could not be sent: %s", type(error).__name__)
            taken = False
        (self._exported if taken else self._failed).inc(len(batch))
        if not taken:
            LOG.warning("the receiver of traces did not take them")


def _tell(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed
        loop.call_soon_threadsafe(over.set)
