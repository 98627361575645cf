"""Follows objects: a list, then watches from its version on, a list again where that is too old."""

import asyncio
import random
import time

from coordinator.config import KubernetesSource
from coordinator.core.instance import Instance
from coordinator.discovery.pauses import Pauses
from coordinator.discovery.source import Make, Report

from .access import Access
from .calls import Calls
from .errors import Expired, Unreachable
from .kinds import Entry, Kind, Pods, Slices
from .objects import Event, Meta, Named, read

WATCH_S = 150.0  # then another one begins, with a token that is read again
BREATH = 50  # objects of a list that are read before requests get a turn
CALM_S = 5.0  # a watch that has lasted that long was none that failed

Key = tuple[str, str]
Made = tuple[list[Instance], dict[str, str]]


class KubernetesObjects:
    """The objects that a source's settings describe, as instances.

    While the API server is away, everything stays as it was last seen. A watch that broke goes on from the last version
    that was seen, bookmarks included.

    Args:
        given: the source's settings.
        access: opens sessions.
        make: builds an instance.
        watch_s: how long a watch lasts; from one to the next it differs by a quarter, so that not all end at once.
        pauses: between tries.
    """

    def __init__(
        self,
        given: KubernetesSource,
        access: Access,
        make: Make,
        *,
        watch_s: float = WATCH_S,
        pauses: Pauses | None = None,
    ) -> None:
        self._given = given
        self._access = access
        self._make = make
        self._watch_s = watch_s
        self._pauses = pauses or Pauses()
        self._kind: Kind = Pods(given) if given.kind == "pods" else Slices(given)
        self._version = ""
        self._made: dict[Key, Made] = {}

    async def run(self, report: Report) -> None:
        """See source.Source."""
        while True:
            begun_s = time.monotonic()
            wait_s = 0.0
            try:
                await self._follow(report)
            except Expired:
                self._version = ""
            except Unreachable as error:
                report.lost(str(error))
                wait_s = error.retry_after_s
            if time.monotonic() - begun_s >= CALM_S:
                self._pauses.reset()
            await asyncio.sleep(max(self._pauses.next_s(), wait_s))

    async def _follow(self, report: Report) -> None:
        """List if need be, and watch until that ends; raises Unreachable, Expired."""
        given = self._given
        async with self._access.session() as session:
            calls = Calls(session.client, self._kind.path(given.namespace or session.namespace), given.label_selector)
            if not self._version:
                await self._list(calls)
                self._tell(report)
            last_s = self._watch_s * random.uniform(0.75, 1.25)  # noqa: S311  # no secret
            async with calls.watch(self._version, last_s) as watch:
                self._tell(report)
                while (events := await watch.events()) is not None:
                    self._take(events, report)

    async def _list(self, calls: Calls) -> None:
        items, version = await calls.list_all()
        made: dict[Key, Made] = {}
        for at, item in enumerate(items):
            if at % BREATH == 0:
                await asyncio.sleep(0)
            meta, entries = self._kind.entries(item)
            made[_key(meta)] = self._instances(entries)
        self._made, self._version = made, version

    def _take(self, events: list[Event], report: Report) -> None:
        changed = False
        try:
            for event in events:
                changed |= self._changed(event)
        finally:
            if changed:
                self._tell(report)

    def _changed(self, event: Event) -> bool:
        """Take an event; returns whether it changes anything about instances."""
        if event.type == "BOOKMARK":
            self._version = read(event.object, Named).metadata.resource_version or self._version
            return False
        if event.type == "DELETED":
            meta = read(event.object, Named).metadata
            self._version = meta.resource_version or self._version
            return self._made.pop(_key(meta), ([], {})) != ([], {})
        if event.type not in ("ADDED", "MODIFIED"):
            return False
        meta, entries = self._kind.entries(event.object)
        made = self._instances(entries)
        self._version = meta.resource_version or self._version
        before = self._made.get(_key(meta))
        self._made[_key(meta)] = made
        return made != (before or ([], {}))

    def _instances(self, entries: list[Entry]) -> Made:
        instances: list[Instance] = []
        faults: dict[str, str] = {}
        for entry in entries:
            if entry.fault:
                faults[entry.name] = entry.fault
                continue
            try:
                instances.append(self._make(entry.keys))
            except ValueError as error:
                faults[entry.name] = str(error)
        return instances, faults

    def _tell(self, report: Report) -> None:
        """Tell all instances, each once: an endpoint may be in several slices, and once for each kind of address."""
        found: dict[str, Instance] = {}
        faults: dict[str, str] = {}
        for key in sorted(self._made):
            instances, refused = self._made[key]
            faults.update(refused)
            for one in instances:
                known = found.get(one.id)
                if known is None or self._given.kind == "pods" or _rank(one) < _rank(known):
                    found[one.id] = one
        report.found(list(found.values()), faults)


def _key(meta: Meta) -> Key:
    return (meta.namespace, meta.name)


def _rank(one: Instance) -> tuple[bool, str, int]:
    """IPv4 before IPv6."""
    return (":" in one.address.host, one.address.host, one.address.port)
