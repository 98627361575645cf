"""From registrations in etcd to members of the cluster (xLLM protocol page §5.1, §7)."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.core.abilities import Host
from coordinator.core.errors import RequestError
from coordinator.core.instance import Instance, Role
from coordinator.engines.xllm.calls import EngineCalls
from coordinator.engines.xllm.condition import Condition
from coordinator.engines.xllm.fleet import Fleet
from coordinator.engines.xllm.info import ROLES, Info, Type, info_of, read_registration
from coordinator.engines.xllm.mixing import Mixing
from coordinator.engines.xllm.registry import Beat
from coordinator.engines.xllm.settings import XllmSettings

KINDS = {b"XLLM:%b:" % kind.name.encode(): kind for kind in Type}
TICK_S = 0.25
TICKS_PER_MIXING = 4
HEALTH = "/health"
HEALTH_TRIES = 2
HEALTH_S = 1.0
HEALTH_PAUSE_S = 0.1


class _Entry:
    """One registered instance."""

    def __init__(self, kind: Type, keys: dict[str, object], condition: Condition) -> None:
        self.kind = kind
        self.keys = keys
        self.condition = condition
        self.instance: Instance | None = None
        self.lost = False


class Discovery:
    """Follows registrations (presence.Listener) and heartbeats, and makes members of the cluster of them.

    Args:
        fleet: is told of troubles and new starts.
        host: makes instances, and members of them.
        calls: asks those whose lease is lost for their health.
    """

    def __init__(  # the engine hands over what it has built
        self,
        settings: XllmSettings,
        fleet: Fleet,
        host: Host,
        calls: EngineCalls,
        log: logging.Logger,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._host = host
        self._calls = calls
        self._log = log
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._mixing = Mixing(settings, host, log)
        self._master = False
        self._faults: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def renew(self, settings: XllmSettings) -> None:
        """Judge silences, and choose roles, by these settings."""
        self._settings = settings
        self._mixing.renew(settings)
        for entry in self._entries.values():
            entry.condition.judge_by(settings.heartbeat_timeout_s, settings.suspect_s)

    def start(self) -> None:
        """Look at times from here on."""
        self._task = asyncio.get_running_loop().create_task(self._tick(), name="xLLM instances")

    async def aclose(self) -> None:
        """Stop."""
        tasks = [task for task in (self._task, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- registrations; see presence.Listener

    def listed(self, entries: Mapping[bytes, bytes]) -> None:
        """All keys there are: those that are missing are gone."""
        present: set[str] = set()
        for key, value in entries.items():
            name = self._name(key)
            if name:
                present.add(name)
                self._register(name, key, value)
        for name, entry in self._entries.items():
            if name not in present and entry.condition.leased:
                self._unleased(name, entry)
        self._announce()

    def put(self, key: bytes, value: bytes) -> None:
        """A key was written."""
        name = self._name(key)
        if name and self._register(name, key, value):
            self._announce()

    def deleted(self, key: bytes, before: bytes) -> None:
        """A key is gone; one of another start of the instance, or of another type, does not count."""
        name = self._name(key)
        entry = self._entries.get(name)
        if entry is None:
            return
        try:
            kind, keys = read_registration(before)
        except ValueError:
            kind, keys = KINDS[key[: key.index(b":", 5) + 1]], entry.keys
        if kind is entry.kind and keys.get("incarnation_id") == entry.condition.incarnation:
            self._unleased(name, entry)

    def mastered(self, *, master: bool) -> None:
        """Whether heartbeats come to us."""
        self._master = master

    def _name(self, key: bytes) -> str:
        """The instance's name in its key; empty for a key of something else."""
        prefix = next((prefix for prefix in KINDS if key.startswith(prefix)), None)
        return key[len(prefix) :].decode("utf-8", "replace") if prefix is not None else ""

    def _register(self, name: str, key: bytes, value: bytes) -> bool:
        """Take a registration; returns whether anything about members changes."""
        try:
            kind, keys = read_registration(value)
        except ValueError as error:
            self._complain(name, str(error))
            return False
        if keys["id"] != name or not key.startswith(b"XLLM:%b:" % kind.name.encode()):
            self._complain(name, "its registration is not that of its key")
            return False
        self._faults.pop(name, None)
        now_s = self._clock()
        old = self._entries.get(name)
        incarnation = str(keys["incarnation_id"])
        if old is not None and old.condition.incarnation == incarnation and old.kind is kind:
            old.condition.registered(now_s)
            changed, old.keys = old.keys != keys, keys
            self._show(name, old)
            return changed
        entry = self._entries[name] = _Entry(kind, keys, self._condition(incarnation, now_s))
        if old is not None:
            entry.instance = self._made(name, entry)
            self._fleet.started_anew(name, entry.instance)
            self._show(name, entry)
        return True

    def _condition(self, incarnation: str, now_s: float) -> Condition:
        settings = self._settings
        return Condition(incarnation, now_s, silence_s=settings.heartbeat_timeout_s, suspect_s=settings.suspect_s)

    # --- heartbeats; see fleet.Registered

    def beat(self, beat: Beat) -> bool | None:
        """Take a heartbeat; see fleet.Registered."""
        entry = self._entries.get(beat.name)
        if entry is None:
            return None
        if beat.incarnation != entry.condition.incarnation:
            return False
        entry.condition.beat(self._clock())
        entry.lost = False
        self._show(beat.name, entry)
        return True

    def find(self, name: str) -> Info | None:
        """See fleet.Registered."""
        entry = self._entries.get(name)
        return info_of(entry.instance) if entry is not None and entry.instance is not None else None

    # --- time

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1
            try:
                self.look()
                if ticks % TICKS_PER_MIXING == 0 and self._mixing.look():
                    self._announce()
            except Exception:  # noqa: BLE001  # the border to all that follows from a tick: a fault must not end it
                self._log.exception("looking after xLLM instances failed")

    def look(self) -> None:
        """See who has been silent for too long."""
        now_s = self._clock()
        gone = []
        for name, entry in self._entries.items():
            condition = entry.condition
            condition.tick(now_s, expects_beats=self._master)
            self._show(name, entry)
            if condition.given_up and not entry.lost:
                entry.lost = True
                self._fleet.lose(name, condition.trouble)
            if condition.gone:
                gone.append(name)
        for name in gone:
            self._log.warning("instance %s is given up", name)
            del self._entries[name]
        if gone:
            self._announce()

    def _unleased(self, name: str, entry: _Entry) -> None:
        """Its key is gone: whether it is alive decides what that means."""
        if name not in self._probes and entry.condition.leased:
            task = asyncio.get_running_loop().create_task(self._ask(name, entry), name=f"is {name} alive")
            self._probes[name] = task
            task.add_done_callback(lambda _: self._probes.pop(name, None))

    async def _ask(self, name: str, entry: _Entry) -> None:
        alive = entry.instance is not None and await self._is_alive(entry.instance)
        if self._entries.get(name) is entry:
            self._log.warning(
                "instance %s has lost its lease and is %s", name, "alive" if alive else "not to be reached"
            )
            entry.condition.lease_lost(self._clock(), alive=alive)
            self._show(name, entry)

    async def _is_alive(self, instance: Instance) -> bool:
        for attempt in range(HEALTH_TRIES):
            if attempt:
                await asyncio.sleep(HEALTH_PAUSE_S)
            try:
                await self._calls.health(instance, HEALTH, HEALTH_S)
            except RequestError:
                continue
            return True
        return False

    # --- members

    def _show(self, name: str, entry: _Entry) -> None:
        self._fleet.trouble(name, entry.condition.trouble)

    def _announce(self) -> None:
        """Make members of all that is registered."""
        mix = [name for name, entry in self._entries.items() if entry.kind is Type.MIX]
        fixed = {name: ROLES[entry.kind] for name, entry in self._entries.items() if entry.kind is not Type.MIX}
        self._mixing.update(mix, fixed)
        instances = []
        for name, entry in self._entries.items():
            entry.instance = self._made(name, entry)
            if entry.instance is not None:
                instances.append(entry.instance)
        for name, why in self._host.announce(instances).items():
            self._complain(name, why)

    def _made(self, name: str, entry: _Entry) -> Instance | None:
        role: Role = self._mixing.role(name) if entry.kind is Type.MIX else ROLES[entry.kind]
        given: dict[str, Any] = {**entry.keys, "role": role.value}
        try:
            return self._host.make(given)
        except ValueError as error:
            self._complain(name, str(error))
            return None

    def _complain(self, name: str, why: str) -> None:
        if self._faults.get(name) != why:
            self._faults[name] = why
            self._log.warning("instance %s, which has registered itself, is not used: %s", name, why)
