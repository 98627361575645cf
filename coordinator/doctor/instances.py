"""Each instance by itself: whether it answers, is who the configuration says it is, and has the right time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from coordinator.core.abilities import Examiner, Identity
from coordinator.core.errors import RequestError
from coordinator.core.instance import Instance
from coordinator.core.ports import EngineProtocol
from coordinator.doctor.advice import advice_for, place_of, told
from coordinator.doctor.findings import Finding, Level, fault, note, ok, warning
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError

SKEW_S = 5.0  # `Date` has whole seconds, and the answer takes its time
NO_HTTP = ("disaggpb",)


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found of one instance.

    Attributes:
        able: whether it can be tried with others.
        models: the names that it says it serves.
    """

    able: bool
    findings: list[Finding]
    models: tuple[str, ...] = ()


class InstanceCheck:
    """Looks at one instance.

    Args:
        engine: its protocol.
        examiner: reads what it tells about itself.
        within_s: for each of the questions.
        wall: the time that it is held against.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        examiner: Examiner,
        client: HttpClient,
        within_s: float,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._engine = engine
        self._examiner = examiner
        self._client = client
        self._within_s = within_s
        self._wall = wall

    async def run(self, instance: Instance) -> Looked:
        """Ask it."""
        failure = await self._reach(instance)
        if failure is not None:
            return Looked(able=False, findings=[failure])
        found = [ok("reach", instance.id, f"{place_of(instance)} answers")]
        identity = await self._examiner.identify(instance, self._within_s)
        if identity.role is not None:
            found.append(_role(instance, identity.role))
        found.append(_model(instance, identity))
        if identity.version is not None:
            found.append(ok("version", instance.id, identity.version))
        if instance.engine not in NO_HTTP:
            found.append(await self._clock(instance))
        return Looked(not any(one.level is Level.FAULT for one in found), found, identity.models)

    async def _reach(self, instance: Instance) -> Finding | None:
        error: Exception
        try:
            async with asyncio.timeout(self._within_s):
                await self._engine.probe(instance)
        except TimeoutError:
            what = f"{place_of(instance)} does not answer within {self._within_s:g} s"
            return fault("reach", instance.id, what, "is it loading, hanging, or behind a firewall? See its own log")
        except RequestError as failed:
            error = failed
        except Exception as odd:  # noqa: BLE001  # the border to engines of the user's own
            error = odd
        else:
            return None
        return fault("reach", instance.id, f"{place_of(instance)}: {told(error)}", advice_for(error))

    async def _clock(self, instance: Instance) -> Finding:
        asked_s = time.monotonic()
        date = None
        with contextlib.suppress(TransportError, ValueError):
            reply = await self._client.fetch(
                instance.address, b"GET", "/v1/models", (), deadline_s=asked_s + self._within_s
            )
            date = parsedate_to_datetime((reply.header(b"date") or b"").decode("latin-1"))
        if date is None or date.tzinfo is None:
            return note("clock", instance.id, "it does not tell its time")
        skew_s = (date - self._wall()).total_seconds() + 0.5  # whole seconds are cut off, half of one on average
        spent_s = time.monotonic() - asked_s
        if abs(skew_s) <= SKEW_S + spent_s:
            return ok("clock", instance.id, "agrees with this machine")
        which = "ahead of" if skew_s > 0 else "behind"
        return warning(
            "clock",
            instance.id,
            f"its clock is {_span(abs(skew_s))} {which} this machine's",
            "let both machines keep time by NTP: certificates and leases go by the clock, logs are ordered by it",
        )


def odd_ones_out(identities: dict[str, tuple[Instance, str]]) -> Iterator[Finding]:
    """Instances of one engine with different versions: KV layouts change between versions."""
    by_engine: dict[str, dict[str, list[str]]] = {}
    for ident, (instance, version) in identities.items():
        by_engine.setdefault(instance.engine, {}).setdefault(version, []).append(ident)
    for engine, versions in by_engine.items():
        if len(versions) > 1:
            shown = "; ".join(f"{version}: {', '.join(ids)}" for version, ids in sorted(versions.items()))
            yield warning(
                "version",
                engine,
                f"its instances have different versions ({shown})",
                "KV of one version may be unreadable for another: run the same version everywhere",
            )


def _role(instance: Instance, role: str) -> Finding:
    if role == instance.role:
        return ok("role", instance.id, role)
    return fault(
        "role",
        instance.id,
        f"it runs as {role}, the configuration says {instance.role}",
        f"start it as {instance.role}, or correct `role` in its entry; is the URL that of another instance?",
    )


def _model(instance: Instance, identity: Identity) -> Finding:
    served = ", ".join(identity.models)
    if not identity.models:
        return note("model", instance.id, "it does not tell its model")
    if instance.model is None or instance.model in identity.models:
        return ok("model", instance.id, served)
    return fault(
        "model",
        instance.id,
        f"it serves {served}, the configuration says {instance.model}",
        "correct `model` in its entry or in `cluster`, or the instance's own served name; `model_aliases` are names "
        "for clients only",
    )


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
