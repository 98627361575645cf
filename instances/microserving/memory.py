"""KV pages of an engine, and which prompts they know already."""

import asyncio
import bisect
from collections import OrderedDict, deque
from collections.abc import Sequence

from instances.ledger import KvLedger

PAGE_TOKENS = 16


class Pages(KvLedger):
    """The ledger, with a line for pages in which the first one waits for ever and everybody else behind it."""

    def __init__(self, total_pages: int) -> None:
        super().__init__(total_pages, PAGE_TOKENS)
        self._queue: deque[tuple[asyncio.Future[None], str, int, int, str]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._queue)

    async def wait_room(self, request_id: str, kv_tokens: int, why: str, reserve: int = 0) -> None:
        """Take pages once they and `reserve` more are free, in order of arrival, however long that takes.

        Cancelled, it leaves the line, or gives back what it has got.
        """
        turn = asyncio.get_running_loop().create_future()
        place = (turn, request_id, self.blocks(kv_tokens), reserve, why)
        self._queue.append(place)
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(request_id, "left while it waited for pages")
            elif place in self._queue:
                self._queue.remove(place)
                self._advance()
            raise

    def _advance(self) -> None:
        while self._queue:
            turn, request_id, pages, reserve, why = self._queue[0]
            if pages + reserve > self.free_blocks:
                return
            self._queue.popleft()
            if not turn.done():
                self._take(pages)
                self._hold(request_id, pages, why)
                turn.set_result(None)

    def holds(self, request_id: str) -> bool:
        """Whether the request has pages."""
        return request_id in self._held


class Radix:
    """A prefix cache that compares token by token; least recently used goes first; 0 pages: none."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity_tokens = capacity_pages * PAGE_TOKENS
        self._used = 0
        self._ages: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._sorted: list[tuple[int, ...]] = []
        self.asked_tokens = self.hit_tokens = 0

    def match(self, prompt: Sequence[int]) -> int:
        """Leading tokens of `prompt` that are known."""
        if not self._capacity_tokens:
            return 0
        key = tuple(prompt)
        at = bisect.bisect_left(self._sorted, key)
        # in a sorted list the longest common prefix is with a neighbour
        found = [(_common(key, known), known) for known in self._sorted[max(0, at - 1) : at + 1]]
        length, best = max(found, default=(0, ()))
        if length:
            self._ages.move_to_end(best)
        self.asked_tokens += len(key)
        self.hit_tokens += length
        return length

    def insert(self, sequence: Sequence[int]) -> None:
        """Know a sequence from now on."""
        key = tuple(sequence)
        if not self._capacity_tokens or not key:
            return
        if key in self._ages:
            self._ages.move_to_end(key)
            return
        self._ages[key] = None
        bisect.insort(self._sorted, key)
        self._used += len(key)
        while self._used > self._capacity_tokens:
            oldest, _ = self._ages.popitem(last=False)
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._used -= len(oldest)

    def clear(self) -> None:
        """Forget everything."""
        self._ages.clear()
        self._sorted.clear()
        self._used = 0


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
