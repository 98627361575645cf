"""The requests that wait for results."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from coordinator.core.errors import InternalError
from coordinator.engines.xllm.mailbox import Mailbox

if TYPE_CHECKING:
    from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGeneration


class Boxes:
    """Hands results to the requests that they belong to.

    Args:
        on_late: called for each result whose request is not there (any more).
    """

    def __init__(self, log: logging.Logger, *, on_late: Callable[[], None]) -> None:
        self._log = log
        self._on_late = on_late
        self._boxes: dict[str, Mailbox] = {}

    @contextlib.contextmanager
    def registered(self, wire_id: str, box: Mailbox) -> Iterator[None]:
        """Route results of `wire_id` to `box` inside the block; outside of it their sender is told to stop."""
        self._boxes[wire_id] = box
        try:
            yield
        finally:
            if self._boxes.get(wire_id) is box:
                del self._boxes[wire_id]
            box.close()

    def __len__(self) -> int:
        return len(self._boxes)

    def deliver(self, results: "Iterable[DisaggStreamGeneration]", now_s: float, sender: str = "") -> list[bool]:
        """Hand results over; returns for each whether its request goes on. Hot. `sender`: its name, if it is known.

        False is the only way to have an engine end a request (protocol page §5.5).
        """
        boxes = self._boxes
        wanted: list[bool] = []
        for told in results:
            box = boxes.get(told.service_req_id)
            if box is None:
                self._on_late()
                wanted.append(False)
                continue
            try:
                wanted.append(box.take(told, now_s, sender))
            except Exception as error:  # noqa: BLE001  # the border: one request's fault must not end others
                self._log.exception("a request failed inside the coordinator", extra={"wire": told.service_req_id})
                box.fail(InternalError(type(error).__name__))
                wanted.append(False)
        return wanted

    def lose(self, instance_id: str, why: str) -> None:
        """Fail what an instance works on: it is gone."""
        for box in list(self._boxes.values()):
            if box.runs_on(instance_id):
                box.lost(instance_id, why)
