"""What the connections of one server have in common."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.server.date import DateLine
from coordinator.server.exchange import Exchange
from coordinator.server.limits import ServerLimits
from coordinator.server.reader import Gate

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class OpenConnection(Protocol):
    """What the server does with a connection."""

    deadline_s: float
    transport: asyncio.Transport

    def close(self) -> None:
        """Close as soon as what was written is sent; an unfinished answer ends torn."""
        ...

    def close_if_idle(self) -> None:
        """Close unless a request is being read or served."""
        ...

    def expire(self, now_s: float) -> None:
        """The deadline has passed."""
        ...


@dataclass(slots=True)
class Shared:
    """Owned by the server.

    Attributes:
        executor: puts long request bodies together and expands them.
        freed: called when a connection is closed.
        gate: asked about requests whose body is still to come.
        date: the `Date` line of an answer.
        encrypted: connections speak TLS, which knows no half-closed ones.
        draining: connections close after the answer at hand.
        stopping: handlers are being cancelled on purpose.
        tasks: handlers at work, those included that only tidy up behind a complete answer.
    """

    handler: Handler
    limits: ServerLimits
    log: logging.Logger
    clock: Callable[[], float]
    executor: Executor
    freed: Callable[[], None]
    gate: Gate | None = None
    date: Callable[[], bytes] = field(default_factory=DateLine)
    loop: asyncio.AbstractEventLoop | None = None
    encrypted: bool = False
    draining: bool = False
    stopping: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    connections: set[OpenConnection] = field(default_factory=set)

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; asking for it costs a system call, so it is asked for once."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        return self.loop
