"""The event stream of one answer, with the faults that shape events."""

import zlib
from typing import Any

from aiohttp import web

from instances.faults import Chosen
from instances.openai.refusal import dump
from instances.replies import EventStream, chunked, reset

DONE = b"[DONE]"
_MIB = 1 << 20
_GZIP = 31  # zlib's window bits for a gzip header
_EXTRA = b": ping\n\nevent: message\nid: 1\nretry: 1000\n"


class Outlet:
    """Writes events; everything after the connection is gone is dropped."""

    def __init__(self, stream: EventStream, chosen: Chosen) -> None:
        self._stream = stream
        self._chosen = chosen
        self._pipe = stream.pipe
        self._gzip = zlib.compressobj(wbits=_GZIP) if "gzip" in chosen else None
        self._joined = b""

    @classmethod
    async def open(cls, request: web.Request, chosen: Chosen) -> "Outlet | None":
        """Send the header; None if the peer has left."""
        headers = {"Content-Encoding": "gzip"} if "gzip" in chosen else {}
        stream = await EventStream.open(request, chosen, headers)
        return None if stream is None else cls(stream, chosen)

    @property
    def response(self) -> web.StreamResponse:
        """What the handler must return; its end is the last chunk."""
        return self._stream.response

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the peer has not taken."""
        return self._pipe.transport.get_write_buffer_size()

    def event(self, value: Any, token: int = 0) -> None:
        """Send an event; `token` is the number of the token it carries, 0 for none."""
        chosen = self._chosen
        if not chosen:
            self._pipe.chunk(b"data: %b\n\n" % _payload(value))
            return
        if token and (fault := chosen.on_piece("huge", token)) is not None:
            value = {**value, "padding": "x" * int(fault.number(1) * _MIB)}
        data = self._joined + self._framed(_payload(value), token)
        self._joined = b""
        if token and chosen.on_piece("join", token) is not None:
            self._joined = data
            return
        split = next((name for name in ("split", "split_chunks") if chosen.on_piece(name, token)), "")
        half = len(data) // 2
        if split == "split_chunks":
            self._send(data[:half])
            self._send(data[half:])
        elif split and self._gzip is None:
            # one HTTP chunk over two TCP segments
            whole = chunked(data)
            self._pipe.apart(whole[:half], whole[half:])
        else:
            self._send(data)

    def _framed(self, payload: bytes, token: int) -> bytes:
        """The event with the fields and line ends that the faults ask for."""
        chosen = self._chosen
        prefix = b"data:" if chosen.on_piece("no_space", token) else b"data: "
        before = _EXTRA if chosen.on_piece("comments", token) else b""
        cut = payload.find(b",") + 1
        if cut and chosen.on_piece("multi_line", token):
            # the parts of one event are joined by a line end, which JSON takes for a blank
            data = prefix + payload[:cut] + b"\n" + prefix + payload[cut:]
        else:
            data = prefix + payload
        data = before + data + b"\n\n"
        return data.replace(b"\n", b"\r\n") if chosen.on_piece("crlf", token) else data

    def _send(self, data: bytes) -> None:
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        self._pipe.chunk(data)

    async def end(self, how: str = "") -> None:
        """Nothing more comes. `how`: `stream_close` (FIN), `stream_reset` (RST), else the handler's return ends it."""
        if self._joined:
            self._send(self._joined)
            self._joined = b""
        if self._gzip is not None:
            self._pipe.chunk(self._gzip.flush())
        await self._pipe.drained()
        if how == "stream_reset":
            reset(self._pipe.transport)
        elif how == "stream_close":
            self._pipe.transport.close()


def _payload(value: Any) -> bytes:
    return value if isinstance(value, bytes) else dump(value)
