"""A loop on whose clock only the time counts in which nothing can be done.

Simulated engines, their callers and the test share one process. When that stands still, because the machine has other
work, so do they all; the usual clock goes on, and whatever was given 50 ms is over before anybody has had a turn. Here
timers are due only after all that could be done meanwhile.
"""

import asyncio
import selectors
import time

TURN_S = 0.001  # of a turn of the loop this much counts, however long it takes
WOKEN_S = 0.02  # where a timer falls due together with news, those who get the news have this much time before it


class PatientSelector(selectors.DefaultSelector):
    """Counts how long it has waited."""

    def __init__(self):
        super().__init__()
        self._counted_s = self._back_s = time.monotonic()

    @property
    def now_s(self):
        """The time that counts; never later than the usual one."""
        return self._counted_s + min(time.monotonic() - self._back_s, TURN_S)

    def select(self, timeout=None):
        self._counted_s = self.now_s
        began_s = time.monotonic()
        events = super().select(timeout)
        self._back_s = time.monotonic()
        waited_s = self._back_s - began_s
        if timeout is not None and waited_s >= timeout:
            waited_s = max(0.0, timeout - WOKEN_S) if events else max(0.0, timeout)
        self._counted_s += waited_s
        return events


class PatientLoop(asyncio.SelectorEventLoop):
    """The loop; what it calls time is for its own timers, and for nothing else."""

    def __init__(self):
        self._patient = PatientSelector()
        super().__init__(self._patient)

    def time(self):
        return self._patient.now_s
