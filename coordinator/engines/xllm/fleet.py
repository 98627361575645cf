"""Every instance that is known, and what its heartbeats tell."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from coordinator.core.instance import Instance
from coordinator.core.ports import Watcher
from coordinator.engines.xllm.info import Info, Type, info_of, lack_of_links
from coordinator.engines.xllm.linking import Linker, Unit
from coordinator.engines.xllm.registry import Beat

GONE = "it is gone: its port refuses connections"

Lose = Callable[[str, str], None]
"""Fails the requests that an instance (by its id) works on, for a reason."""


class Registered(Protocol):
    """Instances that have registered themselves, and those of them that nobody has attached yet."""

    def beat(self, beat: Beat) -> bool | None:
        """Take a heartbeat; None: nobody of this name has registered."""
        ...

    def find(self, name: str) -> Info | None:
        """An instance by its name."""
        ...


class Fleet:
    """The instances of this engine protocol, in the file or registered.

    Args:
        linker: makes their links.
        lose: called when an instance has lost what it worked on.

    Attributes:
        registered: those that register themselves, where there is etcd.
        heard: gets every heartbeat of a known instance.
    """

    def __init__(self, linker: Linker, lose: Lose, log: logging.Logger) -> None:
        self._linker = linker
        self._lose = lose
        self._log = log
        self._met: set[str] = set()
        self._away: set[str] = set()
        self.registered: Registered | None = None
        self.heard: Callable[[Beat], None] | None = None

    # --- the cluster's side

    def attach(self, instance: Instance, watcher: Watcher) -> None:
        """An instance has come, or a MIX one has another role."""
        lack = lack_of_links(info_of(instance))
        if lack is not None:
            self._log.error("instance %s cannot be used: %s", instance.id, lack)
            watcher.unlinked(lack)
            return
        unit = self._linker.units.get(instance.address.netloc)
        if unit is None:
            unit = Unit(instance)
            unit.hold(instance, watcher)
            self._linker.join(unit)
        else:
            unit.hold(instance, watcher)

    async def detach(self, instance: Instance) -> None:
        """An instance is gone, or one role of it."""
        name = instance.address.netloc
        unit = self._linker.units.get(name)
        if unit is not None and unit.release(instance):
            self._away.discard(name)
            self._met.discard(name)
            await self._linker.leave(unit)

    def reached(self, instance: Instance) -> None:
        """A health check went well; after one that could not connect, the instance may have been started anew."""
        name = instance.address.netloc
        self._met.add(name)
        if name in self._away:
            self._away.discard(name)
            unit = self._linker.units.get(name)
            if unit is not None:
                unit.break_off("it was away")

    def unreached(self, instance: Instance, *, refused: bool) -> None:
        """A health check could not connect; before the first one that went well that means nothing.

        `refused`: its process is gone, so nothing of what it worked on will be pushed any more. Its links are made anew
        at once, for with the old ones decode gives up what waits for its first token (protocol page §5.3).
        """
        name = instance.address.netloc
        if name not in self._met:
            return
        if refused:
            self.lose(name, GONE)
            unit = self._linker.units.get(name)
            if unit is not None and name not in self._away:
                unit.break_off(GONE)
        self._away.add(name)

    # --- heartbeats and registrations

    def beat(self, beat: Beat) -> bool:
        """See registry.Registry."""
        known = self.registered.beat(beat) if self.registered is not None else None
        if known is None:
            known = self._beat_of_file(beat)
        if known and self.heard is not None:
            self.heard(beat)
        return known

    def _beat_of_file(self, beat: Beat) -> bool:
        unit = self._linker.units.get(beat.name)
        if unit is None:
            return False
        info = unit.info
        if beat.incarnation and beat.incarnation != info.incarnation:
            known_before = bool(info.incarnation)
            unit.info = replace(info, incarnation=beat.incarnation)
            if known_before:
                self.started_anew(beat.name)
        return True

    def started_anew(self, name: str, instance: Instance | None = None) -> None:
        """An instance has a new incarnation: what it worked on is lost, and so are its links."""
        unit = self._linker.units.get(name)
        if unit is None:
            return
        self._log.warning("instance %s has started anew", name)
        self.lose(name, "it has started anew")
        if instance is not None:
            unit.info = info_of(instance)
        unit.break_off("it has started anew")

    def lose(self, name: str, why: str) -> None:
        """What an instance works on is lost."""
        unit = self._linker.units.get(name)
        if unit is not None:
            for ident in {instance.id for instance in unit.instances}:
                self._lose(ident, why)

    def trouble(self, name: str, why: str) -> None:
        """An instance must not be used for a reason, or with an empty one may be."""
        unit = self._linker.units.get(name)
        if unit is not None:
            unit.trouble_is(why)

    # --- for other instances

    def find(self, name: str) -> Info | None:
        """See registry.Registry."""
        unit = self._linker.units.get(name)
        if unit is not None:
            return unit.info
        return self.registered.find(name) if self.registered is not None else None

    def names(self, kind: Type) -> Iterable[str]:
        """See registry.Registry."""
        return [name for name, unit in self._linker.units.items() if unit.info.kind is kind]
