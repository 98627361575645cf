"""One member of the cluster: its condition, its links and the task that checks it."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance, State
from coordinator.core.ports import EngineProtocol

from .health import Health, HealthSettings

JITTER = 0.1  # checks of many instances spread over the interval instead of coming in one burst
HURRY = 0.2  # share of the interval that lies between two checks even when a failure asks for one at once
DETACH_LIMIT_S = 10.0


@dataclass(slots=True)
class Surroundings:
    """What all members share.

    Attributes:
        health: how often to check and when to judge; may change.
        changed: called after anything about a member may have changed.
    """

    health: HealthSettings
    clock: Callable[[], float]
    log: logging.Logger
    changed: Callable[["Member"], None]


class Member:
    """A known instance, from `attach` to `detach`. It is the `Watcher` that its engine tells about standing links.

    Args:
        instance: who it is.
        source: who named it: file, api or controller.
        engine: the protocol it speaks.
        after: the member that leaves the same place, if its links are still open; attaching waits until they are
            closed, because an engine may allow one link only (MindIE protocol page §5.1: a second /dresult evicts the
            first one with all its requests).
        around: what all members share.

    Attributes:
        source: who named it: file, api or controller.
        held: it takes no new request because somebody said so.
        gone: it is removed; only its links are left to close.
        state: state as of the last `settle`.
        model: model name that its engine told, if any.
    """

    def __init__(
        self, instance: Instance, source: str, engine: EngineProtocol, after: "Member | None", around: Surroundings
    ) -> None:
        self.instance = instance
        self.source = source
        self.held = False
        self.gone = False
        self.state = State.JOINING
        self.model: str | None = None
        self._health = Health(around.health)
        self._changed_at_s = around.clock()
        self._farewell = ""
        self._engine = engine
        self._after = after
        self._around = around
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._attached = False
        self._has_links = False
        self._checked_at_s = 0.0
        self._due_s = 0.0
        self._complained = False
        self._odd = False
        self._settled_model: str | None = None

    @property
    def leaving(self) -> bool:
        """Whether it takes no new request and is removed once no request needs it."""
        return bool(self._farewell)

    @property
    def blocks(self) -> bool:
        """Whether a successor at the same place has to wait for this one's links to be closed."""
        return not self._finished.is_set() and (self.gone or self._has_links)

    @property
    def reason(self) -> str:
        """Why it is not ready; empty if it is."""
        if self._farewell:
            return self._farewell
        if self.held:
            return "taken out by hand"
        if self._after is not None:
            return "the instance that was there before still serves requests"
        return self._health.reason(self._around.clock())

    # --- membership; `settle` draws the conclusions

    def is_same(self, instance: Instance | None) -> bool:
        """Whether an instance is this member, whatever else changed about it: it keeps its load and links then."""
        mine = self.instance
        return instance is mine or (instance is not None and (instance.key, instance.engine) == (mine.key, mine.engine))

    def update(self, instance: Instance, source: str) -> bool:
        """Take over what changed about it apart from its identity; whether anything did, or its source."""
        changed = (self.instance, self.source) != (instance, source)
        if self.instance != instance:
            self.instance = instance
        self.source = source
        return changed

    def readmit(self, instance: Instance, source: str) -> bool:
        """Use it again although it was held or leaving."""
        self.update(instance, source)
        self.held = False
        self._farewell = ""
        return True

    def retire(self, farewell: str) -> None:
        """Let it go once no request needs it."""
        self._farewell = self._farewell or farewell

    def describe(self, now_s: float) -> dict[str, object]:
        """Its row on the management plane."""
        instance = self.instance
        return {
            "id": instance.id,
            "role": instance.role.value,
            "url": instance.url,
            "engine": instance.engine,
            "model": instance.model or self.model,
            "state": self.state.value,
            "reason": self.reason,
            "since_s": round(now_s - self._changed_at_s, 3),
            "source": self.source,
            "group": instance.group,
            "peers": None if instance.peers is None else sorted(instance.peers),
            "max_requests": instance.capacity.max_requests,
        }

    # --- what is told about it

    def linked(self) -> None:
        """Its engine says: every standing link is open (`Watcher`)."""
        if not self._health.linked:
            self._health.link_up()
            self._hurry()
            self._around.changed(self)

    def unlinked(self, reason: str) -> None:
        """Its engine says: a standing link is lost or not open yet (`Watcher`)."""
        self._has_links = True
        self._health.link_down(reason)
        self._around.changed(self)

    def charge(self, error: EngineFailed) -> None:
        """A request failed there; where no connection could be made it is checked at once."""
        if error.connecting:
            known = self._health.lost
            self._health.unconnected(_reason(error))
            if not known:
                self._hurry()
        else:
            self._health.request_failed(error.reason.replace("_", " "), self._around.clock())
            self._wake.set()
        self._around.changed(self)

    def credit(self) -> None:
        """A request went well there."""
        if self._health.request_done():
            self._around.changed(self)

    def settle(self) -> bool:
        """Draw the state from all that is known; returns whether it, or the model, changed. A state is logged once."""
        now_s = self._around.clock()
        state = State.DRAINING if self.held or self.leaving else self._health.state(now_s)
        renamed, self._settled_model = self.model != self._settled_model, self.model
        if state is self.state:
            return renamed
        self.state = state
        self._changed_at_s = now_s
        level = logging.WARNING if state in (State.SUSPECT, State.DOWN) else logging.INFO
        reason = self.reason
        self._around.log.log(level, "instance %s is %s%s", self.instance.id, state, f": {reason}" if reason else "")
        return True

    # --- its task

    def start(self) -> None:
        """Attach it and check it from here on, in a task that `leave` or `stop` ends."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name=f"instance:{self.instance.id}")

    def renew(self) -> None:
        """The settings of health checks have changed: the next one is due by them."""
        self._health.settings = self._around.health
        self._due_s = min(self._due_s, self._checked_at_s + self._around.health.interval_s)
        self._wake.set()

    async def leave(self) -> None:
        """Stop checking, then close its links (within 10 s); successors at its place go on after that."""
        try:
            await self.stop()
            if self._after is not None:
                await self._after._finished.wait()  # noqa: SLF001  a successor waits for this one alone
            elif self._attached:
                async with asyncio.timeout(DETACH_LIMIT_S):
                    await self._engine.detach(self.instance)
        except Exception:  # the border to an engine: whatever it raises, the member is gone
            self._around.log.exception("instance %s could not be detached", self.instance.id)
        finally:
            self._finished.set()

    async def stop(self) -> None:
        """Stop checking; links stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _watch(self) -> None:
        if self._after is not None:
            # ends at the latest with the last request there, which has its own deadline
            await self._after._finished.wait()  # noqa: SLF001
            self._after = None
        if self.gone:
            return
        self._attach()
        while True:
            self._checked_at_s = self._around.clock()
            spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
            self._due_s = self._checked_at_s + self._around.health.interval_s * spread
            await self._check()
            self._around.changed(self)
            await self._pause()

    def _attach(self) -> None:
        self._attached = True
        try:
            self._engine.attach(self.instance, self)
        except Exception:  # the border to an engine: a member that cannot be attached is not linked, no more
            self._around.log.exception("instance %s could not be attached", self.instance.id)
            self.unlinked("it could not be attached")
        self._has_links = self._has_links or not self._health.linked

    async def _check(self) -> None:
        limit_s = self._around.health.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                told = await self._engine.probe(self.instance)
        except TimeoutError:
            self._failed(f"no answer to the health check within {limit_s:g} s")
        except EngineFailed as error:
            self._failed(_reason(error))
        except Exception:  # the border to an engine: an odd reply must not end the checks
            if not self._odd:
                self._odd = True
                self._around.log.exception("the health check of instance %s broke", self.instance.id)
            self._failed("the health check broke")
        else:
            self.model = told or self.model
            self._complained = self._odd = False
            self._health.checked()

    def _failed(self, reason: str) -> None:
        self._health.check_failed(reason)
        if self._health.doubtful:
            self._hurry()
        if self.state is State.JOINING and not self._complained:
            self._complained = True
            self._around.log.warning("instance %s is not ready yet: %s", self.instance.id, reason)

    def _hurry(self) -> None:
        """Have the next check as soon as the last one's start is not too near."""
        if self._task is not None:
            soon_s = self._checked_at_s + self._around.health.interval_s * HURRY
            self._due_s = min(self._due_s, soon_s)
            self._wake.set()

    async def _pause(self) -> None:
        """Wait for the next check; the end of a cool-down in between is told."""
        while (now_s := self._around.clock()) < self._due_s:
            cools_at_s = self._health.cools_at_s
            until_s = min(self._due_s, cools_at_s) if cools_at_s > now_s else self._due_s
            self._wake.clear()
            try:
                async with asyncio.timeout(until_s - now_s):
                    await self._wake.wait()
            except TimeoutError:
                self._around.changed(self)


def _reason(error: EngineFailed) -> str:
    words = error.reason.replace("_", " ")
    return f"{words}: {error.detail}" if error.detail else words
