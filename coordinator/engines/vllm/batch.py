"""A list of prompts: each on its own way over the pair, one answer in the end (vLLM protocol page §0)."""

import asyncio
import time
from collections.abc import Iterator, Sequence

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
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(MAX_AT_ONCE, len(prompts))):
                group.create_task(work.run(turn, answers), name=f"batch worker {number} of {request.id}")
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    placement.decoding(time.monotonic())
    try:
        return one_answer(answers)
    except ValueError as error:
        decode = placement.decode
        raise EngineFailed(side_of(decode), decode.id, "bad_reply", detail=str(error)) from error


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
