"""Frames onto a connection, with the faults that shape bytes."""

import asyncio

from instances.faults import Chosen, Fault
from instances.replies import Pipe
from instances.xllm.frames import Frame

_JOIN_S = 0.02
_SPLIT = Fault("split_bytes", "split_bytes")


class Wire:
    """One direction of one connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._joined: list[bytes] = []
        self._split: Pipe | None = None

    def send(self, frame: Frame, chosen: Chosen) -> None:
        """Send a frame; a connection that is gone takes nothing.

        Of `chosen` it minds split_frames, joined_frames, and those of bodies: split_bytes, cut_after, reset_after.
        """
        data = frame.encode()
        if "joined_frames" in chosen:
            self._joined.append(data)
            if len(self._joined) >= chosen.number("joined_frames", 2):
                self.flush()
            elif len(self._joined) == 1:
                asyncio.get_running_loop().call_later(_JOIN_S, self.flush)
        elif "cut_after" in chosen or "reset_after" in chosen:
            Pipe(self.transport, chosen).write(data)
        elif "split_frames" in chosen or "split_bytes" in chosen or self._split is not None:
            # once split, always split: bytes of a later frame must not come between
            self._split = self._split or Pipe(self.transport, Chosen([_SPLIT]))
            self._split.write(data)
        else:
            self._write(data)

    def flush(self) -> None:
        """Send what was held back to go out together."""
        held, self._joined = self._joined, []
        self._write(b"".join(held))

    def _write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(data)
