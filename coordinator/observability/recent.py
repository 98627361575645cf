"""What has just happened: the last finished requests with the way they took, and the last failures by their kind.

Both are bounded, and hold ids, words from fixed sets and durations: no prompt, no output, no text of an engine.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from heapq import nlargest

import msgspec

from coordinator.core.errors import EngineFailed, Outcome

from .access import RequestRecord
from .lines import printable

MOST_PATHS = 32
MOST_FAILURES = 50
ID_LIMIT = 64

_WAITED_IN_VAIN = (Outcome.UNAVAILABLE, Outcome.DEADLINE)

FailureKey = tuple[str, str, str, str]


class Path(msgspec.Struct, frozen=True, omit_defaults=True):
    """The way that one request took.

    Attributes:
        at_s: when it ended, seconds since the epoch.
        id: the id that the client knows, cut.
        outcome: how it ended.
        prefill: instance id of the last attempt; empty: it was never placed.
        decode: the same.
        attempts: placements that were made.
        tokens: pieces of a stream with output.
        queue_s: until its first placement; for one that was never placed, its whole time.
        prefill_s: in prefill, and the like; None: the last attempt did not come to that stage. The last one that there
            is may have been cut short by the end.
        duration_s: from arrival to the end.
    """

    at_s: float
    id: str
    api: str
    outcome: str
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    tokens: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """Failures of one kind, taken together.

    Attributes:
        at_s: the last one, seconds since the epoch.
        code: as in docs/errors.md.
        reason: an engine's failure, or the stage of a deadline, in one word; may be empty.
        side: who is to blame.
        instance: id of the guilty one; may be empty.
        request: id of the last request that met it, cut.
        count: how many there were.
        survived: how many of them were made good by another placement.
    """

    at_s: float
    code: str
    reason: str
    side: str
    instance: str
    request: str
    count: int
    survived: int

    @property
    def key(self) -> FailureKey:
        """What makes two failures one of a kind."""
        return (self.code, self.reason, self.side, self.instance)


class Recently(msgspec.Struct, frozen=True):
    """The newest paths first, and the newest failures first."""

    paths: list[Path]
    failures: list[Failure]


class Recent:
    """Takes finished requests in; belongs to one process.

    Args:
        wall: seconds since the epoch.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._ended: deque[tuple[float, RequestRecord]] = deque(maxlen=MOST_PATHS)
        self._failures: OrderedDict[FailureKey, Failure] = OrderedDict()

    def take(self, record: RequestRecord) -> None:
        """Keep one request, to be called when nothing more will happen to it; hot."""
        if record.prefill is not None or record.outcome in _WAITED_IN_VAIN:
            self._ended.append((self._wall(), record))
        if record.error_code is not None or record.failed_legs:
            self._take_failures(record)

    def read(self) -> Recently:
        """What there is."""
        return Recently(
            [_path(at_s, record) for at_s, record in reversed(self._ended)], list(reversed(self._failures.values()))
        )

    def _take_failures(self, record: RequestRecord) -> None:
        survived = record.outcome is Outcome.OK
        for side, reason, instance in record.failed_legs:
            self._note(record, (EngineFailed.code, reason, str(side), instance), survived=survived)
        legs = [(reason, instance) for _, reason, instance in record.failed_legs]
        if record.error_code is None or (record.error_reason, record.error_instance) in legs:
            return
        key = (record.error_code, record.error_reason or "", record.error_side or "", record.error_instance or "")
        self._note(record, key, survived=False)

    def _note(self, record: RequestRecord, key: FailureKey, *, survived: bool) -> None:
        before = self._failures.pop(key, None)
        count, good = (before.count, before.survived) if before is not None else (0, 0)
        self._failures[key] = Failure(self._wall(), *key, _cut(record.id), count + 1, good + survived)
        if len(self._failures) > MOST_FAILURES:
            self._failures.popitem(last=False)


def merged(parts: Iterable[Recently]) -> Recently:
    """What several processes have seen, as if it were one."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    failures: dict[FailureKey, Failure] = {}
    for failure in (failure for part in parts for failure in part.failures):
        known = failures.get(failure.key)
        failures[failure.key] = failure if known is None else _together(known, failure)
    paths = (path for part in parts for path in part.paths)
    return Recently(
        nlargest(MOST_PATHS, paths, key=lambda path: path.at_s),
        nlargest(MOST_FAILURES, failures.values(), key=lambda failure: failure.at_s),
    )


def _together(one: Failure, other: Failure) -> Failure:
    newer = one if one.at_s >= other.at_s else other
    return msgspec.structs.replace(newer, count=one.count + other.count, survived=one.survived + other.survived)


def _cut(text: str) -> str:
    return printable(text, ID_LIMIT)


def _path(at_s: float, record: RequestRecord) -> Path:
    placed = record.prefill is not None
    return Path(
        at_s=round(at_s, 3),
        id=_cut(record.id),
        api=record.api,
        outcome=str(record.outcome),
        prefill=_cut(record.prefill or ""),
        decode=_cut(record.decode or ""),
        attempts=record.attempts,
        tokens=record.events,
        queue_s=_short(record.queue_s if placed else record.duration_s),
        prefill_s=_short(record.prefill_s),
        handoff_s=_short(record.handoff_s),
        decode_s=_short(record.decode_s),
        ttft_s=_short(record.ttft_s),
        duration_s=round(record.duration_s, 6),
    )


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 6)
