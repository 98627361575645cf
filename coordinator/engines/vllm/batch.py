"""A list of prompts: each on its own way over the pair, one answer in the end (vLLM protocol page §0)."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Raw

from coordinator.core.errors import EngineFailed
from coordinator.core.ports import Placement
from coordinator.core.request import Request
from coordinator.engines.http_leg import side_of
from coordinator.engines.vllm.handoff import Handoff, Means
from coordinator.wire.json_edit import Fields
from coordinator.wire.merge import one_answer

MAX_AT_ONCE = 8


async def serve_batch(
    means: Means, request: Request, placement: Placement, fields: Fields, prompts: Sequence[Raw]
) -> bytes:
    """Serve every prompt by itself, at most MAX_AT_ONCE at a time, and return the merged answer.

    The first failure ends all; so does cancellation. Either waits for the others' connections to be closed.

    Raises:
        RequestError: the first one of a prompt.
    """
    answers: list[bytes] = [b""] * len(prompts)
    turn = iter(enumerate(prompts))
    work = _Work(means, request, placement, fields, len(prompts))
    await _all(
        asyncio.create_task(work.run(turn, answers), name=f"batch worker {number} of {request.id}")
        for number in range(min(MAX_AT_ONCE, len(prompts)))
    )
    placement.decoding(time.monotonic())
    try:
        return one_answer(answers)
    except ValueError as error:
        decode = placement.decode
        raise EngineFailed(side_of(decode), decode.id, "bad_reply", detail=str(error)) from error


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for all tasks; the first failure, or a cancellation, ends the others, and is raised when they have ended.

    Not a TaskGroup: up to CPython 3.11.2 one that fails leaves its task with a cancellation too many, and no deadline
    holds in it from then on.
    """
    running = list(tasks)
    failed: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failed.append(error)

    for task in running:
        task.add_done_callback(ended)
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    if failed:
        raise failed[0]


class _Work:
    """Takes one prompt after the other."""

    def __init__(self, means: Means, request: Request, placement: Placement, fields: Fields, count: int) -> None:
        self._means = means
        self._request = request
        self._placement = placement
        self._fields = fields
        self._prefills_left = count

    async def run(self, turn: Iterator[tuple[int, Raw]], answers: list[bytes]) -> None:
        for at, prompt in turn:
            handoff = Handoff(self._means, self._request, self._placement, {**self._fields, "prompt": prompt})
            prefilled = await handoff.prefill()
            self._prefills_left -= 1
            if not self._prefills_left:
                self._placement.prefilled(time.monotonic())
            answers[at] = await handoff.whole(prefilled)
