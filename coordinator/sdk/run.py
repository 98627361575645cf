"""What a router works with during one attempt; the coordinator implements it."""

from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.tokens import Tokenizer

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Server:
    """One engine instance as a pattern sees it.

    Attributes:
        id: its name in the configuration.
        url: where it listens, without a trailing slash.
        role: `prefill`, `decode` or `hybrid`.
        recv_rank: its first PE in the NVSHMEM world; None where the configuration does not say.
        in_flight: requests that are placed on it now.
    """

    id: str
    url: str
    role: str
    recv_rank: int | None = None
    in_flight: int = 0


Preference = Callable[[Server], float]


class Run(Protocol):
    """One attempt: where it was placed, and the calls that may be made for it."""

    @property
    def prefill(self) -> Server:
        """Where the prompt is to be computed."""
        ...

    @property
    def decode(self) -> Server:
        """Where the answer is to be generated."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        ...

    @property
    def shared(self) -> MutableMapping[str, Any]:
        """What routers of one class keep for each other, in this process."""
        ...

    @property
    def balance(self) -> float:
        """`pd_balance_factor` of the configuration."""
        ...

    @property
    def alone(self) -> bool:
        """Whether one engine is to serve alone: a hybrid instance, or mode round-robin."""
        ...

    def servers(self, role: str) -> Sequence[Server]:
        """Who could take a role in this attempt, those with the least to do first."""
        ...

    def place(self, role: str, prefer: Preference | None) -> Server:
        """Give a role to the server with the highest preference; of equals, to its holder or who has least to do."""
        ...

    def leave(self, role: str) -> None:
        """Give a role's load back before the attempt ends. Only prefill's can be."""
        ...

    async def prepare(self, server_url: str, body: bytes) -> bytes:
        """Call prep_recv; returns the answer."""
        ...

    async def send(self, server_url: str, body: bytes) -> None:
        """Call remote_send."""
        ...

    def generate(self, server_url: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Call start_generate or an endpoint like it; yields the JSON of each chunk, or of the one answer."""
        ...
