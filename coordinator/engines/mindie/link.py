"""The standing result stream of one decode instance (MindIE protocol page §5)."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.core.instance import Instance
from coordinator.core.ports import Watcher
from coordinator.engines.context import EngineContext
from coordinator.engines.mindie.boxes import Boxes
from coordinator.engines.mindie.split import LinkOffice
from coordinator.transport.errors import TransportError
from coordinator.transport.link import Link, open_link
from coordinator.wire.chunked import ChunkError
from coordinator.wire.mindie import Frame, Kind, ResultParser

HEADERS = ((b"user-agent", b"Coordinator/1.0"), (b"accept", b"text/event-stream"))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times of a standing stream, in seconds, and its limit.

    silence_s: MindIE protocol page §5.1: a heartbeat comes every 5 to 6 s; 30 s without a byte is a dead link.
    evicted_pause_s: another coordinator has taken the stream; taking it back at once would never end.
    """

    head_s: float = 10.0
    silence_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0
    evicted_pause_s: float = 30.0
    max_message_bytes: int = 67108864


class DecodeLink:
    """Opens `GET /dresult`, hands its messages to the requests they belong to, and opens it again when it is lost.

    Exactly one stream is open at a time: a second one would end the first with all its requests.

    Attributes:
        instance: the decode instance.
        boxes: the requests that wait for its messages.
    """

    def __init__(  # noqa: PLR0913  # its instance, its limits, and who is told of what
        self,
        instance: Instance,
        watcher: Watcher,
        settings: LinkSettings,
        context: EngineContext,
        *,
        on_late: Callable[[], None],
        on_reopened: Callable[[], None],
        office: LinkOffice | None = None,
    ) -> None:
        self.instance = instance
        self.boxes = Boxes(instance, context.log, on_late=on_late)
        self._office = office
        self._number = office.number() if office is not None else 0
        self._watcher = watcher
        self._settings = settings
        self._context = context
        self._on_reopened = on_reopened
        self._peers = context.client.peers
        self._parser = ResultParser(settings.max_message_bytes)
        self._link: Link | None = None
        self._ended: asyncio.Future[str] | None = None
        self._heard_s = 0.0
        self._evicted = False
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"dresult {instance.id}")

    @property
    def up(self) -> bool:
        """Whether the stream is open."""
        return self._link is not None

    async def aclose(self) -> None:
        """Close the stream; its requests fail."""
        self._task.cancel()
        await asyncio.wait([self._task])

    # --- from the socket

    def feed(self, data: bytes, now_s: float) -> None:
        """Take raw bytes of the stream; hot."""
        self._heard_s = now_s
        try:
            frames = self._parser.feed(data)
        except ChunkError as error:
            self._end(f"broken framing: {error}")
            return
        left = self.boxes.deliver(frames, now_s)
        if left:
            self._unclaimed(left)
        if self._parser.ended:
            self._end("the instance ended the stream")

    def closed(self, error: TransportError | None) -> None:
        """The connection is gone."""
        self._end("closed" if error is None else error.reason)

    def _unclaimed(self, frames: list[Frame]) -> None:
        """Take messages that are for no request here: for another process, for an ended request, or for the link."""
        for frame in self._office.pass_on(self._number, frames) if self._office is not None else frames:
            _, kind, body = frame
            if self.boxes.stripped(frame):
                self.boxes.doubt(kind)
                if self._office is not None:
                    self._office.doubt(self._number, kind)
            elif kind is Kind.CLOSE:
                self._evicted = True
                self._end("another coordinator has opened the result stream")
            else:
                self.boxes.late(body)

    def _end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    # --- life

    async def _keep(self) -> None:
        pause_s, openings = self._settings.first_pause_s, 0
        try:
            while True:
                opened, reason = await self._once(openings)
                self._watcher.unlinked(reason)
                self._lose(reason)
                if opened:
                    pause_s, openings = self._settings.first_pause_s, openings + 1
                if self._evicted:
                    self._evicted = False
                    pause_s = self._settings.evicted_pause_s
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311  # jitter, no secret
                pause_s = min(pause_s * 2, self._settings.longest_pause_s)
        finally:
            self._lose("the instance was removed")

    async def _once(self, openings: int) -> tuple[bool, str]:
        """Open the stream and stay until it ends: (whether it was open, why it ended)."""
        self._parser = ResultParser(self._settings.max_message_bytes)
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._link = await open_link(
                self.instance.address,
                "/dresult",
                HEADERS,
                self,
                connect_s=self._context.connect_s,
                head_s=self._settings.head_s,
                peers=self._peers,
            )
        except TransportError as error:
            return False, f"{error.reason} {error.detail}".strip()
        link = self._link
        try:
            self._heard_s = time.monotonic()
            if openings:
                self._on_reopened()
            if self._office is not None:
                self._office.opened(self._number, self.instance)
            self._watcher.linked()
            return True, await self._until_ended(self._ended)
        finally:
            link.close()
            self._link = None

    async def _until_ended(self, ended: asyncio.Future[str]) -> str:
        """Wait for the end of the stream, or for a silence that is one."""
        while True:
            left_s = self._heard_s + self._settings.silence_s - time.monotonic()
            if left_s <= 0:
                return f"silent for {self._settings.silence_s:g} s"
            await asyncio.wait([ended], timeout=left_s)
            if ended.done():
                return ended.result()

    def _lose(self, reason: str) -> None:
        self.boxes.lose(reason)
        if self._office is not None:
            self._office.lost(self._number, reason)
