"""What a source of instances is, and to whom it tells what it sees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from coordinator.core.instance import Instance

Make = Callable[[Mapping[str, object]], Instance]
"""An instance from keys of the configuration file; raises ValueError with a sentence."""


class Report(Protocol):
    """Takes what a source sees; every call is synchronous and takes effect at once."""

    def found(
        self,
        instances: Sequence[Instance],
        faults: Mapping[str, str],
        trouble: str = "",
        *,
        incomplete: bool = False,
    ) -> None:
        """Take note that these are all instances there are.

        Args:
            instances: the first of several with the same id or place counts.
            faults: what cannot be used, by its name at the source, each with the reason.
            trouble: a part of the source cannot be read, and what it held last is among `instances`.
            incomplete: that part has not been read a single time, so what is known of the source from before stays.
        """
        ...

    def lost(self, reason: str) -> None:
        """Take note that the source cannot be asked: what it named last stays."""
        ...


class Source(Protocol):
    """One place to look for instances."""

    async def run(self, report: Report) -> None:
        """Look, and tell what there is whenever it changes or may have changed, until cancelled."""
        ...
