"""Who is there, as instances ask for it and tell it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coordinator.engines.xllm.info import Info, Type


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat.

    Attributes:
        waiting: requests that wait in the instance.
        cache_usage: part of its KV cache that is in use.
        stored, removed: hashes of blocks that its prefix cache has taken in and dropped.
    """

    name: str
    incarnation: str
    waiting: int
    cache_usage: float
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Registry(Protocol):
    """Who is there."""

    def beat(self, beat: Beat) -> bool:
        """Take a heartbeat; False: the instance, or this start of it, is not known."""
        ...

    def find(self, name: str) -> Info | None:
        """An instance by its name."""
        ...

    def names(self, kind: Type) -> Iterable[str]:
        """Names of the instances of a type."""
        ...
