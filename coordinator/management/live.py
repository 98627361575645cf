"""`GET /v1/live`: what is going on, once a second, as server-sent events.

The work is done once for all listeners, and only while there are any. A listener that falls behind misses pictures and
gets a whole one then: nothing piles up for it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from aiohttp import web

from .errors import Refused
from .live_picture import Album, Look, Picture

PATH = "/v1/live"
EVERY_S = 1.0
MOST_LISTENERS = 32
WRITE_S = 10.0
QUIET_S = 15.0
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}
OPENING = b"retry: 2000\n\n"
STILL_THERE = b": still there\n\n"
RETRY_S = 5

log = logging.getLogger("pd_coordinator.management")


class Sight(Protocol):
    """Where pictures come from."""

    async def look(self) -> Look:
        """What is going on at this moment, all processes together."""
        ...


class LiveFeed:
    """The feed and its listeners.

    Args:
        about: what the page shows of the coordinator that never changes.
        wall: seconds since the epoch.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sight: Sight,
        about: Mapping[str, object],
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sight = sight
        self._album = Album(about)
        self._wall = wall
        self._clock = clock
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()
        self._closed = False
        self._faulty = False

    @property
    def listeners(self) -> int:
        """How many listen."""
        return self._listeners

    def routes(self) -> list[web.RouteDef]:
        """The route of the feed."""
        return [web.get(PATH, self.stream, allow_head=False)]

    async def aclose(self) -> None:
        """Let the listeners go and look no more; idempotent."""
        self._closed = True
        self._turn.set()
        await self._stop()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send pictures until the listener has left; 503 if there are too many already."""
        if self._closed or self._listeners >= MOST_LISTENERS:
            why = "the coordinator is stopping" if self._closed else f"{MOST_LISTENERS} listen to the live feed already"
            raise Refused(503, why)
        response = web.StreamResponse(headers=HEADERS)
        self._listeners += 1
        try:
            # who leaves is noticed at the next picture
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await self._send(request, response, OPENING)
                await self._follow(request, response)
        finally:
            self._listeners -= 1
            if not self._listeners:
                await self._stop()
        return response

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        sent = 0
        if self._task is not None and self._album.latest is not None:
            await self._send(request, response, self._album.latest.whole)
            sent = self._album.latest.number
        while not self._closed:
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="live feed")
            turn = self._turn
            try:
                async with asyncio.timeout(QUIET_S):
                    await turn.wait()
            except TimeoutError:
                await self._send(request, response, STILL_THERE)
                continue
            picture = self._album.latest
            if picture is not None and not self._closed:
                await self._send(request, response, _for_one_who_has(picture, sent))
                sent = picture.number

    async def _send(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        """Write, at most `WRITE_S` long; raises ConnectionError for a listener that takes nothing or has left."""
        try:
            async with asyncio.timeout(WRITE_S):
                await response.write(data)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionError("the listener takes nothing") from None

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            try:
                look = await self._sight.look()
                self._album.add(look, self._wall(), self._clock())
            except Exception:  # the border to all that is looked at: one fault must not end the feed
                if not self._faulty:
                    log.exception("the live feed could not be made")
                self._faulty = True
            else:
                self._faulty = False
                self._turn.set()
                self._turn = asyncio.Event()
            now_s = self._clock()
            due_s += EVERY_S
            if due_s <= now_s:  # too late for it: not at once either, or slow looks would come without a pause
                due_s = now_s + EVERY_S
            await asyncio.sleep(due_s - now_s)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _for_one_who_has(picture: Picture, number: int) -> bytes:
    return picture.change if picture.change is not None and number == picture.number - 1 else picture.whole
