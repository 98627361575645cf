"""The requests that wait for messages of one decode instance."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from coordinator.core.errors import EngineFailed, InternalError, Side
from coordinator.core.instance import Instance
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.wire.mindie import Frame, Kind

DONE_MARK = b"data: [DONE]\n\n"
ANSWERS = (Kind.DATA, Kind.LAST_DATA, Kind.ERROR, Kind.RETRY, Kind.OVERSIZED)  # what a request lacks without it


class Boxes:
    """Hands an instance's messages to the requests they belong to.

    Attributes:
        instance: the decode instance.
    """

    def __init__(self, instance: Instance, log: logging.Logger, *, on_late: Callable[[], None]) -> None:
        self.instance = instance
        self._log = log
        self._on_late = on_late
        self._boxes: dict[bytes, Mailbox] = {}

    @contextlib.contextmanager
    def registered(self, wire_id: bytes, box: Mailbox) -> Iterator[None]:
        """Route messages of `wire_id` to `box` inside the block; outside of it they are late and dropped."""
        self._boxes[wire_id] = box
        try:
            yield
        finally:
            if self._boxes.get(wire_id) is box:
                del self._boxes[wire_id]

    def deliver(self, frames: list[Frame], now_s: float) -> list[Frame]:
        """Hand messages over; returns those that are nobody's here, heartbeats left out. Hot."""
        boxes = self._boxes
        left: list[Frame] = []
        for frame in frames:
            rid, kind, body = frame
            box = boxes.get(rid)
            if box is not None:
                try:
                    if kind is Kind.DATA:
                        box.data(body, now_s)
                    else:
                        box.message(kind, body, now_s)
                except Exception as error:  # noqa: BLE001  # the border: one request's fault must not end the stream
                    self._log.exception(
                        "a request of instance %s failed inside the coordinator",
                        self.instance.id,
                        extra={"wire": rid.decode("ascii", "replace")},
                    )
                    box.fail(InternalError(type(error).__name__))
            elif kind is not Kind.HEARTBEAT:
                left.append(frame)
        return left

    def late(self, body: bytes) -> None:
        """Count a message whose request has ended, as comes after a stop; a second end mark is not even that."""
        if body != DONE_MARK:
            self._on_late()

    def stripped(self, frame: Frame) -> bool:
        """Whether a message has lost the id of the request that it belongs to.

        An end mark that comes a second time belongs to a request that has its answer.
        """
        rid, kind, body = frame
        return not rid and kind in ANSWERS and body != DONE_MARK

    def doubt(self, kind: Kind) -> None:
        """Fail those that a message without an id may have been for: an answer with a hole would pass for a whole one.

        Answers that are no streams have no part in `data`.
        """
        detail = f"a message ({kind.value.decode()}) came without the id of its request"
        for box in list(self._boxes.values()):
            if box.stream or kind is not Kind.DATA:
                box.fail(EngineFailed(Side.DECODE, self.instance.id, "bad_reply", detail=detail))

    def lose(self, reason: str) -> None:
        """Fail at once what waits here: the stream is lost."""
        for box in list(self._boxes.values()):
            box.fail(EngineFailed(Side.DECODE, self.instance.id, "link_lost", detail=reason))
