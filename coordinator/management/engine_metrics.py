"""Asks every instance for its own metrics now and then, and keeps the last good answer of each."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

from coordinator.core.instance import Address, Instance, Role
from coordinator.observability.metrics import Metrics
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError

from .engine_page import Families, Filter, Unreadable, joined, relabelled

LOG = logging.getLogger("pd_coordinator.management")
Key = tuple[str, Role, Address]
PATH = "/metrics"
HEADERS = ((b"accept", b"text/plain;version=0.0.4"),)
AT_ONCE = 64
TOO_OLD_S = 300.0
IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineMetricsSettings:
    """The section `metrics.engines` of the configuration.

    Attributes:
        scrape: whether instances are asked at all.
        interval_s: from one question to the next, for each instance.
        timeout_s: how long an instance may take to answer.
        max_bytes: a longer answer is not read.
        allow: names of the metrics that are passed on; `*` stands for any characters.
    """

    scrape: bool = False
    interval_s: float = 15.0
    timeout_s: float = 5.0
    max_bytes: int = 1 << 20
    allow: Sequence[str] = ("*",)


@dataclass(frozen=True, slots=True)
class _Good:
    """What an instance has said, and when (monotonic seconds)."""

    families: Families
    at_s: float


class EngineMetrics:
    """The instances' own metrics, asked for in the background: who reads the page never waits for an instance.

    The questions are spread over the interval, so that a large cluster is no burst of work, and answers are read in a
    thread of their own. What an instance said last stays on the page while it does not answer, for `TOO_OLD_S`.

    Args:
        client: the coordinator's client, with its ways to reach instances.
        known: the instances that there are.
        metrics: counts the questions.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: EngineMetricsSettings,
        client: HttpClient,
        known: Callable[[], Sequence[Instance]],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._client = client
        self._known = known
        self._results = metrics.engine_scrapes
        self._clock = clock
        self._filter = Filter(settings.allow)
        self._reader = ThreadPoolExecutor(1, "engine metrics")
        self._good: dict[Key, _Good] = {}
        self._asking: dict[Key, asyncio.Task[None]] = {}
        self._round: asyncio.Task[None] | None = None
        self._started = False
        self._renewed = asyncio.Event()

    def start(self) -> None:
        """Begin to ask, if the settings say so."""
        self._started = True
        if self.settings.scrape and (self._round is None or self._round.done()):
            self._round = asyncio.create_task(self._ask_all(), name="engine metrics")

    def renew(self, settings: EngineMetricsSettings) -> None:
        """Ask, or ask no more, by these from here on."""
        self.settings = settings
        self._filter = Filter(settings.allow)
        self._renewed.set()
        if self._started:
            self.start()

    async def aclose(self) -> None:
        """Stop asking; questions that are under way are given up."""
        tasks = [*self._asking.values(), *([self._round] if self._round is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def page(self) -> bytes | None:
        """The text for `/metrics/engines`; None: instances are not asked."""
        if not self.settings.scrape:
            return None
        return joined(good.families for _, good in self._fresh())

    def read_ages(self) -> Iterator[tuple[tuple[str, str], float]]:
        """For the gauge of the ages: seconds since the last good answer."""
        now_s = self._clock()
        yield from (((instance.id, instance.role), now_s - good.at_s) for instance, good in self._fresh())

    def _fresh(self) -> Iterator[tuple[Instance, _Good]]:
        oldest_s = self._clock() - max(TOO_OLD_S, 2 * self.settings.interval_s)
        for instance in self._known():
            good = self._good.get(instance.key)
            if good is not None and good.at_s >= oldest_s:
                yield instance, good

    async def _ask_all(self) -> None:
        while self.settings.scrape:
            interval_s = self.settings.interval_s
            instances = {instance.key: instance for instance in self._known()}
            for gone in self._good.keys() - instances.keys():
                del self._good[gone]
            for instance in instances.values():
                self._ask(instance)
                if await self._pause(interval_s / len(instances)):
                    break
            if not instances:
                await self._pause(min(interval_s, IDLE_S))

    async def _pause(self, pause_s: float) -> bool:
        """Wait; true: not to the end, since there are other settings."""
        self._renewed.clear()
        try:
            async with asyncio.timeout(pause_s):
                await self._renewed.wait()
        except TimeoutError:
            return False
        return True

    def _ask(self, instance: Instance) -> None:
        key = instance.key
        if key in self._asking or len(self._asking) >= AT_ONCE:
            self._results.labels("skipped").inc()
            return
        self._asking[key] = task = asyncio.create_task(self._scrape(instance), name=f"metrics of {instance.id}")
        task.add_done_callback(lambda _: self._asking.pop(key, None))

    async def _scrape(self, instance: Instance) -> None:
        try:
            result = await self._answer_of(instance)
        except TransportError:
            result = "failed"
        except Unreadable:
            result = "unreadable"
        except Exception:  # the border to what an instance may say
            LOG.exception("the metrics of instance %s could not be read", instance.id)
            result = "unreadable"
        self._results.labels(result).inc()

    async def _answer_of(self, instance: Instance) -> str:
        """Ask it and keep what it says; tells how that went."""
        settings = self.settings
        reply = await self._client.fetch(
            instance.address,
            b"GET",
            PATH,
            HEADERS,
            deadline_s=time.monotonic() + settings.timeout_s,
            max_reply_bytes=settings.max_bytes,
        )
        if reply.status != HTTPStatus.OK:
            return "failed"
        at_s = self._clock()
        text = reply.body.decode("utf-8", "replace")
        labels = {"instance": instance.id, "role": str(instance.role)}
        loop = asyncio.get_running_loop()
        families = await loop.run_in_executor(self._reader, relabelled, text, labels, self._filter)
        self._good[instance.key] = _Good(families, at_s)
        return "ok"
