"""Host names to addresses, off the event loop.

asyncio and uvloop look names up in a small thread pool that is shared with everything else (libuv keeps two threads for
it), so a few dead names would hold up all others. Here each name has its own short-lived thread.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

MAX_LOOKUPS = 128
KEEP_S = 5.0

Found = Sequence[tuple[int, int, int, str, tuple[Any, ...]]]
Lookup = Callable[[str], Found]


def system_lookup(host: str) -> Found:
    """Ask the system's resolver; blocks."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


def is_literal(host: str) -> bool:
    """Whether `host` is an IPv4 or IPv6 address already."""
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        return False
    return True


class Resolver:
    """Finds addresses of names; an answer is used for 5 seconds, or until a connection to it fails.

    One look-up per name runs at a time, however many ask. An abandoned one ends by itself in a daemon thread and its
    answer is dropped.
    """

    def __init__(self, lookup: Lookup = system_lookup, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookup = lookup
        self._clock = clock
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._running: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str) -> list[str]:
        """Return the addresses of `host` in the system's order; at least one.

        The caller sets the deadline. Cancelling one caller leaves the look-up to the others.

        Raises:
            OSError: nothing was found (usually socket.gaierror), or too many look-ups hang already.
        """
        if is_literal(host):
            return [host]
        known = self._known.get(host)
        if known is not None and self._clock() - known[0] < KEEP_S:
            return known[1]
        running = self._running.get(host)
        if running is None:
            if len(self._running) >= MAX_LOOKUPS:
                raise socket.gaierror(socket.EAI_AGAIN, "too many look-ups hang")
            running = self._start(host)
        return await asyncio.shield(running)

    def forget(self, host: str) -> None:
        """Look `host` up anew the next time: what was found last does not answer."""
        self._known.pop(host, None)

    def _start(self, host: str) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[str]] = loop.create_future()
        self._running[host] = future
        thread = threading.Thread(target=self._run, args=(loop, host), name=f"lookup-{host}", daemon=True)
        thread.start()
        return future

    def _run(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        """Runs in the thread."""
        answer: list[str] | OSError
        try:
            answer = list(dict.fromkeys(str(found[4][0]) for found in self._lookup(host)))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot encode
            answer = error if isinstance(error, OSError) else socket.gaierror(socket.EAI_NONAME, str(error))
        try:
            loop.call_soon_threadsafe(self._done, host, answer)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    def _done(self, host: str, answer: list[str] | OSError) -> None:
        future = self._running.pop(host)
        if isinstance(answer, list) and not answer:
            answer = socket.gaierror(socket.EAI_NONAME, "no address")
        if isinstance(answer, list):
            self._known[host] = (self._clock(), answer)
            if not future.done():
                future.set_result(answer)
        elif not future.done():
            future.set_exception(answer)
            future.exception()  # all who asked may have gone: asyncio need not complain
