"""Begins the trace of a request and hands it on at its end."""

import random
import secrets
import time
from collections.abc import Iterable
from typing import Protocol

from coordinator.observability.access import RequestRecord
from coordinator.observability.trace import Trace
from coordinator.observability.trace_context import Header, parent_of

HALF = 1 << 64


class Taker(Protocol):
    """Who makes spans of what is finished."""

    def put(self, trace: Trace, record: RequestRecord) -> None:
        """Take a finished request; returns at once."""
        ...

    async def aclose(self) -> None:
        """Send what is there, as far as that goes within a short time."""
        ...


class Tracer:
    """The traces of one process.

    A caller that has decided about sampling is followed (`traceparent`); for others `sample_ratio` decides by the trace
    id, so that all who see the same trace decide alike. What is not sampled still has ids, for logs and engines.

    Args:
        sample_ratio: share of traces that are recorded, 0 to 1.
        taker: gets the finished ones.
    """

    def __init__(self, sample_ratio: float, taker: Taker) -> None:
        self._below = round(sample_ratio * HALF)
        self._taker = taker
        self._random = random.Random(secrets.randbits(128))  # noqa: S311  # ids are no secrets

    def begin(self, headers: Iterable[Header], method: str, arrived_s: float) -> Trace:
        """A place for a request that came with these headers (names in lower case)."""
        parent = parent_of(headers)
        span_id = self._random.getrandbits(64) or 1
        wall_s = time.time() - time.monotonic()
        if parent is not None:
            trace_id, parent_id, sampled, state = parent
            return Trace(trace_id, span_id, parent_id, sampled, state, arrived_s, wall_s, method)
        trace_id = self._random.getrandbits(128) or 1
        return Trace(trace_id, span_id, 0, trace_id % HALF < self._below, b"", arrived_s, wall_s, method)

    def finished(self, record: RequestRecord) -> None:
        """Hand on a request to which nothing more will happen."""
        trace = record.trace
        if trace is not None and trace.sampled:
            self._taker.put(trace, record)

    async def aclose(self) -> None:
        """Send what is left, within a short time."""
        await self._taker.aclose()
