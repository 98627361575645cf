"""The examination from start to end: which checks, in which order, at most how many at once."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator import config
from coordinator.config import Settings
from coordinator.core.instance import Instance, Role
from coordinator.doctor.findings import Finding, Report, note
from coordinator.doctor.handover import Pair, can_pair
from coordinator.doctor.instances import odd_ones_out
from coordinator.doctor.machine import (
    check_files,
    check_instance_certificate,
    check_notes,
    check_own_certificates,
    check_ports,
)
from coordinator.doctor.running import coordinator_runs
from coordinator.doctor.ward import EXCLUSIVE, Ward
from coordinator.parts import load_settings, make_tokenizers, validate_options
from coordinator.security.certificates import Certificates
from coordinator.transport.client import HttpClient

LOG = logging.getLogger("pd_coordinator.doctor")
INSTANCES_AT_ONCE = 32
PAIRS_AT_ONCE = 8
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Options:
    """How far to go; times in seconds.

    Attributes:
        within_s: for each question to an instance.
        handover: whether pairs are tried; else nothing is sent that makes an engine work.
        handover_s: for the request over one pair.
        most_pairs: so many pairs are tried.
        total_s: for all pairs; those that are left then are not tried.
    """

    within_s: float = 5.0
    handover: bool = True
    handover_s: float = 30.0
    most_pairs: int = 256
    total_s: float = 300.0


async def examine(path: Path, options: Options) -> Report:
    """Look at everything.

    Raises:
        ConfigError: the file cannot be used, so there is nothing to look at.
    """
    began_s = time.monotonic()
    settings = load_settings(path)
    report = Report(str(path))
    running = await coordinator_runs(settings)
    report.add(check_notes(settings))
    report.add(check_files(settings))
    report.add(check_ports(settings, running=running))
    report.add(check_own_certificates(settings))
    async with _opened(settings, options, running=running) as ward:
        instances = config.to_instances(settings, validate_options)
        await ward.attach(instances)
        able = await _look_at_each(ward, instances, report, options)
        if options.handover:
            report.add([_left_alone(name) for name in sorted(ward.left_alone({one.engine for one in instances}))])
            await _try_pairs(ward, able, report, options)
        else:
            report.add([note("handover", "", "not tested, as asked for")])
    report.took_s = time.monotonic() - began_s
    return report


@asynccontextmanager
async def _opened(settings: Settings, options: Options, *, running: bool) -> AsyncIterator[Ward]:
    client = HttpClient(connect_s=min(settings.timeouts.effective.connect_s, options.within_s))
    Certificates(settings, client.peers)
    tokenizers = make_tokenizers(settings)
    ward = Ward(settings, client, tokenizers, options.within_s, running=running)
    try:
        yield ward
    finally:
        await ward.aclose()
        await tokenizers.aclose()
        await client.aclose()


async def _look_at_each(ward: Ward, instances: Sequence[Instance], report: Report, options: Options) -> list[Instance]:
    """Every instance by itself; returns those that can be tried together."""
    looked = await _each(instances, ward.look, INSTANCES_AT_ONCE)
    certificates = await _each(
        instances, lambda one: check_instance_certificate(one, options.within_s), INSTANCES_AT_ONCE
    )
    versions: dict[str, tuple[Instance, str]] = {}
    for instance, (_, found), certificate in zip(instances, looked, certificates, strict=True):
        report.add(found)
        report.add([certificate] if certificate is not None else [])
        versions.update((one.subject, (instance, one.what)) for one in found if one.check == "version")
    report.add(odd_ones_out(versions))
    return [instance for instance, (able, _) in zip(instances, looked, strict=True) if able]


async def _try_pairs(ward: Ward, able: Sequence[Instance], report: Report, options: Options) -> None:
    pairs = pairs_of([one for one in able if ward.may_work(one)])
    tried = list(itertools.islice(pairs, options.most_pairs))
    left = next(pairs, None) is not None
    locks: dict[str, asyncio.Lock] = {}

    async def run(pair: Pair) -> Finding:
        # one at a time for each decode instance: its counters are looked at before and after
        async with locks.setdefault(pair.decode.id, asyncio.Lock()):
            return await ward.hand_over(pair, options.handover_s)

    findings: list[Finding] = []
    try:
        async with asyncio.timeout(options.total_s):
            await _each(tried, run, PAIRS_AT_ONCE, findings.append)
    except TimeoutError:
        left = True
    report.add(sorted(findings, key=lambda found: found.subject))
    if left:
        what = f"there are more pairs than the {len(findings)} that were tried"
        report.add([note("handover", "", what, "raise --pairs or --within to try more")])


def pairs_of(instances: Sequence[Instance]) -> Iterator[Pair]:
    """Hybrid instances, then every pair, in an order in which everybody comes up early."""
    yield from (Pair(one, one) for one in instances if one.role is Role.HYBRID)
    prefills = [one for one in instances if one.role is Role.PREFILL]
    decodes = [one for one in instances if one.role is Role.DECODE]
    rounds = max(len(prefills), len(decodes))
    seen: set[tuple[str, str]] = set()
    for shift, at in itertools.product(range(rounds), range(rounds)):
        if not prefills or not decodes:
            return
        prefill, decode = prefills[(at + shift) % len(prefills)], decodes[at % len(decodes)]
        key = (prefill.id, decode.id)
        if key not in seen and prefill.engine == decode.engine and can_pair(prefill, decode):
            seen.add(key)
            yield Pair(prefill, decode)


def _left_alone(engine: str) -> Finding:
    return note("handover", engine, f"not tested: a coordinator runs, and {EXCLUSIVE[engine]}", "stop it to test this")


async def _each(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int, done: Callable[[R], None] | None = None
) -> list[R]:
    """The result for each, in order, so many at once; a cancellation ends them all."""
    room = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with room:
            result = await work(item)
        if done is not None:
            done(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item), name="examine") for item in items]
    return [task.result() for task in tasks]
