"""Pieces that come at once go on at once."""

from typing import Protocol


class Gatherer(Protocol):
    """What pieces of a stream are given to, and can make one write of several. Both calls may be made in vain."""

    def hold(self) -> None:
        """Keep back what is sent from here on: more follows before anybody else runs, and then `flush`."""
        ...

    def flush(self) -> None:
        """Send what was kept back, in one write."""
        ...
