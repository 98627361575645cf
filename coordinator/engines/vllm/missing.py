"""Handoffs that did not happen: counted each time, told in the log now and then."""

import logging
import time
from collections.abc import Callable

from coordinator.core.instance import Instance

QUIET_S = 60.0


class MissingKv:
    """Counts requests whose prompt decode computes itself, and says so at most once a minute for each reason.

    Args:
        count: adds one to the metric.
    """

    def __init__(
        self, log: logging.Logger, count: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._count = count
        self._clock = clock
        self._told: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def returned_none(self, prefill: Instance) -> None:
        """Prefill has answered without a record."""
        self._count()
        times = self._due(prefill.id)
        if times:
            self._log.warning(
                "prefill instance %s returned no kv_transfer_params (%d times since last told): decode computes the "
                "prompt again; mode recompute",
                prefill.id,
                times,
            )

    def never_asked(self, decode: Instance) -> None:
        """The request is of a kind that prefill's KV cannot serve."""
        self._count()
        times = self._due("")
        if times:
            self._log.info(
                "requests that need more than one KV consumer run on decode alone, lastly on %s (%d since last told); "
                "mode recompute",
                decode.id,
                times,
            )

    def _due(self, reason: str) -> int:
        """How many there are to be told; 0: not yet."""
        times = self._untold.get(reason, 0) + 1
        now_s = self._clock()
        if now_s - self._told.get(reason, -QUIET_S) < QUIET_S:
            self._untold[reason] = times
            return 0
        self._told[reason] = now_s
        self._untold[reason] = 0
        return times
