"""The requests that wait for messages of one decode instance."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Final

from coordinator.core.errors import EngineFailed, InternalError, Side
from coordinator.core.instance import Instance
from coordinator.engines.mindie.mailbox import Mailbox
from coordinator.wire.mindie import Frame, Kind

DONE_MARK = b"data: [DONE]\n\n"
_DATA: Final = Kind.DATA
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
        """Hand over what one read has brought; returns what is nobody's here, heartbeats left out. Hot.

        Where it brings several messages of one request, they go to the client in one write.
        """
        if len({frame[0] for frame in frames}) == len(frames):
            return self._hand_over(frames, now_s)
        several = self._with_several(frames)
        for box in several.values():
            box.hold()
        left = self._hand_over(frames, now_s)
        for rid, box in several.items():
            try:
                box.flush()
            except Exception as error:  # noqa: BLE001  # as in _hand_over
                self._failed(rid, box, error)
        return left

    def _with_several(self, frames: list[Frame]) -> dict[bytes, Mailbox]:
        seen: set[bytes] = set()
        several: dict[bytes, Mailbox] = {}
        for rid, _, _ in frames:
            if rid not in seen:
                seen.add(rid)
            elif (box := self._boxes.get(rid)) is not None:
                several[rid] = box
        return several

    def _hand_over(self, frames: list[Frame], now_s: float) -> list[Frame]:
        boxes = self._boxes
        left: list[Frame] = []
        for frame in frames:
            rid, kind, body = frame
            box = boxes.get(rid)
            if box is not None:
                try:
                    if kind is _DATA:
                        box.data(body, now_s)
                    else:
                        box.message(kind, body, now_s)
                except Exception as error:  # noqa: BLE001  # the border: one request's fault must not end the stream
                    self._failed(rid, box, error)
            elif kind is not Kind.HEARTBEAT:
                left.append(frame)
        return left

    def _failed(self, rid: bytes, box: Mailbox, error: Exception) -> None:
        self._log.error(
            "a request of instance %s failed inside the coordinator",
            self.instance.id,
            exc_info=error,
            extra={"wire": rid.decode("ascii", "replace")},
        )
        box.fail(InternalError(type(error).__name__))

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
