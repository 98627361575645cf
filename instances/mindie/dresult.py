"""The standing stream of decode results, `GET /dresult` (MindIE protocol page §5)."""

import asyncio
import time

from aiohttp import web

from instances.mindie import frames
from instances.mindie.refusal import Refused
from instances.replies import EventStream, Pipe, chunked, reset
from instances.server import Instance

NON_DMI = "Non DMI does not support dresult request"
WRONG_ROLE = "Only the Decode node supports dresult but you send to"
_BUFFER_LIMIT = 4 << 20
_CHECKS_PER_HEARTBEAT = 5


class ResultStream:
    """One coordinator's stream. Messages wait until `flush`; each is one HTTP chunk."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._waiting: list[bytes] = []
        self._muted_until_s = 0.0
        self.last_sent_s = time.monotonic()
        self.ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether a message can still arrive."""
        return not self.ended.is_set() and not self._pipe.closed

    @property
    def muted(self) -> bool:
        """Whether a silence is on."""
        return time.monotonic() < self._muted_until_s

    @property
    def full(self) -> bool:
        """Whether the coordinator reads too slowly for more."""
        return self.alive and self._pipe.transport.get_write_buffer_size() > _BUFFER_LIMIT

    def send(self, message: bytes) -> None:
        """Queue a message as one HTTP chunk."""
        self._waiting.append(chunked(message))

    def send_split(self, message: bytes, *, chunks: bool) -> None:
        """Send a message in two TCP segments, as one HTTP chunk or as two."""
        self.flush()
        half = len(message) // 2
        if chunks:
            self._pipe.apart(chunked(message[:half]), chunked(message[half:]))
        else:
            wire = chunked(message)
            self._pipe.apart(wire[: len(wire) // 2], wire[len(wire) // 2 :])

    def flush(self) -> None:
        """Hand everything that waits to the connection; not while a silence is on."""
        if self._waiting and not self.muted:
            self._pipe.write(b"".join(self._waiting))
            self._waiting.clear()
            self.last_sent_s = time.monotonic()

    def beat(self, after_s: float) -> None:
        """Send a heartbeat if nothing was sent for `after_s`; called from time to time."""
        self.flush()
        if not self.muted and time.monotonic() - self.last_sent_s > after_s:
            self.send(frames.HEARTBEAT)
            self.flush()

    def mute(self, silence_s: float) -> None:
        """Send nothing for so long; messages wait."""
        self._muted_until_s = time.monotonic() + silence_s

    def end(self, how: str) -> None:
        """End the stream: dresult_end, dresult_close (message first), dresult_fin or dresult_reset."""
        self._muted_until_s = 0.0
        if how == "dresult_close":
            self.send(frames.CLOSE)
        self.flush()
        if how == "dresult_fin":
            self._pipe.transport.close()
        elif how == "dresult_reset":
            reset(self._pipe.transport)
        self.ended.set()  # the HTTP library then writes the terminator, where there is a connection left


class Dresult:
    """The current stream of a decode instance and the life of its streams."""

    def __init__(self, instance: Instance, heartbeat_s: float) -> None:
        self._instance = instance
        self._heartbeat_s = heartbeat_s
        self.current: ResultStream | None = None
        self.opened = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        """`GET /dresult`; a second one replaces the first, which gets the close message and its terminator."""
        role = "none" if self._instance.starting else self._instance.role
        if role == "hybrid":
            raise Refused(400, NON_DMI)
        if role not in {"decode", "flex"}:
            raise Refused(400, f"{WRONG_ROLE} {role}")
        chosen = self._instance.faults.always()
        if "dresult_status" in chosen:
            raise Refused(int(chosen.number("dresult_status", 400)), NON_DMI)
        opened = await EventStream.open(request, chosen)
        if opened is None:
            return web.Response()
        stream = ResultStream(opened.pipe)
        old, self.current = self.current, stream
        self.opened += 1
        if old is not None:
            if old.alive:
                old.end("dresult_close")
            old.ended.set()
        if "silence" in chosen:
            stream.mute(chosen.number("silence", 30))
        await stream.ended.wait()
        return opened.response

    async def beat(self) -> None:
        """Heartbeats; meant for a task of its own."""
        while True:
            await asyncio.sleep(self._heartbeat_s / _CHECKS_PER_HEARTBEAT)
            stream = self.current
            if stream is None:
                continue
            if stream.alive:
                stream.beat(self._heartbeat_s)
            else:
                stream.ended.set()  # the coordinator has left: its handler may go
                self.current = None

    async def room(self) -> None:
        """Wait while the coordinator reads too slowly."""
        while self.current is not None and self.current.full:  # noqa: ASYNC110 - transports signal no event to others
            await asyncio.sleep(0.002)

    def flush(self) -> None:
        """Hand what waits on the current stream to the connection."""
        if self.current is not None:
            self.current.flush()

    def close(self) -> None:
        """End the current stream cleanly."""
        if self.current is not None:
            self.current.end("dresult_end")
            self.current = None
