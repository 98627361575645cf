"""What the controller wants to know about work: read interfaces, and the count of what came lately."""

from dataclasses import dataclass
from typing import Protocol


class LoadReader(Protocol):
    """The scheduler's numbers, by instance id; 0 for an unknown one."""

    def allocated(self, instance_id: str, /) -> tuple[int, int]:
        """Requests and KV blocks that the coordinator has placed there."""
        ...

    def running(self, instance_id: str, /) -> int:
        """Requests that need it."""
        ...

    def pair_running(self, prefill_id: str, decode_id: str, /) -> int:
        """Requests that need both."""
        ...

    def live(self) -> int:
        """Requests that are there, waiting ones included."""
        ...


class TrafficReader(Protocol):
    """Counts since the last reading of each kind."""

    def arrivals(self) -> int:
        """Requests since the last call."""
        ...

    def lengths(self) -> tuple[int, int]:
        """Average prompt and output tokens since the last call; without requests, what it was then."""
        ...


@dataclass(slots=True)
class Traffic:
    """Counts requests for the controller.

    Attributes:
        bytes_per_token: the measure for prompts, whose tokens are not counted here (MindIE's `string_token_rate`).
    """

    bytes_per_token: float = 4.02
    _arrivals: int = 0
    _requests: int = 0
    _prompt_bytes: int = 0
    _output_tokens: int = 0
    _lengths: tuple[int, int] = (0, 0)

    def note(self, prompt_bytes: int, output_tokens: int, count: int = 1) -> None:
        """Count a request, or several with their sums."""
        self._arrivals += count
        self._requests += count
        self._prompt_bytes += prompt_bytes
        self._output_tokens += output_tokens

    def arrivals(self) -> int:
        """Requests since the last call (MindIE protocol page §9.2, `recv_flow`)."""
        count, self._arrivals = self._arrivals, 0
        return count

    def lengths(self) -> tuple[int, int]:
        """Average prompt and output tokens since the last call; without requests, what it was then."""
        if self._requests:
            prompt = round(self._prompt_bytes / self._requests / self.bytes_per_token)
            output = round(self._output_tokens / self._requests)
            self._lengths = (prompt or self._lengths[0], output or self._lengths[1])
            self._requests = self._prompt_bytes = self._output_tokens = 0
        return self._lengths
