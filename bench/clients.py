"""Clients of the router under test.

    python -m bench.clients URL --concurrency N --requests N --tokens N [--stream [--counting]] [--prompt-bytes N]

Each client sends one request after another on its own connection. Prints one line of JSON with the figures. With
`--requests 0` every client opens one stream: the line `open` tells that all have their first event, and the figures
come when standard input is closed. With `--counting` nothing is read of a stream but its status and the ends of its
events, and nothing is timed: such clients cost little beside the router.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

LIMIT_S = 180.0
EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_END = DONE + b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Tally:
    """What all clients saw together; `wrong` counts answers by what was wrong with them."""

    left: int
    done: int = 0
    events: int = 0
    opened: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=dict)

    def odd(self, what: str) -> None:
        """Count a wrong answer."""
        self.wrong[what] = self.wrong.get(what, 0) + 1

    def figures(self, wall_s: float) -> dict[str, object]:
        """The figures, as the caller prints them."""
        return {
            "done": self.done,
            "events": self.events,
            "opened": self.opened,
            "wrong": self.wrong,
            "wall_s": round(wall_s, 3),
            "requests_per_s": round(self.done / wall_s, 1),
            "events_per_s": round(self.events / wall_s),
            "ttft_p50_ms": quantile_ms(self.first_s, 0.5),
            "ttft_p99_ms": quantile_ms(self.first_s, 0.99),
            "itl_p99_ms": quantile_ms(self.gaps_s, 0.99),
        }


def quantile_ms(values_s: list[float], share: float) -> float:
    """The value below which this share of the values lies, in ms; 0 if there are none."""
    if not values_s:
        return 0.0
    return round(sorted(values_s)[min(len(values_s) - 1, int(len(values_s) * share))] * 1e3, 2)


class EventCount:
    """Counts the events of a stream that comes in pieces, cut anywhere."""

    def __init__(self) -> None:
        self.events = 0
        self._open = False  # the last byte may be the first half of an event's end

    def feed(self, data: bytes) -> None:
        """Take the next piece."""
        if not data:
            return
        if self._open and data.startswith(b"\n"):
            self.events += 1
            data = data[1:]
        self.events += data.count(EVENT_END)
        self._open = data.endswith(b"\n") and not data.endswith(EVENT_END)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every client does; `events` is what a whole stream must hold (0: it has no end)."""

    request: bytes
    stream: bool
    events: int
    reconnect: Callable[[], object]
    on_done: Callable[[], object]


class Client(asyncio.Protocol):
    """One connection, one request after another."""

    transport: asyncio.Transport

    def __init__(self, plan: Plan, tally: Tally) -> None:
        self._plan, self._tally = plan, tally
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        if self._tally.left <= 0:
            self.transport.close()
            return
        self._tally.left -= 1
        self._busy = True
        self._parser = httptools.HttpResponseParser(self)
        self._seen = EventCount()
        self._tail = b""
        self._last_s = 0.0
        self._sent_s = time.perf_counter()
        self.transport.write(self._plan.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now_s, tally = time.perf_counter(), self._tally
        if self._last_s:
            tally.gaps_s.append(now_s - self._last_s)
        else:
            tally.opened += 1
            tally.first_s.append(now_s - self._sent_s)
            if not self._plan.events:
                self._plan.on_done()
        self._last_s = now_s
        before = self._seen.events
        self._seen.feed(body)
        tally.events += self._seen.events - before
        self._tail = (self._tail + body)[-16:]

    def on_message_complete(self) -> None:
        tally, self._busy = self._tally, False
        self._check(self._parser.get_status_code())
        tally.done += 1
        self._plan.on_done()
        if self._parser.should_keep_alive():
            self._send()
        else:
            self.transport.close()
            self._plan.reconnect()

    def _check(self, status: int) -> None:
        if status != 200:
            self._tally.odd(f"status {status}")
        elif self._plan.stream:
            self._tally.events -= 1  # [DONE] is no event
            if not self._tail.endswith(DONE):
                self._tally.odd("no end")
            elif self._seen.events != self._plan.events + 1:
                self._tally.odd(f"{self._seen.events - 1} events instead of {self._plan.events}")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._busy:
            self._tally.odd("connection lost")
            self._tally.done += 1
            self._plan.on_done()
            self._plan.reconnect()


class Counting(Client):
    """Knows how the router frames a stream: each event ends inside of a chunk, and a chunk of its own is the last."""

    def _send(self) -> None:
        super()._send()
        self._begin = b""

    def data_received(self, data: bytes) -> None:
        if not self._begin:
            self._begin = data[:12]
            if self._begin != b"HTTP/1.1 200":
                self._tally.odd(f"status {self._begin[9:].decode()}")
                self.transport.abort()
                return
        tally, before = self._tally, self._seen.events
        self._seen.feed(data)
        tally.events += self._seen.events - before
        self._tail = data[-32:] if len(data) >= 32 else (self._tail + data)[-32:]
        if self._tail.endswith(STREAM_END):
            self._ended()

    def _ended(self) -> None:
        tally, self._busy = self._tally, False
        tally.events -= 1
        if self._seen.events != self._plan.events + 1:
            tally.odd(f"{self._seen.events - 1} events instead of {self._plan.events}")
        tally.done += 1
        self._plan.on_done()
        self._send()


def request(url: str, prompt_bytes: int, tokens: int, *, stream: bool) -> bytes:
    """A chat request, head and body."""
    parts = urlsplit(url)
    messages = [{"role": "user", "content": "x" * prompt_bytes}]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream}).encode()
    head = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}", "accept: */*", "user-agent: bench/1",
            "content-type: application/json", f"content-length: {len(body)}", "", ""]  # fmt: skip
    return "\r\n".join(head).encode() + body


async def drive(args: argparse.Namespace) -> dict[str, object]:
    """Run all clients to the end; returns the figures."""
    loop, parts = asyncio.get_running_loop(), urlsplit(args.url)
    holds = args.requests == 0
    wanted = args.concurrency if holds else args.requests
    tally = Tally(left=wanted)
    over = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def check_over() -> None:
        if (tally.opened if holds else tally.done) >= wanted:
            over.set()

    make = Counting if args.counting else Client

    async def connect() -> None:
        await loop.create_connection(lambda: make(plan, tally), parts.hostname, parts.port)

    def reconnect() -> None:
        if tally.left > 0:
            task = loop.create_task(connect(), name="reconnect")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    plan = Plan(
        request(args.url, args.prompt_bytes, args.tokens, stream=args.stream),
        stream=args.stream,
        events=0 if holds else args.tokens,
        reconnect=reconnect,
        on_done=check_over,
    )
    started_s = time.perf_counter()
    for _ in range(args.concurrency):
        await connect()
    async with asyncio.timeout(LIMIT_S):
        await over.wait()
        if holds:
            print("open", flush=True)
            await loop.run_in_executor(None, sys.stdin.read)
    return tally.figures(time.perf_counter() - started_s)


def main() -> None:
    """Read the command line, drive, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--counting", action="store_true")
    parser.add_argument("--prompt-bytes", type=int, default=1200)
    print(json.dumps(uvloop.run(drive(parser.parse_args()))))


if __name__ == "__main__":
    main()
