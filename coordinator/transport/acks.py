"""Acknowledging a stream of small pieces seldom.

Linux answers each small read of a socket that only receives with an acknowledgement of its own: a packet sent, and an
eighth of all that a relayed event costs. Told that the connection is interactive (TCP_QUICKACK in tcp(7)), it leaves
out every other one; where none has become due for 40 ms, it sends one and falls back.
"""

import asyncio
import math
import socket
from typing import Final

QUICK_S: Final = 0.025  # pieces that come as soon as this one after the other: it pays to tell the kernel
LOST_S: Final = 0.04  # after such a pause the kernel has fallen back
_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)  # Linux


class Acknowledgements:
    """Those of one reply that comes in many pieces.

    Only for peers that send each piece at once (TCP_NODELAY): another one would wait for an acknowledgement that waits.

    Args:
        transport: the connection that the reply comes by.
    """

    __slots__ = ("_quick", "_read_s", "_seldom", "_transport")

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._read_s = -math.inf
        self._quick = False  # the last gap was short; one alone may be that between the head and the only piece
        self._seldom = False  # as far as is known

    def note(self, now_s: float) -> None:
        """Take note of a read; the kernel is told where pieces have begun to come quickly."""
        gap_s = now_s - self._read_s
        self._read_s = now_s
        if self._seldom:
            self._seldom = self._quick = gap_s < LOST_S
        elif gap_s >= QUICK_S:
            self._quick = False
        elif self._quick:
            self._seldom = True
            self._tell_kernel()
        else:
            self._quick = True

    def _tell_kernel(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if _QUICKACK is not None and sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)
