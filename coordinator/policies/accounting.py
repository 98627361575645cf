"""How a request is measured, and when an instance counts as full."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from coordinator.core.instance import Capacity
from coordinator.core.request import Ask

Order = Literal["fcfs", "shortest", "longest"]
ORDERS: tuple[Order, ...] = ("fcfs", "shortest", "longest")


class Held(Protocol):
    """The part of a load that fills an instance."""

    @property
    def requests(self) -> int:
        """Requests that the instance works for."""
        ...

    @property
    def blocks(self) -> int:
        """KV blocks that they are counted as."""
        ...


@dataclass(frozen=True, slots=True)
class Accounting:
    """Measures that a policy chooses and the scheduler keeps (protocols: MindIE §10.2).

    Attributes:
        bytes_to_tokens: prompt tokens per byte of prompt text, where the client sent no token ids.
        count_blocks: a request counts as the KV blocks of its prompt; False: as one block, so requests are counted.
        respect_capacity: an instance is full also by its blocks; False: by its number of requests alone.
        block_limit_rate: part of its blocks that an instance may have promised before it counts as full.
        order: which waiting request goes first: the one that came first, the shortest or the longest prompt.
    """

    bytes_to_tokens: float = 0.22
    count_blocks: bool = True
    respect_capacity: bool = True
    block_limit_rate: float = 1.1
    order: Order = "fcfs"

    def __post_init__(self) -> None:
        for name in ("bytes_to_tokens", "block_limit_rate"):
            checked_number(name, getattr(self, name))
        for name in ("count_blocks", "respect_capacity"):
            checked_flag(name, getattr(self, name))
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}")

    def tokens(self, ask: Ask) -> int:
        """Prompt tokens, counted where the client sent ids, else estimated from the bytes."""
        if ask.prompt_tokens is not None:
            return ask.prompt_tokens
        return math.ceil(ask.prompt_bytes * self.bytes_to_tokens)

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """KV blocks that a prompt of so many tokens counts as: at least one, or no load would be seen."""
        return max(1, -(-tokens // block_tokens)) if self.count_blocks else 1

    def caps(self, capacity: Capacity) -> bool:
        """Whether an instance can ever be full."""
        return capacity.max_requests is not None or (capacity.total_blocks is not None and self.respect_capacity)

    def full(self, held: Held, capacity: Capacity) -> bool:
        """Whether an instance takes no further request.

        What it holds is compared as it stands, without the next request: so a prompt of any size fits an idle instance,
        and two requests never differ in where they fit.
        """
        if capacity.max_requests is not None and held.requests >= capacity.max_requests:
            return True
        if capacity.total_blocks is None or not self.respect_capacity:
            return False
        return held.blocks > capacity.total_blocks * self.block_limit_rate


def checked_number(name: str, value: object) -> None:
    """Raise ValueError unless the value is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")


def checked_whole(name: str, value: object, *, least: int) -> None:
    """Raise ValueError unless the value is a whole number and not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def checked_flag(name: str, value: object) -> None:
    """Raise ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")  # noqa: TRY004
