"""Requests as the front door makes them of long bodies."""

from coordinator.wire.json_edit import IndexedRequest
from coordinator.wire.json_scan import index


def run(work):
    """Run a stepped computation to its end; what it returns, and how often it paused."""
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


def indexed(request, changed=None):
    """The same request with the index of its body, of whatever length."""
    return IndexedRequest.of(request, request.body, run(index(request.body))[0], changed or {})
