"""Clients that send one request after the other, and know what each answer must be."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Self

from dialects import Dialect
from raw_client import Client, ask

THINGS = ("sea", "wind", "forest", "school", "market", "island", "winter", "morning")
LIMIT = 24
HELD = "[[fault:stall@4]] [[length:25]]"  # goes on when the cluster is told


def prompt_of(thing: str) -> str:
    """A prompt whose answer is LIMIT tokens long."""
    return f"Tell me about the {thing} [[length:{LIMIT}]]"


class Traffic:
    """Requests without a pause while the context is open.

    `counts` tells how they ended: `whole` (the right text, properly ended), `broken` (a stream that was visibly cut
    short), `failed` (a status other than 200), `wrong` (taken for whole by any client, and yet another text).

    Args:
        port: of the coordinator.
        dialects: calls to make, in turn.
        clients: how many at once.
    """

    def __init__(self, port: int, dialects: Sequence[Dialect], clients: int = 8) -> None:
        self._port = port
        self._dialects = dialects
        self._clients = clients
        self._right: dict[tuple[str, str], str] = {}
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.counts: Counter[str] = Counter()
        self.ended = asyncio.Event()
        self.notes: list[str] = []

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(self._learn(dialect, thing) for dialect in self._dialects for thing in THINGS))
        names = (f"client {number}" for number in range(self._clients))
        self._tasks = [asyncio.create_task(self._run(), name=name) for name in names]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def more(self, requests: int) -> None:
        """Wait until so many more requests have ended."""
        wanted = self.counts.total() + requests
        async with asyncio.timeout(90):
            while self.counts.total() < wanted:
                self.ended.clear()
                await self.ended.wait()

    async def _learn(self, dialect: Dialect, thing: str) -> None:
        reply = await ask(self._port, dialect.path, dialect.body(prompt_of(thing), LIMIT))
        assert reply.status == 200, reply.body
        self._right[dialect.name, thing] = dialect.text(reply.body, prompt_of(thing))

    async def _run(self) -> None:
        while not self._stopping:
            number = next(self._turn)
            dialect = self._dialects[number % len(self._dialects)]
            self.counts[await self._one(dialect, THINGS[number % len(THINGS)])] += 1
            self.ended.set()

    async def _one(self, dialect: Dialect, thing: str) -> str:
        prompt = prompt_of(thing)
        async with await Client.connect(self._port) as client:
            await client.ask(dialect.path, dialect.body(prompt, LIMIT))
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await client.rest()
        if client.status != 200:
            self.notes.append(f"{dialect.name} {client.status} {client.body!r}")
            return "failed"
        if not client.complete:
            return "broken"
        text = dialect.text(client.body, prompt)
        if text == self._right[dialect.name, thing]:
            return "whole"
        self.notes.append(f"{dialect.name} {text!r} instead of {self._right[dialect.name, thing]!r}")
        return "wrong"


async def open_streams(port: int, dialect: Dialect, prompts: Iterable[str], limit: int = 30) -> list[Client]:
    """Streams that have begun: each has had its first piece."""
    clients = []
    for prompt in prompts:
        client = await Client.connect(port)
        await client.ask(dialect.path, dialect.body(prompt, limit))
        assert await client.head() == 200
        assert await client.piece()
        clients.append(client)
    return clients
