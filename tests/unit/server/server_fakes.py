"""A transport, a clock and an executor under the test's control, and a connection built on them."""

import asyncio
import logging
from concurrent.futures import Executor, Future

from coordinator.core.errors import RequestError
from coordinator.server.connection import ClientConnection
from coordinator.server.limits import ServerLimits
from coordinator.server.shared import Shared

HEAD_END = b"\r\n\r\n"


class FakeTransport:
    """Keeps what is written; nothing is sent until `take` is called when `stalled`."""

    def __init__(self):
        self.writes = []
        self.unsent = 0
        self.eof = self.closed = self.aborted = self.paused = False
        self.options = []

    # --- what the connection calls
    def write(self, data):
        assert not self.eof, "write after FIN"
        self.writes.append(bytes(data))

    def writelines(self, pieces):
        self.write(b"".join(pieces))

    def write_eof(self):
        self.eof = True

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True

    def is_closing(self):
        return self.closed or self.aborted

    def pause_reading(self):
        assert not self.paused
        self.paused = True

    def resume_reading(self):
        assert self.paused
        self.paused = False

    def get_write_buffer_size(self):
        return self.unsent

    def set_write_buffer_limits(self, high, low):
        self.options.append(("marks", high, low))

    def get_extra_info(self, name):
        return {"peername": ("::ffff:10.1.2.3", 4711, 0, 0), "socket": self}[name]

    def setsockopt(self, *option):
        self.options.append(option)

    # --- what tests look at
    @property
    def sent(self):
        return b"".join(self.writes)


class FakeClock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class SlowExecutor(Executor):
    """Runs what was submitted when told to."""

    def __init__(self):
        self.jobs = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.jobs.append((future, fn, args))
        return future

    def run(self):
        for future, fn, args in self.jobs:
            try:
                future.set_result(fn(*args))
            except RequestError as error:
                future.set_exception(error)
        self.jobs.clear()


class Wire:
    """One connection over a fake transport; `exchanges` are the handler's calls in order."""

    def __init__(self, handler=None, *, date=bytes, **limits):
        self.exchanges = []
        self.cancelled = []
        self.gate = asyncio.Event()
        self.clock = FakeClock()
        self.executor = SlowExecutor()
        self.log = logging.getLogger("test.server")
        self.freed = 0
        self.handler = handler
        self.limits = ServerLimits(**limits)
        self.shared = Shared(self._handle, self.limits, self.log, self.clock, self.executor, self._freed, date=date)
        self.transport = FakeTransport()
        self.connection = ClientConnection(self.shared)
        self.connection.connection_made(self.transport)

    def _freed(self):
        self.freed += 1

    async def _handle(self, exchange):
        self.exchanges.append(exchange)
        try:
            if self.handler is not None:
                await self.handler(exchange)
            else:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(exchange)
            raise

    async def feed(self, data, step=None):
        """Let bytes come in, in pieces of `step`, and the loop work them off."""
        for at in range(0, len(data), step or len(data)):
            self.connection.data_received(data[at : at + (step or len(data))])
        await settle()

    @property
    def exchange(self):
        return self.exchanges[-1]

    @property
    def sent(self):
        return self.transport.sent

    async def aclose(self):
        tasks = list(self.shared.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


async def settle():
    """Let everything that is ready run."""
    for _ in range(6):
        await asyncio.sleep(0)


def post(body, *headers, target="/v1/x", version="1.1"):
    """A POST request with a Content-Length."""
    lines = [f"POST {target} HTTP/{version}", "Host: a", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + HEAD_END + body


def get(*headers, target="/", version="1.1", method="GET"):
    """A request without a body."""
    lines = [f"{method} {target} HTTP/{version}", "Host: a", *headers]
    return "\r\n".join(lines).encode("latin-1") + HEAD_END
