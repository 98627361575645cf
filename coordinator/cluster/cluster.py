"""The one mutable set of instances; it publishes immutable views."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance, State
from coordinator.core.ports import EngineProtocol
from coordinator.core.view import ClusterView

from .blame import Blame
from .health import HealthSettings
from .member import Member, Surroundings
from .pairing import find_pair, list_reasons
from .roster import Place, Roster

Listener = Callable[[ClusterView], None]


@dataclass(frozen=True, slots=True)
class Changes:
    """What `Cluster.replace` did, as ids; `refused` says why for each."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class Cluster:
    """Who is there and how well.

    Everything but `start` and `aclose` is synchronous and takes effect at once: after `remove` returns, no view holds
    the instance any more. Use it from one event loop only.

    Args:
        engines: engine protocols by the names that instances give.
        health: how often to check and when to judge.
        in_flight: number of requests that need an instance, including those whose KV is still to be fetched from it.
        log: where state changes go, one line each.
        clock: monotonic seconds.

    Attributes:
        on_gone: told an instance that has left for good.
        on_named: called when anybody has named or dropped instances, before those that leave are gone.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineProtocol],
        health: HealthSettings,
        *,
        in_flight: Callable[[Instance], int],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._in_flight = in_flight
        self._log = log
        self._clock = clock
        self._around = Surroundings(health, clock, log, self._changed)
        self._roster = Roster()
        self._blame = Blame(self._roster, clock)
        self._leaves: set[asyncio.Task[None]] = set()
        self._listeners: list[Listener] = []
        self._running = False
        self._names: tuple[str, ...] = ()
        self.on_gone: Callable[[Instance], None] | None = None
        self.on_named: Callable[[], None] = lambda: None
        self._any_name = True
        self.view = ClusterView(0)

    def renew(self, health: HealthSettings) -> None:
        """Check and judge by these settings from here on; what is known about the instances stays."""
        self._around.health = health
        for member in self._roster.all():
            member.renew()

    def subscribe(self, listener: Callable[[ClusterView], None]) -> None:
        """Have each view given to `listener`: the present one at once, later ones as they come, synchronously."""
        self._listeners.append(listener)
        listener(self.view)

    async def start(self) -> None:
        """Attach all members and begin to check them; members that come later start at once."""
        self._running = True
        for member in self._roster.all():
            member.start()

    async def aclose(self) -> None:
        """Stop all checks. Links stay: they belong to the engines, which are closed after this."""
        self._running = False
        for task in self._leaves:
            task.cancel()
        await asyncio.gather(*self._leaves, *(m.stop() for m in self._roster.all()), return_exceptions=True)

    # --- who is there

    def add(self, instance: Instance, *, source: str) -> None:
        """Add one instance. One that drains and comes back under the same key is used again, its links untouched.

        Raises:
            ValueError: the id, or the place (role and address), is taken; or nobody speaks its engine's protocol.
        """
        old = self._roster.current.get(instance.id)
        if old is not None and old.is_same(instance) and (old.leaving or old.held):
            old.readmit(instance, source)
        else:
            self._join(instance, source)
        self._settle()

    def replace(self, source: str, instances: Sequence[Instance]) -> Changes:
        """Make `instances` all that `source` names: others of this source drain and go; equal ones are untouched.

        A member under the same key keeps its state, links and load, whatever else changed; one that another source
        named before is taken over. What cannot be added is left out and named in the result.
        """
        wanted = {instance.id: instance for instance in instances}
        added: list[str] = []
        changed: list[str] = []
        refused: dict[str, str] = {}
        removed = [m for m in self._roster.of(source) if not m.is_same(wanted.get(m.instance.id))]
        for member in removed:
            member.retire(f"no longer named by {source}")
        for ident, instance in wanted.items():
            current = self._roster.current.get(ident)
            if current is not None and current.is_same(instance):
                if current.readmit(instance, source) if current.leaving else current.update(instance, source):
                    changed.append(ident)
                continue
            try:
                self._join(instance, source)
                added.append(ident)
            except ValueError as error:
                refused[ident] = str(error)
        changes = Changes(tuple(added), tuple(m.instance.id for m in removed), tuple(changed), refused)
        if changes:
            self._settle()
        return changes

    def remove(self, id: str) -> None:  # noqa: A002
        """Take no more requests for it and remove it once none needs it; raises KeyError."""
        self._roster.current[id].retire("removed by hand")
        self._settle()

    def drain(self, id: str) -> None:  # noqa: A002
        """Take no more requests for it until `resume`; raises KeyError."""
        self._roster.current[id].held = True
        self._settle()

    def resume(self, id: str) -> None:  # noqa: A002
        """Undo `drain`, or `remove` while it is not gone yet; raises KeyError."""
        member = self._roster.current[id]
        member.readmit(member.instance, member.source)
        self._settle()

    def set_offline(self, ids: Iterable[str], *, offline: bool = True) -> None:
        """Drain several, or resume them, without removing any; unknown ids are passed over."""
        for ident in ids:
            if member := self._roster.current.get(ident):
                member.held = offline
        self._settle()

    def instances(self, source: str) -> dict[str, Instance]:
        """Instances that this source named and that are not leaving, by id."""
        return {m.instance.id: m.instance for m in self._roster.of(source)}

    def claimants(self, id: str, place: Place | None = None) -> list[tuple[str, Instance]]:  # noqa: A002
        """Who holds an id or a place, the leaving ones aside: source and instance."""
        return [(m.source, m.instance) for m in self._roster.claimants(id, place)]

    # --- what happened there

    def charge(self, instance: Instance, error: EngineFailed) -> None:
        """A request failed there. An engine's refusal (4xx) is no failure and must not be reported."""
        self._blame.charge(instance, error)

    def credit(self, instance: Instance) -> None:
        """A request went well there."""
        self._blame.credit(instance)

    def idle(self, instance: Instance) -> None:
        """No request needs it any more: if it is leaving, it goes."""
        for member in self._roster.holders(instance):
            self._part(member)

    # --- what can be served

    def models(self) -> tuple[str, ...]:
        """Model names that instances were configured with or told, in their order, each once."""
        return self._names

    def accepts(self, model: str | None) -> bool:
        """Whether some member, whatever its state, serves this name or any name.

        True as well while no instance is known: then the name cannot be judged, and "not available" is a better answer
        than "no such model".
        """
        return model is None or self._any_name or model in self._names

    def ready_pair(self, model: str | None = None) -> tuple[bool, str]:
        """Whether a request (for this model) could be placed, and a sentence that says why (not)."""
        found, sentence = find_pair((*self.view.ready, *self.view.suspect), model)
        if not self._roster.current:
            return False, "no instance is known"
        if not found:
            sentence += list_reasons((m.instance.id, m.state, m.reason) for m in self._roster.current.values())
        return found, sentence

    def known(self) -> tuple[Instance, ...]:
        """Every instance that requests may still run on, the leaving ones included."""
        return tuple(member.instance for member in self._roster.all())

    def describe(self) -> list[dict[str, object]]:
        """One row for each instance, the draining ones included. `since_s`: seconds in its state."""
        now_s = self._clock()
        return [m.describe(now_s) | {"in_flight": self._in_flight(m.instance)} for m in self._roster.all()]

    def states(self) -> Iterator[tuple[Instance, State]]:
        """Each known instance and its state, one for each id."""
        for member in self._roster.current.values():
            yield member.instance, member.state

    # --- inside

    def _join(self, instance: Instance, source: str) -> None:
        engine = self._engines.get(instance.engine)
        if engine is None:
            raise ValueError(f"instance {instance.id!r} wants the engine {instance.engine!r}, which is not in use here")
        before = self._roster.admit(instance)
        after = before if before is not None and before.blocks else None
        member = Member(instance, source, engine, after, self._around)
        self._roster.enter(member)
        self._log.info("instance %s is joining: %s at %s, from %s", instance.id, instance.role, instance.url, source)
        if self._running:
            member.start()

    def _part(self, member: Member) -> None:
        """Forget a leaving member that no request needs, and close its links."""
        if not member.leaving or member.gone or self._in_flight(member.instance) > 0:
            return
        member.gone = True
        self._roster.part(member)
        self._log.info("instance %s is removed", member.instance.id)
        self._publish()
        if not self._running:
            self._roster.vacate(member)
            return
        task = asyncio.create_task(self._leave(member), name=f"leave:{member.instance.id}")
        self._leaves.add(task)
        task.add_done_callback(self._leaves.discard)

    async def _leave(self, member: Member) -> None:
        try:
            await member.leave()
        finally:
            self._roster.vacate(member)
            if self.on_gone is not None:
                self.on_gone(member.instance)

    def _changed(self, member: Member) -> None:
        """Something about one member may have changed."""
        if not member.gone:
            if member.settle():
                self._publish()
            self._part(member)

    def _settle(self) -> None:
        """Membership changed: bring everything up to date, with one view for all of it."""
        self.on_named()
        members = self._roster.all()
        for member in members:
            member.settle()
        self._publish()
        for member in members:
            self._part(member)

    def _publish(self) -> None:
        members = self._roster.current.values()
        names = (m.instance.model or m.model for m in members)
        self._names = tuple(dict.fromkeys(name for name in names if name))
        self._any_name = not members or any(m.instance.model is None for m in members)
        ready = tuple(m.instance for m in members if m.state is State.READY)
        suspect = tuple(m.instance for m in members if m.state is State.SUSPECT)
        if (ready, suspect) != (self.view.ready, self.view.suspect):
            self.view = ClusterView(self.view.version + 1, ready, suspect)
            for listener in self._listeners:
                self._tell(listener)

    def _tell(self, listener: Listener) -> None:
        try:
            listener(self.view)
        except Exception:  # noqa: BLE001  the border to listeners: a fault of theirs must not end health checks
            self._log.exception("a listener failed on version %d of the cluster", self.view.version)
