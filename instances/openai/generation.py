"""The tokens of one request: its sequences in the batch, and the faults that strike them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from instances.faults import Chosen
from instances.openai.ask import Choice, Job
from instances.openai.menu import STREAM_FAULTS
from instances.openai.meters import Meters
from instances.openai.outlet import Outlet
from instances.openai.refusal import Refused
from instances.openai.writers import Writer

_BACKLOG_BYTES = 1 << 20
_FAILED = "Internal server error"


class Work(Protocol):
    """What an instance does with a request besides making tokens: where its KV comes from and where it goes.

    Attributes:
        first_token_ready: whether the first token is there with the KV, or takes a decode step like the others.
    """

    first_token_ready: bool

    async def prepare(self) -> None:
        """Get the KV of every sequence in place; raises Refused."""
        ...

    async def finish(self) -> None:
        """All tokens exist: what must happen before the answer may end; raises Refused."""
        ...

    def ended(self) -> None:
        """Whatever happened, the request is over here: give KV back, unless it waits for a peer."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """All that belongs to one request."""

    job: Job
    writer: Writer
    work: Work
    chosen: Chosen


class Generation:
    """A request on its way.

    Args:
        call: the request.
        meters: of the instance.
        crash: kills the instance; takes the seconds after which it is back.
    """

    def __init__(self, call: Call, meters: Meters, crash: Callable[[float | None], None]) -> None:
        self.call = call
        self.meters = meters
        self.crash = crash
        self.outlet: Outlet | None = None
        self.over = asyncio.Event()
        self.failure: Refused | None = None
        self.struck = ""
        self.sequences = [Sequence(self, choice) for choice in call.job.choices]
        self._left = len(self.sequences)
        self._scope: asyncio.Timeout | None = None

    async def prepare(self) -> None:
        """Get the KV in place; raises Refused, also when `end` comes meanwhile."""
        await self._guarded(self.call.work.prepare)

    async def finish(self) -> None:
        """What must happen once all tokens exist; raises Refused, also when `end` comes meanwhile."""
        await self._guarded(self.call.work.finish)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        self._raise_failure()
        try:
            async with asyncio.timeout(None) as self._scope:
                await work()
        except TimeoutError:
            self._raise_failure()
            raise
        finally:
            self._scope = None

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def opening(self) -> None:
        """The events before the first tokens."""
        if self.outlet is None:
            return
        if "empty_first" in self.call.chosen:
            self.outlet.event(self.call.writer.empty(self.call.job))
        for choice in self.call.job.choices:
            for value in self.call.writer.opening(self.call.job, choice):
                self.outlet.event(value)

    def fail(self, failure: Refused) -> None:
        """The request ends here with an error, in whatever state it is."""
        self.failure = self.failure or failure
        self.over.set()
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def strike(self, name: str) -> None:
        """The stream breaks off in this way."""
        self.struck = name
        self.over.set()

    def done(self) -> None:
        """One sequence is complete."""
        self._left -= 1
        if not self._left:
            self.over.set()


class Sequence:
    """One sequence, as a member of the batch."""

    def __init__(self, generation: Generation, choice: Choice) -> None:
        self._generation = generation
        self.choice = choice
        self._last_s = time.monotonic()
        self._stalled = self._went_on = False

    def go_on(self) -> bool:
        """No stall holds it any more; whether it stood in one, so that it has to join the batch again."""
        stood, self._stalled = self._stalled, False
        self._went_on = True
        return stood

    def step(self) -> bool:
        """Make one token; False when there is nothing more to do."""
        generation, choice = self._generation, self.choice
        outlet, call = generation.outlet, generation.call
        if generation.over.is_set():
            return False
        if outlet is not None and outlet.backlog_bytes > _BACKLOG_BYTES:
            return True  # a slow reader of its own stream holds up nobody else
        if call.chosen and self._strikes(choice.sent):
            return False
        choice.sent += 1
        now_s = time.monotonic()
        generation.meters.token(call.job, choice, now_s - self._last_s)
        self._last_s = now_s
        if outlet is not None:
            for value in call.writer.token(call.job, choice):
                outlet.event(value, choice.sent)
        if choice.is_last(choice.sent - 1):
            generation.done()
            return False
        return True

    def _strikes(self, tokens: int) -> bool:
        """Faults that are due when so many tokens exist; True: no more tokens."""
        generation, chosen = self._generation, self._generation.call.chosen
        if (fault := chosen.at("answer_error", tokens, 0)) is not None:
            generation.fail(Refused(500, fault.value or _FAILED))
            return True
        if (fault := chosen.at("answer_crash", tokens, 0)) is not None:
            generation.crash(fault.number(0) if fault.value else None)
            return True
        if chosen.at("stall", tokens, 0) is not None and not self._went_on:
            self._stalled = True
            return True
        for name in STREAM_FAULTS:
            if chosen.at(name, tokens, 0) is not None and generation.outlet is not None:
                generation.strike(name)
                return True
        return False
