"""KV that prefill keeps for a request whose decode never came (vLLM protocol page §1.5)."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.core.body import RequestBody
from coordinator.core.instance import Instance
from coordinator.engines.vllm.visit import Said, visit
from coordinator.transport.client import HttpClient
from coordinator.transport.request import GivenHeaders

MAX_PENDING = 1000
PAUSES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
TRY_S = 10.0
WITHIN_S = 30.0  # protocol page §1.5: the engine's own lease ends then, and the KV with it
UNRELEASED = frozenset({"failed", "dropped"})
LINGER_S = 0.05  # from an engine's head to our leaving: it takes the request on in the same breath


@dataclass(frozen=True, slots=True)
class Orphan:
    """Prefilled KV without a consumer.

    Attributes:
        decodes: instances that can fetch it, best first; asked one after the other, again and again.
        headers: with the request's id, by which the engines know it.
        body: one token, with prefill's record.
        wait_s: how long the request's own decode instance gets before anybody is asked.
        doubtful: that instance may have got the KV, so that a refusal means no more than that it is gone.
    """

    prefill: Instance
    decodes: Sequence[Instance]
    wire_id: str
    target: str
    headers: GivenHeaders
    body: RequestBody
    wait_s: float = 0.0
    doubtful: bool = False


class KvReleases:
    """Lets a decode instance fetch orphaned KV for one token that nobody reads, on tasks of its own.

    That is the only way there is: prefill has no call that frees it. A decode instance that has taken the request on
    frees prefill's blocks also when it is aborted before it has read them, so it is left as soon as it has.
    """

    def __init__(
        self,
        client: HttpClient,
        log: logging.Logger,
        *,
        on_result: Callable[[str], None],
        pauses_s: Sequence[float] = PAUSES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `on_result` gets a result of `aborts_total`; after those of UNRELEASED the engine's lease must end."""
        self._client = client
        self._log = log
        self._on_result = on_result
        self._pauses_s = pauses_s
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], str] = {}

    def pinned(self) -> Mapping[str, int]:
        """How many orphans each prefill instance still holds, by its id."""
        return Counter(self._tasks.values())

    def release(self, orphan: Orphan) -> None:
        """Have the KV fetched. Returns at once."""
        if len(self._tasks) >= MAX_PENDING:
            self._on_result("dropped")
            return
        task = asyncio.get_running_loop().create_task(self._run(orphan), name=f"release KV of {orphan.wire_id}")
        self._tasks[task] = orphan.prefill.id
        task.add_done_callback(self._tasks.pop)

    async def _run(self, orphan: Orphan) -> None:
        result = "failed"
        try:
            said = await self._asked(orphan)
            if said is Said.TAKEN:
                result = "sent"
            elif said is Said.REFUSED and orphan.doubtful:
                result = "not_found"
        finally:
            self._on_result(result)
        if result == "failed":
            self._log.warning(
                "KV of request %s stays on prefill instance %s until its lease ends: %s",
                orphan.wire_id,
                orphan.prefill.id,
                "decode cannot fetch it" if said is Said.REFUSED else "no decode instance has fetched it",
            )

    async def _asked(self, orphan: Orphan) -> Said:
        """Ask one decode instance after the other until one has looked at the request."""
        if orphan.wait_s:
            await asyncio.sleep(orphan.wait_s)
        deadline_s = self._clock() + WITHIN_S
        for attempt, pause_s in enumerate(self._pauses_s if orphan.decodes else ()):
            if pause_s:
                await asyncio.sleep(pause_s)
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                break
            said = await visit(
                self._client,
                orphan.decodes[attempt % len(orphan.decodes)],
                orphan.target,
                orphan.headers,
                orphan.body,
                within_s=min(TRY_S, left_s),
                linger_s=LINGER_S,
            )
            if said is not Said.NOTHING:
                return said
        return Said.NOTHING

    async def aclose(self, within_s: float) -> None:
        """Wait for what is under way, at most `within_s`, then give up the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=within_s)
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
