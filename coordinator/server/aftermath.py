"""What happens when the handler of a request has ended, and the hard end of a connection."""

import asyncio
import socket
import struct

from coordinator.server.exchange import Exchange
from coordinator.server.shared import Shared

_RESET = struct.pack("ii", 1, 0)
_JSON = ((b"Content-Type", b"application/json"),)
_INTERNAL_ERROR = b'{"error":{"message":"internal error","type":"internal_error","param":null,"code":"internal_error"}}'


def conclude(shared: Shared, exchange: Exchange, task: asyncio.Task[None]) -> None:
    """See to it that every request has an answer, whatever became of its handler."""
    shared.tasks.discard(task)
    error = None if task.cancelled() else task.exception()
    unanswered = not exchange.finished and not exchange.gone
    if error is not None:
        shared.log.error("the handler of a request failed", exc_info=error)
    elif unanswered and not shared.stopping:
        how = "was cancelled" if task.cancelled() else "returned"
        shared.log.error("the handler of a request %s before the answer was complete", how)
    if not unanswered:
        return
    if exchange.started:
        exchange.break_off()
    else:
        exchange.respond(500, _JSON, _INTERNAL_ERROR)


def reset(transport: asyncio.Transport) -> None:
    """Close by a TCP reset, so that the kernel drops what the client did not take, too."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()
