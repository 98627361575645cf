"""KV links between instances: made when one comes, undone when one goes (xLLM protocol page §5.3).

Decode makes the link. A new decode instance links to every prefill one; to a new prefill instance, every decode one
links; a MIX instance links to everybody when it comes. An instance takes requests once all its links are there. If one
of them is refused, all are undone and tried again later. An instance that cannot be reached when another one comes
does not keep that one out: it has its own links made anew when it is back.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from coordinator.core.instance import Instance
from coordinator.core.ports import Watcher
from coordinator.engines.xllm.calls import EngineCalls, LinkError
from coordinator.engines.xllm.info import Info, Type, info_of

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
MOST_AT_ONCE = 32

Pair = tuple[Info, Info]
"""Who makes a link, and to whom."""


class Unit:
    """One instance with its links. A MIX instance whose role changes stays the same unit.

    Attributes:
        info: what its peers must know.
        group: links are made within one group only.
        linked: whether all its links are there.
        trouble: why it must not be used although its links may be there; empty: there is no reason.
        broken: set when its links have to be made anew.
        linked_as: what its peers know of it; None: nothing.
    """

    def __init__(self, instance: Instance) -> None:
        self.info: Info = info_of(instance)
        self.group = instance.group
        self.linked = False
        self.trouble = ""
        self._why = "its links are being made"
        self._holders: dict[object, tuple[Instance, Watcher]] = {}
        self.broken = asyncio.Event()
        self.linked_as: Info | None = None

    @property
    def instances(self) -> tuple[Instance, ...]:
        """It as the cluster knows it: two while its role changes."""
        return tuple(instance for instance, _ in self._holders.values())

    def hold(self, instance: Instance, watcher: Watcher) -> None:
        """The cluster knows it under this instance."""
        self._holders[instance.key] = (instance, watcher)
        self._tell()

    def release(self, instance: Instance) -> bool:
        """The cluster does not any more. Returns whether nobody holds it."""
        self._holders.pop(instance.key, None)
        return not self._holders

    def link_up(self) -> None:
        """All links are there."""
        self.linked = True
        self._tell()

    def link_down(self, why: str) -> None:
        """A link is missing."""
        self.linked = False
        self._why = why
        self._tell()

    def break_off(self, why: str) -> None:
        """Its links do not hold any more, whatever it says: they are to be made anew."""
        self.link_down(why)
        self.broken.set()

    def trouble_is(self, trouble: str) -> None:
        """Say why it must not be used, or with an empty text that it may be."""
        if trouble != self.trouble:
            self.trouble = trouble
            self._tell()

    def _tell(self) -> None:
        for _, watcher in list(self._holders.values()):
            if self.linked and not self.trouble:
                watcher.linked()
            else:
                watcher.unlinked(self.trouble or self._why)


class Linker:
    """Keeps every unit linked to its peers, each by a task of its own.

    Args:
        calls: to the instances.
        log: gets a line for each link that fails.
        pause: waits; a test puts something quicker in its place.

    Attributes:
        ready: nobody is linked before this is set, since prefill asks our own server for its decode instance.
    """

    def __init__(
        self,
        calls: EngineCalls,
        log: logging.Logger,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._calls = calls
        self._log = log
        self._pause = pause
        self._units: dict[str, Unit] = {}
        self._tasks: dict[Unit, asyncio.Task[None]] = {}
        self.ready = asyncio.Event()
        self._joining = asyncio.Lock()  # one at a time, so that no two come past each other unlinked

    @property
    def units(self) -> dict[str, Unit]:
        """Everybody, by name."""
        return self._units

    def join(self, unit: Unit) -> None:
        """Make the links of a new unit, and keep them. Returns at once."""
        self._units[unit.info.name] = unit
        task = asyncio.get_running_loop().create_task(self._keep(unit), name=f"links of {unit.info.name}")
        self._tasks[unit] = task

    async def leave(self, unit: Unit) -> None:
        """A unit is gone: its peers close their links to it."""
        if self._units.get(unit.info.name) is unit:
            del self._units[unit.info.name]
        task = self._tasks.pop(unit, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if unit.linked:
            unit.linked = False
            pairs = [(peer.info, unit.info) for peer in self._peers(unit) if peer.info.kind is not Type.PREFILL]
            await self._undo(pairs)  # prefill instances have made no link that they could close

    async def aclose(self) -> None:
        """Stop making links; those that are there stay."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- one unit

    async def _keep(self, unit: Unit) -> None:
        pause_s, complained = FIRST_PAUSE_S, ""
        await self.ready.wait()
        while True:
            unit.broken.clear()
            async with self._joining:
                fault = await self._link_all(unit)
                if not fault and not unit.broken.is_set():
                    unit.link_up()
            if unit.linked:
                pause_s, complained = FIRST_PAUSE_S, ""
                await unit.broken.wait()
                continue
            if fault and fault != complained:
                complained = fault
                self._log.warning("instance %s is not linked: %s", unit.info.name, fault)
            unit.link_down(fault or "its links are being made")
            await self._pause(pause_s * random.uniform(0.75, 1.25))  # noqa: S311  # jitter, no secret
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _link_all(self, unit: Unit) -> str:
        """Make every link of a unit; returns why not, and then none of them is left."""
        peers = self._peers(unit)
        pairs = [_pair(unit, peer) for peer in peers]
        before, unit.linked_as = unit.linked_as, unit.info
        if before is not None:
            # what is left of its links from before is in the way of new ones
            await self._undo([(a, before if b is unit.info else b) for a, b in pairs])
        results = await self._all(self._calls.link, pairs)
        fault = ""
        for (initiator, _), peer, error in zip(pairs, peers, results, strict=True):
            if error is not None and initiator is peer.info and not error.reached:
                peer.break_off("it could not be reached for a link")
            elif error is not None:
                fault = fault or str(error)
        if fault:
            unit.linked_as = None
            await self._undo(pairs)
        return fault

    def _peers(self, unit: Unit) -> list[Unit]:
        """Those with whom it needs a link and who have theirs."""
        return [u for u in self._units.values() if u is not unit and u.linked and _need_link(unit, u)]

    async def _undo(self, pairs: Sequence[Pair]) -> None:
        await self._all(self._calls.unlink, pairs)

    async def _all(
        self, call: Callable[[Info, Info], Awaitable[None]], pairs: Sequence[Pair]
    ) -> list[LinkError | None]:
        """Make the same call for each pair, a few at a time."""
        room = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(initiator: Info, peer: Info) -> LinkError | None:
            async with room:
                try:
                    await call(initiator, peer)
                except LinkError as error:
                    return error
                return None

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(a, b), name=f"link {a.name} to {b.name}") for a, b in pairs]
        return [task.result() for task in tasks]


def _pair(new: Unit, other: Unit) -> Pair:
    """Who makes the link, and to whom."""
    makes_it = new.info.kind is Type.MIX or (new.info.kind is Type.DECODE)
    return (new.info, other.info) if makes_it else (other.info, new.info)


def _need_link(one: Unit, other: Unit) -> bool:
    kinds = {one.info.kind, other.info.kind}
    return one.group == other.group and (Type.MIX in kinds or kinds == {Type.PREFILL, Type.DECODE})
