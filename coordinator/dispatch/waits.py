"""Timers for waits that hardly ever come to their end."""

import asyncio
from collections.abc import Callable
from typing import Protocol

SHORTEST_WAIT_S = 0.002  # timers of the event loop count in milliseconds
FAR_S = 3.0  # up to here a wait gets a timer of the loop at once
LOOK_EVERY_S = 1.0


class Waiter(Protocol):
    """Who waits. It keeps what `Waits` needs to know of it."""

    due_s: float
    timer: asyncio.TimerHandle | None

    def fire(self) -> None:
        """The time has come; not called after `Waits.stop`."""
        ...


class Waits:
    """The waits of many requests, for one event loop.

    Deadlines are minutes away and requests end within seconds, but to set a timer of the loop and take it back costs as
    much as a good part of a small request. So a distant wait is put into the bag of its second, at next to no cost, and
    gets a timer when its second comes near. One timer looks after all bags, while there is anything in them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock
        self._bags: dict[int, set[Waiter]] = {}
        self._count = 0
        self._look: asyncio.TimerHandle | None = None

    def start(self, waiter: Waiter, now_s: float, wait_s: float) -> None:
        """Fire in so many seconds; a waiter waits for one thing at a time."""
        if wait_s <= FAR_S:
            waiter.timer = self._loop.call_later(max(SHORTEST_WAIT_S, wait_s), waiter.fire)
            return
        waiter.due_s = due_s = now_s + wait_s
        bag = self._bags.get(int(due_s))
        if bag is None:
            bag = self._bags[int(due_s)] = set()
        bag.add(waiter)
        self._count += 1
        if self._look is None:
            self._look = self._loop.call_later(LOOK_EVERY_S, self._look_around)

    def stop(self, waiter: Waiter) -> None:
        """Wait no more; nothing happens if it does not wait."""
        timer = waiter.timer
        if timer is not None:
            waiter.timer = None
            timer.cancel()
            return
        bag = self._bags.get(int(waiter.due_s))
        if bag is not None and waiter in bag:
            bag.remove(waiter)
            self._count -= 1

    def _look_around(self) -> None:
        self._look = None
        now_s = self._clock()
        for second in [second for second in self._bags if second < now_s + FAR_S]:
            bag = self._bags.pop(second)
            self._count -= len(bag)
            for waiter in bag:
                waiter.timer = self._loop.call_later(max(SHORTEST_WAIT_S, waiter.due_s - now_s), waiter.fire)
        if self._count:
            self._look = self._loop.call_later(LOOK_EVERY_S, self._look_around)
        else:
            self._bags.clear()
